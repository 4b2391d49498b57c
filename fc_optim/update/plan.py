"""From parameters and their state to the batches that kernels take, and back."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fc_optim.kernels import reference
from fc_optim.kernels.backends import Backend
from fc_optim.kernels.batch import AdamHyper, Batch, MuonHyper, Segment
from fc_optim.params.collectives import gather, take
from fc_optim.params.layouts import is_dtensor, like, local, local_grad, placements
from fc_optim.params.registry import CONTAINER_DTYPES, Managed, check_dtype
from fc_optim.update.muon import lr_ratio, orthogonalise


@dataclass(slots=True)
class Work:
    """A batch, the parameters it came from, and the backend that will run it.

    Those without an element here (empty, or on other ranks) are not in the batch: `idle`.
    """

    batch: Batch
    entries: list[Managed]
    backend: Backend
    idle: list[Managed] = field(default_factory=list)

    def round(self) -> None:
        """containers <- stochastic rounding of the masters."""
        self.backend.round_(self.batch)
        self._write_back()

    def step(self) -> None:
        """One step of the batch's algorithm, ending with the shadow."""
        batch = self.batch
        if "momentum_buffer" in _moments((self.entries or self.idle)[0]):
            if self.entries:
                self.backend.muon_momentum_(batch)
            self._orthogonalise()
            if self.entries:
                self.backend.muon_update_(batch)
        elif self.entries:
            self.backend.adam_(batch)
        self._write_back()
        for e in self.idle:
            taken = 1 if batch.found_inf is None else batch.found_inf.reshape(()) == 0
            e.state[step_key(e, fused=True)] += taken
            if "step" in e.state:
                e.state["step"] += taken

    def _orthogonalise(self) -> None:
        """updates <- this rank's part of Newton-Schulz of the whole matrices.

        Every rank of a matrix's groups takes part, those without a row of it as well.
        """
        parts = {id(e): u for e, u in zip(self.entries, self.batch.updates, strict=True)}
        for e in sorted(self.entries + self.idle, key=lambda e: e.slot.ids):
            (piece,), groups = e.slot.layout.pieces, e.slot.layout.groups
            part = parts.get(id(e))
            flat = e.local.new_empty(0, dtype=torch.bfloat16) if part is None else part.view(-1)
            whole = flat.view(-1)
            if groups:
                (whole,) = gather([(flat, piece, torch.bfloat16)], groups)
            if part is not None:
                done = orthogonalise(whole.view(piece.shape).to(flat.device), e.group)
                take(done.view(-1), piece.segments, out=flat)

    def adopt(self, flags: Tensor) -> Tensor:
        """In flagged tensors, masters <- foreign elements, and their shadow; int64 counts."""
        counts = self.backend.adopt_(self.batch, flags)
        self._write_back()
        return counts

    def _write_back(self) -> None:
        """Copy containers that had to be staged (strided, or state on another device)."""
        for entry, container in zip(self.entries, self.batch.containers, strict=True):
            if container.data_ptr() != entry.local.data_ptr():
                entry.local.copy_(container)


@dataclass(frozen=True, slots=True)
class Context:
    """What all batches of an optimizer share."""

    seed: int
    epoch: int | None  # None: fresh
    fused: bool
    backend_for: Callable[[torch.device], Backend]
    caches: dict[Any, dict[Any, Any]]


def new_master(param: Tensor) -> Tensor:
    """A contiguous fp32 copy of a parameter, canonical and sharded as it is: the caller owns it."""
    part = local(param)
    master = part.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
    make_canonical(master)
    return like(param, master)


def make_canonical(master: Tensor) -> None:
    """In place: NaNs and magnitudes as masters store them (see `reference.canonical_bits`)."""
    part = local(master)
    whole = [[Segment.whole(0, part.numel())]]
    reference.canonical_(Batch([], [part], whole, [], seed=0, epoch=0))


def step_key(entry: Managed, fused: bool) -> str:
    """The state key of the number of steps that a parameter has taken: int64, never torch's."""
    return "dither_step"


