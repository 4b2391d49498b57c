"""Whether the saved state of all parameters fits, with nothing missing. Nothing here writes."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fc_optim.checkpoint.matching import some
from fc_optim.checkpoint.saved import AS_SAVED, MOMENTS, Saved
from fc_optim.params.names import STATE_KEYS
from fc_optim.params.sources import is_sharded, source_of, to_local
from fc_optim.update.algorithms import ALGORITHMS
from fc_optim.update.state import EPOCH, check_shape

HALF = (torch.bfloat16, torch.float16)
SCALARS = ("step", EPOCH, "param_id")
_ANEW = "To take every master from the parameters, load fc_optim.without_masters(state_dict)."


@dataclass(frozen=True, slots=True)
class Target:
    """A parameter, what it holds, and what it is to hold.

    hyper: the values of its group as they will be.
    served: whether it gets masters.
    flat: whether it is a flat buffer, whose identities are not in the state.
    entry: its saved state; {} where there is none.
    held: its state now.
    """

    name: str
    param: Tensor
    group: dict[str, Any]
    hyper: Mapping[str, Any]
    served: bool
    flat: bool
    entry: Mapping[str, Any]
    held: Mapping[str, Any]

    @property
    def has_elements(self) -> bool:
        """FSDP1 saves and restores nothing of a parameter that has none on this rank."""
        return to_local(self.param).numel() > 0


def check_entries(
    base: Optimizer, fused: bool, saved: Saved, targets: Sequence[Sequence[Target]]
) -> None:
    """Raise ValueError, with names, unless the state of all parameters fits, by group."""
    everyone = [t for group in targets for t in group]
    _check_keys(saved)
    if not any(t.flat for t in everyone):
        _check_names(saved)
    if not saved.anew:
        _check_masters(saved, targets)
    theirs = type(base).__module__.startswith("torch.optim") and not isinstance(
        base,
        torch.optim.LBFGS,  # all its state is flat, and with the first parameter
    )
    for t in everyone:
        _check_entry(t, fused, theirs)
    _check_alike([t for t in everyone if t.served and "master" in t.entry])


def _check_keys(saved: Saved) -> None:
    """Raise ValueError if state that is no parameter's looks as if it should have been."""
    keys = list(chain.from_iterable(saved.keys))
    twice = [key for key, n in Counter(keys).items() if n > 1]
    if twice:
        raise ValueError(f"state_dict: its groups have {some(map(str, twice))} twice. {AS_SAVED}")
    known = {*STATE_KEYS, *MOMENTS, "step"}
    lost = [
        key
        for key, value in saved.extras.items()
        if isinstance(key, int)
        or (isinstance(key, str) and key.isdigit())
        or (isinstance(value, Mapping) and not known.isdisjoint(value))
    ]
    if lost:
        raise ValueError(
            f"state_dict: no group has the parameters {lost[:8]!r}, whose state it holds; its "
            f"groups have {keys[:8]!r}: keys were changed (JSON makes strings of numbers). "
            + AS_SAVED
        )


def _check_names(saved: Saved) -> None:
    """Raise ValueError if names do not say whose they are."""
    for i, (group, keys) in enumerate(zip(saved.groups, saved.keys, strict=True)):
        names = group.get("param_names", keys)
        if len(names) != len(keys) and not all(isinstance(key, str) for key in keys):
            raise ValueError(
                f"state_dict: group {i} has {len(keys)} parameters and {len(names)} param_names. "
                + AS_SAVED
            )


# ---- Masters


def _check_masters(saved: Saved, targets: Sequence[Sequence[Target]]) -> None:
    """Raise ValueError where masters are lost: those of the state, or those that are here."""
    served = [t for group in targets for t in group if t.served and t.has_elements]
    if not any("master" in t.entry for t in served):
        _refuse_no_masters(saved, served)
        return
    lost = [t.name for t in served if t.entry and "master" not in t.entry]
    if lost:
        raise ValueError(
            f"state_dict: the master of {some(lost)} is missing, others are there: the "
            f"checkpoint is damaged. {_ANEW}"
        )
    published = any("master" in t.held for t in served)
    for group in targets:
        # A group that was added since the last publish has masters neither there nor here.
        whole = not any(t.entry or "master" in t.held for t in group)
        for t in group if not (published and whole) else ():
            needed = t.param.requires_grad or "master" in t.held
            if t.served and t.has_elements and needed and not t.entry:
                raise ValueError(
                    f"state_dict: there is no state for {t.name!r}, others have theirs: something "
                    "dropped it. If it was frozen when the state was saved, freeze it while "
                    "loading; if its group was new, load before add_param_group(). " + _ANEW
                )


