"""The CPU backend: `reference`'s kernels in numba, on a pool of threads, with the same bits.

Each tensor's segments are cut into blocks, which threads claim from one counter, so an uneven
model or a core that is busy elsewhere costs little. Within a block, separate loops pass over one
tile after another: a tile stays in the first-level cache between them, and the loops that read
memory and the loop that only computes (Philox) alternate often enough to overlap.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import fields
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.extending import intrinsic
from torch import Tensor

from fc_optim.kernels.batch import SAMPLES, AdamScalars, Batch, adam_scalars, sample_positions
from fc_optim.kernels.reference import adopt_

__all__ = ["adam_", "adopt_", "flag_foreign", "round_"]

BLOCK = 1 << 14  # elements a thread claims at a time: about 15 microseconds of work
TILE = 512  # elements: 8 KiB of four fp32 arrays, a quarter of a first-level cache
SERIAL = 1 << 20  # elements: below, waking a thread costs about what it saves

# Columns of the segment table. Addresses are those of the segment's first element.
CONTAINER, MASTER, GRAD, EXP_AVG, EXP_AVG_SQ, MAX_EXP_AVG_SQ, NUMEL, INNER = range(8)
ROW_STRIDE, BASE, PARAM_ID, TENSOR, OFFSET, T, SCALARS, COLUMNS = range(8, 16)

U16, U32 = np.uint64(16), np.uint64(32)
MASK32, HIGH16 = np.uint64(0xFFFFFFFF), np.uint32(0xFFFF0000)
SIGN, MAGNITUDE = np.uint32(0x80000000), np.uint32(0x7FFFFFFF)
INF, QUIET_NAN, LARGEST_BF16 = np.uint32(0x7F800000), np.uint32(0x7FC00000), np.uint32(0x7F7F0000)
LARGEST = LARGEST_BF16.view(np.float32)
PHILOX_M0, PHILOX_M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
PHILOX_W0, PHILOX_W1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)

_jit = njit(cache=True, nogil=True, error_model="numpy", fastmath=False, boundscheck=False)


# ---- Memory by address

STREAMS = ("container", "master", "grad", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "words")


def _stream(name: str, dtype: Any) -> tuple[Any, Any]:
    """`load(address, i)` and `store(address, i, value)` in one of the arrays of a launch.

    Streams never overlap. LLVM is told so (docs: "noalias and alias.scope metadata"): it would
    else check at run time before each loop, and not vectorise a loop over five arrays at all.
    """

    def access(context: Any, builder: Any, address: Any, i: Any, value: Any = None) -> Any:
        pointer = builder.inttoptr(address, context.get_value_type(dtype).as_pointer())
        pointer = builder.gep(pointer, [i], inbounds=True)
        made = builder.load(pointer) if value is None else builder.store(value, pointer)
        made.align = dtype.bitwidth // 8
        add, string = builder.module.add_metadata, ir.MetaDataString
        domain = add([string(builder.module, __name__)])
        scopes = {s: add([string(builder.module, f"{__name__}.{s}"), domain]) for s in STREAMS}
        made.set_metadata("alias.scope", add([scopes.pop(name)]))
        made.set_metadata("noalias", add(list(scopes.values())))
        return made

    @intrinsic
    def load(typingctx: Any, address: Any, i: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return access(context, builder, *args)

        return dtype(types.int64, types.int64), codegen

    @intrinsic
    def store(typingctx: Any, address: Any, i: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> None:
            access(context, builder, *args)

        return types.void(types.int64, types.int64, dtype), codegen

    return load, store


_container16, _put_container16 = _stream("container", types.uint16)
_container32, _put_container32 = _stream("container", types.uint32)
_master, _put_master = _stream("master", types.float32)
_bits, _put_bits = _stream("master", types.uint32)
_grad, _ = _stream("grad", types.float32)
_grad16, _ = _stream("grad", types.uint16)
_exp_avg, _put_exp_avg = _stream("exp_avg", types.float32)
_exp_avg_sq, _put_exp_avg_sq = _stream("exp_avg_sq", types.float32)
_maximum, _put_maximum = _stream("max_exp_avg_sq", types.float32)
_word, _ = _stream("words", types.uint16)
_, _put_words = _stream("words", types.uint64)


@intrinsic
def _claim(typingctx: Any, counter: Any) -> Any:
    """Atomically add 1 to the int64 at an address; its old value."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", pointer, ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(types.int64), codegen


# ---- Rounding


