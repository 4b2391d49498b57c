"""Whether the groups of an optimizer may take saved options and hyper-parameters."""

import contextlib
import inspect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fc_optim.checkpoint.saved import AS_SAVED, OPTIONS, Saved
from fc_optim.params.names import GROUP_KEYS
from fc_optim.weights import DITHERS, ROUNDING_SCHEME

# How a step is computed, not what: a state may lack these.
_IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")
_ALGORITHMS = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "muon": torch.optim.Muon}


def check_groups(
    base: Optimizer,
    fused: bool,
    saved: Saved,
    pairs: Sequence[tuple[dict[str, Any], Mapping[str, Any]]],
) -> None:
    """Raise ValueError unless hyper-parameters and options can be loaded.

    Args:
        base: the torch optimizer inside.
        fused: whether kernels step it.
        pairs: every group of the optimizer with the saved one that it is.
    """
    _check_options(saved)
    for i, (mine, theirs) in enumerate(pairs):
        _check_group(i, mine, theirs, base, fused, saved.own)


def _check_options(saved: Saved) -> None:
    """What the bits depend on: there, of the right type, the same in all groups."""
    masters = any("master" in entry for entries in saved.entries for entry in entries)
    for i, group in enumerate(saved.groups):
        missing = [key for key in GROUP_KEYS if key not in group]
        if (saved.own or masters) and missing:
            raise ValueError(
                f"state_dict: group {i} lacks {', '.join(map(repr, missing))}, which "
                f"FairCastOptimizer saves with masters. {AS_SAVED}"
            )
        if not saved.own:
            continue
        scheme = group["rounding_scheme"]
        if scheme != ROUNDING_SCHEME:
            raise ValueError(
                f"state_dict: group {i} was rounded with scheme {scheme}, this version knows "
                f"{ROUNDING_SCHEME}: load it with the fc_optim that saved it, or load "
                "fc_optim.without_masters(state_dict)."
            )
        if group["dither"] not in DITHERS:
            raise ValueError(f"state_dict: dither {group['dither']!r} is none of {DITHERS}.")
        for key, end in (("seed", 2**64), ("epoch", 2**63), ("served_version", 2**63)):
            value = group[key]
            if not isinstance(value, int) or isinstance(value, bool):
                raise ValueError(f"state_dict: {key} of group {i} is {value!r}, not an integer.")
            if not 0 <= value < end:
                raise ValueError(f"state_dict: {key} of group {i} is {value}, not in [0, {end}).")
        for key in OPTIONS:
            if group[key] != saved.groups[0][key]:
                raise ValueError(
                    f"state_dict: {key} is {saved.groups[0][key]!r} in group 0 and {group[key]!r} "
                    f"in group {i}: it is the optimizer's. Set it in every group."
                )


def _check_group(
    i: int,
    mine: dict[str, Any],
    saved: Mapping[str, Any],
    base: Optimizer,
    fused: bool,
    own: bool,
) -> None:
    for key in ("algorithm", "served_dtype"):
        if saved.get(key, mine[key]) != mine[key]:
            raise ValueError(
                f"state_dict: {key} of group {i} is {saved[key]!r}, here {mine[key]!r}: build the "
                "optimizer as it was when the state was saved."
            )
    needed = set(base.defaults) - set(_IMPLEMENTATION)
    if own and fused:
        needed |= set(inspect.signature(_ALGORITHMS[mine["algorithm"]]).parameters) & mine.keys()
        needed -= {"params", *_IMPLEMENTATION}
    missing = sorted(needed & mine.keys() - _completed(base, saved).keys())
    if missing:
        raise ValueError(f"state_dict: group {i} lacks {', '.join(map(repr, missing))}. {AS_SAVED}")
    skip = {"params", "param_names", *GROUP_KEYS, *_IMPLEMENTATION}
    for key in mine.keys() & saved.keys() - skip:
        if not _alike(mine[key], saved[key]):
            raise ValueError(
                f"state_dict: {key} of group {i} is {saved[key]!r:.80}, here {mine[key]!r:.80}: "
                f"another type. {AS_SAVED}"
            )


def _completed(base: Optimizer, group: Mapping[str, Any]) -> Mapping[str, Any]:
    """A group with what the base itself adds to those of earlier versions of it."""
    twin = object.__new__(type(base))
    twin.defaults = dict(base.defaults)
    completed = {**group, "params": []}
    with contextlib.suppress(Exception):  # one that wants more than torch's: it adds nothing
        twin.__setstate__({"state": defaultdict(dict), "param_groups": [completed]})
    return completed


def _alike(mine: Any, theirs: Any) -> bool:
    """Whether a hyper-parameter may take this value, as far as types tell."""
    if isinstance(mine, Tensor):
        return _is_number(theirs, mine.numel())
    if isinstance(mine, bool):
        return isinstance(theirs, bool)
    if isinstance(mine, int | float):
        return _is_number(theirs, 1)
    if isinstance(mine, tuple | list):
        same = isinstance(theirs, tuple | list) and len(theirs) == len(mine)
        return same and all(map(_alike, mine, theirs))
    return not isinstance(mine, str) or theirs is None or isinstance(theirs, str)


def _is_number(value: Any, numel: int) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == numel and not value.is_complex() and not value.is_meta
    return isinstance(value, int | float) and not isinstance(value, bool) and numel == 1
