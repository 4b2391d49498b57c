"""The Triton kernels, each with the name of the function of `gpu` that launches it.

They find their tensors through tables in device memory, and every number that changes between
steps is in device memory too: nothing recompiles, and a captured graph replays. A variant
serves the segments of one KIND (see `gpu_tables`).
"""

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from fc_optim.kernels import batch as batch_module
from fc_optim.kernels.gpu_ops import (
    PREPARE_BLOCK,
    SAMPLE_MIX,
    as_float,
    begin,
    block_bounds,
    canonical,
    canonical_nan,
    count,
    dither_epoch,
    draw,
    draw_at,
    find_block,
    flat_index,
    load,
    narrow,
    nearest,
    pointer,
    power,
    put,
    scalar,
    shadow_of,
    store,
    widen,
)
from fc_optim.kernels.gpu_tables import (
    BETA1,
    BETA2,
    BIAS_CORRECTION2_SQRT,
    BLEND,
    BLOCK,
    CONTAINER,
    DECAY,
    DECOUPLED,
    END,
    EPOCH,
    EPS,
    EPSILON,
    EXP_AVG,
    EXP_AVG_SQ,
    FIRST,
    FROM_BUFFER,
    FROM_GRAD_COLUMN,
    GRAD,
    GRAD_FACTOR,
    L2,
    LERP,
    LR,
    LR_RATIO,
    MASTER,
    MAX_EXP_AVG_SQ,
    MAXIMIZE,
    MOMENTUM,
    MOMENTUM_BUFFER,
    NEG_LR,
    NEG_STEP_SIZE,
    NESTEROV,
    ONE_MINUS_SECOND,
    SCALAR_COLUMNS,
    SCATTERED,
    SECOND,
    SEGMENT_COLUMNS,
    SKIP,
    TENSOR,
    UPDATE,
    WEIGHT_DECAY,
)

SCAN = tl.constexpr(256)  # segments whose flags an adoption program reads at a time

SAMPLES, WHOLE = tl.constexpr(batch_module.SAMPLES), tl.constexpr(batch_module.WHOLE)
COUNTS = tl.constexpr(len(batch_module.COUNTS))


SEEDS = ["seed_low", "seed_high"]  # specialised on them, each seed would compile anew


@triton.jit
def canonical_kernel(segments, blocks):
    row, start = find_block(segments, blocks)
    bounds = block_bounds(row, start)
    lane = tl.arange(0, BLOCK)
    old = load(row, MASTER, tl.int32, start, bounds)
    new = canonical(old)
    changed = (new != old) & (lane >= bounds[0]) & (lane < bounds[1])
    tl.store(pointer(row, MASTER, tl.int32) + start + lane, new, mask=changed)


@triton.jit(do_not_specialize=SEEDS)
def round_kernel(
    segments, blocks, tensors, epoch, seed_low, seed_high, C: tl.constexpr, KIND: tl.constexpr
):
    row, start = find_block(segments, blocks)
    bounds = block_bounds(row, start)
    bits = canonical(load(row, MASTER, tl.int32, start, bounds))
    t = dither_epoch(tensors, epoch, tl.load(row + TENSOR))
    words = draw(row, start, (seed_low, seed_high), t, KIND)
    store(row, CONTAINER, C, start, bounds, narrow(shadow_of(bits, words), C))


@triton.jit(do_not_specialize=SEEDS)
def flag_kernel(segments, tensors, epoch, flags, seed_low, seed_high, C: tl.constexpr):
    """One program per segment: `batch.sample_positions` and the comparison."""
    row = segments + tl.program_id(0).to(tl.int64) * SEGMENT_COLUMNS
    first = tl.load(row + FIRST)
    numel = tl.load(row + END) - first
    count = tl.where(numel <= WHOLE, numel, SAMPLES).to(tl.int64)
    i = tl.load(row + TENSOR)
    t = dither_epoch(tensors, epoch, i)
    j = tl.zeros((), tl.int64)
    while j < count:
        k = j + tl.arange(0, SAMPLES)
        mask = k < count
        low, high = k * numel // count, (k + 1) * numel // count
        mixed = ((k * SAMPLE_MIX) >> 20) & ((1 << 44) - 1)
        slot = first + low + mixed % tl.where(mask, high - low, 1)
        words = draw_at(flat_index(row, slot), row, (seed_low, seed_high), t)
        bits = canonical(tl.load(pointer(row, MASTER, tl.int32) + slot, mask=mask, other=0))
        found = tl.load(pointer(row, CONTAINER, C) + slot, mask=mask, other=0)
        foreign = mask & (canonical(widen(found, C)) != shadow_of(bits, words))
        if tl.max(foreign.to(tl.int32), axis=0) != 0:
            tl.store(flags + i, 1)
        j += SAMPLES


