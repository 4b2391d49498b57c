"""What the Triton kernels have in common: how they reach a block, its random words and its shadow.

Streams are read and written as integers of their width where a bit pattern matters: triton's
interpreter converts between bf16 and fp32 wrongly, and integers leave no choice to any compiler.
"""

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from fc_optim.kernels import batch, reference
from fc_optim.kernels.gpu_tables import (
    ALIGNED,
    BASE,
    BLOCK,
    CONTAINER,
    END,
    EPOCH,
    FIRST,
    FIRST_BLOCK,
    FOUND_INF,
    GRAD_SCALE,
    GROUPS,
    HYPER,
    HYPER_COLUMNS,
    INNER,
    MASTER,
    PARAM_ID,
    ROW_STRIDE,
    RUN,
    SCALAR_COLUMNS,
    SCATTERED,
    SEGMENT_COLUMNS,
    SKIP,
    STEP,
    TAKEN,
    TENSOR_COLUMNS,
    WARPS,
)

PREPARE_BLOCK = tl.constexpr(128)  # tensors per program of a prologue
LARGEST_BF16 = tl.constexpr(reference.LARGEST_BF16)
INF = tl.constexpr(reference.INF)
QUIET_NAN = tl.constexpr(reference.QUIET_NAN)
SMALLEST_NORMAL = tl.constexpr(reference.SMALLEST_NORMAL)
PHILOX_M0, PHILOX_M1 = tl.constexpr(reference.PHILOX_M0), tl.constexpr(reference.PHILOX_M1)
PHILOX_W0, PHILOX_W1 = tl.constexpr(reference.PHILOX_W0), tl.constexpr(reference.PHILOX_W1)
SAMPLE_MIX = tl.constexpr(batch.SAMPLE_MIX - 2**64)
CHUNK_BITS, STRATUM_BITS = tl.constexpr(batch.CHUNK_BITS), tl.constexpr(batch.STRATUM_BITS)
assert BLOCK.value == 1 << batch.CHUNK_BITS  # so that most programs count all of a block or nothing


@triton.jit
def pointer(row, column: tl.constexpr, dtype: tl.constexpr):
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
def find_block(segments, blocks):
    """The segment row of this program, and its first slot."""
    pid = tl.program_id(0)
    row = segments + tl.load(blocks + pid).to(tl.int64) * SEGMENT_COLUMNS
    return row, (pid - tl.load(row + FIRST_BLOCK)) * BLOCK


@triton.jit
def block_bounds(row, start):
    """Of the block at slot `start`: its first and end lane, and whether `_aligned` serves it."""
    first = tl.maximum(tl.load(row + FIRST) - start, 0).to(tl.int32)
    end = tl.minimum(tl.load(row + END) - start, BLOCK).to(tl.int32)
    return first, end, (first == 0) & (end == BLOCK) & (tl.load(row + ALIGNED) != 0)


@triton.jit
def load(row, column: tl.constexpr, dtype: tl.constexpr, start, bounds):
    first, end, whole = bounds
    lane = tl.arange(0, BLOCK)
    if whole:
        x = tl.load(_aligned(row, column, dtype) + start + lane)
    else:
        mask = (lane >= first) & (lane < end)
        x = tl.load(pointer(row, column, dtype) + start + lane, mask=mask, other=0)
    return x


@triton.jit
def store(row, column: tl.constexpr, dtype: tl.constexpr, start, bounds, x):
    first, end, whole = bounds
    lane = tl.arange(0, BLOCK)
    if whole:
        tl.store(_aligned(row, column, dtype) + start + lane, x)
    else:
        # The mask of `load` in other words: LLVM would keep that, in predicates that others lack.
        mask = (lane - first).to(tl.uint32) < (end - first).to(tl.uint32)
        tl.store(pointer(row, column, dtype) + start + lane, x, mask=mask)


@triton.jit
def flat_index(row, slot):
    """The flat index of a slot in the unsharded parameter."""
    inner = tl.load(row + INNER)
    return tl.load(row + BASE) + slot // inner * tl.load(row + ROW_STRIDE) + slot % inner


@triton.jit
def _product(x, m: tl.constexpr):
    """The halves of a 32 x 32 -> 64 bit product: one instruction, where high and low are two."""
    p = x.to(tl.uint64) * m
    return (p >> 32).to(tl.uint32), p.to(tl.uint32)


