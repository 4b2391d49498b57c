"""The executable specification: every kernel in plain torch operations, on any device.

Each operation rounds once in fp32; no `lerp`, `addcmul` or `addcdiv` (torch fuses them), and
square roots are taken in float64 and rounded (torch's CPU sqrt is an ulp off on some values).
The compiled backends (`cpu`, `gpu`) take the same arguments and give the same bits.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fc_optim.kernels.batch import (
    AdamScalars,
    Batch,
    Segment,
    adam_scalars,
    is_counted,
    muon_scalars,
    sample_positions,
)

CHUNK = 1 << 18  # elements per pass: bounds the int64 temporaries to a few MB
# On a CPU torch splits longer loops between threads of which each has a floating-point mode of its
# own: what is computed stays in the caller's, which `_ieee` sets.
SERIAL_CHUNK = 1 << 14
MASK32 = 0xFFFFFFFF
SIGN = -0x80000000
INF = 0x7F800000
QUIET_NAN = 0x7FC00000
LARGEST_BF16 = 0x7F7F0000
SMALLEST_NORMAL = 2.0**-126  # fp32's, and bf16's
SMALLEST_DOUBLE = 2.0**-1022  # of the normal ones

PHILOX_M0, PHILOX_M1 = 0xD2511F53, 0xCD9E8D57  # Salmon et al. 2011, table 2
PHILOX_W0, PHILOX_W1 = 0x9E3779B9, 0xBB67AE85

Counter = tuple[Tensor, Tensor, Tensor, Tensor]


def philox4x32(counter: Counter, seed: int) -> Counter:
    """Philox4x32-10 (Salmon et al. 2011): four 32-bit words per counter, held in int64 tensors."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & MASK32, seed >> 32 & MASK32
    for _ in range(10):
        # The int64 product wraps, its 64 bits are right; the mask undoes the arithmetic shift.
        p0, p1 = c0 * PHILOX_M0, c2 * PHILOX_M1
        c0, c1, c2, c3 = (
            (p1 >> 32 & MASK32) ^ c1 ^ k0,
            p1 & MASK32,
            (p0 >> 32 & MASK32) ^ c3 ^ k1,
            p0 & MASK32,
        )
        k0, k1 = (k0 + PHILOX_W0) & MASK32, (k1 + PHILOX_W1) & MASK32
    return c0, c1, c2, c3


def random_words(
    segment: Segment, *, seed: int, t: int, stream: int = 0, device: torch.device | str = "cpu"
) -> Tensor:
    """The 16-bit random words of a segment's elements, in local order: int32 `[numel]`."""
    if segment.rows == 1 and segment.inner:  # a contiguous run: one Philox call for 8 elements
        lane = segment.base & 7
        g = torch.arange(segment.base >> 3, (segment.base + segment.inner + 7) >> 3, device=device)
        words = torch.stack(_philox_of_groups(g, segment.param_id, seed, t, stream), dim=-1)
        pair = torch.stack((words & 0xFFFF, words >> 16), dim=-1).flatten().to(torch.int32)
        return pair[lane : lane + segment.inner]
    e = flat_indices(segment, device)
    return random_words_at(e, param_id=segment.param_id, seed=seed, t=t, stream=stream)


def flat_indices(segment: Segment, device: torch.device | str = "cpu") -> Tensor:
    """Where a segment's elements are in the unsharded parameter, in local order: int64."""
    columns = torch.arange(segment.inner, device=device, dtype=torch.int64)
    rows = torch.arange(segment.rows, device=device, dtype=torch.int64) * segment.row_stride
    return (segment.base + rows[:, None] + columns).flatten()


def random_words_at(e: Tensor, *, param_id: int, seed: int, t: int, stream: int = 0) -> Tensor:
    """The 16-bit random words of the elements with flat indices `e` (int64): int32, same shape."""
    words = torch.stack(_philox_of_groups(e >> 3, param_id, seed, t, stream), dim=-1)
    lane = e & 7
    word = words.gather(-1, (lane >> 1).unsqueeze(-1)).squeeze(-1)
    return (word >> 16 * (lane & 1) & 0xFFFF).to(torch.int32)


def _philox_of_groups(g: Tensor, param_id: int, seed: int, t: int, stream: int) -> Counter:
    c0, c1 = g & MASK32, g >> 32 | stream << 28
    return philox4x32((c0, c1, torch.full_like(g, param_id), torch.full_like(g, t & MASK32)), seed)