def _refuse_no_masters(saved: Saved, served: Sequence[Target]) -> None:
    """Of a state without any: a plain one, or one of before the first publish, may load."""
    traces = [t.name for t in served if not t.entry.keys().isdisjoint(STATE_KEYS)]
    if traces:
        raise ValueError(
            f"state_dict: the master of {some(traces)} is missing, what is saved with it is "
            f"there: the checkpoint is damaged. {_ANEW}"
        )
    version = max((g["served_version"] for g in saved.groups), default=0) if saved.own else 0
    trained = [t.name for t in served if t.param.requires_grad]
    if version and trained:
        raise ValueError(
            f"state_dict: its groups are of version {version}, but the masters of "
            f"{some(trained)} are missing: something dropped them on the way. (Some frameworks "
            f"load only what an optimizer holds: publish() before loading.) {_ANEW}"
        )
    here = [t.name for t in served if "master" in t.held]
    if here:
        raise ValueError(
            f"state_dict: it has no masters, and those of {some(here)} here would be replaced by "
            f"what the parameters hold, which is rounded. {_ANEW}"
        )


# ---- Entries


def _check_entry(t: Target, fused: bool, theirs: bool) -> None:
    """Shapes, dtypes and completeness of a parameter's state.

    fused: whether kernels step the optimizer. theirs: whether the base is torch's, whose state
    is known; of others only the masters are.
    """
    known = theirs or fused
    own = t.served and not t.entry.keys().isdisjoint(STATE_KEYS)
    for key, value in t.entry.items():
        for tensor in _tensors(value):
            _check_readable(key, tensor, t)
        if key in SCALARS:
            continue
        tensor_here = isinstance(value, Tensor)
        if key == "master" or (key in MOMENTS and known and value is not None):
            if not tensor_here:
                raise ValueError(
                    f"state_dict: the {key} of {t.name!r} is {value!r:.80}, not a tensor."
                )
            _check_cut(key, value, t)
        elif tensor_here and value.shape == t.param.shape:
            _check_cut(key, value, t)
        elif (
            tensor_here
            and theirs
            and not fused
            and value.ndim
            and value.shape != _shape(key, t.param)
        ):
            raise ValueError(
                f"state_dict: the {key} of {t.name!r} has shape {tuple(value.shape)}, the "
                f"parameter {tuple(t.param.shape)}: it is of another model, or truncated."
            )
        _check_dtype(key, value, t, own=own, fused=fused, known=known)
    for key in ("step", EPOCH):
        if key in t.entry and (known or key == EPOCH):
            _check_count(key, t.entry[key], t.name)
    if t.entry and t.has_elements:
        _check_complete(t, fused, own)


def _shape(key: str, param: Tensor) -> tuple[int, ...]:
    """The shape of a state tensor of torch's: the parameter's, but for Adafactor's factors."""
    shape = tuple(param.shape)
    if key == "row_var":
        return (*shape[:-1], 1)
    return (*shape[:-2], 1, shape[-1]) if key == "col_var" else shape


def _check_readable(key: str, value: Tensor, t: Target) -> None:
    """Raise ValueError for a tensor without memory that could be copied."""
    part = to_local(value)
    if part.is_meta and not t.param.is_meta:
        raise ValueError(
            f"state_dict: the {key} of {t.name!r} is on the meta device, which holds no values."
        )
    if part.layout != torch.strided:
        if key in (*MOMENTS, *SCALARS, "master"):
            raise ValueError(f"state_dict: the {key} of {t.name!r} is {part.layout}, not dense.")
        return
    if not has_memory(part):
        raise ValueError(
            f"state_dict: the memory of the {key} of {t.name!r} was freed (offloaded?): bring it "
            "back before loading."
        )