@triton.jit
def _philox(row, seed, g, t):
    """The four words (uint32) of groups `g` of 8 elements, at dither epoch `t`."""
    c0, c1 = g.to(tl.uint32), (g >> 32).to(tl.uint32)
    c2, c3 = tl.load(row + PARAM_ID).to(tl.uint32), t.to(tl.uint32)
    k0, k1 = seed[0].to(tl.uint32), seed[1].to(tl.uint32)
    for _ in tl.static_range(10):
        high0, low0 = _product(c0, PHILOX_M0)
        high1, low1 = _product(c2, PHILOX_M1)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 = tl.add(k0, PHILOX_W0, sanitize_overflow=False)
        k1 = tl.add(k1, PHILOX_W1, sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def draw_at(e, row, seed, t):
    """The 16-bit random words (int32) of the elements with flat indices `e`: a Philox call each."""
    c0, c1, c2, c3 = _philox(row, seed, e >> 3, t)
    low, high = tl.where((e & 2) != 0, c1, c0), tl.where((e & 2) != 0, c3, c2)
    word = tl.where((e & 4) != 0, high, low)
    return (tl.where((e & 1) != 0, word >> 16, word) & 0xFFFF).to(tl.int32)


@triton.jit
def draw(row, start, seed, t, KIND: tl.constexpr):
    """The 16-bit random words (int32) of a block of a segment of this kind."""
    if KIND == SCATTERED:
        return draw_at(flat_index(row, start + tl.arange(0, BLOCK)), row, seed, t)
    else:
        # A thread draws one group of 8, but holds 4 neighbours of each half of the block, so that
        # a warp's accesses are contiguous. Groups are numbered so that a warp draws for itself.
        warp = tl.arange(0, WARPS)[:, None, None] * 16
        half = tl.arange(0, 2)[None, :, None] * (BLOCK // 16)
        g = (start >> 3) + (warp + half + tl.arange(0, 16)[None, None, :])
        if KIND == GROUPS:
            width = tl.load(row + INNER) >> 3
            r = (g.to(tl.int32) // width.to(tl.int32)).to(tl.int64)
            g += r * ((tl.load(row + ROW_STRIDE) >> 3) - width)
        g += tl.load(row + BASE) >> 3
        c0, c1, c2, c3 = _philox(row, seed, g, t)
        words = tl.join(tl.join(c0, c2), tl.join(c1, c3))
        lanes = tl.join(words & 0xFFFF, words >> 16)  # [warp, half, group, 2, 2, 2]
        return tl.reshape(tl.permute(lanes, (1, 0, 2, 3, 4, 5)), (BLOCK,)).to(tl.int32)


@triton.jit
def canonical(bits):
    """`reference.canonical_bits`."""
    magnitude = bits & 0x7FFFFFFF
    clamped = (bits & -0x80000000) | tl.minimum(magnitude, LARGEST_BF16)
    return tl.where(magnitude < INF, clamped, tl.where(magnitude == INF, bits, QUIET_NAN))


@triton.jit
def canonical_nan(x):
    """The patterns (int32) of fp32 numbers, with the one NaN that has no sign."""
    return tl.where(x != x, QUIET_NAN, x.to(tl.int32, bitcast=True))


@triton.jit
def shadow_of(bits, words):
    """`reference.round_bits` of canonical patterns."""
    return (bits + words) & -0x10000


@triton.jit
def widen(x, dtype: tl.constexpr):
    """bf16 or fp32 patterns, by their width, as fp32 patterns (int32)."""
    return x.to(tl.int32) << 16 if dtype == tl.int16 else x


@triton.jit
def narrow(shadow, dtype: tl.constexpr):
    """The opposite; for bf16 the low half of a pattern is dropped."""
    return (shadow >> 16).to(tl.int16) if dtype == tl.int16 else shadow


@triton.jit
def as_float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def nearest(x):
    """fp32 patterns (int32) whose high half is the bf16 nearest to `x`, ties to even."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)  # carries into Inf, as it should; and out of NaN
    return tl.where(x != x, QUIET_NAN, rounded)


@triton.jit
def dither_epoch(tensors, epoch, i):
    """The dither epoch of tensor `i`: the batch's own, or (when that is -1) the steps it took."""
    t = tl.load(epoch)
    if t < 0:
        t = tl.load(pointer(tensors + i * TENSOR_COLUMNS, TAKEN, tl.int64))
    return t.to(tl.int32)


@triton.jit
def _optional(at, live, default: tl.constexpr):
    """The fp32 number behind a pointer in the tensor table, or the default of a null pointer."""
    address = tl.load(at, live, other=0)
    return tl.load(address.to(tl.pointer_type(tl.float32)), address != 0, other=default)


@triton.jit
def power(x, n):
    """`batch.power`, until all exponents of the program are used up."""
    result = tl.full((PREPARE_BLOCK,), 1.0, tl.float64)
    while tl.max(n, axis=0) > 0:
        result = tl.where((n & 1) != 0, result * x, result)
        x *= x
        n >>= 1
    return result


@triton.jit
def put(at, x, live):
    """Store what `scalar` is to read: the one rounding of a number in float64."""
    tl.store(at, x.to(tl.float32).to(tl.int32, bitcast=True), live)


@triton.jit
def begin(tensors, epoch, hypers, scalars, count, ADVANCE: tl.constexpr):
    """What the prologues share: counting unless `found_inf` (where ADVANCE), `t`, grad_scale.

    Returns, for a block of tensors, their rows of `hypers` and of `scalars`, which of them exist,
    their step counts (Adam's) and grad_scales.
    """
    i = tl.program_id(0) * PREPARE_BLOCK + tl.arange(0, PREPARE_BLOCK)
    live = i < count
    row = tensors + i * TENSOR_COLUMNS
    skip = _optional(row + FOUND_INF, live, 0.0) != 0
    step_at = tl.load(row + STEP, live, other=0)
    has_step = step_at != 0
    step_at = step_at.to(tl.pointer_type(tl.float32))
    step = tl.load(step_at, has_step, other=0.0)
    taken_at = tl.load(row + TAKEN, live, other=0)
    has_taken = taken_at != 0
    taken_at = taken_at.to(tl.pointer_type(tl.int64))
    taken = tl.load(taken_at, has_taken, other=0)
    if ADVANCE:
        step, taken = step + 1.0, taken + 1
        tl.store(step_at, step, has_step & ~skip)
        tl.store(taken_at, taken, has_taken & ~skip)
    n = tl.where(has_step, step, 0.0).to(tl.int64)
    t = tl.load(epoch)
    out = scalars + i * SCALAR_COLUMNS
    tl.store(out + SKIP, skip.to(tl.int32), live)
    tl.store(out + EPOCH, tl.where(t < 0, taken, t).to(tl.int32), live)
    h = hypers + tl.load(row + HYPER, live, other=0) * HYPER_COLUMNS
    return h, out, live, n, _optional(row + GRAD_SCALE, live, 1.0).to(tl.float64)


@triton.jit
def scalar(row, column: tl.constexpr):
    """An fp32 number that a prologue computed."""
    return as_float(tl.load(row + column))


@triton.jit
def _is_counted(e):
    """`batch.is_counted`."""
    chunk = e >> CHUNK_BITS
    taken = (((chunk >> STRATUM_BITS) * SAMPLE_MIX) >> (64 - STRATUM_BITS)) & 15
    return (chunk & 15) == taken


@triton.jit
def count(
    row, start, bounds, bits, shadow, at,
    C: tl.constexpr, KIND: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Add to `at` what a step does to a block: `reference.count_changes`, before the stores.

    The old masters are read again: in 15 of 16 blocks nothing need keep them. No store can come
    before these loads, for the sums wait for all threads.
    """
    lane = tl.arange(0, BLOCK)
    live = (lane >= bounds[0]) & (lane < bounds[1])
    some = True
    if COUNT == "sampled":
        if KIND == RUN:  # a block lies in two chunks, or in one
            e = tl.load(row + BASE) + start
            border = BLOCK - (e & (BLOCK - 1)).to(tl.int32)
            one, two = _is_counted(e), _is_counted(e + (BLOCK - 1))
            live &= ((lane < border) & one) | ((lane >= border) & two)
            some = one | two
        else:
            live &= _is_counted(flat_index(row, start + lane))
            some = tl.max(live.to(tl.int32), axis=0) != 0
    if some:
        before = load(row, MASTER, tl.int32, start, bounds)
        words = widen(load(row, CONTAINER, C, start, bounds), C)
        scale = tl.maximum(as_float(before & INF), SMALLEST_NORMAL)
        moved = tl.abs(as_float(bits) - as_float(before)) * 256.0
        magnitude = bits & 0x7FFFFFFF
        changed, dead = live & (words != shadow), live & (moved < scale)
        clamped, nonfinite = live & (magnitude == LARGEST_BF16), live & (magnitude >= INF)
        usual = tl.sum(changed.to(tl.int32) | (dead.to(tl.int32) << 16), axis=0)
        special = tl.sum(clamped.to(tl.int32) | (nonfinite.to(tl.int32) << 16), axis=0)
        if usual != 0:
            tl.atomic_add(at, (usual & 0xFFFF).to(tl.int64), sem="relaxed")
            tl.atomic_add(at + 1, (usual >> 16).to(tl.int64), sem="relaxed")
        if special != 0:
            tl.atomic_add(at + 2, (special & 0xFFFF).to(tl.int64), sem="relaxed")
            tl.atomic_add(at + 3, (special >> 16).to(tl.int64), sem="relaxed")
