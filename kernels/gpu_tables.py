"""The device tables of a batch: what the Triton kernels read in place of arguments.

Pointers, places and hyper-parameters are columns of a few tables, kept between launches on the
host and on the device, so that one launch serves hundreds of tensors.
"""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from fc_optim.kernels.batch import AdamHyper, Batch, MuonHyper, Segment, distinct_hypers

WARPS = tl.constexpr(4)
BLOCK = tl.constexpr(WARPS.value * 256)  # elements per program: 8 per thread, one Philox call
REGISTERS = 128  # per thread, the bound of most kernels: without one ptxas may spill to stay at 64

# Columns of the segment table (int64), of 128 bytes a row. Slot s of a run is element BASE + s,
# where BASE is a multiple of 8, so that the 8 elements of a Philox call never lie in two programs.
# The segment's own slots are FIRST <= s < END. Pointers are those of slot 0: it may lie up to 7
# elements before the tensor, and is then never accessed.
CONTAINER, MASTER, GRAD, EXP_AVG, EXP_AVG_SQ, MAX_EXP_AVG_SQ = map(tl.constexpr, range(6))
MOMENTUM_BUFFER, UPDATE = EXP_AVG, EXP_AVG_SQ  # Muon's in the place of Adam's: a row is one line
TENSOR, FIRST_BLOCK, FIRST, END, BASE, INNER, ROW_STRIDE, PARAM_ID, ALIGNED = map(
    tl.constexpr, range(6, 15)
)
SEGMENT_COLUMNS = tl.constexpr(16)
# Kinds of segments, by how random words are drawn: a run; rows whose groups of 8 are those of the
# whole parameter; any rows, with a Philox call for each element. Each has launches of its own: few
# batches have any of the latter two, and none shall be the slower for a shard of another.
RUN, GROUPS, SCATTERED = KINDS = tuple(map(tl.constexpr, range(3)))
STREAMS = {  # fields of `Batch`
    "containers": CONTAINER.value,
    "masters": MASTER.value,
    "grads": GRAD.value,
    "exp_avgs": EXP_AVG.value,
    "exp_avg_sqs": EXP_AVG_SQ.value,
    "max_exp_avg_sqs": MAX_EXP_AVG_SQ.value,
    "momentum_buffers": MOMENTUM_BUFFER.value,
    "updates": UPDATE.value,
}

# Columns of the tensor table (int64) and of the hyper-parameter table (float64).
STEP, TAKEN, HYPER, FOUND_INF, GRAD_SCALE = map(tl.constexpr, range(5))
TENSOR_COLUMNS = tl.constexpr(5)
LR, WEIGHT_DECAY = map(tl.constexpr, range(2))
BETA1, BETA2, EPS, DECOUPLED, MAXIMIZE = map(tl.constexpr, range(2, 7))  # Adam
MOMENTUM, NESTEROV, LR_RATIO = map(tl.constexpr, range(2, 5))  # Muon
HYPER_COLUMNS = tl.constexpr(7)

# Columns of what a prologue computes per tensor: int32, or fp32 patterns.
SKIP, EPOCH, FROM_GRAD_COLUMN, GRAD_FACTOR, DECAY, LERP = map(tl.constexpr, range(6))
L2, SECOND, ONE_MINUS_SECOND, NEG_STEP_SIZE, BIAS_CORRECTION2_SQRT, EPSILON = map(
    tl.constexpr, range(6, 12)
)  # Adam
BLEND, FROM_BUFFER, NEG_LR = map(tl.constexpr, range(6, 9))  # Muon
SCALAR_COLUMNS = tl.constexpr(16)


T = TypeVar("T", bound="Tables")


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _current_stream(device: torch.device) -> Any:
    """None where there are no streams."""
    return None if device.type == "cpu" else torch.accelerator.current_stream(device)


def _record(table: Tensor, stream: Any) -> None:
    table.record_stream(stream)


def _pin(host: Tensor, device: torch.device) -> Tensor:
    """A copy in pinned memory, which is not used again before copies from it are done."""
    return host.clone() if device.type == "cpu" else host.pin_memory()


@dataclass(slots=True)
class _Entry:
    """A table on the device, what it was made of, and the stream that used it last."""

    host: Tensor
    table: Tensor
    stream: Any


