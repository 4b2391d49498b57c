"""The CPU backend's loops, compiled by numba.

All are in one file: numba's disk cache does not see a change in a function that is called from
another file.

Each tensor's segments are cut into blocks, which threads claim from one counter, so an uneven
model or a core that is busy elsewhere costs little. Within a block, separate loops pass over one
tile after another: a tile stays in the first-level cache between them, and the loops that read
memory and the loop that only computes (Philox) alternate often enough to overlap.

A kernel's first arguments are that counter, a table with one row per segment (columns below) and
the segments' first blocks, the last entry being the number of all blocks.
"""

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.extending import intrinsic

from fc_optim.kernels.batch import CHUNK_BITS, COUNTS, SAMPLE_MIX, SAMPLES, STRATUM_BITS, WHOLE

BLOCK = 1 << 14  # elements a thread claims at a time: about 15 microseconds of work
TILE = 512  # elements: 8 KiB of four fp32 arrays, a quarter of a first-level cache

# Columns of the segment table. Addresses are those of the segment's first element.
CONTAINER, MASTER, GRAD, EXP_AVG, EXP_AVG_SQ, MAX_EXP_AVG_SQ, MOMENTUM_BUFFER, UPDATE = range(8)
NUMEL, INNER, ROW_STRIDE, BASE, PARAM_ID, TENSOR, OFFSET, T, SCALARS, COLUMNS = range(8, 18)

U16, U32 = np.uint64(16), np.uint64(32)
MASK32, HIGH16 = np.uint64(0xFFFFFFFF), np.uint32(0xFFFF0000)
SIGN, MAGNITUDE = np.uint32(0x80000000), np.uint32(0x7FFFFFFF)
INF, QUIET_NAN, LARGEST_BF16 = np.uint32(0x7F800000), np.uint32(0x7FC00000), np.uint32(0x7F7F0000)
LARGEST = LARGEST_BF16.view(np.float32)
SMALLEST_NORMAL = np.float32(2.0**-126)
PHILOX_M0, PHILOX_M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
PHILOX_W0, PHILOX_W1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
MIX, TOP_BITS = np.uint64(SAMPLE_MIX), np.uint64(64 - STRATUM_BITS)

OPTIONS: dict[str, Any] = {"cache": True, "nogil": True, "error_model": "numpy"}
_jit = njit(**OPTIONS)
_jit_inline = njit(**OPTIONS, forceinline=True)  # LLVM's own choice may leave a call in a hot loop


# ---- Memory by address

STREAMS = ["container", "master", "grad", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "words"]
STREAMS += ["momentum_buffer", "update", "kept"]


def _stream(name: str, dtype: Any) -> tuple[Any, Any]:
    """`load(address, i)` and `store(address, i, value)` in one of the arrays of a launch.

    Streams never overlap. LLVM is told so (docs: "noalias and alias.scope metadata"): it would
    else check at run time before each loop, and not vectorise a loop over five arrays at all.
    The stream "any" may be one of them.
    """

    def access(context: Any, builder: Any, address: Any, i: Any, value: Any = None) -> Any:
        pointer = builder.inttoptr(address, context.get_value_type(dtype).as_pointer())
        pointer = builder.gep(pointer, [i], inbounds=True)
        made = builder.load(pointer) if value is None else builder.store(value, pointer)
        made.align = dtype.bitwidth // 8
        if name == "any":
            return made
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
_buffer, _put_buffer = _stream("momentum_buffer", types.float32)
_orthogonal, _put_update = _stream("update", types.uint16)
_random, _ = _stream("words", types.uint16)
_, _put_words = _stream("words", types.uint64)
_kept, _keep = _stream("kept", types.float32)
_kept_bits, _ = _stream("kept", types.uint32)
_pattern, _put_pattern = _stream("any", types.uint32)
_epoch, _put_epoch = _stream("any", types.int64)