def complete_state(entry: Managed, fused: bool) -> None:
    """Add what is missing of a parameter's state, and bring it to what the kernels read: fp32.

    Raises ValueError for a moment of another shape.
    """
    state, master = entry.state, entry.state["master"]
    if not fused:
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16):
                state[key] = value.float()  # made for a bf16 parameter
    step = step_key(entry, fused)
    if step not in state:
        state[step] = torch.zeros((), dtype=torch.int64, device=master.device)
        if fused and "step" in state:  # of a plain torch state
            state[step] += torch.as_tensor(state["step"]).to(master.device, torch.int64)
    elif state[step].dtype != torch.int64:
        state[step] = state[step].to(torch.int64)
    if fused and entry.group["algorithm"] != "muon":
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=master.device)
        elif state["step"].dtype != torch.float32:
            state["step"] = state["step"].to(torch.float32)
    for key in _moments(entry) if fused else ():
        value = state.get(key)
        if value is None:
            state[key] = like(entry.param, torch.zeros_like(local(master)))
            continue
        check_shape(key, value, entry.slot.name, entry.param)
        if value.dtype != torch.float32 or not local(value).is_contiguous():
            state[key] = like(entry.param, local(value).to(torch.float32).contiguous())


def check_shape(key: str, value: Tensor, name: str, param: Tensor) -> None:
    """Raise ValueError unless a state tensor is shaped and cut as its parameter."""
    if value.shape != param.shape:
        raise ValueError(
            f"state: the {key} of {name!r} has shape {tuple(value.shape)}, the parameter "
            f"{tuple(param.shape)}: the state is of another model or another order of parameters, "
            "or the parameter was replaced. Load the state that fits, or build a new optimizer."
        )
    if type(value) is Tensor and not is_dtensor(param):
        return
    mine, theirs = placements(param), placements(value)
    if mine != theirs:
        raise ValueError(
            f"state: the {key} of {name!r} is cut as {theirs or 'a plain tensor'}, the parameter "
            f"as {mine or 'a plain tensor'}: load it with torch.distributed.checkpoint, which "
            "cuts it anew."
        )
    if local(value).shape != local(param).shape:  # as many rows for another number of ranks
        raise ValueError(
            f"state: this rank's part of the {key} of {name!r} has shape "
            f"{tuple(local(value).shape)}, of the parameter {tuple(local(param).shape)}: it was "
            "saved on another number of ranks. Load it with torch.distributed.checkpoint, which "
            "cuts it anew."
        )


def _check_master(entry: Managed) -> None:
    master = entry.state["master"]
    check_shape("master", master, entry.slot.name, entry.param)
    if master.dtype != torch.float32 or not local(master).is_contiguous():
        raise TypeError(
            f"state: the master of {entry.slot.name!r} is {master.dtype}, strides "
            f"{master.stride()}: it must be contiguous float32. Something rewrote the state; load "
            "it again with load_state_dict()."
        )


def _moments(entry: Managed) -> tuple[str, ...]:
    if entry.group["algorithm"] == "muon":
        return ("momentum_buffer",)
    if entry.group["amsgrad"]:
        return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    return ("exp_avg", "exp_avg_sq")


def state_work(
    context: Context, entries: Iterable[Managed], *, scratch: bool = False
) -> list[Work]:
    """Batches of masters and containers, for publishing and checking.

    With `scratch` the containers are copies, for comparing with what the model holds.
    """

    def key(e: Managed) -> tuple:
        return (e.state["master"].device, e.param.dtype)

    works = []
    for (device, dtype), part in _grouped((e for e in entries if e.local.numel()), key):
        batch = Batch(
            containers=[container_of(e.local, device, copy=scratch) for e in part],
            masters=[local(e.state["master"]) for e in part],
            segments=[e.slot.segments for e in part],
            epochs=[e.state[step_key(e, context.fused)].to(device) for e in part],
            seed=context.seed,
            epoch=context.epoch,
            cache={} if scratch else context.caches.setdefault(("state", device, dtype), {}),
            shared=context.caches.setdefault(device, {}),
        )
        works.append(Work(batch, part, context.backend_for(device)))
    return works