class _Host:
    """The segment and tensor tables on the host, but for what changes with every step.

    What is known of a list of the batch holds for as long as it is the same list.
    """

    def __init__(self, segments: Sequence[Sequence[Segment]]) -> None:
        self.segments = segments
        flat = [(i, s) for i, of_tensor in enumerate(segments) for s in of_tensor]
        kinds = [_kind(s) for _, s in flat]
        places, shifts, counts = [], [], []
        ends = [0] * len(KINDS)  # blocks so far, of the launch for the segment's kind
        for (i, s), kind in zip(flat, kinds, strict=True):
            first = s.base & 7 if kind == RUN.value else 0
            inner = 2**62 if kind == RUN.value else s.inner
            place = [i, ends[kind], first, first + s.numel, s.base - first, inner, s.row_stride]
            places.append([*place, s.param_id, 1])
            shifts.append(s.offset - first)
            counts.append(triton.cdiv(first + s.numel, BLOCK.value) if s.numel else 0)
            ends[kind] += counts[-1]
        self.rows = torch.zeros(len(flat), SEGMENT_COLUMNS.value, dtype=torch.int64, device="cpu")
        if flat:
            self.rows[:, TENSOR.value : ALIGNED.value + 1] = torch.tensor(places, device="cpu")
        self.shifts = torch.tensor(shifts, dtype=torch.int64, device="cpu")
        self.tensor = self.rows[:, TENSOR.value].clone()
        self.blocks = [
            _block_map([n if k == kind.value else 0 for n, k in zip(counts, kinds, strict=True)])
            for kind in KINDS
        ]
        self.tensors = torch.zeros(
            len(segments), TENSOR_COLUMNS.value, dtype=torch.int64, device="cpu"
        )
        self.hypers: list[AdamHyper | MuonHyper] = []  # distinct ones
        self._known: dict[str, Any] = {}
        self._aligned: dict[int, Tensor] = {}  # by column

    def point(self, batch: Batch, *names: str) -> None:
        """Set the addresses of these lists of the batch (keys of STREAMS)."""
        for name in names:
            tensors, column = getattr(batch, name), STREAMS[name]
            if name != "grads" and self._known.get(name) is tensors:
                continue
            if name != "grads":  # backward makes them anew, without a new list; nor kept alive here
                self._known[name] = tensors
            addresses = torch.zeros_like(self.shifts)
            if tensors:
                size = tensors[0].element_size()
                addresses = _addresses(name, tensors)[self.tensor] + self.shifts * size
                self._aligned[column] = addresses % (4 * size) == 0
            else:
                self._aligned.pop(column, None)
            self.rows[:, column] = addresses
        if self._aligned:
            self.rows[:, ALIGNED.value] = torch.stack([*self._aligned.values()]).all(0)

    def point_scalars(self, batch: Batch) -> None:
        """Set the tensor table's columns."""
        for name, column in (("steps", STEP.value), ("epochs", TAKEN.value)):
            tensors = getattr(batch, name)
            if self._known.get(name) is not tensors:
                self._known[name] = tensors
                self.tensors[:, column] = _addresses(name, tensors) if tensors else 0
        hypers = batch.hypers or batch.muon_hypers
        if self._known.get("hypers") is not hypers:
            self._known["hypers"] = hypers
            index, self.hypers = distinct_hypers(hypers)
            self.tensors[:, HYPER.value] = torch.tensor(index, device="cpu") if index else 0
        for x, column in ((batch.found_inf, FOUND_INF), (batch.grad_scale, GRAD_SCALE)):
            self.tensors[:, column.value] = 0 if x is None else x.data_ptr()


class Tables:
    """Device tables from a cache where nothing changed, and their device's context.

    A table of pointers is never modified, since a captured graph reads those of its capture and
    another stream may be reading it: when an address changes there is a new one, copied from
    pinned memory. Tables made during a capture are filled only by a replay, which copies from the
    host: they do not enter the cache, and whatever a capture uses is kept for good.
    """

    def __init__(self, device: torch.device, cache: dict[Any, Any]) -> None:
        self.device, self.cache = device, cache
        self.capturing = False
        self.stream: Any = None
        self.used: list[Tensor] = []
        on_cpu, index = device.type == "cpu", device.index
        self.context = nullcontext() if on_cpu else torch.accelerator.device_index(index)

    def __enter__(self: T) -> T:
        self.context.__enter__()
        self.capturing, self.stream = _is_capturing(self.device), _current_stream(self.device)
        return self

    def __exit__(self, *exc: Any) -> None:
        if self.capturing:
            self.cache.setdefault("gpu captured", []).append(self.used)
        self.context.__exit__(*exc)

    def table(self, name: str, host: Tensor) -> Tensor:
        """A table that is made anew whenever something in it changes."""
        entry: _Entry | None = self.cache.get(name)
        if entry is None or not self._fits(entry, host) or not torch.equal(entry.host, host):
            entry = self._upload(host)
            if not self.capturing:
                self.cache[name] = entry
        return self._use(entry)

    def values(self, name: str, host: Tensor, cache: dict[Any, Any]) -> Tensor:
        """A table that is overwritten whenever its values change: a captured graph sees them."""
        entry: _Entry | None = cache.get(name)
        if entry is None or not self._fits(entry, host):
            entry = self._upload(host)
            if not self.capturing:
                cache[name] = entry
        elif not torch.equal(entry.host, host):
            if self.capturing:
                return self._use(self._upload(host))
            self._use(entry)  # waits for what another stream did with it
            entry.host = _pin(host, self.device)
            entry.table.copy_(entry.host, non_blocking=True)
        return self._use(entry)

    def _fits(self, entry: _Entry, host: Tensor) -> bool:
        return entry.table.shape == host.shape and entry.table.device == self.device

    def _upload(self, host: Tensor) -> _Entry:
        pinned = _pin(host, self.device)
        self.used.append(pinned)
        table = torch.empty_like(host, device=self.device)
        table.copy_(pinned, non_blocking=True)
        return _Entry(pinned, table, self.stream)

    def _use(self, entry: _Entry) -> Tensor:
        """The table, safe on this stream: written before, and not given away before it is read.

        (A capture can neither wait for other streams nor needs to: it keeps what it uses.)
        """
        self.used.append(entry.table)
        if not self.capturing and entry.stream != self.stream:
            self.stream.wait_stream(entry.stream)
            _record(entry.table, self.stream)
            entry.stream = self.stream
        return entry.table