def has_memory(part: Tensor) -> bool:
    """Whether all of a tensor lies in its storage; one that was freed must not be read."""
    if part.is_meta or not part.numel() or type(part) not in (Tensor, torch.nn.Parameter):
        return True
    last = sum((n - 1) * s for n, s in zip(part.shape, part.stride(), strict=True))
    end = (part.storage_offset() + last + 1) * part.element_size()
    return part.untyped_storage().nbytes() >= end


def _check_cut(key: str, value: Tensor, t: Target) -> None:
    """Raise ValueError unless a tensor is shaped as the parameter, and cut so, or whole."""
    whole = is_sharded(t.param) and not is_sharded(value)
    if not whole or value.shape != t.param.shape:
        check_shape(key, value, t.name, t.param)
    theirs, mine = source_of(value).mesh(value), source_of(t.param).mesh(t.param)
    if is_sharded(value) and theirs != mine:
        raise ValueError(
            f"state_dict: the {key} of {t.name!r} is on {theirs}, the parameter on {mine}: load it "
            "with torch.distributed.checkpoint."
        )


def _check_dtype(key: str, value: Any, t: Target, *, own: bool, fused: bool, known: bool) -> None:
    """What belongs to a master is fp32; plain torch's state is of the parameter's dtype."""
    if not isinstance(value, Tensor):
        return
    cast = key == "master" and value.dtype != torch.float32
    if own and key in MOMENTS and fused:
        cast = value.dtype != torch.float32
    elif own and known:
        cast |= value.dtype in HALF
    elif key in MOMENTS and known:
        cast = not value.is_floating_point()
    if cast:
        raise ValueError(
            f"state_dict: the {key} of {t.name!r} is {value.dtype}, not float32: something cast "
            f"the state. Load the state as it was saved, or fc_optim.without_masters(state_dict)."
        )


def _check_count(key: str, value: Any, name: str) -> None:
    """Raise ValueError unless a step count is one whole number that was never rounded."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            shape = tuple(value.shape)
            raise ValueError(
                f"state_dict: the {key} of {name!r} has shape {shape}, not one number."
            )
        if value.dtype in HALF or value.is_complex() or value.dtype == torch.bool:
            raise ValueError(
                f"state_dict: the {key} of {name!r} is {value.dtype}: something cast it. "
                + AS_SAVED
            )
        value = 0 if value.is_meta else value.item()
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value < 0 or value != int(value):
        raise ValueError(
            f"state_dict: the {key} of {name!r} is {value!r:.80}, not a number of steps. "
            + AS_SAVED
        )


def _check_complete(t: Target, fused: bool, own: bool) -> None:
    """Raise ValueError if a part is missing that would silently begin at zero."""
    needed = [EPOCH] if own else []
    if fused:
        algorithm = ALGORITHMS[t.group["algorithm"]]
        count = ["step"] if algorithm.has_step else needed  # 0.1.0 had one of them
        needed = [*algorithm.moments(t.hyper), *count]
    missing = [key for key in needed if t.entry.get(key) is None]
    if missing:
        has = ", ".join(map(repr, list(t.entry)[:8]))
        raise ValueError(
            f"state_dict: the state of {t.name!r} lacks {', '.join(map(repr, missing))} (it has "
            f"{has}): the next update would be wrong. {AS_SAVED}"
        )


def _check_alike(mastered: Sequence[Target]) -> None:
    """Raise ValueError if some lack what keys their random bits, and others have it."""
    by_step = [t for t in mastered if "step" in t.entry]
    single = [t for t in mastered if not t.flat]
    for key, targets in ((EPOCH, by_step), ("param_id", single)):
        without = [t.name for t in targets if t.has_elements and key not in t.entry]
        if without and any(key in t.entry for t in targets):
            raise ValueError(
                f"state_dict: the {key} of {some(without)} is missing, others are there. {AS_SAVED}"
            )


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in a value, in its lists and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _tensors(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _tensors(inner)
