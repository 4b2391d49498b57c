"""What an optimizer says of itself: step metrics, and which dtype is where in each group."""

import logging
import sys
from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fc_optim.metrics.step import StepMetrics, Telemetry
from fc_optim.params.registry import Managed
from fc_optim.update.plan import Context

logger = logging.getLogger("fc_optim")


class Reporting(Optimizer):
    """The part of `FairCastOptimizer` that says what it does."""

    model: nn.Module | None
    _served_version: int
    _telemetry: Telemetry
    _reported: bool

    def managed(self) -> list[Managed]:
        raise NotImplementedError

    def context(self) -> Context:
        raise NotImplementedError

    def metrics(self) -> StepMetrics:
        """What the last `step()` did, with `metrics=True` or "all"; nothing waits until it is read.

        Call it before the next step, or before weights are written, if that step is of interest.
        Before the first step, and after `load_state_dict()` or `adopt_weights()`, nothing was
        counted: n is 0, ratios are NaN. Raises RuntimeError if the optimizer does not count.
        """
        if not self._telemetry.mode:
            raise RuntimeError("metrics(): build the optimizer with metrics=True or metrics='all'.")
        return self._telemetry.figures(self.managed(), self._served_version)

    def report(self) -> "Report":
        """Which dtypes the masters, the forward, the gradients and the served copy have, by group.

        `print()` shows a table; the logger "fc_optim" has it in one line (INFO) at the first step.
        FSDP's and DDP's mixed precision are known once the model is bound.
        """
        return Report(tuple(_rows(self)), self.dither, self.seed)  # type: ignore[attr-defined]

    def _before_update(self, entries: list[Managed]) -> None:
        self._telemetry.begin(self.context(), entries)
        if not self._reported and logger.isEnabledFor(logging.INFO):
            logger.info(self.report().line())
        self._reported = True


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


def _rows(opt: Reporting) -> Iterable[GroupPrecision]:
    """Two for a group of which some parameters are managed and some are not."""
    managed = {e.param: e for e in opt.managed()}
    mixed = _mixed_precision(opt.model)
    for number, group in enumerate(opt.param_groups):
        alone = [p for p in group["params"] if p.requires_grad and p not in managed]
        for params in ([p for p in group["params"] if p in managed], alone):
            if not params:
                continue
            served = params[0] in managed
            devices = {p.device for p in params} if served else set()
            backends = {_name_of(opt.context().backend_for(d)) for d in devices}
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
        dtype = _policy(module)
        if dtype is not None:
            found.update(dict.fromkeys(module.parameters(), dtype))
    return found


def _policy(module: nn.Module) -> torch.dtype | None:
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    policy: Any = None
    if fsdp is not None and isinstance(module, fsdp.FSDPModule):
        policy = module._get_fsdp_state()._mp_policy  # type: ignore[operator, union-attr]
    elif fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel):
        policy = module.mixed_precision
    elif isinstance(module, nn.parallel.DistributedDataParallel):
        policy = module.mixed_precision
    return getattr(policy, "param_dtype", None)
