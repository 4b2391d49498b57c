"""What a state dict holds: read into plain data, and made from or for plain torch."""

import logging
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from fc_optim.checkpoint.matching import Place
from fc_optim.params.names import GROUP_KEYS, STATE_KEYS
from fc_optim.params.sources import source_of
from fc_optim.update.state import EPOCH, MASTER
from fc_optim.weights import ServedWeights, StateDict

logger = logging.getLogger("fc_optim")

OPTIONS = ("seed", "dither", "epoch", "served_version")
MASTERS_FROM = "masters_from"  # group key of a state dict: `without_masters` made it
NAMES = "names"  # key of a state dict: names of a bound model, by parameter key
AS_SAVED = "Load the state as it was saved."  # the remedy of most faults
MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")


@dataclass(frozen=True, slots=True)
class Saved:
    """A state dict, read. Tensors are the state dict's own.

    groups: its parameter groups.
    keys: how the state is keyed by parameters, by group: numbers or names.
    places: what is known of each parameter, parallel to `keys`.
    entries: the state of each parameter, parallel to `keys`; {} where there is none.
    extras: state that belongs to no parameter.
    own: whether this package saved it (or it says so).
    anew: whether it came from `without_masters`.
    """

    groups: Sequence[Mapping[str, Any]]
    keys: Sequence[Sequence[Hashable]]
    places: Sequence[Sequence[Place]]
    entries: Sequence[Sequence[Mapping[str, Any]]]
    extras: Mapping[Hashable, Any]
    own: bool
    anew: bool


def read(state_dict: Any) -> Saved:
    """The contents of a state dict. Raises ValueError if it is not built as one."""
    state, groups = _parts(state_dict)
    keys = [_keys(i, group) for i, group in enumerate(groups)]
    names = _names(state_dict.get(NAMES, {}))
    seen = set(chain.from_iterable(keys))
    entries = [[_entry(k, state.get(k, {})) for k in own] for own in keys]
    return Saved(
        groups=groups,
        keys=keys,
        places=[
            list(_places(group, own, found, names))
            for group, own, found in zip(groups, keys, entries, strict=True)
        ],
        entries=entries,
        extras={k: v for k, v in state.items() if k not in seen},
        own=any(key in group for group in groups for key in GROUP_KEYS),
        anew=any(MASTERS_FROM in group for group in groups),
    )


def _parts(state_dict: Any) -> tuple[Mapping[Hashable, Any], list[Mapping[str, Any]]]:
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        found = sorted(map(str, state_dict))[:8] if isinstance(state_dict, Mapping) else state_dict
        raise ValueError(
            "state_dict: expected the keys 'state' and 'param_groups' of an optimizer's state "
            f"dict, found {found!r:.200}."
        )
    state, groups = state_dict["state"], state_dict["param_groups"]
    if not isinstance(state, Mapping):
        raise ValueError(f"state_dict: state is {state!r:.80}, not a dict.")
    if not isinstance(groups, list | tuple) or not all(isinstance(g, Mapping) for g in groups):
        raise ValueError(f"state_dict: param_groups is {groups!r:.80}, not a list of dicts.")
    return state, list(groups)


def _keys(i: int, group: Mapping[str, Any]) -> list[Hashable]:
    keys = group.get("params")
    if not isinstance(keys, list | tuple) or not all(isinstance(k, int | str) for k in keys):
        raise ValueError(
            f"state_dict: params of group {i} is {keys!r:.80}, not a list of numbers or names."
        )
    return list(keys)


def _names(names: Any) -> Mapping[Hashable, tuple[str, ...]]:
    for own in names.values() if isinstance(names, Mapping) else [names]:
        _refuse_no_names(NAMES, own)
    return {key: tuple(own) for key, own in names.items()}


def _refuse_no_names(what: str, names: Any) -> None:
    if not isinstance(names, list | tuple) or not all(isinstance(n, str) for n in names):
        raise ValueError(f"state_dict: {what} has {names!r:.80}, not a list of names. {AS_SAVED}")


def _entry(key: Hashable, entry: Any) -> Mapping[str, Any]:
    if not isinstance(entry, Mapping):
        raise ValueError(f"state_dict: the state of parameter {key!r} is {entry!r:.80}, no dict.")
    return entry