@_jit
def _philox(g, param_id, t, key0, key1):
    """The words of group g as two little-endian uint64: lanes 0 to 3 and 4 to 7.

    Words live in uint64 whose upper halves are garbage: a 32 x 32 -> 64 bit vector multiply
    (vpmuludq) reads lower halves only, so that masking here costs nothing.
    """
    c0, c1, c2, c3 = g, g >> U32, param_id, t
    for _ in range(10):
        p0, p1 = (c0 & MASK32) * PHILOX_M0, (c2 & MASK32) * PHILOX_M1
        c0, c1, c2, c3 = (p1 >> U32) ^ c1 ^ key0, p1, (p0 >> U32) ^ c3 ^ key1, p0
        key0, key1 = (key0 + PHILOX_W0) & MASK32, (key1 + PHILOX_W1) & MASK32
    return (c0 & MASK32) | (c1 << U32), (c2 & MASK32) | (c3 << U32)


@_jit
def _fill(words, row, e, n, key0, key1):
    """Write the words of n elements from flat index e on, from lane 0 of e's group on."""
    param_id, t = np.uint64(row[PARAM_ID]), np.uint64(row[T])
    for i in range((e + n + 7 >> 3) - (e >> 3)):
        low, high = _philox(np.uint64((e >> 3) + i), param_id, t, key0, key1)
        _put_words(words, 2 * i, low)
        _put_words(words, 2 * i + 1, high)


@_jit
def _canonical(bits):
    magnitude = bits & MAGNITUDE
    if magnitude > INF:
        return (bits & SIGN) | QUIET_NAN
    if LARGEST_BF16 < magnitude < INF:
        return (bits & SIGN) | LARGEST_BF16
    return bits


@_jit
def _round_run(container, bits, words, n, narrow, canonical):
    """Add and truncate; only `canonical` patterns cannot carry out of a special value."""
    if narrow:
        for i in range(n):
            x = _bits(bits, i) if canonical else _canonical(_bits(bits, i))
            _put_container16(container, i, np.uint16(x + _word(words, i) >> U16))
    else:
        for i in range(n):
            x = _bits(bits, i) if canonical else _canonical(_bits(bits, i))
            _put_container32(container, i, np.uint32(x + _word(words, i) & HIGH16))


@_jit
def _round_tile(row, start, n, words, key0, key1, narrow, canonical):
    """Round n masters of a segment, from element `start` on, run by run."""
    done = 0
    while done < n:
        at = start + done
        r = at // row[INNER] if row[INNER] < row[NUMEL] else 0
        c = at - r * row[INNER]
        run = min(row[INNER] - c, n - done)
        e = row[BASE] + r * row[ROW_STRIDE] + c
        _fill(words, row, e, run, key0, key1)
        container = row[CONTAINER] + (2 * at if narrow else 4 * at)
        first_word = words + 2 * (e & 7)
        _round_run(container, row[MASTER] + 4 * at, first_word, run, narrow, canonical)
        done += run


@_jit
def _next_block(counter, table, firsts):
    """Claim a block: its segment, start and stop; start is -1 when there is none left."""
    b = _claim(counter.ctypes.data)
    if b >= firsts[-1]:
        return 0, -1, -1
    s = np.searchsorted(firsts, b, side="right") - 1
    start = (b - firsts[s]) * BLOCK
    return s, start, min(start + BLOCK, table[s, NUMEL])


