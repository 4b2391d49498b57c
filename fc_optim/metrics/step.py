"""Step metrics: what the last step did to masters and served words, counted by its own kernels.

The kernels count words, dead updates, saturations and non-finites in the pass that writes them
(`kernels.batch.COUNTS`). Captured and lag come from a fixed sample of coordinates, which is
gathered after each step. Figures stay on the device until somebody reads them.
"""

import contextlib
import functools
import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fc_optim.kernels import reference
from fc_optim.kernels.batch import COUNTS, Batch, count_size, scattered_positions
from fc_optim.metrics import formulas as metrics
from fc_optim.params.collectives import comm_device, sum_
from fc_optim.params.layouts import Group
from fc_optim.params.registry import Managed
from fc_optim.params.sources import to_local
from fc_optim.update.plan import Context, KernelCall, container_of, state_calls

MODES = (False, True, "all")
SAMPLE = 1 << 15  # coordinates of which captured and lag are taken, in all ranks' shards together
HISTORY = 200  # steps that the lag can look back: 4 bytes for each coordinate and step

Key = tuple[str, tuple[int, ...]]  # what a strand and a rank's sums are sorted by


@dataclass(frozen=True, slots=True)
class Counts:
    """What one step did to `n` counted elements of a parameter, or of all.

    n: elements that were counted: of this rank, 0 if the step was skipped or had no gradient.
    changed: bf16 words that differ from those before: what a sync has to send.
    dead: |M_t - M_{t-1}| < ulp(M_{t-1}) / 2: updates that round-to-nearest would have dropped.
    saturated: masters that are held at the largest finite bf16.
    nonfinite: masters that are Inf or NaN.
    """

    n: int
    changed: int
    dead: int
    saturated: int
    nonfinite: int

    @property
    def changed_ratio(self) -> float:
        """`metrics.changed_ratio` of the counted elements; NaN if there are none."""
        return self.changed / self.n if self.n else float("nan")

    @property
    def dead_zone_fraction(self) -> float:
        """`metrics.dead_zone_fraction` of the counted elements; NaN if there are none."""
        return self.dead / self.n if self.n else float("nan")


@dataclass(frozen=True, slots=True)
class _Strand:
    """The sample of the parameters of one kind at one step. Owns nothing that is written again."""

    start: Tensor  # W0
    served: Tensor
    masters: tuple[Tensor, ...]  # oldest first

    def along(self, of: Tensor) -> Tensor:
        """<x - W0, M_t - W0>: 0-d float64."""
        start = self.start.double()
        return (of.double() - start) @ (self.masters[-1].double() - start)


