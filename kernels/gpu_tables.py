"""The device tables of a batch: what the Triton kernels read in place of arguments.

Pointers, places and hyper-parameters are columns of a few tables, made on the host and kept
between launches, so that one launch serves hundreds of tensors.
"""

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from fc_optim.kernels.batch import AdamHyper, Batch, MuonHyper, Segment

WARPS = tl.constexpr(4)
BLOCK = tl.constexpr(WARPS.value * 256)  # elements per program: 8 per thread, one Philox call
REGISTERS = 128  # per thread, the bound of most kernels: without one ptxas may spill to stay at 64

# Columns of the segment table (int64). Slot s of a segment of one row is element BASE + s, where
# BASE is a multiple of 8, so that the 8 elements of a Philox call never lie in two programs. The
# segment's own slots are FIRST <= s < END. Pointers are those of slot 0: it may lie up to 7
# elements before the tensor, and is then never accessed.
CONTAINER, MASTER, GRAD, EXP_AVG, EXP_AVG_SQ, MAX_EXP_AVG_SQ = map(tl.constexpr, range(6))
MOMENTUM_BUFFER, UPDATE = EXP_AVG, EXP_AVG_SQ  # Muon's in the place of Adam's: a row is one line
TENSOR, FIRST_BLOCK, FIRST, END, BASE, INNER, ROW_STRIDE, PARAM_ID, SEED, ALIGNED = map(
    tl.constexpr, range(6, 16)
)
SEGMENT_COLUMNS = tl.constexpr(16)
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
SKIP, EPOCH, FROM_GRAD, GRAD_FACTOR, DECAY, LERP = map(tl.constexpr, range(6))
L2, SECOND, ONE_MINUS_SECOND, NEG_STEP_SIZE, BIAS_CORRECTION2_SQRT, EPSILON = map(
    tl.constexpr, range(6, 12)
)  # Adam
BLEND, FROM_BUFFER, NEG_LR = map(tl.constexpr, range(6, 9))  # Muon
SCALAR_COLUMNS = tl.constexpr(16)


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class Launch:
    """The device tables of a batch, from its cache where nothing changed; and its device context.

    A captured graph reads the tables of its capture, so those of pointers are never modified.
    Tables made during a capture are filled only by a replay, which copies from the host: they do
    not enter the cache, and whatever a capture uses is kept for good.
    """

    def __init__(self, batch: Batch) -> None:
        self.batch, self.device = batch, batch.masters[0].device
        self.cuda = self.device.type == "cuda"
        self.capturing = False
        self.used: list[Tensor] = []
        on_cpu, index = self.device.type == "cpu", self.device.index
        self.context = nullcontext() if on_cpu else torch.accelerator.device_index(index)

    def __enter__(self) -> "Launch":
        self.context.__enter__()
        self.capturing = _is_capturing(self.device)
        return self

    def __exit__(self, *exc: Any) -> None:
        if self.capturing:
            self.batch.cache.setdefault("gpu captured", []).append(self.used)
        self.context.__exit__(*exc)

    def options(self, registers: int = REGISTERS) -> dict[str, Any]:
        """Launch options: above all no contraction of products and sums into FMA."""
        options = {"num_warps": WARPS.value, "enable_fp_fusion": False}
        return options | {"maxnreg": registers} if self.cuda and not torch.version.hip else options

    def cores(self) -> int:
        if not self.cuda:
            return 1 if self.device.type == "cpu" else 64
        return torch.cuda.get_device_properties(self.device).multi_processor_count

    def segments(self, *names: str) -> tuple[Tensor, Tensor, bool]:
        """The segment table, the map from blocks to its rows, and whether any has rows > 1.

        `names` are those of the batch's lists (keys of `STREAMS`) that the kernel finds in it.
        """
        parts = [tuple(x) for x in self.batch.segments]
        flat = [(i, s) for i, xs in enumerate(parts) for s in xs]
        lists = {STREAMS[name]: getattr(self.batch, name) for name in names}
        streams = {
            column: ([x.data_ptr() for x in xs], xs[0].element_size())
            for column, xs in lists.items()
            if xs
        }

        def rows() -> Tensor:
            return _segment_rows(flat, streams, self.batch.seed)

        def blocks() -> Tensor:
            counts = torch.tensor([_block_count(s) for _, s in flat], dtype=torch.int64)
            return torch.repeat_interleave(torch.arange(len(flat), dtype=torch.int32), counts)

        key = (parts, streams, self.batch.seed)
        table = self._table(f"gpu segments of {', '.join(names)}", key, rows)
        return table, self._table("gpu blocks", parts, blocks), any(s.rows > 1 for _, s in flat)

    def tensors(self) -> Tensor:
        """The tensor table."""
        batch, count = self.batch, len(self.batch.masters)
        rows, _ = self._hyper_rows()
        columns = [[x.data_ptr() for x in xs] or [0] * count for xs in (batch.steps, batch.epochs)]
        columns.append(rows or [0] * count)
        for x in (batch.found_inf, batch.grad_scale):
            columns.append([0 if x is None else x.data_ptr()] * count)
        return self._table("gpu tensors", columns, lambda: torch.tensor(columns).T.contiguous())

    def epoch(self) -> Tensor:
        """int64 `[1]`, the same for all batches of an optimizer: a graph sees others' redraws."""
        epoch = -1 if self.batch.epoch is None else self.batch.epoch
        return self._values(self.batch.shared, "gpu epoch", torch.tensor([epoch]))

    def hypers(self) -> Tensor:
        """The hyper-parameter table: numbers from the host, and tensors copied on the device."""
        values, tensors = [], []
        for row, columns in enumerate(self._hyper_rows()[1]):
            numbers = [0.0] * HYPER_COLUMNS.value
            for column, x in enumerate(columns):
                if isinstance(x, Tensor) and x.device == self.device:
                    tensors.append((row, column, x))
                    numbers[column] = math.inf  # no number replaces a tensor unnoticed
                else:
                    numbers[column] = float(x)
            values.append(numbers)
        host = torch.tensor(values, dtype=torch.float64)
        table = self._values(self.batch.cache, "gpu hypers", host)
        for row, column, x in tensors:
            table[row, column].copy_(x.detach().reshape(()))
        return table

    def _hyper_rows(self) -> tuple[list[int], list[tuple[Any, ...]]]:
        """Each tensor's row of the hyper-parameter table, and the rows: equal ones once."""
        place: dict[tuple[Any, ...], int] = {}
        rows: list[tuple[Any, ...]] = []
        found = []
        for h in self.batch.hypers or self.batch.muon_hypers:
            columns = _hyper_columns(h)
            key = tuple(id(x) if isinstance(x, Tensor) else x for x in columns)
            if key not in place:
                place[key] = len(rows)
                rows.append(columns)
            found.append(place[key])
        return found, rows

    def _table(self, name: str, key: Any, build: Callable[[], Tensor]) -> Tensor:
        """A table that is made anew whenever its key changes."""
        known, table = self.batch.cache.get(name, (None, None))
        if table is None or known != key or table.device != self.device:
            table = self._upload(build())
            if not self.capturing:
                self.batch.cache[name] = (key, table)
        self.used.append(table)
        return table

    def _values(self, cache: dict[Any, Any], name: str, host: Tensor) -> Tensor:
        """A table that is overwritten whenever its values change: a captured graph sees them."""
        known, table = cache.get(name, (None, None))
        fits = table is not None and table.shape == host.shape and table.device == self.device
        changed = not fits or not torch.equal(known, host)
        if not fits or (changed and self.capturing):
            table = self._upload(host.clone())
        elif changed:
            table.copy_(self._pinned(host), non_blocking=True)
        if not self.capturing:
            cache[name] = (host, table)
        self.used.append(table)
        return table

    def _upload(self, host: Tensor) -> Tensor:
        return self._pinned(host).to(self.device, non_blocking=True)

    def _pinned(self, host: Tensor) -> Tensor:
        if self.device.type != "cpu":
            host = host.pin_memory()
            self.used.append(host)
        return host


