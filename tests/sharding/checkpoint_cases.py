"""Runs to save and load with torch.distributed.checkpoint, and how they must continue."""

import copy
import functools
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import strategies
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from strategies import Model, differences, gradients, result, whole_state
from torch import nn
from torch.distributed.checkpoint import state_dict as dsd
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecision
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from fc_optim import FairCastOptimizer, muon_param_groups
from fc_optim.params.names import clean_name

SAVED, END = 3, 6  # steps
NEVER = "second.last.weight"  # has no gradient in some cases


# ---- Models, optimizers, steps


def new_model(dtype: torch.dtype, seed: int) -> nn.Module:
    """Weights that depend on the seed: a load must replace them."""
    model = Model().to(dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(seed)
    return model


def plain(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    return model


def ddp(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    return DistributedDataParallel(model)


def fsdp2(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    return strategies.sharded(model, init_device_mesh("cpu", (dist.get_world_size(),)), dtype)


def hsdp(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    world = dist.get_world_size()
    shape = (2, world // 2) if world % 2 == 0 else (1, world)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("r", "s"))
    return strategies.sharded(model, mesh, dtype)


def tensor_parallel(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    places = [Shard(0), Shard(1), Replicate()]
    strategies.distribute(
        model, mesh, lambda i, p: places[i % 3] if p.ndim > 1 else places[i % 2 * 2]
    )
    return model


def fsdp1(model: Any, dtype: torch.dtype, original: bool = True) -> nn.Module:
    options: dict[str, Any] = {"use_orig_params": original, "device_id": torch.device("cpu")}
    if dtype == torch.float32:
        options["mixed_precision"] = MixedPrecision(torch.bfloat16, torch.float32)
    model.second = FullyShardedDataParallel(model.second, **options)
    ignored = None if original else [model.frozen]  # a flat parameter is trainable as a whole
    return FullyShardedDataParallel(model, ignored_modules=ignored, **options)


def fsdp1_flat(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    return fsdp1(model, dtype, original=False)


# ---- Optimizers


def adamw(params: Any, **options: Any) -> FairCastOptimizer:
    options = {"lr": 1e-3, "weight_decay": 0.1, **options}
    return FairCastOptimizer(torch.optim.AdamW, params, **options)


def named(model: nn.Module, **options: Any) -> FairCastOptimizer:
    return adamw(model.named_parameters(), **options)


def two_groups(model: nn.Module, **options: Any) -> FairCastOptimizer:
    """With another rate, and one that is not rounded: vectors."""
    named = list(model.named_parameters())
    matrices = [(n, p) for n, p in named if p.ndim > 1]
    groups = [
        {"params": matrices[::2]},
        {"params": matrices[1::2], "betas": (0.8, 0.9), "amsgrad": True},
        {"params": [(n, p) for n, p in named if p.ndim == 1], "served_dtype": None},
    ]
    return adamw(groups, **options)


def muon(model: nn.Module, **options: Any) -> FairCastOptimizer:
    return adamw(muon_param_groups(model, muon={"lr": 2e-3}), **options)


def sgd(model: nn.Module, **options: Any) -> FairCastOptimizer:
    options = {"lr": 1e-3, "momentum": 0.9, **options}
    return FairCastOptimizer(torch.optim.SGD, model.named_parameters(), **options)


def rmsprop(model: nn.Module, **options: Any) -> FairCastOptimizer:
    return FairCastOptimizer(torch.optim.RMSprop, model.named_parameters(), **options)


@dataclass(frozen=True)
class Case:
    """A sharded model and its optimizer, and the way into a checkpoint and out of it."""

    strategy: Callable[..., nn.Module]
    dtype: torch.dtype = torch.float32
    dither: str = "fresh"
    make: Callable[..., FairCastOptimizer] = named
    flat: bool = False  # flatten_optimizer_state_dict
    together: bool = False  # get_state_dict() in place of one function for each
    skip: tuple[str, ...] = ()  # parameters that never have a gradient

    @property
    def name(self) -> str:
        fields = (self.strategy.__name__, str(self.dtype)[6:], self.dither, self.make.__name__)
        return "-".join((*fields, f"{self.flat:d}{self.together:d}", *self.skip))

    def build(self, seed: int = 11, **options: Any) -> tuple[nn.Module, FairCastOptimizer]:
        model = self.strategy(new_model(self.dtype, seed), self.dtype)
        options = {"dither": self.dither, "seed": seed, "backend": "cpu", **options}
        opt = self.make(model, **options)
        return model, opt.bind(model)

    def build_other(self) -> tuple[nn.Module, FairCastOptimizer]:
        """As the process that resumes may: other weights, seed, dither, rate."""
        return self.build(5, dither="held" if self.dither == "fresh" else "fresh", lr=0.5)

    def train(self, model: nn.Module, opt: FairCastOptimizer, first: int, end: int) -> None:
        fsdp = any(isinstance(m, FSDP_TYPES) for m in model.modules()) and not self.skip
        for i in range(first, end):
            opt.zero_grad()
            if fsdp:
                model(grads_of(i)).backward()
            else:
                set_grads(model, grads_of(i), self.skip)
            opt.step()
            if i % 3 == 2:
                opt.publish(redraw=True)

    def state(self, model: nn.Module, opt: FairCastOptimizer) -> dict[str, Any]:
        options = StateDictOptions(flatten_optimizer_state_dict=self.flat)
        if self.together:
            weights, state = dsd.get_state_dict(model, opt, options=options)
        else:
            weights = dsd.get_model_state_dict(model, options=options)
            state = dsd.get_optimizer_state_dict(model, opt, options=options)
        return {"model": weights, "optim": state}

    def load(self, model: nn.Module, opt: FairCastOptimizer, path: str) -> None:
        """Optimizer and model, model and optimizer, or, since masters win, the optimizer alone."""
        state = self.state(model, opt)
        if not self.together and not self.flat and self.make is not two_groups:
            del state["model"]
        dcp.load(state, checkpoint_id=path)
        options = StateDictOptions(flatten_optimizer_state_dict=self.flat)
        if self.together:
            dsd.set_state_dict(
                model, opt, model_state_dict=state["model"], optim_state_dict=state["optim"],
                options=options,
            )  # fmt: skip
        else:
            if "model" in state:
                dsd.set_model_state_dict(model, state["model"], options=options)
            dsd.set_optimizer_state_dict(model, opt, state["optim"], options=options)


grads_of = functools.cache(gradients)
FSDP_TYPES = (FullyShardedDataParallel, FSDPModule)


def set_grads(model: nn.Module, grads: dict[str, torch.Tensor], skip: tuple[str, ...]) -> None:
    for name, p in model.named_parameters():
        name = clean_name(name)
        if p.requires_grad and name not in skip:
            g = grads[name].to(p.dtype)
            if isinstance(p, DTensor):
                g = distribute_tensor(g, p.device_mesh, p.placements, src_data_rank=None)
            p.grad = g


def held(model: nn.Module, opt: FairCastOptimizer) -> dict[str, Any]:
    """Served weights, masters, digest, version and all state, put together: own memory."""
    found = result(None, opt)
    adam = all(g["algorithm"] == "adamw" for g in opt.param_groups)
    if adam:
        found["moments"] = dict(sorted(whole_state(model, opt).items()))
    if not isinstance(model, FullyShardedDataParallel):  # of which `moments` is all that is public
        found["state"] = {
            f"{identity.name}.{key}": v.full_tensor() if isinstance(v, DTensor) else v
            for _, p, identity in opt.weights.registry.places(opt.param_groups)
            for key, v in sorted(opt.state.get(p, {}).items())
        }
    return copy.deepcopy(found)


def expected(case: Case) -> tuple[dict, dict]:
    """What the uninterrupted, unsharded run holds when it is saved, and at its end."""
    return _expected(replace(case, strategy=plain, flat=False, together=False))


@functools.cache
def _expected(case: Case) -> tuple[dict, dict]:
    model, opt = case.build()
    case.train(model, opt, 0, SAVED)
    saved = held(model, opt)
    case.train(model, opt, SAVED, END)
    return saved, held(model, opt)


# ---- Save on N ranks, load on M

B = torch.bfloat16
CASES = [
    Case(plain), Case(ddp, B, "sync", flat=True), Case(ddp, together=True),
    Case(fsdp2), Case(fsdp2, B, "sync", flat=True), Case(fsdp2, B, "held", together=True),
    Case(fsdp2, make=two_groups), Case(fsdp2, B, make=two_groups, flat=True),
    Case(fsdp2, make=muon), Case(fsdp2, B, make=muon, flat=True),
    Case(fsdp2, make=sgd), Case(fsdp2, B, "sync", make=sgd, together=True),
    Case(fsdp2, skip=(NEVER,)), Case(fsdp2, B, flat=True, skip=(NEVER,)),
    Case(hsdp, dither="held"), Case(hsdp, B, flat=True),
    Case(tensor_parallel, dither="sync"), Case(tensor_parallel, B, flat=True, together=True),
    Case(fsdp1, flat=True), Case(fsdp1, B, "sync", flat=True), Case(fsdp1, dither="held"),
    Case(fsdp1_flat, flat=True), Case(fsdp1_flat, B, "sync", flat=True, together=True),
]  # fmt: skip
# Saved under one strategy, loaded under another. (Flat parameters save no identities.)
CROSSED = [
    (Case(fsdp2), plain), (Case(fsdp2, make=muon), plain), (Case(fsdp2, make=sgd), plain),
    (Case(plain), fsdp2), (Case(fsdp2, B, "held", together=True), tensor_parallel),
    (Case(fsdp1, flat=True), fsdp2), (Case(hsdp, B, flat=True), fsdp1),
]  # fmt: skip


def trained(case: Case, steps: int = SAVED) -> tuple[nn.Module, FairCastOptimizer]:
    model, opt = case.build()
    case.train(model, opt, 0, steps)
    return model, opt


def continued(case: Case, model: nn.Module, opt: FairCastOptimizer) -> list[str]:
    """How a loaded run differs from the uninterrupted one, now and at its end."""
    saved, end = expected(case)
    found = differences(saved, held(model, opt))
    case.train(model, opt, SAVED, END)
    return found + differences(end, held(model, opt))


@contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings of FSDP1 and of torch's checkpoints, and of seeds that are replaced."""
    logger = logging.getLogger("fc_optim")
    level = logger.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            logger.setLevel(level)
