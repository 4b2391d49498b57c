"""Why a rollout engine holds other weights than it was sent: compare manifests, name the cause."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fc_optim.serving.digests import sharded_digest
from fc_optim.sync.manifests import Entry, Manifest

if TYPE_CHECKING:
    from fc_optim.serving.stream import Item

Suspects = Mapping[str, Mapping[str, int]]  # what was done to the weights -> digests by name

_CASTS: dict[str, Callable[[Tensor], Tensor]] = {
    "cast to fp16 on the way": lambda x: x.half().to(x.dtype),
    "cast to fp8 (e4m3) on the way": lambda x: x.to(torch.float8_e4m3fn).to(x.dtype),
    "zeros": torch.zeros_like,
}


class SyncError(RuntimeError):
    """The engine does not hold what it was sent.

    Attributes:
        problem: "dropped", "late", "failed", "refused", "truncated", "missing", "recast", "stale",
            "bits", "views", "changed", or "elsewhere" on a rank whose peer has the error.
        parameters: the names it concerns.
        held: the engine's manifest, if it answered.
    """

    def __init__(
        self,
        problem: str,
        message: str,
        parameters: Iterable[str] = (),
        held: Manifest | None = None,
    ):
        super().__init__(message)
        self.problem, self.parameters, self.held = problem, tuple(parameters), held


def suspects(served: Sequence["Item"], masters: Sequence["Item"]) -> Suspects:
    """Digests of what an engine would hold that did one of the usual things to the weights.

    Collective where parameters are sharded.
    """
    found = {what: sharded_digest(served, cast).parameters for what, cast in _CASTS.items()}
    nearest = sharded_digest(masters, lambda x: x.bfloat16()).parameters
    return found | {"the masters rounded to nearest, not what was sent": nearest}


def find_difference(sent: Manifest, held: Manifest, before: Manifest | None) -> SyncError | None:
    """What is wrong with the weights that an engine holds after an update, None if nothing is.

    Args:
        sent: what it was to hold.
        held: what it answered.
        before: what it held before, if that is known.
    """
    missing = [n for n in sent.parameters if n not in held.parameters]
    if missing:
        return SyncError("missing", f"the engine has no {_names(missing)}.", missing, held)
    pairs = {n: (e, held.parameters[n]) for n, e in sent.parameters.items()}
    wrong = {n: (e, h) for n, (e, h) in pairs.items() if h != e}
    if not wrong:
        return _of_version(sent, held)
    shapes = {n: (e, h) for n, (e, h) in wrong.items() if e.shape != h.shape}
    if shapes:
        name, (e, h) = next(iter(shapes.items()))
        return SyncError(
            "truncated",
            f"the engine holds {_names(shapes)} in another shape: {name} was sent as {e.shape}, "
            f"it holds {h.shape}.", shapes, held,
        )  # fmt: skip
    old = [n for n in wrong if before and before.parameters.get(n) == held.parameters[n]]
    if old and before:
        return _old_tensors(sent, held, before, wrong, old)
    dtypes = {n: (e, h) for n, (e, h) in wrong.items() if e.dtype != h.dtype}
    if dtypes:
        name, (e, h) = next(iter(dtypes.items()))
        return SyncError(
            "recast",
            f"the engine holds {_names(dtypes)} as {h.dtype}, sent as {e.dtype}: start it with "
            "the dtype that is served (frozen weights: Sync's frozen_dtype).", dtypes, held,
        )  # fmt: skip
    return SyncError(
        "bits",
        f"the engine holds other bits than it was sent in {len(wrong)} of {len(sent.parameters)} "
        f"tensors: {_names(wrong)}.", wrong, held,
    )  # fmt: skip


def _of_version(sent: Manifest, held: Manifest) -> SyncError | None:
    if held.version == sent.version:
        return None
    return SyncError(
        "late",
        f"the engine has the weights of version {sent.version} but still says that it holds "
        f"version {held.version}: requests would be labelled wrongly.", (), held,
    )  # fmt: skip


def _old_tensors(
    sent: Manifest,
    held: Manifest,
    before: Manifest,
    wrong: Mapping[str, tuple[Entry, Entry]],
    old: Sequence[str],
) -> SyncError:
    """It kept what it had: in all tensors that were to change, or in some."""
    changed = [n for n, e in sent.parameters.items() if before.parameters.get(n) != e]
    if len(old) == len(changed):
        if held.version == sent.version:
            text = f"the engine says that it holds version {sent.version}, but has dropped the "
            text += f"update: its weights are still those of version {before.version}."
            return SyncError("dropped", text, old, held)
        text = "the engine answers late, or dropped the update: it still holds version "
        text += f"{held.version}, not {sent.version}."
        return SyncError("late", text, old, held)
    text = f"the engine kept old tensors: {len(old)} of the {len(changed)} that changed are still "
    text += f"of version {before.version}: {_names(old)}."
    if len(wrong) > len(old):
        text += f" {len(wrong) - len(old)} more differ."
    return SyncError("stale", text, old, held)


def find_write(known: Manifest, held: Manifest, now: Manifest) -> SyncError | None:
    """Whether the engine's weights changed since they were last proved.

    Args:
        known: what it held then.
        held: what it holds.
        now: what the optimizer serves, of which the engine was sent nothing yet.
    """
    wrong = [n for n, e in known.parameters.items() if held.parameters.get(n) != e]
    if not wrong and held.version == known.version:
        return None
    moved = [n for n in wrong if held.parameters.get(n) == now.parameters.get(n)]
    if moved:
        return SyncError(
            "views",
            f"{_names(moved)} changed in the engine with the optimizer's step, though nothing was "
            "sent: the engine holds views of the trainer's memory. It must copy what it is given.",
            moved, held,
        )  # fmt: skip
    what = _names(wrong) if wrong else f"the version ({known.version}, now {held.version})"
    return SyncError(
        "changed",
        f"between two syncs {what} changed in the engine: it was restarted, or something else "
        "writes into it. What it generated since then is of unknown weights.", wrong, held,
    )  # fmt: skip


def explain(error: SyncError, found: Suspects) -> SyncError:
    """The same error, with what was done to the weights where that can be told."""
    if error.problem != "bits" or error.held is None:
        return error
    held = {n: error.held.parameters[n].digest for n in error.parameters}
    for what, digests in found.items():
        names = [n for n, value in held.items() if value is not None and digests.get(n) == value]
        if names:
            message = f"{error} In {len(names)} of them the bits are: {what}."
            problem = "recast" if what in _CASTS and what != "zeros" else "bits"
            return SyncError(problem, message, error.parameters, error.held)
    return error


def _names(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