@intrinsic
def _fetch_add(typingctx: Any, address: Any, value: Any) -> Any:
    """Atomically add to the int64 at an address; its old value."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", pointer, args[1], "monotonic")

    return types.int64(types.int64, types.int64), codegen


# ---- Rounding


@_jit_inline
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


@_jit_inline
def _canonical(bits):
    magnitude = bits & MAGNITUDE
    if magnitude > INF:
        return QUIET_NAN
    if LARGEST_BF16 < magnitude < INF:
        return (bits & SIGN) | LARGEST_BF16
    return bits


@_jit_inline
def _widen(bits16):
    return np.uint32(np.uint64(bits16) << U16).view(np.float32)


@_jit_inline
def _nearest(x):
    """The bf16 pattern nearest to x, ties to even."""
    bits = np.float32(x).view(np.uint32)
    if bits & MAGNITUDE > INF:
        return np.uint16(QUIET_NAN >> U16)
    return np.uint16(bits + np.uint64(0x7FFF) + (bits >> U16 & np.uint64(1)) >> U16)


@_jit
def _make_canonical(w, n):
    for i in range(n):
        _put_bits(w, i, _canonical(_bits(w, i)))


@_jit
def _is_canonical(w, n):
    changed = np.uint32(0)
    for i in range(n):
        changed |= _bits(w, i) ^ _canonical(_bits(w, i))
    return changed == 0


@_jit
def _canonical_nan(x, n):
    """Of moments, where a NaN was computed: its sign is up to the instructions that LLVM chose."""
    for i in range(n):
        bits = _pattern(x, i)
        _put_pattern(x, i, QUIET_NAN if bits & MAGNITUDE > INF else bits)


@_jit
def _round_run(container, bits, words, n, narrow, canonical, found):
    """Add and truncate; only `canonical` patterns cannot carry out of a special value."""
    changed = np.uint32(0)
    if narrow:
        for i in range(n):
            x = _bits(bits, i) if canonical else _canonical(_bits(bits, i))
            y = np.uint16(x + _random(words, i) >> U16)
            if found is not None:
                changed = np.uint32(changed + np.uint32(y != _container16(container, i)))
            _put_container16(container, i, y)
    else:
        for i in range(n):
            x = _bits(bits, i) if canonical else _canonical(_bits(bits, i))
            z = np.uint32(x + _random(words, i) & HIGH16)
            if found is not None:
                changed = np.uint32(changed + np.uint32(z != _container32(container, i)))
            _put_container32(container, i, z)
    if found is not None:
        found[0] += changed


@_jit
def _round_tile(row, start, n, words, key0, key1, narrow, canonical, found):
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
        _round_run(container, row[MASTER] + 4 * at, first_word, run, narrow, canonical, found)
        done += run


@_jit
def _next_block(counter, table, firsts):
    """Claim a block: its segment, start and stop; start is -1 when there is none left."""
    b = _fetch_add(counter.ctypes.data, 1)
    if b >= firsts[-1]:
        return 0, -1, -1
    s = np.searchsorted(firsts, b, side="right") - 1
    start = (b - firsts[s]) * BLOCK
    return s, start, min(start + BLOCK, table[s, NUMEL])


@_jit
def round_kernel(counter, table, firsts, key0, key1, narrow):
    words = np.empty(TILE // 4 + 2, np.uint64)
    while True:
        s, start, stop = _next_block(counter, table, firsts)
        if start < 0:
            return words[0]  # keeps the buffer alive
        for at in range(start, stop, TILE):
            n = min(TILE, stop - at)
            _round_tile(table[s], at, n, words.ctypes.data, key0, key1, narrow, False, None)


@_jit
def canonical_kernel(counter, table, firsts):
    while True:
        s, start, stop = _next_block(counter, table, firsts)
        if start < 0:
            return
        for at in range(start, stop, TILE):
            w, n = table[s, MASTER] + 4 * at, min(TILE, stop - at)
            if not _is_canonical(w, n):  # seldom: what is only read costs half
                _make_canonical(w, n)


# ---- Counting: what a step does to a run of elements goes to `found`, in columns of COUNTS


@_jit
def _piece(row, at, limit, count_all):
    """Of the elements from `at` on: how many are counted, or not, as one; and whether they are."""
    if count_all:
        return limit, True
    r = at // row[INNER] if row[INNER] < row[NUMEL] else 0
    c = at - r * row[INNER]
    e = row[BASE] + r * row[ROW_STRIDE] + c
    stratum = e >> CHUNK_BITS + STRATUM_BITS
    taken = np.int64(np.uint64(stratum) * MIX >> TOP_BITS)
    first = (stratum << STRATUM_BITS) + taken << CHUNK_BITS
    end = first + (1 << CHUNK_BITS)
    border = first if e < first else end if e < end else stratum + 1 << CHUNK_BITS + STRATUM_BITS
    return min(limit, row[INNER] - c, border - e), first <= e < end


@_jit_inline
def _is_dead(new, old, old_bits):
    """As in `reference.count_changes`."""
    scale = np.uint32(old_bits & INF).view(np.float32)
    scale = scale if scale > SMALLEST_NORMAL else SMALLEST_NORMAL
    return abs(new - old) * np.float32(256) < scale


@_jit
def _count_special(w, kept, n, found):
    """Count a run whose masters are not all within bf16, after they were made canonical."""
    for i in range(n):
        magnitude = _bits(w, i) & MAGNITUDE
        found[1] += _is_dead(_master(w, i), _kept(kept, i), _kept_bits(kept, i))
        found[2] += magnitude == LARGEST_BF16
        found[3] += magnitude >= INF


@_jit
def _report(found, counts, s):
    for c in range(found.size):
        if found[c]:
            _fetch_add(counts + 8 * (s * found.size + c), found[c])
            found[c] = 0


@_jit
def sample_kernel(addresses, ends, out, narrow):
    """Gather runs of elements, each given by its first address and its end in `out`."""
    start = 0
    for r in range(addresses.size):
        for i in range(ends[r] - start):
            if narrow:
                out[start + i] = _widen(_container16(addresses[r], i))
            else:
                out[start + i] = _master(addresses[r], i)
        start = ends[r]


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
def _differs(container, bits, words, n, narrow):
    """Compare a run with its shadow."""
    differing = np.uint32(0)
    for i in range(n):
        if narrow:
            found = np.uint32(np.uint64(_container16(container, i)) << U16)
        else:
            found = _container32(container, i)
        shadow = np.uint32(_canonical(_bits(bits, i)) + _random(words, i) & HIGH16)
        differing |= shadow ^ _canonical(found)
    return differing != 0


@_jit
def _is_any_foreign(row, words, key0, key1, narrow):
    """Compare a whole segment with its shadow, run by run: Philox once for 8 elements."""
    at, numel, inner = 0, row[NUMEL], row[INNER]
    while at < numel:
        run = min(inner - at % inner, numel - at, TILE)
        e = row[BASE] + at // inner * row[ROW_STRIDE] + at % inner
        _fill(words, row, e, run, key0, key1)
        container = row[CONTAINER] + (2 * at if narrow else 4 * at)
        if _differs(container, row[MASTER] + 4 * at, words + 2 * (e & 7), run, narrow):
            return True
        at += run
    return False


@_jit
def flag_kernel(counter, table, positions, ends, flags, key0, key1, narrow):
    words = np.empty(TILE // 4 + 2, np.uint64)
    found, masters = np.empty(SAMPLES, np.uint32), np.empty(SAMPLES, np.uint32)
    while True:
        s = _fetch_add(counter.ctypes.data, 1)
        if s >= len(table):
            return words[0]  # keeps the buffer alive
        if table[s, NUMEL] <= WHOLE:
            foreign = _is_any_foreign(table[s], words.ctypes.data, key0, key1, narrow)
        else:
            at = positions[ends[s] - SAMPLES : ends[s]]
            foreign = _is_foreign(table[s], at, found, masters, key0, key1, narrow)
        if foreign:
            flags[table[s, TENSOR]] = 1


# ---- Adam


@_jit_inline
def _gradient(g, grad16, i):
    if grad16 is not None:
        return _widen(_grad16(g, i))
    return _grad(g, i)


@_jit
def _adam_run(w, m, v, g, grad16, maximum, n, x, kept, found, usual):
    """Moments and masters of n elements; whether all masters are within bf16.

    `maximum` is None without amsgrad, `grad16` for fp32 gradients, `found` where nothing is
    counted: what is None is known from its type, so each case is compiled on its own. `kept` is
    where counting keeps the masters of before.
    """
    factor, decay, l2, lerp, from_grad = x[0], x[1], x[2], x[3], x[4] != 0
    beta2, one_minus_beta2, neg_step_size, correction, eps = x[5], x[6], x[7], x[8], x[9]
    has_l2, fine, dead = l2 != 0, True, np.uint32(0)
    if usual is not None:  # LLVM does not split a loop that counts by what does not change in it
        has_l2, from_grad = False, False
    for i in range(n):
        wi, mi, gi = _master(w, i), _exp_avg(m, i), _gradient(g, grad16, i) * factor
        gi = gi + wi * l2 if has_l2 else gi
        mi = (gi if from_grad else mi) + (gi - mi) * lerp
        vi = _exp_avg_sq(v, i) * beta2 + gi * one_minus_beta2 * gi
        _put_exp_avg(m, i, mi)
        _put_exp_avg_sq(v, i, vi)
        if maximum is not None:
            old = _maximum(maximum, i)
            vi = vi if vi > old or vi != vi else old  # NaN wins, as in torch.maximum
            _put_maximum(maximum, i, vi)
        before, bits = wi, _bits(w, i)
        wi = wi * decay + mi * neg_step_size / (np.sqrt(vi) / correction + eps)
        if found is not None:
            _keep(kept, i, before)
            dead = np.uint32(dead + np.uint32(_is_dead(wi, before, bits)))
        _put_master(w, i, wi)
        fine &= abs(wi) < LARGEST if found is not None else abs(wi) <= LARGEST
    if found is not None and fine:
        found[1] += dead
    return fine


@_jit_inline
def _adam_case(w, m, v, g, grad16, maximum, n, x, kept, found):
    if found is not None:
        if x[2] == 0 and x[4] == 0:
            return _adam_run(w, m, v, g, grad16, maximum, n, x, kept, found, True)
    return _adam_run(w, m, v, g, grad16, maximum, n, x, kept, found, None)


@_jit
def _adam_tile(row, start, n, g, grad16, x, kept, found):
    at = 4 * start
    w, m, v = row[MASTER] + at, row[EXP_AVG] + at, row[EXP_AVG_SQ] + at
    if row[MAX_EXP_AVG_SQ]:
        fine = _adam_case(w, m, v, g, grad16, row[MAX_EXP_AVG_SQ] + at, n, x, kept, found)
    else:
        fine = _adam_case(w, m, v, g, grad16, None, n, x, kept, found)
    if not fine:  # a NaN in a moment gives one in the master
        _make_canonical(w, n)
        _canonical_nan(m, n)
        _canonical_nan(v, n)
        if row[MAX_EXP_AVG_SQ]:
            _canonical_nan(row[MAX_EXP_AVG_SQ] + at, n)
        if found is not None:
            _count_special(w, kept, n, found)


@_jit
def _adam_and_round(row, at, n, grad16, x, words, key0, key1, narrow, kept, found):
    if grad16:
        _adam_tile(row, at, n, row[GRAD] + 2 * at, True, x, kept, found)
    else:
        _adam_tile(row, at, n, row[GRAD] + 4 * at, None, x, kept, found)
    _round_tile(row, at, n, words, key0, key1, narrow, True, found)


@_jit
def adam_kernel(counter, table, firsts, scalars, grad16, key0, key1, narrow, counts, count_all):
    words, kept = np.empty(TILE // 4 + 2, np.uint64), np.empty(TILE, np.float32)
    found = np.zeros(len(COUNTS), np.int64)
    rounding = words.ctypes.data, key0, key1, narrow, kept.ctypes.data
    while True:
        s, start, stop = _next_block(counter, table, firsts)
        if start < 0:
            return words[0] + kept[0]  # keeps the buffers alive
        row, x, at = table[s], scalars[table[s, SCALARS]], start
        while at < stop:
            end, counted = stop, False
            if counts is not None:
                n, counted = _piece(row, at, stop - at, count_all)
                end = at + n
            for tile in range(at, end, TILE):
                n = min(TILE, end - tile)
                if counts is not None and counted:
                    _adam_and_round(row, tile, n, grad16, x, *rounding, found)
                else:
                    _adam_and_round(row, tile, n, grad16, x, *rounding, None)
            at = end
        if counts is not None:
            _report(found, counts, s)


# ---- Muon


@_jit
def _momentum_run(m, g, grad16, u, n, x):
    factor, lerp, from_grad, blend, from_buffer = x[0], x[1], x[2] != 0, x[3], x[4] != 0
    nan = False
    for i in range(n):
        mi, gi = _buffer(m, i), _gradient(g, grad16, i) * factor
        mi = (gi if from_grad else mi) + (gi - mi) * lerp
        _put_buffer(m, i, mi)
        ui = (mi if from_buffer else gi) + (mi - gi) * blend
        nan |= ui != ui  # as it is where the buffer is
        _put_update(u, i, _nearest(ui))
    if nan:
        _canonical_nan(m, n)


@_jit
def momentum_kernel(counter, table, firsts, scalars, grad16):
    while True:
        s, start, stop = _next_block(counter, table, firsts)
        if start < 0:
            return
        row, n, x = table[s], stop - start, scalars[table[s, SCALARS]]
        m, u = row[MOMENTUM_BUFFER] + 4 * start, row[UPDATE] + 2 * start
        if grad16:
            _momentum_run(m, row[GRAD] + 2 * start, True, u, n, x)
        else:
            _momentum_run(m, row[GRAD] + 4 * start, None, u, n, x)


@_jit
def _update_run(w, u, n, x, kept, found):
    """Masters of n elements; whether all are within bf16."""
    decay, neg_lr, fine, dead = x[5], x[6], True, np.uint32(0)
    for i in range(n):
        before, bits = _master(w, i), _bits(w, i)
        wi = before * decay + _widen(_orthogonal(u, i)) * neg_lr
        if found is not None:
            _keep(kept, i, before)
            dead = np.uint32(dead + np.uint32(_is_dead(wi, before, bits)))
        _put_master(w, i, wi)
        fine &= abs(wi) < LARGEST if found is not None else abs(wi) <= LARGEST
    if found is not None and fine:
        found[1] += dead
    return fine


@_jit
def _update_and_round(row, at, n, x, words, key0, key1, narrow, kept, found):
    w = row[MASTER] + 4 * at
    if not _update_run(w, row[UPDATE] + 2 * at, n, x, kept, found):
        _make_canonical(w, n)
        if found is not None:
            _count_special(w, kept, n, found)
    _round_tile(row, at, n, words, key0, key1, narrow, True, found)


@_jit
def update_kernel(counter, table, firsts, scalars, key0, key1, narrow, counts, count_all):
    words, kept = np.empty(TILE // 4 + 2, np.uint64), np.empty(TILE, np.float32)
    found = np.zeros(len(COUNTS), np.int64)
    rounding = words.ctypes.data, key0, key1, narrow, kept.ctypes.data
    while True:
        s, start, stop = _next_block(counter, table, firsts)
        if start < 0:
            return words[0] + kept[0]  # keeps the buffers alive
        row, x, at = table[s], scalars[table[s, SCALARS]], start
        while at < stop:
            end, counted = stop, False
            if counts is not None:
                n, counted = _piece(row, at, stop - at, count_all)
                end = at + n
            for tile in range(at, end, TILE):
                n = min(TILE, end - tile)
                if counts is not None and counted:
                    _update_and_round(row, tile, n, x, *rounding, found)
                else:
                    _update_and_round(row, tile, n, x, *rounding, None)
            at = end
        if counts is not None:
            _report(found, counts, s)


# ---- Counts of steps


@_jit
def read_steps(addresses, increment):
    values = np.empty(addresses.size, np.float32)
    for i in range(addresses.size):
        values[i] = _master(addresses[i], 0)
        if increment:
            values[i] += np.float32(1)
            _put_master(addresses[i], 0, values[i])
    return values


@_jit
def read_epochs(addresses, increment):
    values = np.empty(addresses.size, np.int64)
    for i in range(addresses.size):
        values[i] = _epoch(addresses[i], 0)
        if increment:
            values[i] += 1
            _put_epoch(addresses[i], 0, values[i])
    return values