def _places(
    group: Mapping[str, Any],
    keys: Sequence[Hashable],
    entries: Sequence[Mapping[str, Any]],
    names: Mapping[Hashable, tuple[str, ...]],
) -> Iterable[Place]:
    given = group.get("param_names", [])
    _refuse_no_names("param_names", given)
    known = len(given) == len(keys)  # FSDP1 leaves those of the buffers that it put back apart
    for i, (key, entry) in enumerate(zip(keys, entries, strict=True)):
        is_name = isinstance(key, str) and not key.isdigit()
        # Where keys are names, torch put them into our order; `param_names` are of the saved one.
        name = given[i] if known and not is_name else None
        labels = names.get(key, (str(key),) if is_name else ())
        title = name or (labels[0] if labels else f"number {key}")
        yield Place(title, name, labels, identity(title, entry.get("param_id")))


def identity(name: str, value: Any) -> int | None:
    """The `param_id` of an entry, if it has one. Raises ValueError if it cannot be one."""
    if value is None:
        return None
    whole = isinstance(value, int) and not isinstance(value, bool)
    if isinstance(value, Tensor):
        whole = value.numel() == 1 and not value.is_meta and value.dtype == torch.int64
    if not whole or not 0 <= int(value) < 2**32:
        shown = f"{value.dtype}" if isinstance(value, Tensor) else repr(value)
        raise ValueError(
            f"state_dict: the param_id of {name!r} is {shown:.80}, not one int64 in [0, 2**32): "
            "something cast or replaced it. Load the state as it was saved."
        )
    return int(value)


# ---- State dicts that are made


def places_of(weights: ServedWeights) -> list[list[Place]]:
    """What is known of the parameters of an optimizer, by group."""
    identities = {p: i for _, p, i in weights.registry.places(weights.groups)}
    found = []
    for group in weights.groups:
        params, given = group["params"], group.get("param_names", ())
        known = len(given) == len(params)  # a framework may have put flat buffers there
        places = []
        for i, p in enumerate(params):
            own = identities[p]
            # Names of FSDP1's flat parameters are known with the model alone.
            named = own.bound or (own.flat and not source_of(p).is_flat(p))
            places.append(
                Place(
                    title=own.name,
                    given=given[i] if known else None,
                    labels=own.names if named else (),
                    param_id=None if own.flat else own.param_id,
                )
            )
        found.append(places)
    return found


def add_names(weights: ServedWeights, state_dict: Any) -> Any:
    """`state_dict` with the names that the bound model gives, where the groups have none.

    In place, at the top level, which `torch.distributed.checkpoint` (it has names of its own) and
    plain torch ignore.
    """
    names: dict[Hashable, list[str]] = {}
    groups = zip(weights.groups, places_of(weights), state_dict["param_groups"], strict=True)
    for group, places, packed in groups:
        if "param_names" not in group:
            keys = zip(packed["params"], places, strict=True)
            names |= {key: list(place.labels) for key, place in keys if place.labels}
    if names:
        state_dict[NAMES] = names
    return state_dict


def plain_epochs(weights: ServedWeights, state_dict: StateDict) -> StateDict:
    """`state_dict` with the dither epochs of a framework's buffers as plain numbers.

    DeepSpeed's `ds_to_universal` cuts the padding off every tensor that is not called `step`.
    """
    if weights.buffers is None:
        return state_dict
    state = {
        key: {**entry, EPOCH: int(entry[EPOCH])} if EPOCH in entry else entry
        for key, entry in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


def without_masters(state_dict: StateDict) -> StateDict:
    """A state dict that loads moments and hyper-parameters but takes masters from the parameters.

    To load it is to say so: the masters that an optimizer has are given up, and the next
    `publish()` or `step()` makes them anew from what the parameters hold then. For a state of
    plain torch as well. The input is left as it is; tensors are shared with it. Raises ValueError
    if it is no optimizer's state dict.
    """
    state, groups = _parts(state_dict)
    return {
        **state_dict,
        "state": {
            key: {n: v for n, v in entry.items() if n != MASTER}
            if isinstance(entry, Mapping)
            else entry
            for key, entry in state.items()
        },
        "param_groups": [{**group, MASTERS_FROM: "parameters"} for group in groups],
    }


def to_torch_state_dict(saved: StateDict, fused: bool) -> StateDict:
    """The state dict that the base optimizer alone would have saved (moments stay fp32).

    Parameters that were never stepped have no entry, as in torch.
    """
    state = {}
    for key, entry in saved["state"].items():
        if not isinstance(entry, Mapping):  # no parameter's
            state[key] = entry
            continue
        own = {n: v for n, v in entry.items() if n not in STATE_KEYS}
        steps = entry.get("step", entry.get(EPOCH)) if fused else None
        if own and (steps is None or steps != 0):
            state[key] = own
    groups = [{k: v for k, v in g.items() if k not in GROUP_KEYS} for g in saved["param_groups"]]
    return {"state": state, "param_groups": groups}