def update_work(
    context: Context,
    entries: Iterable[Managed],
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> list[Work]:
    """Batches for one fused step of the parameters that have a gradient."""

    def key(e: Managed) -> tuple:
        assert e.param.grad is not None
        return (e.param.device, e.param.dtype, e.param.grad.dtype, _moments(e))

    works = []
    for keys, everyone in _grouped((e for e in entries if e.param.grad is not None), key):
        device, moments = keys[0], keys[-1]
        for e in everyone:
            check_grad(e)
            complete_state(e, fused=True)
            _to_device(e.state, device)
        grads = [local_grad(e.param) for e in everyone]  # of idle ones as well: may communicate
        part = [e for e in everyone if e.local.numel()]
        batch = Batch(
            containers=[container_of(e.local, device) for e in part],
            masters=[local(e.state["master"]) for e in part],
            segments=[e.slot.segments for e in part],
            epochs=[e.state[step_key(e, fused=True)] for e in part],
            seed=context.seed,
            epoch=context.epoch,
            grads=[_dense(grad) for grad in grads if grad.numel()],
            grad_scale=_scalar_on(grad_scale, device),
            found_inf=_scalar_on(found_inf, device),
            cache=context.caches.setdefault(keys, {}),
            shared=context.caches.setdefault(device, {}),
        )
        for name in moments:
            setattr(batch, f"{name}s", [local(e.state[name]) for e in part])
        if "momentum_buffer" in moments:
            batch.updates = [torch.empty_like(m, dtype=torch.bfloat16) for m in batch.masters]
            batch.muon_hypers = [_muon_hyper(e.group, _shape(e)) for e in part]
        else:
            batch.steps = [e.state["step"] for e in part]
            groups = {id(e.group): e.group for e in part}
            hypers = {key: _adam_hyper(group) for key, group in groups.items()}
            batch.hypers = [hypers[id(e.group)] for e in part]
        idle = [e for e in everyone if not e.local.numel()]
        works.append(Work(batch, part, context.backend_for(device), idle))
    return works


def _shape(entry: Managed) -> torch.Size:
    """The shape of the unsharded parameter."""
    return entry.slot.layout.pieces[0].shape


def _grouped(
    entries: Iterable[Managed], key: Callable[[Managed], tuple]
) -> Iterator[tuple[tuple, list[Managed]]]:
    groups: dict[tuple, list[Managed]] = {}
    for entry in entries:
        if entry.param.dtype not in CONTAINER_DTYPES:  # the rest was checked with its master
            check_dtype(entry.param, entry.slot.name)
        _check_master(entry)
        groups.setdefault(key(entry), []).append(entry)
    yield from groups.items()


def _adam_hyper(group: dict[str, Any]) -> AdamHyper:
    beta1, beta2 = group["betas"]
    return AdamHyper(
        lr=group["lr"],
        beta1=beta1,
        beta2=beta2,
        eps=group["eps"],
        weight_decay=group["weight_decay"],
        decoupled=group["algorithm"] == "adamw",
        maximize=group["maximize"],
    )


def _muon_hyper(group: dict[str, Any], shape: torch.Size) -> MuonHyper:
    return MuonHyper(
        lr=group["lr"],
        momentum=group["momentum"],
        nesterov=group["nesterov"],
        weight_decay=group["weight_decay"],
        lr_ratio=lr_ratio(group["adjust_lr_fn"], shape),
    )


def container_of(part: Tensor, device: torch.device, copy: bool = False) -> Tensor:
    """What kernels can take in its place: the part itself if they can and may, else a copy."""
    if copy:  # not an empty one: kernels do not write the padding of flat parameters
        return part.to(device, memory_format=torch.contiguous_format, copy=True)
    if part.device == device and part.is_contiguous():
        return part
    return part.to(device).contiguous()


def _to_device(state: dict[str, Any], device: torch.device) -> None:
    """Bring state back that was moved elsewhere (verl offloads it between phases)."""
    for key, value in state.items():
        if isinstance(value, Tensor) and key != "param_id" and value.device != device:
            state[key] = value.to(device, non_blocking=True)


def _scalar_on(value: Tensor | None, device: torch.device) -> Tensor | None:
    return None if value is None else value.detach().to(device, torch.float32)


def _dense(grad: Tensor) -> Tensor:
    return grad.detach().resolve_neg().contiguous()


def check_grad(entry: Managed) -> None:
    """Raise TypeError for a gradient that no kernel takes."""
    grad, name = entry.param.grad, entry.slot.name
    assert grad is not None
    if grad.layout != torch.strided:
        raise TypeError(
            f"the gradient of {name!r} is {grad.layout}: sparse gradients are not supported. "
            "Use a dense embedding (sparse=False), or put it in a group with served_dtype=None."
        )
    if grad.dtype not in CONTAINER_DTYPES:
        raise TypeError(f"the gradient of {name!r} is {grad.dtype}, not bfloat16 or float32.")
