"""Loading a state dict: all of it is checked and copied beside, then it takes its place at once."""

import contextlib
import copy
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from fc_optim.checkpoint.checks import SCALARS, Target, check_entries, has_memory
from fc_optim.checkpoint.hyper import check_groups
from fc_optim.checkpoint.matching import pair
from fc_optim.checkpoint.saved import (
    MASTERS_FROM,
    MOMENTS,
    OPTIONS,
    Saved,
    identity,
    logger,
    places_of,
    read,
)
from fc_optim.params.collectives import copy_to_shard
from fc_optim.params.names import STATE_KEYS
from fc_optim.params.registry import Managed
from fc_optim.params.sources import is_sharded, layout_of, source_of, to_local
from fc_optim.params.words import differing_words
from fc_optim.update.plan import Context, state_calls
from fc_optim.update.state import EPOCH, MASTER, complete_state, id_tensor
from fc_optim.weights import ServedWeights, StateDict

# A group's own, never loaded over: they say what the group is, not how it is stepped.
_KEPT = (
    *("params", "param_names", "algorithm", "served_dtype", "decoupled_weight_decay"),
    MASTERS_FROM,
)

_COUNTS = {"step": torch.float32, EPOCH: torch.int64}  # as kernels read them

State = dict[str, Any]


def load_state(weights: ServedWeights, state_dict: StateDict) -> None:
    """`load_state_dict` without its hooks.

    Whatever is raised, by a check (ValueError) or for want of memory, is raised before state and
    groups change; weights that were rewritten by then are put back.
    """
    saved = read(state_dict)
    pairing = pair(saved.places, places_of(weights))
    groups = [saved.groups[i] for i in pairing.groups]
    pairs = list(zip(weights.groups, groups, strict=True))
    check_groups(weights.base, weights.fused, saved, pairs)
    targets = _targets(weights, saved, pairing.places, groups)
    check_entries(weights.base, weights.fused, saved, targets)

    everyone = [t for group in targets for t in group]
    extras = {k: _copied(None, v) for k, v in saved.extras.items()}
    hyper = [_new_hyper(mine, theirs) for mine, theirs in pairs]
    states = {t.param: _new_state(t, weights.fused) for t in everyone}
    entries = _with_masters(weights, states)
    context = _context(weights, groups[0] if saved.own else {})
    with _rewritten(context, entries) as words:
        _take_over(weights, states, extras, hyper)
    if saved.own:
        load_options(weights, **{k: groups[0][k] for k in OPTIONS})
    _settle(weights, entries)
    _report(weights, pairing.by, words)


# ---- Copies of what is loaded


def _targets(
    weights: ServedWeights, saved: Saved, order: list[int], groups: list[Mapping[str, Any]]
) -> list[list[Target]]:
    """The parameters of each group, with the saved entry of each."""
    identities = {p: i for _, p, i in weights.registry.places(weights.groups)}
    flat = [entry for entries in saved.entries for entry in entries]
    if saved.anew:
        flat = [{k: v for k, v in entry.items() if k != MASTER} for entry in flat]
    found, start = [], 0
    for group, theirs in zip(weights.groups, groups, strict=True):
        hyper = {**group, **{k: v for k, v in theirs.items() if k not in _KEPT}}
        found.append(
            [
                Target(
                    name=identities[p].name,
                    param=p,
                    group=group,
                    hyper=hyper,
                    served=group["served_dtype"] is not None,
                    flat=identities[p].flat,
                    entry=flat[order[start + i]],
                    held=weights.state.get(p, {}),
                )
                for i, p in enumerate(group["params"])
            ]
        )
        start += len(group["params"])
    return found


def _new_hyper(mine: State, theirs: Mapping[str, Any]) -> State:
    """What a group takes from the saved one: copies, of the types that it has."""
    new = {}
    for key, value in theirs.items():
        if key in _KEPT:
            continue
        held = mine.get(key)
        if isinstance(held, Tensor) and held is not value:
            value = torch.as_tensor(value).detach().to(held, copy=True).reshape(held.shape)
        elif not isinstance(held, Tensor):
            value = copy.deepcopy(value)
        new[key] = tuple(value) if isinstance(held, tuple) and isinstance(value, list) else value
    return new