@dataclass(frozen=True)
class StepMetrics:
    """The figures of one step, of this rank's elements. Reading any of them waits for the device.

    Keeping one for later is fine: the next step does not write into it. In a captured graph the
    counts are those of the last replay; `captured` and `lag_steps` do not follow its steps.

    Attributes:
        served_version: `FairCastOptimizer.served_version` after the step.
        names: of the parameters; several for a flat one.
        sampled: whether a fixed sixteenth of the elements was counted (of each parameter the
            first 1024, then 1024 of every 16,384), or (False) all of them.
        steps: numbers of the steps in the sample's history, the last being this one; 0 is W0.
    """

    served_version: int
    names: tuple[str, ...]
    sampled: bool
    steps: tuple[int, ...] = ()
    _groups: tuple[tuple[Group, ...], ...] = ()
    _parts: tuple["_Part", ...] = ()
    _strands: Mapping[tuple[int, ...], tuple[_Strand, ...]] = field(default_factory=dict)
    _summed: tuple[Tensor, Tensor] | None = None  # over ranks: the table, the projections

    @functools.cached_property
    def _table(self) -> Tensor:
        """int64 `[names, 1 + len(COUNTS)]` on the host: n, then COUNTS."""
        if self._summed is not None:
            return self._summed[0]
        table = torch.zeros(len(self.names), 1 + len(COUNTS), dtype=torch.int64, device="cpu")
        for part in self._parts:
            rows = torch.tensor(part.rows, dtype=torch.int64, device="cpu")
            table.index_add_(0, rows, part.read())
        return table

    @functools.cached_property
    def parameters(self) -> dict[str, Counts]:
        """The counts of each parameter, by name."""
        rows = self._table.tolist()
        return {name: Counts(*row) for name, row in zip(self.names, rows, strict=True)}

    @functools.cached_property
    def total(self) -> Counts:
        """The counts of all parameters together.

        Where a sixteenth is counted, parameters under 16,384 elements have a greater part in it.
        """
        return Counts(*self._table.sum(0).tolist())

    @functools.cached_property
    def captured(self) -> float:
        """`metrics.captured` of the sample: 1 means unbiased. NaN while masters have not moved.

        W0 are the served weights before the first step since the optimizer was built, loaded, or
        given other weights by `adopt_weights()`.
        """
        target, length = self._along("served"), self._along(-1)
        return target / length if length else float("nan")

    @functools.cached_property
    def lag_steps(self) -> float:
        """`metrics.lag_steps` of the sample, at most HISTORY."""
        if not self.steps:
            return float("nan")
        history = ((step, self._along(i)) for i, step in reversed(list(enumerate(self.steps))))
        return metrics.lag_of_projections(self._along("served"), history)

    def _along(self, which: int | str) -> float:
        """The projection of the served weights, or of a step of the history, on M_t - W0."""
        if self._summed is not None:
            return float(self._summed[1][-1 if which == "served" else int(which) % len(self.steps)])
        strands = [s for kind in self._strands.values() for s in kind]
        sums = [s.along(s.served if which == "served" else s.masters[int(which)]) for s in strands]
        return sum(map(float, sums)) if sums else 0.0

    def over_ranks(self) -> "StepMetrics":
        """The figures of the whole parameters: summed over the ranks that hold them. Collective.

        Every rank calls it, with the same step. A replica's elements are not counted twice.
        """
        table = self._table.clone()
        along = torch.zeros(len(self.steps) + 1, dtype=torch.float64, device="cpu")
        kinds: dict[tuple[int, ...], tuple[tuple[Group, ...], list[int]]] = {}
        for row, groups in enumerate(self._groups):
            kinds.setdefault(_key(groups), (groups, []))[1].append(row)
        for key, (groups, rows) in kinds.items():
            own = torch.zeros_like(along)
            for s in self._strands.get(key, ()):
                own += torch.stack([s.along(x) for x in (*s.masters, s.served)]).cpu()
            device = comm_device(groups, own.device)
            counts, own = table[rows].to(device), own.to(device)
            sum_(counts, groups)
            sum_(own, groups)
            table[rows] = counts.cpu()
            along += own.cpu()
        return replace(self, _summed=(table, along), _parts=(), _strands={})


def flatten(
    step: StepMetrics, prefix: str = "fair_cast/", per_parameter: bool = False
) -> dict[str, float]:
    """The figures as floats that any logger takes: {"fair_cast/changed_ratio": 0.3, ...}.

    With `per_parameter`, those of each parameter too: "fair_cast/changed_ratio/<name>".
    """
    flat = _floats(step.total)
    flat |= {"captured": step.captured, "lag_steps": step.lag_steps}
    if per_parameter:
        for name, counts in step.parameters.items():
            flat |= {f"{key}/{name}": x for key, x in _floats(counts).items()}
    return {prefix + key: x for key, x in flat.items()}


def _floats(counts: Counts) -> dict[str, float]:
    return {
        "changed_ratio": counts.changed_ratio,
        "dead_zone_fraction": counts.dead_zone_fraction,
        "saturated": float(counts.saturated),
        "nonfinite": float(counts.nonfinite),
        "counted": float(counts.n),
    }


# ---- Collecting


@dataclass(frozen=True, slots=True)
class _Part:
    """What one batch counted: a row per segment, each of which belongs to a row of the table."""

    counts: Tensor  # int64 [segments, len(COUNTS)]
    rows: Sequence[int]
    sizes: Sequence[int]  # counted elements of each segment
    taken: Tensor | None  # whether the step was taken; None: it was

    def read(self) -> Tensor:
        sizes = torch.tensor(self.sizes, dtype=torch.int64, device="cpu")[:, None]
        if self.taken is not None:
            sizes = sizes * self.taken.cpu()
        return torch.cat((sizes, self.counts.cpu()), dim=1)


