"""Which dtype is where in each parameter group: what an optimizer reports of itself."""

from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from fc_optim.params import sources
from fc_optim.weights import ServedWeights


@dataclass(frozen=True, slots=True)
class GroupPrecision:
    """The dtypes of the parameters of one group that are alike. Several values: "bf16, fp32".

    group: number of the parameter group.
    parameters, elements: how many; of this rank if the parameters are sharded.
    algorithm: that updates the masters.
    master: in the optimizer's state; "-" for parameters that are not managed.
    container: the parameter itself.
    forward: what the forward computes with: the container, or the dtype of FSDP's or DDP's mixed
        precision, or of an autocast that is active now. The values are the same: on the grid.
    grad: of the gradients that are there, else of those that backward will make.
    served: what the engine gets.
    backend: that rounds; "-" where nothing is rounded.
    """

    group: int
    parameters: int
    elements: int
    algorithm: str
    master: str
    container: str
    forward: str
    grad: str
    served: str
    backend: str


@dataclass(frozen=True, slots=True)
class Report:
    """What `FairCastOptimizer.report` returns; `str()` renders it as aligned text."""

    groups: tuple[GroupPrecision, ...]
    dither: str
    seed: int

    def __str__(self) -> str:
        header = [f.name for f in fields(GroupPrecision)]
        rows = [header, *([_cell(x) for x in astuple(g)] for g in self.groups)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(x.ljust(w) for x, w in zip(row, widths, strict=True)).rstrip() for row in rows
        ]
        return "\n".join([*lines, f"dither {self.dither}, seed {self.seed}"])

    def line(self) -> str:
        """The same in one line, for a log."""
        parts = [
            f"group {g.group}: {g.parameters} parameters ({g.elements:,} elements), {g.algorithm}, "
            f"master {g.master}, forward {g.forward}, grad {g.grad}, served {g.served}"
            for g in self.groups
        ]
        backends = sorted({g.backend for g in self.groups} - {"-"})
        return f"{'; '.join(parts)}; dither {self.dither}, backend {', '.join(backends) or '-'}"


def report(weights: ServedWeights) -> Report:
    """See `FairCastOptimizer.report`."""
    return Report(tuple(_rows(weights)), weights.dither, weights.seed)


def _rows(weights: ServedWeights) -> Iterable[GroupPrecision]:
    """Two for a group of which some parameters are managed and some are not."""
    managed = {e.param: e for e in weights.entries()}
    backend_for = weights.context().backend_for
    mixed = _mixed_precision(weights.model)
    for number, group in enumerate(weights.groups):
        alone = [p for p in group["params"] if p.requires_grad and p not in managed]
        for params in ([p for p in group["params"] if p in managed], alone):
            if not params:
                continue
            served = params[0] in managed
            devices = {p.device for p in params} if served else set()
            backends = {_name_of(backend_for(d)) for d in devices}
            sizes = [(managed[p].local if served else p).numel() for p in params]
            yield GroupPrecision(
                group=number,
                parameters=len(params),
                elements=sum(sizes),
                algorithm=group["algorithm"],
                master="fp32" if served else "-",
                container=_names(p.dtype for p in params),
                forward=_names(_forward(p, mixed) for p in params),
                grad=_names(map(_grad, params)),
                served="bf16" if served else _names(p.dtype for p in params),
                backend=", ".join(sorted(backends)) or "-",
            )


def _name_of(backend: Any) -> str:
    """As the option `backend` has it."""
    module = backend.__name__.rpartition(".")[2]
    return "triton" if module == "gpu" else module


def _cell(x: Any) -> str:
    return f"{x:,}" if isinstance(x, int) else str(x)


def _names(dtypes: Iterable[torch.dtype]) -> str:
    short = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.float16: "fp16"}
    return ", ".join(sorted({short.get(d, str(d).removeprefix("torch.")) for d in dtypes}))


def _grad(param: Tensor) -> torch.dtype:
    if param.grad is not None:
        return param.grad.dtype
    return getattr(param, "grad_dtype", None) or param.dtype


def _forward(param: Tensor, mixed: dict[Tensor, torch.dtype]) -> torch.dtype:
    if param in mixed:
        return mixed[param]
    device = param.device.type
    if param.dtype == torch.float32 and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return param.dtype


def _mixed_precision(model: nn.Module | None) -> dict[Tensor, torch.dtype]:
    """The dtypes to which FSDP and DDP cast parameters for the forward, where they do."""
    found: dict[Tensor, torch.dtype] = {}
    if model is None:
        return found
    for module in model.modules():  # outer ones first: the innermost wrapper decides
        dtype = next((d for s in sources.active() if (d := s.forward_dtype(module))), None)
        if dtype is not None:
            found.update(dict.fromkeys(module.parameters(), dtype))
    return found
