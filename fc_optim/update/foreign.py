"""Foreign writes: somebody other than the optimizer changed a served parameter.

A parameter is known by its version counter and address after each publish. If they moved, the
whole container is compared with its shadow; if not, a fixed sample is (`.data` writes move
neither). Only `step()` adopts what it finds; everything else refuses and names the remedies.
"""

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fc_optim.params.collectives import anywhere
from fc_optim.params.layouts import Group
from fc_optim.params.names import listed
from fc_optim.params.registry import Managed
from fc_optim.params.words import differing_words
from fc_optim.update.plan import Context, KernelCall, state_calls

REMEDIES = (
    "call adopt_weights() to make the new values the masters, or restore_weights() to put the "
    "served values back"
)


def record(entries: Sequence[Managed], written: bool = True) -> None:
    """Note that these parameters hold their shadow now; bumps version counters if `written`."""
    if written:  # through raw pointers: autograd must learn of it (saved tensors are stale)
        tensors = [e.param for e in entries]
        tensors += [e.local for e in entries if e.source.placements(e.param) is not None]
        torch.autograd.graph.increment_version(tensors)
    for e, seen in zip(entries, _fingerprints(entries), strict=True):
        e.identity.seen = seen


class ForeignWrites:
    """Finds foreign writes; keeps adoption counts that are still on their way to the host."""

    def __init__(self) -> None:
        self._pending: list[tuple[Tensor, list[str], Any]] = []

    def adopt(
        self, calls: Sequence[KernelCall], *, everything: bool = False, warn: bool = True
    ) -> None:
        """Masters <- what was written; one warning names the parameters (`step()`'s way).

        With `everything`, compares all elements whatever the counters say.
        """
        self._warn_pending(wait=False)
        adopted: list[str] = []
        for call in calls:
            moved = list(range(len(call.entries))) if everything else _moved(call.entries)
            flags = call.flag_foreign()
            on_cpu = flags.device.type == "cpu"
            if moved:
                flags.index_fill_(0, _indices(moved, flags.device), 1)
            if on_cpu and not flags.any():
                continue
            counts = call.adopt(flags)
            names = [e.identity.name for e in call.entries]
            if on_cpu:
                record([e for e, flag in zip(call.entries, flags.tolist(), strict=True) if flag])
                adopted += _changed(counts, names)
            else:
                record([call.entries[i] for i in moved])
                self._keep(call, counts, names)
        if warn:
            _warn(adopted)

    def check(
        self,
        context: Context,
        calls: Sequence[KernelCall],
        action: str,
        groups: Sequence[Group] = (),
        written: Iterable[str] = (),
    ) -> None:
        """Raise RuntimeError if a container is not its master's shadow.

        With `groups`, on all their ranks if it is so on one: else the others would wait for it.
        `written`: what the caller itself found.
        """
        found: list[str] = []
        failed: Exception | None = None
        try:
            self._warn_pending(wait=True)
            self._warn_replays(calls)
            found = [*compare(context, _suspects(calls)), *written]
        except Exception as error:
            failed = error
        if anywhere(bool(found or failed), groups):
            if failed is not None:
                raise failed
            what = listed(dict.fromkeys(found)) if found else "parameters of other ranks"
            raise RuntimeError(
                f"{action}: {what} changed since the optimizer last wrote: {REMEDIES}. "
                "(The next step() would adopt them.)"
            )

    def _keep(self, call: KernelCall, counts: Tensor, names: list[str]) -> None:
        """Counts on a device, to be told once they are here; replays of a graph add them up."""
        if not _capturing(counts.device):
            if call.adopted is None:
                call.adopted = torch.zeros_like(counts)
            self._pending.append(_read_later(counts, names))
        elif call.adopted is not None:  # a graph that is captured first has no memory outside
            call.adopted += counts

    def _warn_replays(self, calls: Sequence[KernelCall]) -> None:
        """Report what replays of captured steps adopted. Waits for the device."""
        for call in calls:
            if call.adopted is not None and not _capturing(call.adopted.device):
                _warn(_changed(call.adopted, [e.identity.name for e in call.entries]))
                call.adopted.zero_()

    def _warn_pending(self, *, wait: bool) -> None:
        """Report adoptions of earlier steps whose counts have reached the host."""
        if not self._pending or _capturing(torch.device("cuda")):
            return  # an event may not be asked while a stream is being captured
        ready = [p for p in self._pending if wait or p[2].query()]
        self._pending = [p for p in self._pending if not any(p is r for r in ready)]
        for counts, names, event in ready:
            event.synchronize()
            _warn(_changed(counts, names))


def compare(context: Context, entries: Iterable[Managed]) -> dict[str, int]:
    """Names and element counts of containers that differ from their shadows, fully compared."""
    found = {}
    for entry in entries:
        for call in state_calls(context, [entry], scratch=True):
            count = _differing(call)
            if count:
                found[entry.identity.name] = count
            else:
                (entry.identity.seen,) = _fingerprints([entry])
    return found


def _suspects(calls: Sequence[KernelCall]) -> list[Managed]:
    suspects: list[Managed] = []
    for call in calls:
        flags, moved = call.flag_foreign().tolist(), _moved(call.entries)
        suspects += [e for i, e in enumerate(call.entries) if flags[i] or i in moved]
    return suspects


def _fingerprints(entries: Sequence[Managed]) -> list[tuple[Any, ...]]:
    """What changes when somebody writes: version counters and addresses."""
    return [(e.source.versions(e.param), e.source.address(e.param), e.param.dtype) for e in entries]


def _moved(entries: Sequence[Managed]) -> list[int]:
    """Which of them are not as the optimizer left them."""
    now, seen = _fingerprints(entries), [e.identity.seen for e in entries]
    return [] if now == seen else [i for i, x in enumerate(now) if x != seen[i]]


def _differing(call: KernelCall) -> int:
    assert call.scratch is not None
    (entry,), (scratch,) = call.entries, call.scratch
    if entry.identity.flat:  # padding is nobody's
        scratch.copy_(entry.local)
    call.round()  # into scratch, not into the parameter
    return int(differing_words(entry.local, scratch))


def _indices(moved: list[int], device: torch.device) -> Tensor:
    """On the device, without waiting for it: from pinned memory."""
    index = torch.tensor(moved, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
    return index.to(device, non_blocking=True)


def _capturing(device: torch.device) -> bool:
    return (
        device.type == "cuda"
        and torch.cuda.is_available()
        and torch.cuda.is_current_stream_capturing()
    )


def _read_later(counts: Tensor, names: list[str]) -> tuple[Tensor, list[str], Any]:
    """Zeros until the copy is done; the event is recorded where the counts are."""
    host = torch.zeros(counts.shape, dtype=counts.dtype, device="cpu", pin_memory=True)
    with torch.accelerator.device_index(counts.device.index):
        host.copy_(counts, non_blocking=True)
        event = torch.Event(counts.device.type)
        event.record()
    return host, names, event


def _changed(counts: Tensor, names: list[str]) -> list[str]:
    return [n for n, c in zip(names, counts.tolist(), strict=True) if c]


def _warn(names: list[str]) -> None:
    if names:
        which = listed(dict.fromkeys(names))
        warnings.warn(
            f"weights changed outside the optimizer were adopted as masters: {which}. "
            "If this was not meant, call restore_weights() before step().",
            stacklevel=6,
        )