def _first_slot(s: Segment) -> int:
    return s.base & 7 if s.rows == 1 else 0


def _block_count(s: Segment) -> int:
    return triton.cdiv(_first_slot(s) + s.numel, BLOCK.value) if s.numel else 0


def _segment_rows(
    flat: list[tuple[int, Segment]], streams: dict[int, tuple[list[int], int]], seed: int
) -> Tensor:
    """`streams`: by column, the address of each tensor and the size of an element."""
    rows, block = [], 0
    signed_seed = (seed + 2**63) % 2**64 - 2**63
    for i, s in flat:
        first = _first_slot(s)
        pointers, aligned = [0] * TENSOR.value, True
        for column, (addresses, size) in streams.items():
            pointers[column] = addresses[i] + (s.offset - first) * size
            aligned &= pointers[column] % (4 * size) == 0
        inner = s.inner if s.rows > 1 else 2**62  # one row, wherever its first slot is
        place = [i, block, first, first + s.numel, s.base - first, inner, s.row_stride]
        rows.append([*pointers, *place, s.param_id, signed_seed, aligned])
        block += _block_count(s)
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, SEGMENT_COLUMNS.value)


def _hyper_columns(h: AdamHyper | MuonHyper) -> tuple[Any, ...]:
    if isinstance(h, MuonHyper):
        return (h.lr, h.weight_decay, h.momentum, h.nesterov, h.lr_ratio)
    return (h.lr, h.weight_decay, h.beta1, h.beta2, h.eps, h.decoupled, h.maximize)
