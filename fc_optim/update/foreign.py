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
from fc_optim.params.layouts import Group, is_dtensor
from fc_optim.params.registry import Managed
from fc_optim.update.plan import Context, Work, state_work

REMEDIES = (
    "call adopt_weights() to make the new values the masters, or restore_weights() to put the "
    "served values back"
)


def record(entries: Iterable[Managed]) -> None:
    """Note that these parameters hold their shadow now; bumps their version counters."""
    entries = list(entries)
    # Kernels write through raw pointers: autograd must learn of it (saved tensors are stale).
    sharded = [e.local for e in entries if is_dtensor(e.param)]
    torch.autograd.graph.increment_version([e.param for e in entries] + sharded)
    for e in entries:
        e.slot.seen = _fingerprint(e)


class ForeignWrites:
    """Finds foreign writes; keeps adoption counts that are still on their way to the host."""

    def __init__(self) -> None:
        self._pending: list[tuple[Tensor, list[str], Any]] = []

    def adopt(
        self,
        context: Context,
        entries: Sequence[Managed],
        *,
        everything: bool = False,
        warn: bool = True,
    ) -> None:
        """Masters <- what was written; one warning names the parameters (`step()`'s way).

        With `everything`, compares all elements whatever the counters say.
        """
        self._warn_pending(wait=False)
        adopted: list[str] = []
        for work in state_work(context, entries):
            moved = [i for i, e in enumerate(work.entries) if everything or _moved(e)]
            flags = work.backend.flag_foreign(work.batch)
            if moved:
                flags[moved] = 1
            on_cpu = flags.device.type == "cpu"
            if on_cpu and not flags.any():
                continue
            counts = work.adopt(flags)
            names = [e.slot.name for e in work.entries]
            if on_cpu or moved:
                adopted += _changed(counts, names)
            elif not (counts.is_cuda and torch.cuda.is_current_stream_capturing()):
                self._pending.append(_read_later(counts, names))
        if warn:
            _warn(adopted)

    def refuse(
        self,
        context: Context,
        entries: Sequence[Managed],
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
            found = [*self.compare(context, self._suspects(context, entries)), *written]
        except Exception as error:
            failed = error
        if anywhere(bool(found or failed), groups):
            if failed is not None:
                raise failed
            what = _listed(found) if found else "parameters of other ranks"
            raise RuntimeError(
                f"{action}: {what} changed since the optimizer last wrote: {REMEDIES}. "
                "(The next step() would adopt them.)"
            )

    def _suspects(self, context: Context, entries: Sequence[Managed]) -> list[Managed]:
        suspects: list[Managed] = []
        for work in state_work(context, entries):
            flags = work.backend.flag_foreign(work.batch).tolist()
            suspects += [e for e, f in zip(work.entries, flags, strict=True) if f or _moved(e)]
        return suspects

    def compare(self, context: Context, entries: Iterable[Managed]) -> dict[str, int]:
        """Names and element counts of containers that differ from their shadows, fully compared."""
        found = {}
        for entry in entries:
            for work in state_work(context, [entry], scratch=True):
                count = _differing(work)
                if count:
                    found[entry.slot.name] = count
                else:
                    entry.slot.seen = _fingerprint(entry)
        return found

    def _warn_pending(self, *, wait: bool) -> None:
        """Report adoptions of earlier steps whose counts have reached the host."""
        ready = [p for p in self._pending if wait or p[2].query()]
        self._pending = [p for p in self._pending if not any(p is r for r in ready)]
        for counts, names, event in ready:
            event.synchronize()
            _warn(_changed(counts, names))


def _fingerprint(entry: Managed) -> tuple[Any, ...]:
    """A DTensor has two version counters: its own, and that of its local tensor."""
    param, part = entry.param, entry.local
    return (param._version, part._version, part.data_ptr(), part.dtype)


def _moved(entry: Managed) -> bool:
    return entry.slot.seen != _fingerprint(entry)


def differing_words(a: Tensor, b: Tensor) -> Tensor:
    """How many elements of two containers differ in their bits: 0-d int64 on the device of `b`."""
    as_int = torch.int16 if b.dtype == torch.bfloat16 else torch.int32
    a = a.detach().to(b.device)
    return (a.contiguous().view(as_int) != b.detach().contiguous().view(as_int)).sum()


def _differing(work: Work) -> int:
    (entry,), (scratch,) = work.entries, work.batch.containers
    if entry.slot.flat:  # padding is nobody's
        scratch.copy_(entry.local)
    work.backend.round_(work.batch)  # into scratch, not into the parameter
    return int(differing_words(entry.local, scratch))


def _read_later(counts: Tensor, names: list[str]) -> tuple[Tensor, list[str], Any]:
    host = torch.empty(counts.shape, dtype=counts.dtype, device="cpu", pin_memory=True)
    host.copy_(counts, non_blocking=True)
    event = torch.Event(counts.device.type)
    event.record()
    return host, names, event


def _changed(counts: Tensor, names: list[str]) -> list[str]:
    return [n for n, c in zip(names, counts.tolist(), strict=True) if c]


def _listed(names: Iterable[str]) -> str:
    names = list(dict.fromkeys(names))
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _warn(names: list[str]) -> None:
    if names:
        warnings.warn(
            f"weights changed outside the optimizer were adopted as masters: {_listed(names)}. "
            "If this was not meant, call restore_weights() before step().",
            stacklevel=5,
        )