def canonical_bits(bits: Tensor) -> Tensor:
    """fp32 patterns (int32) as a master may hold them: one NaN, finite values within bf16.

    The NaN has no sign: that of a computed one differs between processors, and on one of them
    between vector widths.
    """
    magnitude, sign = bits & 0x7FFFFFFF, bits & SIGN
    bits = torch.where((magnitude > LARGEST_BF16) & (magnitude < INF), sign | LARGEST_BF16, bits)
    return torch.where(magnitude > INF, QUIET_NAN, bits)


def nearest_bf16(x: Tensor) -> Tensor:
    """fp32 values to the nearest bf16, ties to even: a new contiguous tensor. A NaN is 0x7FC0."""
    out = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
    copy_cast_(out, x.detach())
    return out


def copy_cast_(target: Tensor, x: Tensor) -> None:
    """`target.copy_(x)` for every export, of equal shapes; to bf16 with one pattern for NaN.

    Torch's own cast makes 0xFFFF of a NaN in a vector and 0x7FC0 at a loop's end, so that what a
    value becomes depends on where its shard is cut. In place: an export has no room to spare.
    """
    target.copy_(x)
    if target.dtype == torch.bfloat16 and x.dtype == torch.float32:
        torch.nan_to_num_(target, nan=math.nan, posinf=math.inf, neginf=-math.inf)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x.to(dtype)`, by `copy_cast_` if it must be."""
    if x.dtype == torch.float32 and dtype == torch.bfloat16:
        return nearest_bf16(x)
    return x.to(dtype)


def round_bits(bits: Tensor, words: Tensor) -> Tensor:
    """Stochastic rounding of fp32 patterns: the bf16 pattern in the high half, zeros below.

    Add and truncate. On canonical patterns the addition cannot carry out of a NaN, an Inf or the
    largest finite bf16, since their low 16 bits are zero.
    """
    return (canonical_bits(bits) + words) & -0x10000


def store_shadow(container: Tensor, shadow: Tensor) -> None:
    """Write shadow bits (int32, as `round_bits` gives them) into a bf16 or fp32 container."""
    if container.dtype == torch.bfloat16:
        container.view(torch.int16).copy_(shadow >> 16)
    else:
        container.view(torch.int32).copy_(shadow)


def load_container(container: Tensor) -> Tensor:
    """A container's values as fp32 patterns (int32), canonical."""
    return canonical_bits(container.float().view(torch.int32))


def _dither_epoch(batch: Batch, i: int) -> int:
    return int(batch.epochs[i].item()) if batch.epoch is None else batch.epoch


def _chunks(batch: Batch, i: int) -> Iterator[tuple[Segment, slice]]:
    size = SERIAL_CHUNK if batch.masters[i].device.type == "cpu" else CHUNK
    for segment in batch.segments[i]:
        for part in segment.split(size):
            yield part, slice(part.offset, part.offset + part.numel)


def round_(batch: Batch) -> None:
    """containers <- stochastic rounding of masters, with the current dither epoch."""
    for i, (container, master) in enumerate(zip(batch.containers, batch.masters, strict=True)):
        t = _dither_epoch(batch, i)
        for part, at in _chunks(batch, i):
            words = random_words(part, seed=batch.seed, t=t, device=master.device)
            shadow = round_bits(master.view(-1)[at].view(torch.int32), words)
            store_shadow(container.view(-1)[at], shadow)


def canonical_(batch: Batch) -> None:
    """masters <- the same, as a master may hold them: see `canonical_bits`. Reads nothing else."""
    for i, master in enumerate(batch.masters):
        for _, at in _chunks(batch, i):
            bits = master.view(-1)[at].view(torch.int32)
            bits.copy_(canonical_bits(bits))


def flag_foreign(batch: Batch) -> Tensor:
    """int32 `[tensors]`, 1 where a sampled element of a container is not its master's shadow."""
    flags = torch.zeros(len(batch.masters), dtype=torch.int32, device=batch.masters[0].device)
    for i, (container, master) in enumerate(zip(batch.containers, batch.masters, strict=True)):
        t = _dither_epoch(batch, i)
        for s in batch.segments[i]:
            local = sample_positions(s.numel).to(master.device)
            e = s.base + local // max(s.inner, 1) * s.row_stride + local % max(s.inner, 1)
            words = random_words_at(e, param_id=s.param_id, seed=batch.seed, t=t)
            at = local + s.offset
            shadow = round_bits(master.view(-1)[at].view(torch.int32), words)
            foreign = load_container(container.view(-1)[at]) != shadow
            flags[i] |= foreign.any()
    return flags


def adopt_(batch: Batch, flags: Tensor) -> Tensor:
    """In flagged tensors, masters <- containers where a container is not its master's shadow.

    Those elements of the containers become the shadow of their new masters. Returns int64
    `[tensors]`, the number of elements adopted.
    """
    counts = torch.zeros(len(batch.masters), dtype=torch.int64, device=batch.masters[0].device)
    for i, flag in enumerate(flags.tolist()):
        if not flag:
            continue
        t, container, master = _dither_epoch(batch, i), batch.containers[i], batch.masters[i]
        for part, at in _chunks(batch, i):
            bits = master.view(-1)[at].view(torch.int32)
            words = random_words(part, seed=batch.seed, t=t, device=master.device)
            found = load_container(container.view(-1)[at])
            foreign = found != round_bits(bits, words)
            counts[i] += foreign.sum()
            bits.copy_(torch.where(foreign, found, bits))
            store_shadow(container.view(-1)[at], round_bits(bits, words))
    return counts


@contextlib.contextmanager
def _ieee() -> Iterator[None]:
    """Keep subnormals, whatever `torch.set_flush_denormal` said; and as it was, afterwards."""
    flushes = SMALLEST_DOUBLE * 0.5 == 0.0
    if flushes:
        torch.set_flush_denormal(False)
    try:
        yield
    finally:
        if flushes:
            torch.set_flush_denormal(True)


@_ieee()
def adam_(batch: Batch) -> None:
    """One step of Adam or AdamW, and its shadow. Source: `torch.optim.adam._single_tensor_adam`.

    Reads grads; writes epochs, steps, moments, masters and containers. A non-zero `found_inf`
    leaves all of them alone.
    """
    if _skipped(batch):
        return
    for i in range(len(batch.masters)):
        scalars = adam_scalars(batch.hypers[i], int(batch.steps[i].item()) + 1, _scale(batch))
        batch.steps[i] += 1
        batch.epochs[i] += 1
        t = _dither_epoch(batch, i)
        for part, at in _chunks(batch, i):
            with _counting(batch, i, part):
                _adam_chunk(batch, i, at, scalars)
                _finish(batch, i, part, at, t)


@_ieee()
def muon_momentum_(batch: Batch) -> None:
    """Momentum, Nesterov, and the cast to Newton-Schulz's input. Source: `torch.optim.Muon`.

    Reads grads; writes momentum_buffers (a plain average, never normalised) and updates (bf16,
    rounded to nearest). A non-zero `found_inf` leaves both alone.
    """
    if _skipped(batch):
        return
    for i, grad in enumerate(batch.grads):
        scalars = muon_scalars(batch.muon_hypers[i], _scale(batch))
        for _, at in _chunks(batch, i):
            buffer = batch.momentum_buffers[i].view(-1)[at]
            g = grad.view(-1)[at].float() * _fp32(scalars.grad_factor, buffer)
            buffer.copy_(
                (g if scalars.from_grad else buffer) + (g - buffer) * _fp32(scalars.lerp, g)
            )
            blended = (buffer - g) * _fp32(scalars.blend, buffer)
            update = (buffer if scalars.from_buffer else g) + blended
            batch.updates[i].view(-1)[at] = nearest_bf16(update)
            _canonical_nan_(buffer)


@_ieee()
def muon_update_(batch: Batch) -> None:
    """Weight decay, the orthogonalised update, and the shadow. Source: `torch.optim.Muon`.

    Reads updates; writes epochs, masters and containers. A non-zero `found_inf` leaves all alone.
    """
    if _skipped(batch):
        return
    for i, master in enumerate(batch.masters):
        scalars = muon_scalars(batch.muon_hypers[i])
        batch.epochs[i] += 1
        t = _dither_epoch(batch, i)
        for part, at in _chunks(batch, i):
            w, update = master.view(-1)[at], batch.updates[i].view(-1)[at].float()
            with _counting(batch, i, part):
                w.mul_(_fp32(scalars.decay, w)).add_(update * _fp32(scalars.neg_lr, w))
                _finish(batch, i, part, at, t)


def _finish(batch: Batch, i: int, part: Segment, at: slice, t: int) -> None:
    """Make a piece of a master canonical, and write its shadow."""
    bits = batch.masters[i].view(-1)[at].view(torch.int32)
    bits.copy_(canonical_bits(bits))
    words = random_words(part, seed=batch.seed, t=t, device=bits.device)
    store_shadow(batch.containers[i].view(-1)[at], round_bits(bits, words))


def _canonical_nan_(*tensors: Tensor) -> None:
    for x in tensors:
        bits = x.view(torch.int32)
        bits.masked_fill_(bits & 0x7FFFFFFF > INF, QUIET_NAN)


def _skipped(batch: Batch) -> bool:
    return batch.found_inf is not None and batch.found_inf.item() != 0


def _scale(batch: Batch) -> float:
    return 1.0 if batch.grad_scale is None else batch.grad_scale.item()


def _fp32(x: float, like: Tensor) -> Tensor:
    """A 0-d fp32 tensor, on the device: torch would divide by a host scalar by its reciprocal."""
    return torch.tensor(x, dtype=torch.float64, device=like.device).to(torch.float32)


def _adam_chunk(batch: Batch, i: int, at: slice, scalars: AdamScalars) -> None:
    w, m, v = (x[i].view(-1)[at] for x in (batch.masters, batch.exp_avgs, batch.exp_avg_sqs))
    g = batch.grads[i].view(-1)[at].float() * _fp32(scalars.grad_factor, w)
    l2 = _fp32(scalars.l2, w)
    if l2 != 0:
        g = g + w * l2
    w.mul_(_fp32(scalars.decay, w))
    m.copy_((g if scalars.from_grad else m) + (g - m) * _fp32(scalars.lerp, w))
    v.copy_(v * _fp32(scalars.beta2, w) + g * _fp32(scalars.one_minus_beta2, w) * g)
    second = v
    if batch.max_exp_avg_sqs:
        second = batch.max_exp_avg_sqs[i].view(-1)[at]
        # Not `maximum`: whether that gives 0 or -0 of the two differs between vector widths.
        second.copy_(torch.where((v > second) | v.isnan(), v, second))
    root = second.double().sqrt().to(torch.float32)
    denominator = root / _fp32(scalars.bias_correction2_sqrt, w) + _fp32(scalars.eps, w)
    w.add_(m * _fp32(scalars.neg_step_size, w) / denominator)
    _canonical_nan_(m, v, second)


# ---- Counting


@contextlib.contextmanager
def _counting(batch: Batch, i: int, part: Segment) -> Iterator[None]:
    """Add to `batch.counts` what the code inside does to a piece of tensor `i`."""
    if batch.counts is None:
        yield
        return
    rows = [(k, s) for k, tensor in enumerate(batch.segments) for s in tensor]
    row = next(
        r
        for r, (k, s) in enumerate(rows)
        if k == i and s.offset <= part.offset < s.offset + s.numel
    )
    before = counted_values(batch, i, part)
    yield
    batch.counts[row] += count_changes(before, counted_values(batch, i, part))


def counted_values(batch: Batch, i: int, part: Segment) -> tuple[Tensor, Tensor]:
    """Copies of masters and containers (fp32 patterns, int32) where a piece is counted."""
    at = slice(part.offset, part.offset + part.numel)
    master, container = batch.masters[i].view(-1)[at], batch.containers[i].view(-1)[at]
    if batch.count_all:
        return master.clone().view(torch.int32), container.float().view(torch.int32).clone()
    hit = is_counted(flat_indices(part, master.device))
    return master[hit].view(torch.int32), container[hit].float().view(torch.int32)


def count_changes(old: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor]) -> Tensor:
    """What happened between two `counted_values`: int64 `[len(COUNTS)]`, see `batch.COUNTS`.

    |M - M_old| < ulp(M_old) / 2 is exact in fp32: near the threshold the difference is, and both
    sides are scaled by 256, so that a subnormal half ulp is never rounded.
    """
    (before, old_words), (after, words) = old, new
    scale = (before & INF).view(torch.float32).clamp(min=SMALLEST_NORMAL)
    moved = (after.view(torch.float32) - before.view(torch.float32)).abs() * 256
    magnitude = after & 0x7FFFFFFF
    found = (words != old_words, moved < scale, magnitude == LARGEST_BF16, magnitude >= INF)
    return torch.stack([x.sum() for x in found])


def sample(
    tensors: Sequence[Tensor], positions: Sequence[Tensor], cache: dict[object, object]
) -> Tensor:
    """The values of contiguous tensors of one dtype (bf16, fp32) at flat positions: fp32, 1-D.

    All in a row; the caller owns the result. `positions` are int64 on the host, and the same ones
    whenever the same `cache` is given.
    """
    return torch.cat(
        [t.view(-1)[p.to(t.device)].float() for t, p in zip(tensors, positions, strict=True)]
    )