def _new_state(t: Target, fused: bool) -> State | None:
    """A parameter's new state, in memory of its own; None if it has none.

    What is here already is not copied: some frameworks load into the very tensors of the state.
    """
    if not t.entry:
        lost = t.served and not t.has_elements and MASTER in t.held  # FSDP1 drops it
        return dict(t.held) if lost else None
    new = {}
    for key, value in t.entry.items():
        try:
            new[key] = _new_value(t, key, value, fused=fused and t.served)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise ValueError(
                f"state_dict: the {key} of {t.name!r} cannot be copied: {error}"
            ) from error
    if MASTER not in new or t.flat:  # then identities come from the names
        new.pop("param_id", None)
    return new


def _new_value(t: Target, key: str, value: Any, *, fused: bool) -> Any:
    """Never casts what is fp32. State of an excluded group is torch's: of the parameter's dtype."""
    held = t.held.get(key)
    if value is held and isinstance(value, Tensor):
        return value
    if key == "param_id":
        found = identity(t.name, value)
        if found is None:
            raise ValueError("None is no identity")
        return id_tensor(found)
    dtype = _COUNTS[key] if key == EPOCH or (key == "step" and fused) else None
    if dtype is not None:
        value = torch.as_tensor(value).detach().reshape(())
    if isinstance(value, Tensor) and value.is_floating_point() and key != "step":
        if not t.served:
            dtype = t.param.dtype
        elif fused and key in MOMENTS:
            dtype = torch.float32
    # torch keeps the step of an unfused optimizer where it is.
    stays = t.param.is_meta or (key == "step" and not fused)
    value = _part(t.param, key, value)
    return _copied(None if stays else t.param.device, value, dtype, t.param)


def _part(param: Tensor, key: str, value: Any) -> Any:
    """This rank's part of a whole tensor, if the parameter is sharded; else the value itself."""
    whole = isinstance(value, Tensor) and not is_sharded(value)
    if not (whole and is_sharded(param)) or key in SCALARS or value.shape != param.shape:
        return value
    (piece,) = layout_of(param, {}, "").pieces
    own = value.new_empty(to_local(param).shape)
    copy_to_shard(value.detach().contiguous().view(-1), piece.segments, out=own.view(-1))
    return source_of(param).from_local(param, own)


def _copied(
    device: torch.device | None,
    value: Any,
    dtype: torch.dtype | None = None,
    param: Tensor | None = None,
) -> Any:
    """A copy on `device` (None: where it is), of `dtype` (None: as it is), cut as `param` is."""
    if isinstance(value, Tensor):
        if is_sharded(value):
            like = param if param is not None and value.shape == param.shape else value
            return source_of(like).from_local(like, _copied(device, to_local(value), dtype))
        strided = value.layout == torch.strided
        return value.detach().to(
            device=value.device if device is None else device,
            dtype=value.dtype if dtype is None else dtype,
            memory_format=torch.contiguous_format if strided else torch.preserve_format,
            copy=True,
        )
    if isinstance(value, dict):
        return {k: _copied(device, v) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied(device, v) for v in value)
    return copy.deepcopy(value)


# ---- Weights, and the change itself


def _with_masters(weights: ServedWeights, states: Mapping[Tensor, State | None]) -> list[Managed]:
    """The parameters that will have masters, with complete new state; nothing of `opt` changes."""
    entries = []
    for group, p, identity_ in weights.registry.places(weights.groups):
        new = states.get(p)
        if new is None or MASTER not in new or group["served_dtype"] is None:
            continue
        if not identity_.flat:
            new.setdefault("param_id", id_tensor(identity_.param_id))
            identity_ = dataclasses.replace(identity_, ids=(int(new["param_id"]),))
        entries.append(Managed(p, new, group, identity_, source_of(p)))
    weights.registry.find_layouts(entries)
    for e in entries:
        if weights.fused or EPOCH not in e.state:  # state of a base without kernels is its own
            complete_state(e, weights.fused)
    return entries


