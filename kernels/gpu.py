"""The Triton backend: one launch for all tensors of a batch; same functions as `reference`.

Kernels find their tensors through tables in device memory, and every number that changes between
steps is in device memory too: nothing recompiles, the host never waits, and a captured graph
replays. CUDA, XPU and (interpreted) CPU tensors are taken.
"""

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from fc_optim.kernels import batch as batch_module
from fc_optim.kernels import reference
from fc_optim.kernels.batch import Batch, Segment

WARPS = tl.constexpr(4)
BLOCK = tl.constexpr(WARPS.value * 256)  # elements per program: 8 per thread, one Philox call
PREPARE_BLOCK = tl.constexpr(128)  # tensors per program of the Adam prologue
SCAN = tl.constexpr(256)  # segments whose flags an adoption program reads at a time
PROGRAMS_PER_CORE = 4  # of the adoption kernel, which in most steps has nothing to do
# Register bounds, of Adam's kernel without column shards and of the others. Without them ptxas
# spills some variants in order to stay at 64 or 72; no variant of the first needs more than 76.
ADAM_REGISTERS, REGISTERS = 80, 128

LARGEST_BF16 = tl.constexpr(reference.LARGEST_BF16)
INF = tl.constexpr(reference.INF)
QUIET_NAN = tl.constexpr(reference.QUIET_NAN)
SAMPLES = tl.constexpr(batch_module.SAMPLES)
SAMPLE_MIX = tl.constexpr(batch_module.SAMPLE_MIX - 2**64)

# Columns of the segment table (int64). Slot s of a segment of one row is element BASE + s, where
# BASE is a multiple of 8, so that the 8 elements of a Philox call never lie in two programs. The
# segment's own slots are FIRST <= s < END. Pointers are those of slot 0: it may lie up to 7
# elements before the tensor, and is then never accessed.
CONTAINER, MASTER, GRAD, EXP_AVG, EXP_AVG_SQ, MAX_EXP_AVG_SQ = map(tl.constexpr, range(6))
TENSOR, FIRST_BLOCK, FIRST, END, BASE, INNER, ROW_STRIDE, PARAM_ID, SEED, ALIGNED = map(
    tl.constexpr, range(6, 16)
)
SEGMENT_COLUMNS = tl.constexpr(16)

# Columns of the tensor table (int64) and of the hyper-parameter table (float64).
STEP, HYPER, FOUND_INF, GRAD_SCALE = map(tl.constexpr, range(4))
TENSOR_COLUMNS = tl.constexpr(4)
LR, BETA1, BETA2, EPS, WEIGHT_DECAY, DECOUPLED, MAXIMIZE = map(tl.constexpr, range(7))
HYPER_COLUMNS = tl.constexpr(7)

# Columns of what the prologue computes per tensor: three int32, then fp32 patterns.
SKIP, EPOCH, FROM_GRAD, GRAD_FACTOR, DECAY, L2, LERP = map(tl.constexpr, range(7))
SECOND, ONE_MINUS_SECOND, NEG_STEP_SIZE, BIAS_CORRECTION2_SQRT, EPSILON = map(
    tl.constexpr, range(7, 12)
)
SCALAR_COLUMNS = tl.constexpr(16)


@triton.jit
def _pointer(row, column: tl.constexpr, dtype: tl.constexpr):
    """The pointer in a column of a table."""
    return tl.load(row + column).to(tl.pointer_type(dtype))


@triton.jit
def _aligned(row, column: tl.constexpr, dtype: tl.constexpr):
    """The same, with a hint that 4 elements can be accessed at once: 16 bytes of fp32, 8 of bf16.

    Not 16 of bf16: with one layout for all streams only the random words move between threads,
    and a warp covers whole sectors anyway. (In one expression: triton 3.6 drops a hint on a call.)
    """
    address = tl.load(row + column)
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), dtype.primitive_bitwidth // 2)


@triton.jit
def _find_block(segments, blocks):
    """The segment row of this program, and its first slot."""
    pid = tl.program_id(0)
    row = segments + tl.load(blocks + pid).to(tl.int64) * SEGMENT_COLUMNS
    return row, (pid - tl.load(row + FIRST_BLOCK)) * BLOCK


