"""State dicts: what is saved, what a load restores, and the ways from and to plain torch."""

import copy
import logging
from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from fc_optim.params.collectives import copy_to_shard
from fc_optim.params.names import GROUP_KEYS, STATE_KEYS
from fc_optim.params.registry import Managed
from fc_optim.params.sources import is_sharded, layout_of, source_of, to_local
from fc_optim.params.words import differing_words
from fc_optim.update.plan import state_calls
from fc_optim.update.state import EPOCH, MASTER, check_shape, complete_state, id_tensor
from fc_optim.weights import DITHERS, ROUNDING_SCHEME, ServedWeights, StateDict

logger = logging.getLogger("fc_optim")

_OPTIONS = ("seed", "dither", "epoch", "served_version")
# A group's own, never loaded over: they say what the group is, not how it is stepped.
_KEPT = ("params", "param_names", "algorithm", "served_dtype", "decoupled_weight_decay")
_PARAMETER_SHAPED = ("master", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")
_SCALARS = ("step", "dither_step", "param_id")


def without_masters(state_dict: StateDict) -> StateDict:
    """A state dict that loads moments and hyper-parameters but takes masters from the parameters.

    The input is left as it is; tensors are shared with it.
    """
    state = {
        k: {n: v for n, v in entry.items() if n != "master"} if isinstance(entry, dict) else entry
        for k, entry in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


def to_torch_state_dict(saved: StateDict, fused: bool) -> StateDict:
    """The state dict that the base optimizer alone would have saved (moments stay fp32).

    Parameters that were never stepped have no entry, as in torch.
    """
    state = {}
    for key, entry in saved["state"].items():
        if not isinstance(entry, dict):  # what a base keeps there beside the parameters'
            state[key] = entry
            continue
        own = {n: v for n, v in entry.items() if n not in STATE_KEYS}
        steps = entry.get("step", entry.get("dither_step")) if fused else None
        if own and (steps is None or steps.item() != 0):
            state[key] = own
    groups = [{k: v for k, v in g.items() if k not in GROUP_KEYS} for g in saved["param_groups"]]
    return {"state": state, "param_groups": groups}


def load_state(weights: ServedWeights, state_dict: StateDict) -> None:
    """`load_state_dict` without its hooks: validate everything, then change things."""
    saved_groups, by_param = _matched(weights, state_dict)
    by_param = {p: _cut(p, entry) for p, entry in by_param.items()}
    for i, (group, saved) in enumerate(zip(weights.groups, saved_groups, strict=True)):
        _check_group(i, group, saved)
    for p, entry in by_param.items():
        name = weights.registry.name_of(weights.groups, p)
        _check_entry(name, p, entry, weights.fused)
    _refuse_some_masters(weights, by_param)

    masters = _count_masters(weights)
    _load_groups(weights, saved_groups)
    for group in weights.groups:
        fused = weights.fused and group["served_dtype"] is not None
        for p in group["params"]:
            old = weights.state.pop(p, {})
            if p in by_param:
                weights.state[p] = _load_entry(p, old, by_param[p], group, fused=fused)
    own = set(chain.from_iterable(g["params"] for g in saved_groups))  # numbers, or names (DCP)
    weights.state.update({k: v for k, v in state_dict["state"].items() if k not in own})
    kept = _count_masters(weights)
    if not by_param and any(g.get("served_version", 0) > 0 for g in saved_groups):
        logger.warning(
            "load_state_dict: the groups are of version %d, but the state of every parameter is "
            "missing: something dropped it on the way.", saved_groups[0].get("served_version", 0),
        )  # fmt: skip
    if kept < masters:
        logger.warning(
            "load_state_dict: the state has no master for %d parameters; theirs are made anew "
            "from the parameters.", masters - kept,
        )  # fmt: skip
    if not weights.fused:
        _warn_of_lost_buffers(weights)
    restored = _adopt_ids(weights)
    if restored:
        changed, total = rewrite(weights, restored)
        logger.info(
            "load_state_dict: %d parameters rewritten from their masters; %d of %d served words "
            "changed (%.3g %%)",
            len(restored), changed, total, 100 * changed / max(total, 1),
        )  # fmt: skip


def rewrite(weights: ServedWeights, entries: list[Managed]) -> tuple[int, int]:
    """Containers <- shadow of the masters; returns (words that changed, words)."""
    changed: list[Tensor] = []
    total = 0
    for entry in entries:  # one at a time: the old values are kept beside the new ones
        if entry.param.is_meta:
            continue
        old = entry.local.clone()
        for call in state_calls(weights.context(), [entry]):
            call.round()
        changed.append(differing_words(old, entry.local))
        total += old.numel()
    weights.wrote([e for e in entries if not e.param.is_meta])
    return int(sum(c.item() for c in changed)), total


def _adopt_ids(weights: ServedWeights) -> list[Managed]:
    """Take the loaded identities; returns the parameters that have a master."""
    for e in weights.entries():
        e.identity.has_master = MASTER in e.state
    entries = weights.with_master()
    for e in entries:
        if e.identity.flat:
            e.state.pop("param_id", None)
        elif "param_id" in e.state:
            e.identity.ids = (int(e.state["param_id"]),)
        else:
            e.state["param_id"] = id_tensor(e.identity.param_id)
    weights.registry.changes += 1
    weights.registry.find_layouts(entries)
    for e in entries:
        complete_state(e, weights.fused)
    return entries


def _matched(
    weights: ServedWeights, state_dict: StateDict
) -> tuple[list[dict[str, Any]], dict[Tensor, Mapping[str, Any]]]:
    """The saved groups, and the saved entry of each parameter that has one."""
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        raise ValueError(
            "state_dict: expected the keys 'state' and 'param_groups' of an optimizer's state "
            f"dict, found {sorted(map(str, state_dict))[:8] if state_dict else state_dict!r}."
        )
    saved = list(state_dict["param_groups"])
    mine = [len(g["params"]) for g in weights.groups]
    theirs = [len(g["params"]) for g in saved]
    if mine != theirs:
        raise ValueError(
            f"state_dict: its parameter groups have {theirs} parameters, this optimizer's have "
            f"{mine}: build the optimizer with the groups that it was saved with."
        )
    pairs = zip(
        chain.from_iterable(g["params"] for g in saved),
        chain.from_iterable(g["params"] for g in weights.groups),
        strict=True,
    )
    entries = state_dict["state"]
    return saved, {p: entries[k] for k, p in pairs if k in entries}


def _cut(param: Tensor, entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """The entry of a sharded parameter, with this rank's part in place of whole tensors."""
    if not is_sharded(param):
        return entry
    (piece,) = layout_of(param, {}, "").pieces

    def part(key: str, value: Any) -> Any:
        whole = isinstance(value, Tensor) and not is_sharded(value)
        if not whole or key in _SCALARS or value.shape != param.shape:
            return value
        own = value.new_empty(to_local(param).shape)
        copy_to_shard(value.detach().contiguous().view(-1), piece.segments, out=own.view(-1))
        return source_of(param).from_local(param, own)

    return {k: part(k, v) for k, v in entry.items()}


def _check_group(i: int, mine: dict[str, Any], saved: dict[str, Any]) -> None:
    scheme = saved.get("rounding_scheme", ROUNDING_SCHEME)
    if scheme != ROUNDING_SCHEME:
        raise ValueError(
            f"state_dict: group {i} was rounded with scheme {scheme}, this version knows "
            f"{ROUNDING_SCHEME}: load it with the fc_optim that saved it, or load "
            "fc_optim.without_masters(state_dict)."
        )
    if saved.get("dither", "fresh") not in DITHERS:
        raise ValueError(f"state_dict: dither {saved['dither']!r} is none of {DITHERS}.")
    for key in ("seed", "epoch", "served_version"):
        if not isinstance(saved.get(key, 0), int):
            raise ValueError(f"state_dict: {key} of group {i} is {saved[key]!r}, not an integer.")
    for key in ("algorithm", "served_dtype"):
        if saved.get(key, mine[key]) != mine[key]:
            raise ValueError(
                f"state_dict: {key} of group {i} is {saved[key]!r}, here {mine[key]!r}: build the "
                "optimizer as it was when the state was saved."
            )


def _check_entry(name: str, param: Tensor, entry: Mapping[str, Any], fused: bool) -> None:
    shaped = _PARAMETER_SHAPED if fused else ("master",)  # of the rest, the base alone knows
    for key, value in entry.items():
        alike = isinstance(value, Tensor) and value.shape == param.shape and key not in _SCALARS
        if key not in shaped and not alike:
            continue
        if isinstance(value, Tensor):
            check_shape(key, value, name, param)
            if is_sharded(value) and value.device_mesh != param.device_mesh:  # type: ignore[attr-defined]
                raise ValueError(
                    f"state_dict: the {key} of {name!r} is on {value.device_mesh}, the parameter "  # type: ignore[attr-defined]
                    f"on {param.device_mesh}: load it with torch.distributed.checkpoint."  # type: ignore[attr-defined]
                )
        elif value is not None:
            raise ValueError(f"state_dict: the {key} of {name!r} is {value!r}, not a tensor.")
    for key in ("step", "dither_step"):
        if isinstance(entry.get(key), Tensor) and entry[key].numel() != 1:
            shape = tuple(entry[key].shape)
            raise ValueError(
                f"state_dict: the {key} of {name!r} has shape {shape}, not one number."
            )
    if "master" in entry and entry["master"].dtype != torch.float32:
        raise ValueError(
            f"state_dict: the master of {name!r} is {entry['master'].dtype}, not float32: "
            "something cast the state. Load the state as it was saved, or "
            "fc_optim.without_masters(state_dict)."
        )


def _refuse_some_masters(
    weights: ServedWeights, by_param: Mapping[Tensor, Mapping[str, Any]]
) -> None:
    """Raise ValueError if the state has lost the masters of some parameters, not of all."""
    managed = {e.param: e.identity.name for e in weights.entries()}
    lost = [managed[p] for p, entry in by_param.items() if p in managed and "master" not in entry]
    if lost and any("master" in entry for entry in by_param.values()):
        raise ValueError(
            f"state_dict: the master of {', '.join(map(repr, lost[:8]))} is missing, others are "
            "there: the checkpoint is damaged. To take every master from the parameters, load "
            "fc_optim.without_masters(state_dict)."
        )


def _count_masters(weights: ServedWeights) -> int:
    """Of parameters with elements here: FSDP1 restores no state of the others."""
    params = [p for p in weights.state if isinstance(p, Tensor)]  # a base may keep more there
    return sum("master" in weights.state[p] and p.numel() > 0 for p in params)


def _warn_of_lost_buffers(weights: ServedWeights) -> None:
    """For an unfused optimizer whose own state was not saved, or not loaded."""
    names = [
        e.identity.name
        for e in weights.entries()
        if e.group.get("momentum") != 0  # SGD has no state then
        and e.state.get("dither_step", 0) > 0
        and e.state.keys() <= set(STATE_KEYS)
    ]
    if names:
        logger.warning(
            "load_state_dict: the state has nothing of the base optimizer for %d parameters that "
            "were stepped, such as %s: its buffers start anew. torch.distributed.checkpoint loads "
            "only what the optimizer holds: load before the first publish().",
            len(names), names[0],
        )  # fmt: skip


def _load_entry(
    param: Tensor,
    old: dict[str, Any],
    saved: Mapping[str, Any],
    group: dict[str, Any],
    *,
    fused: bool,
) -> dict[str, Any]:
    """A parameter's new state. Never casts fp32; writes into `old` tensors where they fit.

    State of an excluded group is torch's: of the parameter's dtype.
    """
    new = {}
    for key, value in saved.items():
        if key == EPOCH:
            value = torch.as_tensor(value).to(torch.int64).reshape(())
        elif key == "step" and fused:
            value = torch.as_tensor(value, dtype=torch.float32).reshape(())
        elif isinstance(value, Tensor) and value.is_floating_point() and key != "step":
            if group["served_dtype"] is None:
                value = value.to(param.dtype)
            elif fused:
                value = value.to(torch.float32)
        # torch keeps the step of an unfused optimizer where it is; ids are only read on the host.
        stays = param.is_meta or key == "param_id" or (key == "step" and not fused)
        device = None if stays else param.device
        if is_sharded(value) and old.get(key) is not value:
            mine = old.get(key)
            mine = None if mine is None else to_local(mine)
            own = _load_value(device, mine, to_local(value))
            new[key] = source_of(value).from_local(
                param if value.shape == param.shape else value, own
            )
        else:
            new[key] = _load_value(device, old.get(key), value)
    return new


def _load_value(device: torch.device | None, old: Any, value: Any) -> Any:
    if isinstance(value, Tensor):
        if old is value:
            return value
        device = value.device if device is None else device
        fits = (
            isinstance(old, Tensor)
            and (old.shape, old.dtype, old.device) == (value.shape, value.dtype, device)
            and old.is_contiguous()
        )
        if fits:
            return old.copy_(value)
        return value.detach().to(device, memory_format=torch.contiguous_format, copy=True)
    if isinstance(value, dict):
        inner = old if isinstance(old, dict) else {}
        return {k: _load_value(device, inner.get(k), v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_load_value(device, None, v) for v in value)
    return copy.deepcopy(value)


def _load_groups(weights: ServedWeights, saved_groups: list[dict[str, Any]]) -> None:
    for group, saved in zip(weights.groups, saved_groups, strict=True):
        for key, value in saved.items():
            if key in _KEPT:
                continue
            mine = group.get(key)
            if isinstance(mine, Tensor):  # schedulers and captured graphs hold this very tensor
                if mine is not value:
                    mine.copy_(torch.as_tensor(value))
            else:
                group[key] = tuple(value) if key == "betas" else copy.deepcopy(value)
    if saved_groups and all(k in saved_groups[0] for k in _OPTIONS):
        load_options(weights, **{k: saved_groups[0][k] for k in _OPTIONS})


def load_options(
    weights: ServedWeights, seed: int, dither: str, epoch: int, served_version: int
) -> None:
    """Continue a saved run: its seed, dither and counters win over the constructor's."""
    for key, mine, theirs in (("seed", weights.seed, seed), ("dither", weights.dither, dither)):
        if mine != theirs:
            logger.warning(
                "load_state_dict: %s=%r of the state replaces %r. To keep yours, set it in "
                "every group of the state dict before loading.", key, theirs, mine,
            )  # fmt: skip
    weights.seed, weights.dither, weights.epoch = int(seed), dither, int(epoch)
    weights.disagree()
    # Monotonic: going back to an older state in this process is a new version for an engine.
    older = int(served_version) < weights.version
    weights.version = weights.version + 1 if older else int(served_version)