def _context(weights: ServedWeights, options: Mapping[str, Any]) -> Context:
    """What keys the random bits once `options` are loaded."""
    context = dataclasses.replace(weights.context(), shared={})
    if not options:
        return context
    epoch = {"fresh": None, "sync": options["epoch"], "held": 0}[options["dither"]]
    return dataclasses.replace(context, seed=options["seed"], epoch=epoch)


@contextlib.contextmanager
def _rewritten(context: Context, entries: list[Managed]) -> Iterator[tuple[int, int]]:
    """Containers <- shadow of the new masters; put back if anything raises.

    Gives (words that changed, words).
    """
    before: list[tuple[Tensor, Tensor]] = []
    changed: list[Tensor] = []
    try:
        for e in entries:
            if e.param.is_meta:
                continue
            before.append((e.local, e.local.clone()))
            for call in state_calls(context, [e]):
                call.round()
            changed.append(differing_words(before[-1][1], e.local))
        yield sum(int(c) for c in changed), sum(old.numel() for _, old in before)
    except BaseException:
        for container, old in before:
            container.copy_(old)
        raise


def _take_over(
    weights: ServedWeights,
    states: Mapping[Tensor, State | None],
    extras: Mapping[Any, Any],
    hyper: list[State],
) -> None:
    """The change: groups and state in place. Copies between tensors that fit cannot fail."""
    for group, new in zip(weights.groups, hyper, strict=True):
        for key, value in new.items():
            group[key] = _placed(group.get(key), value)
    for p, state in states.items():
        old = weights.state.pop(p, {})
        if state is not None:
            weights.state[p] = {k: _placed(old.get(k), v) for k, v in state.items()}
    weights.state.update(extras)


def _placed(old: Any, new: Any) -> Any:
    """`new`, in the memory of `old` where it fits: schedulers and captured graphs hold that."""
    if not isinstance(old, Tensor) or not isinstance(new, Tensor) or old is new:
        return new
    mine, own = to_local(old), to_local(new)
    fits = (
        (old.shape, source_of(old).placements(old)) == (new.shape, source_of(new).placements(new))
        and (mine.shape, mine.dtype, mine.device) == (own.shape, own.dtype, own.device)
        and mine.is_contiguous()
        and not mine.is_inference()
        and has_memory(mine)
    )
    if not fits:
        return new
    mine.copy_(own)
    return old


def _settle(weights: ServedWeights, entries: list[Managed]) -> None:
    """Identities of the state are the optimizer's own now, and its weights are its own."""
    identities = {p: i for _, p, i in weights.registry.places(weights.groups)}
    for e in entries:
        identities[e.param].ids = e.identity.ids
    weights.registry.changes += 1
    for p, identity_ in identities.items():  # of frozen ones too
        identity_.has_master = MASTER in weights.state.get(p, {})
    loaded = weights.with_master()
    weights.registry.find_layouts(loaded)
    weights.wrote([e for e in loaded if not e.param.is_meta])


def _report(weights: ServedWeights, by: str, words: tuple[int, int]) -> None:
    loaded = weights.with_master()
    if loaded:
        changed, total = words
        logger.info(
            "load_state_dict: %d parameters rewritten from their masters, matched by %s; %d of %d "
            "served words changed (%.3g %%)",
            len(loaded), by, changed, total, 100 * changed / max(total, 1),
        )  # fmt: skip
    elif weights.entries():
        logger.info(
            "load_state_dict: parameters are matched by %s; the next publish() makes masters from "
            "the parameters", by,
        )  # fmt: skip
    if not weights.fused:
        _warn_of_lost_buffers(weights)


def _warn_of_lost_buffers(weights: ServedWeights) -> None:
    """For an unfused optimizer whose own state was not saved, or not loaded."""
    names = [
        e.identity.name
        for e in weights.entries()
        if e.group.get("momentum") != 0  # SGD has no state then
        and e.state.get(EPOCH, 0) > 0
        and e.state.keys() <= set(STATE_KEYS)
    ]
    if names:
        logger.warning(
            "load_state_dict: the state has nothing of the base optimizer for %d parameters that "
            "were stepped, such as %s: its buffers start anew. torch.distributed.checkpoint loads "
            "only what the optimizer holds: load before the first publish().",
            len(names), names[0],
        )  # fmt: skip


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