@_jit
def _round_kernel(counter, table, firsts, key0, key1, narrow):
    words = np.empty(TILE // 4 + 2, np.uint64)
    while True:
        s, start, stop = _next_block(counter, table, firsts)
        if start < 0:
            return words[0]  # keeps the buffer alive
        for at in range(start, stop, TILE):
            n = min(TILE, stop - at)
            _round_tile(table[s], at, n, words.ctypes.data, key0, key1, narrow, False)


# ---- Foreign writes


@_jit
def _is_foreign(row, at, found, masters, key0, key1, narrow):
    """Compare the elements at positions `at` with their shadows; two arrays of scratch.

    The loads come first, in a loop with nothing else in it, so that many misses are under way at
    once; Philox then runs vectorised.
    """
    for k in range(at.size):
        masters[k] = _bits(row[MASTER], at[k])
        if narrow:
            found[k] = np.uint32(np.uint64(_container16(row[CONTAINER], at[k])) << U16)
        else:
            found[k] = _container32(row[CONTAINER], at[k])
    contiguous = row[INNER] == row[NUMEL]
    param_id, t, foreign = np.uint64(row[PARAM_ID]), np.uint64(row[T]), False
    for k in range(at.size):
        e = row[BASE] + at[k]
        if not contiguous:
            e += at[k] // row[INNER] * (row[ROW_STRIDE] - row[INNER])
        low, high = _philox(np.uint64(e >> 3), param_id, t, key0, key1)
        word = (low if e & 4 == 0 else high) >> np.uint64(16 * (e & 3)) & np.uint64(0xFFFF)
        foreign |= np.uint32(_canonical(masters[k]) + word & HIGH16) != _canonical(found[k])
    return foreign


@_jit
def _flag_kernel(counter, table, firsts, key0, key1, narrow, positions, ends, flags):
    found, masters = np.empty(SAMPLES, np.uint32), np.empty(SAMPLES, np.uint32)
    while True:
        s = _claim(counter.ctypes.data)
        if s >= len(table):
            return
        at = positions[ends[s] - min(table[s, NUMEL], SAMPLES) : ends[s]]
        if _is_foreign(table[s], at, found, masters, key0, key1, narrow):
            flags[table[s, TENSOR]] = 1


# ---- Adam


@_jit
def _update(w, m, v, g, grad16, maximum, n, x):
    """Moments and masters of n elements; whether all masters are within bf16.

    `maximum` is None without amsgrad, `grad16` is None for fp32 gradients: what is None is known
    from its type, so each case is compiled on its own.
    """
    factor, decay, l2, lerp, from_grad = x[0], x[1], x[2], x[3], x[4] != 0
    beta2, one_minus_beta2, neg_step_size, correction, eps = x[5], x[6], x[7], x[8], x[9]
    has_l2, fine = l2 != 0, True
    for i in range(n):
        if grad16 is not None:
            gi = np.uint32(np.uint64(_grad16(g, i)) << U16).view(np.float32)
        else:
            gi = _grad(g, i)
        wi, mi, gi = _master(w, i), _exp_avg(m, i), gi * factor
        gi = gi + wi * l2 if has_l2 else gi
        mi = (gi if from_grad else mi) + (gi - mi) * lerp
        vi = _exp_avg_sq(v, i) * beta2 + gi * one_minus_beta2 * gi
        _put_exp_avg(m, i, mi)
        _put_exp_avg_sq(v, i, vi)
        if maximum is not None:
            old = _maximum(maximum, i)
            vi = old if old >= vi or old != old else vi  # NaN wins, as in torch.maximum
            _put_maximum(maximum, i, vi)
        wi = wi * decay + mi * neg_step_size / (np.sqrt(vi) / correction + eps)
        _put_master(w, i, wi)
        fine &= abs(wi) <= LARGEST
    return fine


@_jit
def _adam_tile(row, start, n, g, grad16, x):
    at = 4 * start
    w, m, v = row[MASTER] + at, row[EXP_AVG] + at, row[EXP_AVG_SQ] + at
    if row[MAX_EXP_AVG_SQ]:
        fine = _update(w, m, v, g, grad16, row[MAX_EXP_AVG_SQ] + at, n, x)
    else:
        fine = _update(w, m, v, g, grad16, None, n, x)
    if not fine:
        for i in range(n):
            _put_bits(w, i, _canonical(_bits(w, i)))


@_jit
def _adam_kernel(counter, table, firsts, key0, key1, narrow, scalars, grad16):
    words = np.empty(TILE // 4 + 2, np.uint64)
    while True:
        s, start, stop = _next_block(counter, table, firsts)
        if start < 0:
            return words[0]  # keeps the buffer alive
        row, x = table[s], scalars[table[s, SCALARS]]
        for at in range(start, stop, TILE):
            n = min(TILE, stop - at)
            if grad16:
                _adam_tile(row, at, n, row[GRAD] + 2 * at, True, x)
            else:
                _adam_tile(row, at, n, row[GRAD] + 4 * at, None, x)
            _round_tile(row, at, n, words.ctypes.data, key0, key1, narrow, True)


@_jit
def _read_steps(addresses, increment):
    values = np.empty(addresses.size, np.float32)
    for i in range(addresses.size):
        values[i] = _master(addresses[i], 0)
        if increment:
            values[i] += np.float32(1)
            _put_master(addresses[i], 0, values[i])
    return values


# ---- Launching

_pool: ThreadPoolExecutor | None = None


def _drop_pool() -> None:
    """A forked child inherits the pool without its threads: what it submits would never run."""
    global _pool
    _pool = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_drop_pool)


def _launch(kernel: Callable[..., object], elements: int, *args: object) -> None:
    """Run a kernel here and in the pool's threads, all claiming work from one counter."""
    global _pool
    counter = np.zeros(1, np.int64)
    helpers = torch.get_num_threads() - 1 if elements >= SERIAL else 0
    if helpers > 0 and _pool is None:
        _pool = ThreadPoolExecutor(max(helpers, os.cpu_count() or 1), "fc_optim")
    futures = [_pool.submit(kernel, counter, *args) for _ in range(helpers)] if _pool else []
    try:
        kernel(counter, *args)
    finally:  # also on KeyboardInterrupt: the helpers hold bare addresses
        wait(futures)
    for future in futures:
        future.result()


def _segment_table(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """The table but for addresses, T and SCALARS; and segments' first blocks (last: of all)."""
    segments = tuple(map(tuple, batch.segments))
    cached = batch.cache.get(__name__)
    if cached is None or cached[0] != segments:
        rows = [
            (s.numel, s.inner, s.row_stride, s.base, s.param_id, i, s.offset)
            for i, of_tensor in enumerate(segments)
            for s in of_tensor
        ]
        table = np.zeros((len(rows), COLUMNS), np.int64)
        table[:, NUMEL:T] = np.array(rows, np.int64).reshape(-1, T - NUMEL)
        one_run = table[:, INNER] == table[:, ROW_STRIDE]
        table[one_run, INNER] = table[one_run, NUMEL]
        firsts = np.concatenate(([0], np.cumsum(-(-table[:, NUMEL] // BLOCK))))
        cached = batch.cache[__name__] = segments, table, firsts
    return cached[1].copy(), cached[2]


def _addresses(tensors: list[Tensor]) -> np.ndarray:
    if not all(map(Tensor.is_contiguous, tensors)):
        raise ValueError("kernels need contiguous tensors")
    return np.fromiter(map(Tensor.data_ptr, tensors), np.int64, len(tensors))


def _arguments(
    batch: Batch, adam: list[list[Tensor]] | None = None
) -> tuple[np.ndarray, tuple[Any, ...]]:
    """The steps, and what all kernels take: table, first blocks, halves of the key, is it bf16.

    `adam` are the gradients and moments of an Adam step: the steps are then incremented.
    """
    table, firsts = _segment_table(batch)
    owner = table[:, TENSOR]
    for column, tensors in enumerate([batch.containers, batch.masters, *(adam or [])]):
        if tensors:  # else the addresses stay 0
            size = tensors[0].element_size()
            table[:, column] = _addresses(tensors)[owner] + table[:, OFFSET] * size
    steps = _read_steps(_addresses(batch.steps), adam is not None)
    t = steps.astype(np.int64)[owner] if batch.epoch is None else batch.epoch
    table[:, T] = t & 0xFFFFFFFF
    key = np.uint64(batch.seed & 0xFFFFFFFF), np.uint64(batch.seed >> 32 & 0xFFFFFFFF)
    return steps, (table, firsts, *key, batch.containers[0].dtype == torch.bfloat16)


def round_(batch: Batch) -> None:
    """As `reference.round_`."""
    if batch.masters:
        _, args = _arguments(batch)
        _launch(_round_kernel, args[0][:, NUMEL].sum(), *args)


def flag_foreign(batch: Batch) -> Tensor:
    """As `reference.flag_foreign`."""
    flags = torch.zeros(len(batch.masters), dtype=torch.int32)
    if batch.masters:
        _, args = _arguments(batch)
        sizes = args[0][:, NUMEL]
        key = (__name__, "samples")  # depends on sizes only
        if key not in batch.cache or not np.array_equal(batch.cache[key][0], sizes):
            positions = [np.empty(0, np.int64)]  # so that there is something to join
            positions += [sample_positions(n).numpy() for n in sizes.tolist()]
            ends = np.cumsum([p.size for p in positions])[1:]
            batch.cache[key] = sizes.copy(), np.concatenate(positions), ends
        _, positions, ends = batch.cache[key]
        # A sample costs about what 20 elements of a step do: cache and TLB misses.
        _launch(_flag_kernel, 20 * positions.size, *args, positions, ends, flags.numpy())
    return flags


_scalar_row = attrgetter(*(f.name for f in fields(AdamScalars)))


def _scalars(batch: Batch, steps: np.ndarray) -> tuple[np.ndarray, list[int]]:
    """Distinct rows (fp32: the fields of `AdamScalars`), and each tensor's row."""
    scale = 1.0 if batch.grad_scale is None else batch.grad_scale.item()
    rows: list[tuple[float, ...]] = []
    seen: dict[tuple[int, float], int] = {}
    for hyper, step in zip(batch.hypers, steps.tolist(), strict=True):
        if (id(hyper), step) not in seen:
            seen[id(hyper), step] = len(rows)
            scalars = adam_scalars(hyper, int(step), scale)
            rows.append(_scalar_row(scalars))
    index = [seen[key] for key in zip(map(id, batch.hypers), steps.tolist(), strict=True)]
    return torch.tensor(rows, dtype=torch.float64).to(torch.float32).numpy(), index


def adam_(batch: Batch) -> None:
    """As `reference.adam_`."""
    if not batch.masters or (batch.found_inf is not None and batch.found_inf.item() != 0):
        return
    adam = [batch.grads, batch.exp_avgs, batch.exp_avg_sqs, batch.max_exp_avg_sqs]
    steps, args = _arguments(batch, adam)
    scalars, index = _scalars(batch, steps)
    args[0][:, SCALARS] = np.array(index)[args[0][:, TENSOR]]
    grad16 = batch.grads[0].dtype == torch.bfloat16
    _launch(_adam_kernel, args[0][:, NUMEL].sum(), *args, scalars, grad16)