class Telemetry:
    """Follows the steps of one optimizer; does nothing when it is off."""

    def __init__(self, mode: bool | str = False) -> None:
        self.mode = mode
        self.restart()

    def __getstate__(self) -> dict[str, Any]:
        return {"mode": self.mode}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def restart(self) -> None:
        """The next step's weights are another W0."""
        self._plan: _Plan | None = None
        self._parts: list[_Part] = []
        self._stepped = False

    def begin(self, context: Context, entries: Sequence[Managed]) -> None:
        """Before a step, when masters are made and foreign writes adopted."""
        if not self.mode:
            return
        self._parts = []
        key = [(e.segments, e.identity.names, e.local.device, e.local.dtype) for e in entries]
        if self._plan is None or self._plan.key != key:
            self._plan = _Plan(key, entries, self.mode == "all")
        if self._plan.sample is None and not _capturing():
            self._plan.sample = _Sample(context, entries)

    def fused(self, calls: list[KernelCall]) -> list[KernelCall]:
        """Give the batches of a fused step something to count into."""
        if not self.mode:
            return calls
        for call in calls:
            batch = call.batch
            if not call.entries:
                continue
            batch.count_all = self.mode == "all"
            size = sum(map(len, batch.segments)), len(COUNTS)
            batch.counts = torch.zeros(size, dtype=torch.int64, device=call.device)
            taken = None if batch.found_inf is None else batch.found_inf.reshape(()) == 0
            self._parts.append(self._part(batch.counts, call.entries, taken))
        return calls

    @contextlib.contextmanager
    def unfused(self, context: Context, moving: Sequence[Managed]) -> Iterator[None]:
        """Count what the code inside does to these parameters.

        In plain torch: it copies the counted elements first.
        """
        if not self.mode:
            yield
            return
        before = self._values(context, moving)
        yield
        after = self._values(context, moving)
        for (call, old), (_, new) in zip(before, after, strict=True):
            rows = [reference.count_changes(a, b) for a, b in zip(old, new, strict=True)]
            if rows:  # padding alone has none
                self._parts.append(self._part(torch.stack(rows), call.entries, None))

    def end(self, entries: Sequence[Managed]) -> None:
        """After a step: the figures are those of it from now on."""
        if self.mode and self._plan is not None:
            self._stepped = True
            if self._plan.sample is not None and not _capturing():
                self._plan.sample.record(entries)

    def figures(self, entries: Sequence[Managed], served_version: int) -> StepMetrics:
        """Of the last step; the served sample is gathered here."""
        if not self.mode:
            raise RuntimeError("metrics(): build the optimizer with metrics=True or metrics='all'.")
        plan, sampled = self._plan, self.mode != "all"
        if not self._stepped or plan is None:
            return StepMetrics(served_version, (), sampled)
        steps, strands = plan.sample.strands(entries) if plan.sample is not None else ((), {})
        parts = tuple(self._parts)
        return StepMetrics(served_version, plan.names, sampled, steps, plan.groups, parts, strands)

    def _values(
        self, context: Context, entries: Sequence[Managed]
    ) -> list[tuple[KernelCall, list[tuple[Tensor, Tensor]]]]:
        calls = state_calls(context, entries)
        for call in calls:
            call.stage()
            call.batch.count_all = self.mode == "all"
        return [
            (c, [v for i in range(len(c.entries)) for v in _values_of(c.batch, i)]) for c in calls
        ]

    def _part(self, counts: Tensor, entries: Sequence[Managed], taken: Tensor | None) -> _Part:
        assert self._plan is not None
        return _Part(counts, *self._plan.rows_and_sizes(entries), taken)


