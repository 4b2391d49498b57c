"""A managed parameter's state: the master, the dither epoch, and what its algorithm keeps.

State is made when masters are made or loaded, and brought back into shape when a plan is built
after somebody exchanged a part of it; a step itself checks nothing.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fc_optim.kernels import reference
from fc_optim.kernels.batch import Batch, Segment
from fc_optim.params.registry import CONTAINER_DTYPES, Managed, check_dtype
from fc_optim.params.sources import source_of, to_local
from fc_optim.update.algorithms import algorithm_of

_CHUNK = 1 << 22  # elements: 17 MB for each int32 temporary

MASTER = "master"
EPOCH = "dither_step"  # int64: steps taken, the dither epoch of "fresh"; users zero `step`


def state_keys(entry: Managed, fused: bool) -> tuple[str, ...]:
    """The keys of the tensors that kernels read."""
    if not fused:
        return (MASTER, EPOCH)
    algorithm = algorithm_of(entry)
    step = ("step",) if algorithm.has_step else ()
    return (MASTER, EPOCH, *step, *algorithm.moments(entry.group))


def new_master(entry: Managed) -> Tensor:
    """A contiguous fp32 copy of a parameter, canonical and cut as it is: the caller owns it."""
    kept = torch.contiguous_format
    master = entry.local.to(torch.float32, memory_format=kept, copy=True)
    whole = [[Segment.whole(0, master.numel())]]
    reference.canonical_(Batch([], [master], whole, [], seed=0, epoch=0))
    return entry.source.from_local(entry.param, master)


def on_grid(part: Tensor) -> bool:
    """Whether all values are bf16 values as a shadow has them, so that rounding changes none."""
    for chunk in part.reshape(-1).split(_CHUNK):
        bits = chunk.to(torch.float32).view(torch.int32)
        if bool(((reference.canonical_bits(bits) & -0x10000) != bits).any()):
            return False
    return True


def id_tensor(param_id: int) -> Tensor:
    """An identity as per-parameter state: 0-d int64, on the host, which alone reads it."""
    return torch.tensor(param_id, dtype=torch.int64, device="cpu")


def _fp32(value: Any) -> Any:
    """A state of a bf16 parameter as the base would have made it for a master."""
    if isinstance(value, Tensor):
        return value.float() if value.dtype == torch.bfloat16 else value
    if type(value) is dict:
        return {k: _fp32(v) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_fp32(v) for v in value)
    return value


def complete_state(entry: Managed, fused: bool, new: bool = False) -> None:
    """Add what is missing beside a master, in the dtypes that kernels read.

    Of an optimizer without kernels only what was made for the parameter, before there was a master
    (`new`), becomes fp32: later, a bf16 state is its own choice. Moments that are all missing
    begin anew. Raises ValueError for a moment of another shape, RuntimeError if some are there and
    others are not.
    """
    state = entry.state
    if new and not fused:
        state.update({key: _fp32(value) for key, value in state.items()})
    _complete_epoch(entry, fused)
    if not fused:
        return
    algorithm = algorithm_of(entry)
    _check_moments(entry)
    if algorithm.has_step:
        _complete_step(state)
    for key in algorithm.moments(entry.group):
        value = state.get(key)
        if value is None:
            zeros = torch.zeros_like(to_local(state[MASTER]))
            state[key] = entry.source.from_local(entry.param, zeros)
            continue
        check_shape(key, value, entry.identity.name, entry.param)
        part = to_local(value)
        if part.dtype != torch.float32 or not part.is_contiguous():
            part = part.to(torch.float32).contiguous()
            state[key] = entry.source.from_local(entry.param, part)


def _check_moments(entry: Managed) -> None:
    """Raise RuntimeError for half a state: an update from it would be too large, or too small."""
    expected = set(state_keys(entry, fused=True)) - {MASTER, EPOCH, "max_exp_avg_sq"}
    lost = expected - entry.state.keys()
    if lost and lost != expected:
        raise RuntimeError(
            f"state: {', '.join(sorted(lost))} of {entry.identity.name!r} is missing beside "
            f"{', '.join(sorted(expected - lost))}. To begin the moments anew, call "
            "reset_moments(); else load_state_dict() a saved state."
        )


def _complete_step(state: dict[str, Any]) -> None:
    if "step" not in state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=to_local(state[MASTER]).device)
    elif state["step"].dtype != torch.float32:
        state["step"] = state["step"].to(torch.float32)


def _complete_epoch(entry: Managed, fused: bool) -> None:
    """The dither epoch; of a state that has none (0.1.0, plain torch) it is torch's step count."""
    state = entry.state
    epoch = state.get(EPOCH)
    if epoch is None:
        device = to_local(state[MASTER]).device
        state[EPOCH] = torch.zeros((), dtype=torch.int64, device=device)
        if fused and "step" in state:
            state[EPOCH] += int(state["step"])
    else:
        state[EPOCH] = epoch.to(to_local(state[MASTER]).device, torch.int64)


def check_state(entry: Managed) -> None:
    """Raise unless the container and the master are what kernels take; before a plan is built."""
    name, master = entry.identity.name, entry.state[MASTER]
    if entry.param.dtype not in CONTAINER_DTYPES:  # the rest was checked with its master
        check_dtype(entry.param, name)
    check_shape(MASTER, master, name, entry.param)
    if master.dtype != torch.float32 or not to_local(master).is_contiguous():
        raise TypeError(
            f"state: the master of {name!r} is {master.dtype}, strides {master.stride()}: it must "
            "be contiguous float32. Something rewrote the state; load it again with "
            "load_state_dict()."
        )


def check_shape(key: str, value: Tensor, name: str, param: Tensor) -> None:
    """Raise ValueError unless a state tensor is shaped and cut as its parameter."""
    if value.shape != param.shape:
        raise ValueError(
            f"state: the {key} of {name!r} has shape {tuple(value.shape)}, the parameter "
            f"{tuple(param.shape)}: the state is of another model or another order of parameters, "
            "or the parameter was replaced. Load the state that fits, or build a new optimizer."
        )
    mine = source_of(param).placements(param)
    theirs = source_of(value).placements(value)
    if mine != theirs:
        raise ValueError(
            f"state: the {key} of {name!r} is cut as {theirs or 'a plain tensor'}, the parameter "
            f"as {mine or 'a plain tensor'}: load it with torch.distributed.checkpoint, which "
            "cuts it anew."
        )
    if mine is not None and to_local(value).shape != to_local(param).shape:  # another world size
        raise ValueError(
            f"state: this rank's part of the {key} of {name!r} has shape "
            f"{tuple(to_local(value).shape)}, of the parameter {tuple(to_local(param).shape)}: it "
            "was saved on another number of ranks. Load it with torch.distributed.checkpoint, "
            "which cuts it anew."
        )


def move_state(entries: Sequence[Managed], device: torch.device) -> None:
    """Bring state back that was moved elsewhere (verl offloads it between phases)."""
    for e in entries:
        for key, value in e.state.items():
            if isinstance(value, Tensor) and key != "param_id" and value.device != device:
                e.state[key] = value.to(device, non_blocking=True)
