"""Small runs whose state dicts are saved, damaged and loaded; also by `data/make_states.py`."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from models import tiny
from torch import nn

from fc_optim import FairCastOptimizer


def all_named(model: nn.Module) -> Any:
    return model.named_parameters()


def unnamed(model: nn.Module) -> Any:
    return model.parameters()


def two_groups(model: nn.Module) -> Any:
    """As most trainers sort them: by whether weight decay applies."""
    named = list(model.named_parameters())
    return [
        {"params": [(n, p) for n, p in named if p.ndim > 1], "weight_decay": 0.1},
        {"params": [(n, p) for n, p in named if p.ndim < 2], "weight_decay": 0.0, "lr": 3e-3},
    ]


def two_unnamed_groups(model: nn.Module) -> Any:
    return [{**g, "params": [p for _, p in g["params"]]} for g in two_groups(model)]


def excluded(model: nn.Module) -> Any:
    decayed, rest = two_groups(model)
    return [decayed, {**rest, "served_dtype": None}]


def muon(model: nn.Module) -> Any:
    decayed, rest = two_groups(model)
    return [{**decayed, "algorithm": "muon"}, rest]


@dataclass(frozen=True)
class Case:
    """An optimizer of the tiny model, and how long it runs.

    steps: None if it is saved before the first publish.
    """

    base: type[torch.optim.Optimizer]
    dtype: torch.dtype = torch.float32
    params: Callable[[nn.Module], Any] = all_named
    steps: int | None = 3
    options: dict[str, Any] = field(default_factory=dict)

    def build(self, seed: int = 0, **options: Any) -> tuple[nn.Module, FairCastOptimizer]:
        """The model of this seed with its optimizer, before the first step."""
        model = tiny(self.dtype, seed)
        options = {"lr": 1e-2, **self.options, **options}
        return model, FairCastOptimizer(self.base, self.params(model), **options)

    def trained(self, **options: Any) -> tuple[nn.Module, FairCastOptimizer]:
        """The same after its steps."""
        model, opt = self.build(**options)
        if self.steps is not None:
            opt.publish()
            run(model, opt, 0, self.steps)
        return model, opt


def run(model: nn.Module, opt: FairCastOptimizer, first: int, end: int) -> None:
    """Steps with gradients that are the same on every machine; a rollout after each."""
    for i in range(first, end):
        generator = torch.Generator().manual_seed(i)
        for p in model.parameters():
            grad = torch.randint(-512, 512, p.shape, generator=generator) / 1024
            p.grad = grad.to(p.dtype)
        opt.step()
        opt.publish(redraw=True)


B = torch.bfloat16
CASES = {
    "adam_fp32": Case(torch.optim.Adam),
    "adam_bf16": Case(torch.optim.Adam, B, options={"weight_decay": 0.1}),
    "adamw_amsgrad_bf16": Case(
        torch.optim.AdamW, B, options={"amsgrad": True, "seed": 2**63 + 1}
    ),
    "adamw_sync_fp32": Case(torch.optim.AdamW, options={"dither": "sync", "seed": 5}),
    "adamw_held_unnamed_bf16": Case(
        torch.optim.AdamW, B, two_unnamed_groups, options={"dither": "held"}
    ),
    "adamw_excluded_fp32": Case(torch.optim.AdamW, params=excluded),
    "adamw_never_stepped_bf16": Case(torch.optim.AdamW, B, steps=0),
    "adamw_never_published_fp32": Case(torch.optim.AdamW, steps=None),
    "muon_mixed_fp32": Case(torch.optim.AdamW, params=muon),
    "muon_mixed_sync_bf16": Case(torch.optim.AdamW, B, muon, options={"dither": "sync"}),
    "sgd_momentum_bf16": Case(torch.optim.SGD, B, options={"momentum": 0.9}),
    "sgd_momentum_sync_fp32": Case(
        torch.optim.SGD, params=two_groups, options={"momentum": 0.9, "dither": "sync"}
    ),
}  # fmt: skip


def snapshot(model: nn.Module, opt: FairCastOptimizer) -> dict[str, Any]:
    """Everything that a load may change, in memory of its own."""
    kept = copy.deepcopy(
        {
            "state": [opt.state.get(p) for g in opt.param_groups for p in g["params"]],
            "groups": [{k: v for k, v in g.items() if k != "params"} for g in opt.param_groups],
            "options": [opt.seed, opt.dither, opt.served_version, opt.weights.context().epoch],
            "others": {k: v for k, v in opt.state.items() if not isinstance(k, torch.Tensor)},
            "weights": [p.detach() for p in model.parameters()],
        }
    )
    ids = [e.identity.ids for e in opt.managed()]
    return {**kept, "ids": ids}