class Launch(Tables):
    """The tables of a batch, and what else its kernels take."""

    def __init__(self, batch: Batch) -> None:
        super().__init__(batch.masters[0].device, batch.cache)
        self.batch = batch
        host = batch.cache.get("gpu host")
        if host is None or host.segments is not batch.segments:
            host = batch.cache["gpu host"] = _Host(batch.segments)
        self.host: _Host = host

    def options(self, registers: int = REGISTERS) -> dict[str, Any]:
        """Launch options: above all no contraction of products and sums into FMA."""
        options = {"num_warps": WARPS.value, "enable_fp_fusion": False}
        cuda = self.device.type == "cuda" and not torch.version.hip
        return options | {"maxnreg": registers} if cuda else options

    def cores(self) -> int:
        if self.device.type != "cuda":
            return 1 if self.device.type == "cpu" else 64
        return torch.cuda.get_device_properties(self.device).multi_processor_count

    def seed(self) -> tuple[int, int]:
        """Its halves, as the int32 that kernels take."""
        return _signed(self.batch.seed), _signed(self.batch.seed >> 32)

    def segments(self, *names: str) -> tuple[Tensor, list[tuple[Tensor, int]]]:
        """The segment table; and of each launch the map from its programs to rows, and the kind.

        `names` are those of the batch's lists (keys of `STREAMS`) that the kernel finds in it.
        """
        self.host.point(self.batch, *names)
        table = self.table("gpu segments", self.host.rows)
        maps = [
            (self.table(f"gpu blocks {kind}", blocks), kind)
            for kind, blocks in enumerate(self.host.blocks)
            if len(blocks)
        ]
        return table, maps

    def tensors(self) -> Tensor:
        """The tensor table."""
        self.host.point_scalars(self.batch)
        return self.table("gpu tensors", self.host.tensors)

    def epoch(self) -> Tensor:
        """int64 `[1]`, the same for all batches of an optimizer: a graph sees others' redraws."""
        epoch = -1 if self.batch.epoch is None else self.batch.epoch
        host = torch.tensor([epoch], device="cpu")
        return self.values("gpu epoch", host, self.batch.shared)

    def hypers(self) -> Tensor:
        """The hyper-parameter table: numbers from the host, and tensors copied on the device."""
        values, tensors = [], []
        for row, hyper in enumerate(self.host.hypers):
            numbers = [0.0] * HYPER_COLUMNS.value
            for column, x in enumerate(_hyper_columns(hyper)):
                if isinstance(x, Tensor) and x.device == self.device:
                    tensors.append((row, column, x))
                    numbers[column] = math.inf  # no number replaces a tensor unnoticed
                else:
                    numbers[column] = float(x)
            values.append(numbers)
        host = torch.tensor(values, dtype=torch.float64, device="cpu")
        table = self.values("gpu hypers", host, self.cache)
        for row, column, x in tensors:
            table[row, column].copy_(x.detach().reshape(()))
        return table


def _signed(x: int) -> int:
    return (x + 2**31) % 2**32 - 2**31


def _kind(s: Segment) -> int:
    if s.rows <= 1 or s.inner == s.row_stride:
        kind = RUN
    else:  # the kernel divides numbers of groups in 32 bits
        whole = (s.base | s.inner | s.row_stride) & 7 == 0 and s.numel < 2**34
        kind = GROUPS if whole else SCATTERED
    return int(kind.value)


def _block_map(counts: list[int]) -> Tensor:
    """The row of each of a launch's blocks: int32."""
    rows = torch.arange(len(counts), dtype=torch.int32, device="cpu")
    return torch.repeat_interleave(rows, torch.tensor(counts, dtype=torch.int64, device="cpu"))


def _addresses(name: str, tensors: list[Tensor]) -> Tensor:
    if not all(map(Tensor.is_contiguous, tensors)):
        raise ValueError(f"batch.{name}: kernels need contiguous tensors; pass contiguous copies.")
    return torch.tensor([*map(Tensor.data_ptr, tensors)], dtype=torch.int64, device="cpu")


def _hyper_columns(h: AdamHyper | MuonHyper) -> tuple[Any, ...]:
    if isinstance(h, MuonHyper):
        return (h.lr, h.weight_decay, h.momentum, h.nesterov, h.lr_ratio)
    return (h.lr, h.weight_decay, h.beta1, h.beta2, h.eps, h.decoupled, h.maximize)