@triton.jit
def _bounds(row, start):
    """Of the block at slot `start`: its first and end lane, and whether `_aligned` serves it."""
    first = tl.maximum(tl.load(row + FIRST) - start, 0).to(tl.int32)
    end = tl.minimum(tl.load(row + END) - start, BLOCK).to(tl.int32)
    return first, end, (first == 0) & (end == BLOCK) & (tl.load(row + ALIGNED) != 0)


@triton.jit
def _load(row, column: tl.constexpr, dtype: tl.constexpr, start, bounds):
    first, end, whole = bounds
    lane = tl.arange(0, BLOCK)
    if whole:
        x = tl.load(_aligned(row, column, dtype) + (start + lane))
    else:
        mask = (lane >= first) & (lane < end)
        x = tl.load(_pointer(row, column, dtype) + (start + lane), mask=mask, other=0)
    return x


@triton.jit
def _store(row, column: tl.constexpr, dtype: tl.constexpr, start, bounds, x):
    first, end, whole = bounds
    lane = tl.arange(0, BLOCK)
    if whole:
        tl.store(_aligned(row, column, dtype) + (start + lane), x)
    else:
        mask = (lane >= first) & (lane < end)
        tl.store(_pointer(row, column, dtype) + (start + lane), x, mask=mask)


@triton.jit
def _element(row, slot):
    """The flat index of a slot in the unsharded parameter."""
    inner = tl.load(row + INNER)
    return tl.load(row + BASE) + slot // inner * tl.load(row + ROW_STRIDE) + slot % inner


@triton.jit
def _philox(row, g, t):
    """The four words (uint32) of groups `g` of 8 elements, at dither epoch `t`."""
    param_id = tl.load(row + PARAM_ID).to(tl.int32)
    return tl.philox(tl.load(row + SEED), g.to(tl.int32), (g >> 32).to(tl.int32), param_id, t)


@triton.jit
def _words_at(e, row, t):
    """The 16-bit random words (int32) of the elements with flat indices `e`: a Philox call each."""
    c0, c1, c2, c3 = _philox(row, e >> 3, t)
    low, high = tl.where((e & 2) != 0, c1, c0), tl.where((e & 2) != 0, c3, c2)
    word = tl.where((e & 4) != 0, high, low)
    return (tl.where((e & 1) != 0, word >> 16, word) & 0xFFFF).to(tl.int32)