class _Plan:
    """What is the same in every step, as long as parameters are the same and cut the same way."""

    def __init__(self, key: list[Any], entries: Sequence[Managed], count_all: bool) -> None:
        self.key, self._all = key, count_all
        self.names = tuple(name for e in entries for name in e.identity.names)
        self.groups = tuple(e.layout.groups for e in entries for _ in e.identity.names)
        ends = itertools.accumulate((len(e.identity.names) for e in entries), initial=0)
        self._first = {id(e.identity): row for e, row in zip(entries, ends, strict=False)}
        self._batches: dict[tuple[int, ...], tuple[list[int], list[int]]] = {}
        self.sample: _Sample | None = None

    def rows_and_sizes(self, entries: Sequence[Managed]) -> tuple[list[int], list[int]]:
        """Of each segment of a batch: its parameter's row of the table, its counted elements."""
        batch = tuple(id(e.identity) for e in entries)
        if batch not in self._batches:
            rows, sizes = [], []
            for e in entries:
                for i, piece in enumerate(e.layout.pieces):
                    rows += [self._first[id(e.identity)] + i] * len(piece.segments)
                    sizes += [s.numel if self._all else count_size(s) for s in piece.segments]
            self._batches[batch] = rows, sizes
        return self._batches[batch]


def _values_of(batch: Batch, i: int) -> Iterator[tuple[Tensor, Tensor]]:
    for segment in batch.segments[i]:
        yield reference.counted_values(batch, i, segment)


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _key(groups: Iterable[Group]) -> tuple[int, ...]:
    return tuple(map(id, groups))


class _Sample:
    """A fixed sample of coordinates, evenly over all elements, whichever rank has them."""

    def __init__(self, context: Context, entries: Sequence[Managed]) -> None:
        total = sum(piece.shape.numel() for e in entries for piece in e.layout.pieces)
        every = max(1, -(-total // SAMPLE))
        self._kinds: dict[Any, _Kind] = {}
        for i, e in enumerate(entries):
            places = [scattered_positions(s, every) + s.offset for s in e.segments]
            at = torch.cat(places) if places else torch.empty(0, dtype=torch.int64, device="cpu")
            if at.numel():
                key = e.local.device, e.local.dtype, _key(e.layout.groups)
                kind = self._kinds.setdefault(key, _Kind(context, key[0]))
                kind.members.append(i)
                kind.positions.append(at)
        self._steps = deque([0], maxlen=HISTORY + 1)
        for kind in self._kinds.values():
            kind.start = kind.served(entries)
            kind.masters.append(kind.start)

    def record(self, entries: Sequence[Managed]) -> None:
        """Add the masters of the step that was done to the history."""
        self._steps.append(self._steps[-1] + 1)
        for kind in self._kinds.values():
            kind.masters.append(kind.take(entries, masters=True))

    def strands(
        self, entries: Sequence[Managed]
    ) -> tuple[tuple[int, ...], dict[tuple[int, ...], tuple[_Strand, ...]]]:
        """The numbers of the history's steps, and the sample by groups."""
        found: dict[tuple[int, ...], tuple[_Strand, ...]] = {}
        for (_, _, groups), kind in self._kinds.items():
            strand = _Strand(kind.start, kind.served(entries), tuple(kind.masters))
            found[groups] = (*found.get(groups, ()), strand)
        return tuple(self._steps), found


class _Kind:
    """Parameters of one device, dtype and set of groups, and where their sample is."""

    def __init__(self, context: Context, device: torch.device) -> None:
        self.members: list[int] = []
        self.positions: list[Tensor] = []
        self.masters: deque[Tensor] = deque(maxlen=HISTORY + 1)
        self.start = torch.empty(0, device="cpu")
        self._device, self._backend = device, context.backend_for(device)
        self._caches: tuple[dict[Any, Any], dict[Any, Any]] = ({}, {})

    def served(self, entries: Sequence[Managed]) -> Tensor:
        return self.take(entries, masters=False)

    def take(self, entries: Sequence[Managed], masters: bool) -> Tensor:
        own = [entries[i] for i in self.members]
        tensors = [to_local(e.state["master"]) for e in own] if masters else [e.local for e in own]
        tensors = [t if _plain(t, self._device) else container_of(t, self._device) for t in tensors]
        return self._backend.sample(tensors, self.positions, self._caches[masters])


def _plain(tensor: Tensor, device: torch.device) -> bool:
    return tensor.is_contiguous() and tensor.device == device