@triton.jit(do_not_specialize=["count", "flags", *SEEDS])
def adopt_kernel(
    segments, count, tensors, epoch, flags, counts, seed_low, seed_high, C: tl.constexpr
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
                    _adopt_segment(row, tensors, epoch, counts, (seed_low, seed_high), C)
                j += 1


@triton.jit
def _adopt_segment(row, tensors, epoch, counts, seed, C: tl.constexpr):
    i = tl.load(row + TENSOR)
    t = dither_epoch(tensors, epoch, i)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    while start < tl.load(row + END):
        bounds = block_bounds(row, start)
        bits = load(row, MASTER, tl.int32, start, bounds)
        found = canonical(widen(load(row, CONTAINER, C, start, bounds), C))
        words = draw(row, start, seed, t, SCATTERED)  # right for all kinds
        foreign = found != shadow_of(canonical(bits), words)
        foreign &= (tl.arange(0, BLOCK) >= bounds[0]) & (tl.arange(0, BLOCK) < bounds[1])
        bits = tl.where(foreign, found, bits)
        store(row, MASTER, tl.int32, start, bounds, bits)
        store(row, CONTAINER, C, start, bounds, narrow(shadow_of(canonical(bits), words), C))
        tl.atomic_add(counts + i, tl.sum(foreign.to(tl.int32), axis=0).to(tl.int64))
        start += tl.num_programs(0) * BLOCK


@triton.jit(do_not_specialize=["count"])
def prepare_adam_kernel(tensors, epoch, hypers, scalars, count):
    """Adam's prologue: `batch.adam_scalars` in float64."""
    h, out, live, n, grad_scale = begin(tensors, epoch, hypers, scalars, count, True)
    lr, beta1, beta2 = tl.load(h + LR), tl.load(h + BETA1), tl.load(h + BETA2)
    weight_decay, decoupled = tl.load(h + WEIGHT_DECAY), tl.load(h + DECOUPLED) != 0
    one = tl.full((PREPARE_BLOCK,), 1.0, tl.float64)
    weight = 1.0 - beta1
    from_grad = weight >= 0.5
    tl.store(out + FROM_GRAD_COLUMN, from_grad.to(tl.int32), live)
    put(out + GRAD_FACTOR, tl.where(tl.load(h + MAXIMIZE) != 0, -one, one) / grad_scale, live)
    put(out + DECAY, tl.where(decoupled, 1.0 - lr * weight_decay, one), live)
    put(out + L2, tl.where(decoupled, 0.0, weight_decay), live)
    put(out + LERP, tl.where(from_grad, weight - 1.0, weight), live)
    put(out + SECOND, beta2, live)
    put(out + ONE_MINUS_SECOND, 1.0 - beta2, live)
    # Times -1: the minus sign of triton 3.6 is 0 - x, which is not -0 where x is 0.
    put(out + NEG_STEP_SIZE, lr * -1.0 / (1.0 - power(beta1, n)), live)
    put(out + BIAS_CORRECTION2_SQRT, tl.sqrt(1.0 - power(beta2, n)), live)
    put(out + EPSILON, tl.load(h + EPS), live)


@triton.jit(do_not_specialize=["count"])
def prepare_muon_kernel(tensors, epoch, hypers, scalars, count, ADVANCE: tl.constexpr):
    """The prologue of both of Muon's kernels: `batch.muon_scalars` in float64."""
    h, out, live, _, grad_scale = begin(tensors, epoch, hypers, scalars, count, ADVANCE)
    lr, momentum = tl.load(h + LR), tl.load(h + MOMENTUM)
    nesterov = tl.load(h + NESTEROV) != 0
    one = tl.full((PREPARE_BLOCK,), 1.0, tl.float64)
    weight = 1.0 - momentum
    from_grad, from_buffer = weight >= 0.5, (momentum >= 0.5) | ~nesterov
    blend = tl.where(from_buffer, momentum - 1.0, momentum)
    tl.store(out + FROM_GRAD_COLUMN, from_grad.to(tl.int32), live)
    tl.store(out + FROM_BUFFER, from_buffer.to(tl.int32), live)
    put(out + GRAD_FACTOR, one / grad_scale, live)
    put(out + LERP, tl.where(from_grad, weight - 1.0, weight), live)
    put(out + BLEND, tl.where(nesterov, blend, 0.0), live)
    put(out + DECAY, 1.0 - lr * tl.load(h + WEIGHT_DECAY), live)
    put(out + NEG_LR, lr * -1.0 * tl.load(h + LR_RATIO), live)


@triton.jit
def _finish(
    row, start, bounds, w, seed, t, counts, blocks,
    C: tl.constexpr, KIND: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Store new masters, made canonical, and their shadow; first compare them with the old."""
    bits = canonical(w.to(tl.int32, bitcast=True))
    shadow = shadow_of(bits, draw(row, start, seed, t, KIND))
    if COUNT is not None:
        at = counts + tl.load(blocks + tl.program_id(0)).to(tl.int64) * COUNTS
        count(row, start, bounds, bits, shadow, at, C, KIND, COUNT)
    store(row, CONTAINER, C, start, bounds, narrow(shadow, C))
    store(row, MASTER, tl.int32, start, bounds, bits)


@triton.jit(do_not_specialize=SEEDS)
def adam_kernel(
    segments, blocks, scalars, counts, seed_low, seed_high, C: tl.constexpr, G: tl.constexpr,
    AMSGRAD: tl.constexpr, HAS_L2: tl.constexpr, FROM_GRAD: tl.constexpr, KIND: tl.constexpr,
    COUNT: tl.constexpr,
):  # fmt: skip
    row, start = find_block(segments, blocks)
    s = scalars + tl.load(row + TENSOR) * SCALAR_COLUMNS
    bounds = block_bounds(row, start)
    g = load(row, GRAD, G, start, bounds)
    w = load(row, MASTER, tl.float32, start, bounds)
    m = load(row, EXP_AVG, tl.float32, start, bounds)
    v = load(row, EXP_AVG_SQ, tl.float32, start, bounds)
    if AMSGRAD:
        second = load(row, MAX_EXP_AVG_SQ, tl.float32, start, bounds)
    if tl.load(s + SKIP) != 0:  # not before the loads: few steps are skipped
        return

    g = as_float(widen(g, G)) * scalar(s, GRAD_FACTOR)
    if HAS_L2:
        l2 = scalar(s, L2)
        g = tl.where(l2 != 0, g + w * l2, g)
    w = w * scalar(s, DECAY)
    moved = (g - m) * scalar(s, LERP)
    if FROM_GRAD:
        m = tl.where(tl.load(s + FROM_GRAD_COLUMN) != 0, g, m)
    m += moved
    v = v * scalar(s, SECOND) + g * scalar(s, ONE_MINUS_SECOND) * g
    if AMSGRAD:
        second = tl.where((v > second) | (v != v), v, second)  # settles NaN, and 0 against -0
    else:
        second = v
    root = tl.div_rn(tl.sqrt_rn(second), scalar(s, BIAS_CORRECTION2_SQRT))
    w += tl.div_rn(m * scalar(s, NEG_STEP_SIZE), root + scalar(s, EPSILON))
    if COUNT is not None:  # registers to count with
        _store_moments(row, start, bounds, m, v, second, AMSGRAD)
    seed, t = (seed_low, seed_high), tl.load(s + EPOCH)
    _finish(row, start, bounds, w, seed, t, counts, blocks, C, KIND, COUNT)
    if COUNT is None:
        _store_moments(row, start, bounds, m, v, second, AMSGRAD)


@triton.jit
def _store_moments(row, start, bounds, m, v, second, AMSGRAD: tl.constexpr):
    store(row, EXP_AVG, tl.int32, start, bounds, canonical_nan(m))
    store(row, EXP_AVG_SQ, tl.int32, start, bounds, canonical_nan(v))
    if AMSGRAD:
        store(row, MAX_EXP_AVG_SQ, tl.int32, start, bounds, canonical_nan(second))


@triton.jit
def muon_momentum_kernel(segments, blocks, scalars, G: tl.constexpr):
    row, start = find_block(segments, blocks)
    s = scalars + tl.load(row + TENSOR) * SCALAR_COLUMNS
    bounds = block_bounds(row, start)
    g = load(row, GRAD, G, start, bounds)
    buffer = load(row, MOMENTUM_BUFFER, tl.float32, start, bounds)
    if tl.load(s + SKIP) != 0:
        return

    g = as_float(widen(g, G)) * scalar(s, GRAD_FACTOR)
    buffer = tl.where(tl.load(s + FROM_GRAD_COLUMN) != 0, g, buffer) + (g - buffer) * scalar(
        s, LERP
    )
    blended = (buffer - g) * scalar(s, BLEND)
    update = tl.where(tl.load(s + FROM_BUFFER) != 0, buffer, g) + blended
    store(row, MOMENTUM_BUFFER, tl.int32, start, bounds, canonical_nan(buffer))
    store(row, UPDATE, tl.int16, start, bounds, narrow(nearest(update), tl.int16))


@triton.jit(do_not_specialize=SEEDS)
def muon_update_kernel(
    segments, blocks, scalars, counts, seed_low, seed_high,
    C: tl.constexpr, KIND: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    row, start = find_block(segments, blocks)
    s = scalars + tl.load(row + TENSOR) * SCALAR_COLUMNS
    bounds = block_bounds(row, start)
    w = load(row, MASTER, tl.float32, start, bounds)
    update = load(row, UPDATE, tl.int16, start, bounds)
    if tl.load(s + SKIP) != 0:
        return

    w = w * scalar(s, DECAY) + as_float(widen(update, tl.int16)) * scalar(s, NEG_LR)
    seed, t = (seed_low, seed_high), tl.load(s + EPOCH)
    _finish(row, start, bounds, w, seed, t, counts, blocks, C, KIND, COUNT)


@triton.jit(do_not_specialize=["size"])
def sample_kernel(addresses, out, size, C: tl.constexpr):
    i = tl.program_id(0) * SCAN + tl.arange(0, SCAN)
    live = i < size
    address = tl.load(addresses + i, live, other=0)
    x = tl.load(address.to(tl.pointer_type(C)), live, other=0)
    tl.store(out + i, widen(x, C), live)
