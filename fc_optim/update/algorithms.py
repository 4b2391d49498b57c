"""What each fused algorithm is: its state, its hyper-parameters, the kernels of its step."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from fc_optim.kernels.batch import AdamHyper, MuonHyper, hyper_key
from fc_optim.params.collectives import copy_to_shard, gather
from fc_optim.params.registry import Managed
from fc_optim.params.sources import source_of
from fc_optim.update.muon import lr_ratio, orthogonalise

if TYPE_CHECKING:
    from fc_optim.update.plan import KernelCall

Group = dict[str, Any]


@dataclass(frozen=True)
class Algorithm:
    """A fused algorithm; its `name` is what the group key `algorithm` holds.

    base: torch's optimizer of the same arithmetic and hyper-parameters.
    whole_matrices: its update needs the whole of a parameter, which a flat buffer may cut anywhere.
    has_step: its state has torch's own fp32 `step`.
    """

    name: str
    base: type[Optimizer]
    whole_matrices: ClassVar[bool] = False
    has_step: ClassVar[bool] = True

    def moments(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """The state keys that hold fp32 tensors of the parameter's shape."""
        raise NotImplementedError

    def complete_group(self, group: Group) -> None:
        """Add the hyper-parameters that another base's group does not have."""
        for name, parameter in inspect.signature(self.base).parameters.items():
            if parameter.default is not inspect.Parameter.empty:
                group.setdefault(name, parameter.default)

    def check_group(self, group: Group) -> None:
        """Raise ValueError for hyper-parameters or parameters that it cannot take."""

    def prepare(self, call: "KernelCall") -> None:
        """Put the hyper-parameters of this step into the call's lists."""
        raise NotImplementedError

    def step(self, call: "KernelCall") -> None:
        """Run the kernels: moments, masters and containers of all entries, on this rank."""
        raise NotImplementedError


@dataclass(frozen=True)
class Adam(Algorithm):
    """Adam, or AdamW with `decoupled` weight decay. Source: `torch.optim.Adam`."""

    decoupled: bool = False

    def moments(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        amsgrad = ("max_exp_avg_sq",) if group["amsgrad"] else ()
        return ("exp_avg", "exp_avg_sq", *amsgrad)

    def prepare(self, call: "KernelCall") -> None:
        hypers = {key: self._hyper(group) for key, group in call.groups.items()}
        keys = list(map(hyper_key, hypers.values()))
        if keys != call.hyper_keys:  # else the backend's tables of them still hold
            call.batch.hypers = [hypers[id(e.group)] for e in call.entries]
            call.hyper_keys = keys

    def _hyper(self, group: Group) -> AdamHyper:
        beta1, beta2 = group["betas"]
        return AdamHyper(
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            decoupled=self.decoupled,
            maximize=group["maximize"],
        )

    def step(self, call: "KernelCall") -> None:
        if call.entries:
            call.backend.adam_(call.batch)


@dataclass(frozen=True)
class Muon(Algorithm):
    """Momentum, orthogonalised by Newton-Schulz. Source: Jordan et al.; `torch.optim.Muon`."""

    whole_matrices: ClassVar[bool] = True
    has_step: ClassVar[bool] = False

    def moments(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return ("momentum_buffer",)

    def check_group(self, group: Group) -> None:
        if group.get("maximize") or group.get("amsgrad"):
            raise ValueError("maximize, amsgrad: Muon has neither; set them in Adam groups only.")
        lr_ratio(group["adjust_lr_fn"], torch.Size((1, 1)))
        for i, p in enumerate(group["params"]):
            name = group.get("param_names", {i: f"number {i} of its group"})[i]
            shape = source_of(p).shape(p, name) if p.requires_grad else ()
            if p.requires_grad and len(shape) != 2:
                raise ValueError(
                    f"params: {name!r} has shape {tuple(shape)}, but Muon takes matrices only; "
                    "fc_optim.muon_param_groups(model) sorts parameters."
                )

    def prepare(self, call: "KernelCall") -> None:
        call.batch.muon_hypers = [self._hyper(e) for e in call.entries]
        masters = call.batch.masters
        call.batch.updates = [torch.empty_like(m, dtype=torch.bfloat16) for m in masters]

    def _hyper(self, entry: Managed) -> MuonHyper:
        group = entry.group
        return MuonHyper(
            lr=group["lr"],
            momentum=group["momentum"],
            nesterov=group["nesterov"],
            weight_decay=group["weight_decay"],
            lr_ratio=lr_ratio(group["adjust_lr_fn"], entry.shape),
        )

    def step(self, call: "KernelCall") -> None:
        if call.entries:
            call.backend.muon_momentum_(call.batch)
        self._orthogonalise(call)
        if call.entries:
            call.backend.muon_update_(call.batch)
        call.batch.updates = []

    def _orthogonalise(self, call: "KernelCall") -> None:
        """updates <- this rank's part of Newton-Schulz of the whole matrices.

        Every rank of a matrix's groups takes part, those without a row of it as well.
        """
        parts: dict[int, Tensor] = {
            id(e): u for e, u in zip(call.entries, call.batch.updates, strict=True)
        }
        for e in sorted(call.entries + call.idle, key=lambda e: e.identity.ids):
            (piece,), groups = e.layout.pieces, e.layout.groups
            part = parts.get(id(e))
            flat = e.local.new_empty(0, dtype=torch.bfloat16) if part is None else part.view(-1)
            whole = flat.view(-1)
            if groups:
                (whole,) = gather([(flat, piece, torch.bfloat16)], groups)
            if part is not None:
                done = orthogonalise(whole.view(piece.shape).to(flat.device), e.group)
                copy_to_shard(done.view(-1), piece.segments, out=flat)


ALGORITHMS: dict[str, Algorithm] = {
    "adam": Adam("adam", torch.optim.Adam),
    "adamw": Adam("adamw", torch.optim.AdamW, decoupled=True),
    "muon": Muon("muon", torch.optim.Muon),
}


def own_algorithm(base: type[Optimizer], group: Mapping[str, Any], fused: bool) -> str:
    """The name of what a base optimizer does to a group of its own."""
    if fused and base is not torch.optim.Muon:
        decoupled = group.get("decoupled_weight_decay", base is torch.optim.AdamW)
        return "adamw" if decoupled else "adam"
    return base.__name__.lower()


def algorithm_of(entry: Managed) -> Algorithm:
    """The fused algorithm that updates a parameter."""
    return ALGORITHMS[entry.group["algorithm"]]