@triton.jit
def _words(row, start, t, STRIDED: tl.constexpr):
    """The 16-bit random words (int32) of a block: one Philox call for 8 elements if contiguous."""
    if STRIDED:
        return _words_at(_element(row, start + tl.arange(0, BLOCK)), row, t)
    else:
        # A thread draws one group of 8, but holds 4 neighbours of each half of the block, so that
        # a warp's accesses are contiguous. Groups are numbered so that a warp draws for itself.
        warp = tl.arange(0, WARPS)[:, None, None] * 16
        half = tl.arange(0, 2)[None, :, None] * (BLOCK // 16)
        g = ((tl.load(row + BASE) + start) >> 3) + (warp + half + tl.arange(0, 16)[None, None, :])
        c0, c1, c2, c3 = _philox(row, g, t)
        words = tl.join(tl.join(c0, c2), tl.join(c1, c3))
        lanes = tl.join(words & 0xFFFF, words >> 16)  # [warp, half, group, 2, 2, 2]
        return tl.reshape(tl.permute(lanes, (1, 0, 2, 3, 4, 5)), (BLOCK,)).to(tl.int32)


@triton.jit
def _canonical(bits):
    """`reference.canonical_bits`."""
    magnitude = bits & 0x7FFFFFFF
    finite = tl.minimum(magnitude, LARGEST_BF16)
    other = tl.where(magnitude == INF, INF, QUIET_NAN)
    return (bits & -0x80000000) | tl.where(magnitude >= INF, other, finite)


@triton.jit
def _shadow(bits, words):
    """`reference.round_bits` of canonical patterns."""
    return (bits + words) & -0x10000


@triton.jit
def _to_container(shadow, dtype: tl.constexpr):
    """Shadow patterns as integers of the container's width."""
    return (shadow >> 16).to(tl.int16) if dtype == tl.int16 else shadow


@triton.jit
def _from_container(x, dtype: tl.constexpr):
    """`reference.load_container` of integers of the container's width."""
    return _canonical(x.to(tl.int32) << 16 if dtype == tl.int16 else x)


@triton.jit
def _epoch(tensors, epoch, i):
    """The dither epoch of tensor `i`: the batch's own, or (when that is -1) its step count."""
    t = tl.load(epoch)
    if t < 0:
        t = tl.load(_pointer(tensors + i * TENSOR_COLUMNS, STEP, tl.float32)).to(tl.int64)
    return t.to(tl.int32)


@triton.jit
def _round_kernel(segments, blocks, tensors, epoch, C: tl.constexpr, STRIDED: tl.constexpr):
    row, start = _find_block(segments, blocks)
    bounds = _bounds(row, start)
    bits = _canonical(_load(row, MASTER, tl.int32, start, bounds))
    words = _words(row, start, _epoch(tensors, epoch, tl.load(row + TENSOR)), STRIDED)
    _store(row, CONTAINER, C, start, bounds, _to_container(_shadow(bits, words), C))


@triton.jit
def _flag_kernel(segments, tensors, epoch, flags, C: tl.constexpr):
    """One program per segment: `batch.sample_positions` and the comparison."""
    row = segments + tl.program_id(0).to(tl.int64) * SEGMENT_COLUMNS
    first = tl.load(row + FIRST)
    numel = tl.load(row + END) - first
    count = tl.maximum(tl.minimum(numel, SAMPLES), 1)
    k = tl.arange(0, SAMPLES).to(tl.int64)
    mask = k < numel
    low, high = k * numel // count, (k + 1) * numel // count
    mixed = ((k * SAMPLE_MIX) >> 20) & ((1 << 44) - 1)
    slot = first + low + mixed % tl.where(mask, high - low, 1)
    i = tl.load(row + TENSOR)
    words = _words_at(_element(row, slot), row, _epoch(tensors, epoch, i))
    bits = _canonical(tl.load(_pointer(row, MASTER, tl.int32) + slot, mask=mask, other=0))
    found = _from_container(tl.load(_pointer(row, CONTAINER, C) + slot, mask=mask, other=0), C)
    foreign = mask & (found != _shadow(bits, words))
    if tl.max(foreign.to(tl.int32), axis=0) != 0:
        tl.store(flags + i, 1)


@triton.jit(do_not_specialize=["count", "flags"])
def _adopt_kernel(
    segments, count, tensors, epoch, flags, counts, C: tl.constexpr, STRIDED: tl.constexpr
):
    """A small grid over the blocks of flagged tensors; a few loads when there are none."""
    j = 0
    while j < count:  # (the `range` of triton 3.6's interpreter takes no tensors)
        s = j + tl.arange(0, SCAN)
        live = s < count
        tensor = tl.load(segments + s.to(tl.int64) * SEGMENT_COLUMNS + TENSOR, live, other=0)
        if tl.max(tl.load(flags + tensor, live, other=0), axis=0) == 0:
            j += SCAN
        else:
            end = tl.minimum(j + SCAN, count)
            while j < end:
                row = segments + j * SEGMENT_COLUMNS
                if tl.load(flags + tl.load(row + TENSOR)) != 0:
                    _adopt_segment(row, tensors, epoch, counts, C, STRIDED)
                j += 1


@triton.jit
def _adopt_segment(row, tensors, epoch, counts, C: tl.constexpr, STRIDED: tl.constexpr):
    i = tl.load(row + TENSOR)
    t = _epoch(tensors, epoch, i)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    while start < tl.load(row + END):
        bounds = _bounds(row, start)
        bits = _load(row, MASTER, tl.int32, start, bounds)
        found = _from_container(_load(row, CONTAINER, C, start, bounds), C)
        foreign = found != _shadow(_canonical(bits), _words(row, start, t, STRIDED))
        foreign &= (tl.arange(0, BLOCK) >= bounds[0]) & (tl.arange(0, BLOCK) < bounds[1])
        at = _pointer(row, MASTER, tl.int32) + start + tl.arange(0, BLOCK)
        tl.store(at, found, mask=foreign)
        tl.atomic_add(counts + i, tl.sum(foreign.to(tl.int32), axis=0).to(tl.int64))
        start += tl.num_programs(0) * BLOCK


@triton.jit
def _optional(at, live, default: tl.constexpr):
    """The fp32 number behind a pointer in the tensor table, or the default of a null pointer."""
    address = tl.load(at, live, other=0)
    return tl.load(address.to(tl.pointer_type(tl.float32)), address != 0, other=default)


@triton.jit
def _power(x, n):
    """`batch.power`, until all exponents of the program are used up."""
    result = tl.full((PREPARE_BLOCK,), 1.0, tl.float64)
    while tl.max(n, axis=0) > 0:
        result = tl.where((n & 1) != 0, result * x, result)
        x *= x
        n >>= 1
    return result


@triton.jit
def _put(at, x, live):
    tl.store(at, x.to(tl.float32).to(tl.int32, bitcast=True), live)


@triton.jit(do_not_specialize=["count"])
def _prepare_kernel(tensors, epoch, hypers, scalars, count):
    """Adam's prologue: `steps += 1` unless `found_inf`, and `batch.adam_scalars` in float64."""
    i = tl.program_id(0) * PREPARE_BLOCK + tl.arange(0, PREPARE_BLOCK)
    live = i < count
    row = tensors + i * TENSOR_COLUMNS
    skip = _optional(row + FOUND_INF, live, 0.0) != 0
    step_at = tl.load(row + STEP, live, other=0).to(tl.pointer_type(tl.float32))
    step = tl.load(step_at, live, other=0.0) + 1.0
    tl.store(step_at, step, live & ~skip)

    h = hypers + tl.load(row + HYPER, live, other=0) * HYPER_COLUMNS
    lr, beta1, beta2 = tl.load(h + LR), tl.load(h + BETA1), tl.load(h + BETA2)
    weight_decay, decoupled = tl.load(h + WEIGHT_DECAY), tl.load(h + DECOUPLED) != 0
    n = tl.where(live, step, 0.0).to(tl.int64)
    t = tl.load(epoch)
    one = tl.full((PREPARE_BLOCK,), 1.0, tl.float64)
    sign = tl.where(tl.load(h + MAXIMIZE) != 0, -one, one)
    weight = 1.0 - beta1
    from_grad = weight >= 0.5

    out = scalars + i * SCALAR_COLUMNS
    tl.store(out + SKIP, skip.to(tl.int32), live)
    tl.store(out + EPOCH, tl.where(t < 0, n, t).to(tl.int32), live)
    tl.store(out + FROM_GRAD, from_grad.to(tl.int32), live)
    _put(out + GRAD_FACTOR, sign / _optional(row + GRAD_SCALE, live, 1.0).to(tl.float64), live)
    _put(out + DECAY, tl.where(decoupled, 1.0 - lr * weight_decay, one), live)
    _put(out + L2, tl.where(decoupled, 0.0, weight_decay), live)
    _put(out + LERP, tl.where(from_grad, weight - 1.0, weight), live)
    _put(out + SECOND, beta2, live)
    _put(out + ONE_MINUS_SECOND, 1.0 - beta2, live)
    _put(out + NEG_STEP_SIZE, -(lr / (1.0 - _power(beta1, n))), live)
    _put(out + BIAS_CORRECTION2_SQRT, tl.sqrt(1.0 - _power(beta2, n)), live)
    _put(out + EPSILON, tl.load(h + EPS), live)


@triton.jit
def _scalar(row, column: tl.constexpr):
    return tl.load(row + column).to(tl.float32, bitcast=True)


@triton.jit
def _adam_kernel(
    segments, blocks, scalars, C: tl.constexpr, G: tl.constexpr,
    AMSGRAD: tl.constexpr, HAS_L2: tl.constexpr, STRIDED: tl.constexpr,
):  # fmt: skip
    row, start = _find_block(segments, blocks)
    s = scalars + tl.load(row + TENSOR) * SCALAR_COLUMNS
    bounds = _bounds(row, start)
    g = _load(row, GRAD, G, start, bounds)
    w = _load(row, MASTER, tl.float32, start, bounds)
    m = _load(row, EXP_AVG, tl.float32, start, bounds)
    v = _load(row, EXP_AVG_SQ, tl.float32, start, bounds)
    if AMSGRAD:
        second = _load(row, MAX_EXP_AVG_SQ, tl.float32, start, bounds)
    if tl.load(s + SKIP) != 0:  # not before the loads: few steps are skipped
        return

    if G == tl.int16:  # bf16 patterns: triton's interpreter widens its subnormals wrongly
        g = (g.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    g = g * _scalar(s, GRAD_FACTOR)
    if HAS_L2:
        l2 = _scalar(s, L2)
        g = tl.where(l2 != 0, g + w * l2, g)
    w = w * _scalar(s, DECAY)
    m = tl.where(tl.load(s + FROM_GRAD) != 0, g, m) + (g - m) * _scalar(s, LERP)
    v = v * _scalar(s, SECOND) + g * _scalar(s, ONE_MINUS_SECOND) * g
    if AMSGRAD:
        second = tl.maximum(second, v, propagate_nan=tl.PropagateNan.ALL)
    else:
        second = v
    root = tl.div_rn(tl.sqrt_rn(second), _scalar(s, BIAS_CORRECTION2_SQRT))
    w += tl.div_rn(m * _scalar(s, NEG_STEP_SIZE), root + _scalar(s, EPSILON))
    bits = _canonical(w.to(tl.int32, bitcast=True))
    words = _words(row, start, tl.load(s + EPOCH), STRIDED)

    _store(row, CONTAINER, C, start, bounds, _to_container(_shadow(bits, words), C))
    _store(row, MASTER, tl.int32, start, bounds, bits)
    _store(row, EXP_AVG, tl.float32, start, bounds, m)
    _store(row, EXP_AVG_SQ, tl.float32, start, bounds, v)
    if AMSGRAD:
        _store(row, MAX_EXP_AVG_SQ, tl.float32, start, bounds, second)


def round_(batch: Batch) -> None:
    """See `reference.round_`."""
    if not batch.masters:
        return
    with _Launch(batch) as launch:
        table, blocks, strided = launch.segments(batch.containers, batch.masters)
        arguments = (table, blocks, launch.tensors(), launch.epoch())
        if len(blocks):
            _round_kernel[(len(blocks),)](
                *arguments, C=_container_type(batch), STRIDED=strided, **launch.options()
            )


def flag_foreign(batch: Batch) -> Tensor:
    """See `reference.flag_foreign`."""
    flags = torch.zeros(len(batch.masters), dtype=torch.int32, device=batch.masters[0].device)
    with _Launch(batch) as launch:
        table, _, _ = launch.segments(batch.containers, batch.masters)
        arguments = (table, launch.tensors(), launch.epoch(), flags)
        if len(table):
            _flag_kernel[(len(table),)](*arguments, C=_container_type(batch), **launch.options())
    return flags


def adopt_(batch: Batch, flags: Tensor) -> Tensor:
    """See `reference.adopt_`."""
    counts = torch.zeros(len(batch.masters), dtype=torch.int64, device=batch.masters[0].device)
    with _Launch(batch) as launch:
        table, blocks, strided = launch.segments(batch.containers, batch.masters)
        arguments = (table, len(table), launch.tensors(), launch.epoch(), flags, counts)
        programs = min(launch.cores() * PROGRAMS_PER_CORE, len(blocks))
        if programs:
            _adopt_kernel[(programs,)](
                *arguments, C=_container_type(batch), STRIDED=strided, **launch.options()
            )
    return counts


def adam_(batch: Batch) -> None:
    """See `reference.adam_`."""
    if not batch.masters:
        return
    count = len(batch.masters)
    streams = (batch.containers, batch.masters, batch.grads)
    moments = (batch.exp_avgs, batch.exp_avg_sqs, batch.max_exp_avg_sqs)
    with _Launch(batch) as launch:
        table, blocks, strided = launch.segments(*streams, *moments)
        scalars = torch.empty(count, SCALAR_COLUMNS.value, dtype=torch.int32, device=launch.device)
        _prepare_kernel[(triton.cdiv(count, PREPARE_BLOCK.value),)](
            launch.tensors(), launch.epoch(), launch.hypers(), scalars, count, **launch.options()
        )
        if len(blocks):
            _adam_kernel[(len(blocks),)](
                table,
                blocks,
                scalars,
                C=_container_type(batch),
                G=tl.int16 if batch.grads[0].dtype == torch.bfloat16 else tl.float32,
                AMSGRAD=bool(batch.max_exp_avg_sqs),
                HAS_L2=any(not h.decoupled and h.weight_decay != 0 for h in batch.hypers),
                STRIDED=strided,
                **launch.options(REGISTERS if strided else ADAM_REGISTERS),
            )


def _container_type(batch: Batch) -> tl.dtype:
    return tl.int16 if batch.containers[0].dtype == torch.bfloat16 else tl.int32


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class _Launch:
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

    def __enter__(self) -> "_Launch":
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

    def segments(self, *streams: list[Tensor]) -> tuple[Tensor, Tensor, bool]:
        """The segment table, the map from blocks to its rows, and whether any has rows > 1."""
        parts = [tuple(x) for x in self.batch.segments]
        flat = [(i, s) for i, xs in enumerate(parts) for s in xs]
        addresses = [[x.data_ptr() for x in xs] for xs in streams]
        sizes = [xs[0].element_size() if xs else 4 for xs in streams]

        def rows() -> Tensor:
            return _segment_rows(flat, addresses, sizes, self.batch.seed)

        def blocks() -> Tensor:
            counts = torch.tensor([_block_count(s) for _, s in flat], dtype=torch.int64)
            return torch.repeat_interleave(torch.arange(len(flat), dtype=torch.int32), counts)

        key = (parts, addresses, sizes, self.batch.seed)
        table = self._table(f"gpu segments {len(streams)}", key, rows)
        return table, self._table("gpu blocks", parts, blocks), any(s.rows > 1 for _, s in flat)

    def tensors(self) -> Tensor:
        """The tensor table."""
        batch = self.batch
        place: dict[int, int] = {}
        hyper_rows = [place.setdefault(id(h), len(place)) for h in batch.hypers]
        columns = [[x.data_ptr() for x in batch.steps], hyper_rows or [0] * len(batch.steps)]
        for x in (batch.found_inf, batch.grad_scale):
            columns.append([0 if x is None else x.data_ptr()] * len(batch.steps))
        return self._table("gpu tensors", columns, lambda: torch.tensor(columns).T.contiguous())

    def epoch(self) -> Tensor:
        """int64 `[1]`."""
        epoch = self.batch.epoch
        return self._values("gpu epoch", torch.tensor([-1 if epoch is None else epoch]))

    def hypers(self) -> Tensor:
        """The hyper-parameter table: numbers from the host, and tensors copied on the device."""
        values, tensors = [], []
        for row, h in enumerate({id(h): h for h in self.batch.hypers}.values()):
            columns = [h.lr, h.beta1, h.beta2, h.eps, h.weight_decay, h.decoupled, h.maximize]
            for column, x in enumerate(columns):
                if isinstance(x, Tensor) and x.device == self.device:
                    tensors.append((row, column, x))
                    columns[column] = math.inf  # no number replaces a tensor unnoticed
            values.append([float(x) for x in columns])
        table = self._values("gpu hypers", torch.tensor(values, dtype=torch.float64))
        for row, column, x in tensors:
            table[row, column].copy_(x.detach().reshape(()))
        return table

    def _table(self, name: str, key: Any, build: Callable[[], Tensor]) -> Tensor:
        """A table that is made anew whenever its key changes."""
        known, table = self.batch.cache.get(name, (None, None))
        if table is None or known != key or table.device != self.device:
            table = self._upload(build())
            if not self.capturing:
                self.batch.cache[name] = (key, table)
        self.used.append(table)
        return table

    def _values(self, name: str, host: Tensor) -> Tensor:
        """A table that is overwritten whenever its values change: a captured graph sees them."""
        known, table = self.batch.cache.get(name, (None, None))
        fits = table is not None and table.shape == host.shape and table.device == self.device
        changed = not fits or not torch.equal(known, host)
        if not fits or (changed and self.capturing):
            table = self._upload(host.clone())
        elif changed:
            table.copy_(self._pinned(host), non_blocking=True)
        if not self.capturing:
            self.batch.cache[name] = (host, table)
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
    flat: list[tuple[int, Segment]], addresses: list[list[int]], sizes: list[int], seed: int
) -> Tensor:
    rows, block = [], 0
    streams = [(xs, size) for xs, size in zip(addresses, sizes, strict=True) if xs]
    unused = [0] * (TENSOR.value - len(streams))
    signed_seed = (seed + 2**63) % 2**64 - 2**63
    for i, s in flat:
        first = _first_slot(s)
        pointers = [xs[i] + (s.offset - first) * size for xs, size in streams]
        aligned = all(p % (4 * size) == 0 for p, (_, size) in zip(pointers, streams, strict=True))
        inner = s.inner if s.rows > 1 else 2**62  # one row, wherever its first slot is
        place = [i, block, first, first + s.numel, s.base - first, inner, s.row_stride]
        rows.append([*pointers, *unused, *place, s.param_id, signed_seed, aligned])
        block += _block_count(s)
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, SEGMENT_COLUMNS.value)
