"""A sync that proves itself: send the served weights, ask the engine what it holds, compare.

    sync = Sync(optimizer, engine)
    receipt = sync()               # after an optimizer step, or after several

The engine answers with a `Manifest` of the weights that it would now sample from. Whatever it did
with the update (dropped it, kept some old tensors, cast it, failed half-way, answered late, kept
views of the trainer's memory) shows there and raises a `SyncError` that says which. The sender
counts a version as held only once the manifests are equal.
"""

import time
from collections.abc import Callable, Iterator
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from fc_optim.optimizer import FairCastOptimizer
from fc_optim.params.collectives import anywhere
from fc_optim.params.layouts import Group
from fc_optim.serving.stream import Item, NamedTensors, list_items, stream
from fc_optim.sync import diagnosis
from fc_optim.sync.diagnosis import SyncError
from fc_optim.sync.manifests import Manifest, manifest, served_manifest
from fc_optim.sync.patches import Baseline, Patch

_POLL_S = 0.05


@runtime_checkable
class Engine(Protocol):
    """What a sync asks of a rollout engine. `fc_optim.integrations` has adapters."""

    def load(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Copy all weights, of which each is valid until the next; they are `version` then.

        Returns when new requests will be answered from them alone: nothing is generated from a
        mixture, and caches that were computed from older weights are dropped.
        """

    def held(self) -> Manifest:
        """What it would generate from now, read from the memory that it computes with."""


@runtime_checkable
class SparseEngine(Protocol):
    """An engine that also takes what changed."""

    def load_patches(self, patches: Iterator[Patch], version: int) -> None:
        """As `load`, but weights that no patch names stay."""


@runtime_checkable
class WatchingEngine(Protocol):
    """An engine that has to see every weight, also those that are sent as patches."""

    def watch(
        self, weights: Iterator[tuple[str, Tensor]], sent: Manifest
    ) -> Iterator[tuple[str, Tensor]]:
        """Pass the weights on, in any order, having looked at each; called before each load.

        May refuse `sent`, what the engine is to hold, by raising at once: nothing was sent then.
        """


def _refuse_no_engine(engine: object, asked_only: bool) -> None:
    """Raise TypeError for an object that lacks what a sync calls."""
    needed = ("held",) if asked_only else ("load", "held")
    lost = [n for n in needed if not callable(getattr(engine, n, None))]
    if engine is not None and (lost or isinstance(engine, type)):
        what = f"{engine.__name__} is a class" if isinstance(engine, type) else ""
        what = what or f"{type(engine).__name__} has no {' and no '.join(n + '()' for n in lost)}"
        raise TypeError(
            f"engine: {what}. Pass an object with load(weights, version) and held(), such as "
            "fc_optim.integrations.vllm.OfflineEngine, or None on ranks that only help to gather."
        )


class Sync:
    """Keeps one rollout engine at the optimizer's served weights, and knows that it is.

    Where parameters are sharded every rank makes one and calls it; the ranks that only help to
    gather pass no engine.

    Args:
        optimizer: bound to the model that is served.
        engine: see `Engine`.
        send: the export of a framework that sends the weights itself. Called on every rank with
            what the engine is to hold, in place of the engine's `load`; the engine is only asked,
            and need not know its version. Proved are the managed parameters: a framework may leave
            out frozen ones, or cast them.
        sparse: send what changed, to a `SparseEngine`; the first sync, and one after an error, is
            whole. Keeps a copy of the served weights. With dither "fresh" or "sync" up to a third
            of the words change; "held" keeps them as few as round-to-nearest does.
        frozen_dtype: cast frozen weights to this on the way, such as those of a model that was
            loaded in fp32 for an engine that holds bf16. By default they are sent as they are.
        recheck: before sending, ask the engine whether it still holds the last version. Finds
            restarts, other writers and views, for one more manifest per sync.
        source: what to send in place of `served_params()`, each time anew, such as
            `lambda: merge_lora(model, optimizer)`. Two passes over it must give the same bits.
        bucket_bytes: as in `served_params`.
        wait_s: how many seconds to wait for an engine that loads behind its answer.
    """

    def __init__(
        self,
        optimizer: FairCastOptimizer,
        engine: Engine | None,
        *,
        send: Callable[[Manifest], None] | None = None,
        sparse: bool = False,
        frozen_dtype: torch.dtype | None = None,
        recheck: bool = True,
        source: Callable[[], NamedTensors] | None = None,
        bucket_bytes: int | None = None,
        wait_s: float = 0.0,
    ):
        if not isinstance(optimizer, FairCastOptimizer):
            raise TypeError(
                f"optimizer: {type(optimizer).__name__} is not a FairCastOptimizer (inside "
                "accelerate's wrapper it is what `register()` returns)."
            )
        _refuse_no_engine(engine, asked_only=send is not None)
        if sparse and engine is not None and not isinstance(engine, SparseEngine):
            raise TypeError(
                f"sparse: {type(engine).__name__} has no load_patches(); use sparse=False."
            )
        if sparse and send is not None:
            raise ValueError("sparse: `send` decides what is sent; use sparse=False.")
        if wait_s < 0:
            raise ValueError(f"wait_s: {wait_s} is negative; give seconds, 0 not to wait.")
        self.optimizer, self.engine, self.send = optimizer, engine, send
        self.sparse, self.recheck, self.source = sparse, recheck, source
        self.bucket_bytes, self.wait_s, self.frozen_dtype = bucket_bytes, wait_s, frozen_dtype
        self._proved: Manifest | None = None
        self._told: int | None = None  # the last version that `send` sent to the end
        self._baseline: Baseline | None = None

    @property
    def version(self) -> int | None:
        """The version that the engine was last proved to hold, None if none is or it is unsure."""
        return None if self._proved is None else self._proved.version

    def __call__(self, redraw: bool = True) -> Manifest:
        """Publish, send, ask, compare; returns what the engine now holds.

        Under dither "sync" it redraws first; with several engines, let only the first one's sync do
        so. Raises SyncError if the engine holds anything else; then `version` is None, and the next
        call sends everything again.
        """
        self.optimizer.publish(redraw=redraw)
        items = self._items("served")
        groups = list(dict.fromkeys(g for i in items for g in i.groups))
        version = self.optimizer.served_version
        if self.source is None:
            now = served_manifest(version, items)
        else:
            now = manifest(version, self.source())
        before, self._proved = self._proved, None  # until the engine has answered
        if self.recheck and before is not None:
            self._together(lambda: self._still_holds(before, now), items, groups)
        self._together(lambda: self._send(items, now, before), items, groups)
        self._together(lambda: self._holds(now, before), items, groups)
        self._proved = now
        return now

    def _items(self, which: str) -> list[Item]:
        opt = self.optimizer
        return list_items(
            opt.model, (opt.weights,), which,
            managed_only=self.send is not None, frozen_dtype=self.frozen_dtype,
        )  # fmt: skip

    # ---- The three parts of a sync, on the rank that has the engine

    def _still_holds(self, before: Manifest, now: Manifest) -> SyncError | None:
        if self.engine is None:
            return None
        return diagnosis.find_write(before, self._ask(), now)

    def _send(self, items: list[Item], now: Manifest, before: Manifest | None) -> SyncError | None:
        weights: NamedTensors = iter(())
        if self.source is not None:
            weights = self.source()
        elif self.send is None:
            weights = stream(items, (self.optimizer.weights,), bucket_bytes=self.bucket_bytes)
        error = None
        try:
            if self.send is not None:
                self.send(now)
                self._told = now.version
            elif self.engine is not None:
                self._load(self.engine, weights, now, whole=before is None)
        except SyncError as e:
            error = e
        except Exception as e:
            error = self._failure(e, now, before)
            error.__cause__ = e
        for _ in weights:  # the other ranks gather to the end
            pass
        return error

    def _load(self, engine: Engine, weights: NamedTensors, now: Manifest, whole: bool) -> None:
        version = now.version or 0
        if isinstance(engine, WatchingEngine):
            try:
                weights = engine.watch(weights, now)
            except Exception as e:
                text = f"the engine cannot take version {version}, nothing was sent: {e}"
                raise SyncError("refused", text) from e
        if not self.sparse:
            engine.load(weights, version)
        elif whole or self._baseline is None:
            self._baseline = Baseline()
            engine.load(self._baseline.record(weights), version)
        else:
            assert isinstance(engine, SparseEngine)
            engine.load_patches(self._baseline.patches(weights), version)

    def _holds(self, now: Manifest, before: Manifest | None) -> SyncError | None:
        if self.engine is None:
            return None
        deadline = time.monotonic() + self.wait_s
        while True:
            held = self._ask()
            error = diagnosis.find_difference(now, held, before)
            if error is None or error.problem != "late" or time.monotonic() >= deadline:
                return error
            time.sleep(_POLL_S)

    # ---- Errors

    def _ask(self) -> Manifest:
        assert self.engine is not None
        try:
            held = self.engine.held()
            return held if self.send is None else Manifest(self._told, held.parameters)
        except TimeoutError as e:
            raise SyncError("late", f"the engine did not say in time what it holds: {e}") from e

    def _failure(self, e: Exception, now: Manifest, before: Manifest | None) -> SyncError:
        """What an exception in the middle of a load left in the engine."""
        if isinstance(e, TimeoutError):
            return SyncError("late", f"the engine did not take version {now.version} in time: {e}")
        if self.engine is None:
            return SyncError("failed", f"this rank failed to send version {now.version}: {e!r}.")
        why = str(e).removesuffix(".")
        text = (
            f"the engine failed while it loaded version {now.version}: {type(e).__name__}: {why}."
        )
        try:
            held = self._ask()
        except Exception as second:
            return SyncError("failed", f"{text} It does not say what it holds ({second}).")
        new = [n for n, x in now.parameters.items() if held.parameters.get(n) == x]
        text += f" {len(new)} of {len(now.parameters)} tensors are as sent"
        if before is not None:
            rest = [n for n in now.parameters if n not in new]
            old = sum(held.parameters.get(n) == before.parameters.get(n) for n in rest)
            text += f", {old} still of version {before.version}"
        return SyncError("failed", f"{text}: do not generate from it.", held=held)

    def _together(
        self, part: Callable[[], SyncError | None], items: list[Item], groups: list[Group]
    ) -> None:
        """Run a part; if it failed on one rank, raise on all."""
        try:
            error = part()
        except Exception as e:
            if not groups:
                raise
            error = e if isinstance(e, SyncError) else SyncError("failed", f"{e!r}")
            error.__cause__ = e
        if not anywhere(error is not None, groups):
            return
        found = diagnosis.suspects(items, self._items("master"))  # collective as well
        if error is None:
            raise SyncError("elsewhere", "the sync failed on the rank that has the engine.")
        raise diagnosis.explain(error, found) from error.__cause__
