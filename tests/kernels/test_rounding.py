"""The rounding contract: Philox known answers, exhaustive bits, specials, placement."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fc_optim
from fc_optim.kernels import cpu, gpu, reference
from fc_optim.kernels.batch import SAMPLES, WHOLE, Batch, Segment, power, sample_positions

BACKENDS = [reference, cpu, gpu]
names = [b.__name__.rsplit(".", 1)[-1] for b in BACKENDS]


# Random123's kat_vectors for philox4x32 10: counter, key, expected words.
KNOWN = [
    ([0, 0, 0, 0], 0, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, 2**64 - 1, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        0x299F31D0A4093822,
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "seed", "words"), KNOWN)
def test_philox_gives_the_random123_known_answers(counter, seed, words):
    out = reference.philox4x32(tuple(torch.tensor(c) for c in counter), seed)
    assert [int(w) for w in out] == words


def plain_word(e: int, *, seed: int, param_id: int, t: int) -> int:
    """The contract read literally: one element, Python integers."""
    g, lane = e >> 3, e & 7
    c = [g & 0xFFFFFFFF, g >> 32, param_id, t]
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(10):
        p0, p1 = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [p1 >> 32 ^ c[1] ^ k0, p1 & 0xFFFFFFFF, p0 >> 32 ^ c[3] ^ k1, p0 & 0xFFFFFFFF]
        k0, k1 = k0 + 0x9E3779B9 & 0xFFFFFFFF, k1 + 0xBB67AE85 & 0xFFFFFFFF
    word = c[lane >> 1]
    return word >> 16 if lane & 1 else word & 0xFFFF


def rounded_with(backend, bits, *, seed=0, param_id=0, t=0, offset=0, dtype=torch.bfloat16):
    """Shadow bits (numpy uint32, low half zero) of fp32 patterns by a backend."""
    x = torch.from_numpy(np.asarray(bits, dtype=np.uint32).view(np.float32).copy())
    out = torch.empty(x.shape, dtype=dtype)
    n = x.numel()
    segment = Segment(param_id, base=offset, rows=1, inner=n, row_stride=n)
    batch = Batch([out], [x], [(segment,)], [], seed=seed, epoch=t)
    backend.round_(batch)
    return out.float().view(torch.int32).numpy().view(np.uint32)


@pytest.mark.parametrize("backend", BACKENDS, ids=names)
@pytest.mark.parametrize("offset", [0, 3, 2**35 + 5])
def test_words_are_those_of_the_contract(backend, offset):
    # A value whose low half is h rounds up exactly when word >= 2**16 - h: scan three thresholds.
    n = 40
    words = [plain_word(offset + i, seed=2**63 + 7, param_id=2**32 - 1, t=9) for i in range(n)]
    for half in (1, 0x8000, 0xFFFF):
        bits = np.full(n, 0x3F800000 | half, dtype=np.uint32)
        got = rounded_with(backend, bits, seed=2**63 + 7, param_id=2**32 - 1, t=9, offset=offset)
        up = np.array([w + half >= 2**16 for w in words])
        assert np.array_equal(got, np.where(up, 0x3F810000, 0x3F800000))


@pytest.mark.parametrize("half", [0, 1, 2, 0x7FFF, 0x8000, 0xFFFE, 0xFFFF])
@pytest.mark.parametrize("high", [0x0000, 0x0001, 0x3F80, 0x8080, 0x7F7E, 0xBF80])
def test_over_all_random_words_the_round_ups_are_the_discarded_bits(high, half):
    bits = torch.full((65536,), high << 16 | half, dtype=torch.int64).to(torch.int32)
    words = torch.arange(65536, dtype=torch.int32)
    out = (reference.round_bits(bits, words) >> 16) & 0xFFFF
    assert int((out == high + 1).sum()) == half
    assert int((out == high).sum()) == 65536 - half


F32 = {
    "zero": (0x00000000, 0x0000), "minus zero": (0x80000000, 0x8000),
    "inf": (0x7F800000, 0x7F80), "-inf": (0xFF800000, 0xFF80),
    "quiet nan": (0x7FC00000, 0x7FC0), "gpu nan": (0x7FFFFFFF, 0x7FC0),
    "signalling nan": (0x7F800001, 0x7FC0), "x86 nan": (0xFFC00000, 0x7FC0),
    "negative signalling nan": (0xFF80FFFF, 0x7FC0),
    "largest bf16": (0x7F7F0000, 0x7F7F), "above it": (0x7F7F0001, 0x7F7F),
    "largest fp32": (0x7F7FFFFF, 0x7F7F), "-largest fp32": (0xFF7FFFFF, 0xFF7F),
    "on the grid": (0x3F810000, 0x3F81), "subnormal on the grid": (0x00010000, 0x0001),
}  # fmt: skip


@pytest.mark.parametrize("words", ["zeros", "ones", "random"])
@pytest.mark.parametrize("name", F32)
def test_specials_do_not_depend_on_the_random_word(name, words):
    pattern, expected = F32[name]
    generator = torch.Generator().manual_seed(0)
    r = {
        "zeros": torch.zeros(64, dtype=torch.int32),
        "ones": torch.full((64,), 0xFFFF, dtype=torch.int32),
        "random": torch.randint(65536, (64,), generator=generator, dtype=torch.int32),
    }[words]
    bits = torch.full((64,), pattern, dtype=torch.int64).to(torch.int32)
    out = (reference.round_bits(bits, r) >> 16) & 0xFFFF
    assert out.unique().tolist() == [expected]


@pytest.mark.parametrize("backend", BACKENDS, ids=names)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_backend_keeps_the_specials(backend, dtype):
    for pattern, expected in F32.values():
        got = rounded_with(backend, [pattern] * 9, seed=5, dtype=dtype)
        if pattern & 0x7FFFFFFF > 0x7F800000 and dtype == torch.bfloat16:
            got = got & 0xFFFF0000
        assert np.all(got == expected << 16)


@pytest.mark.parametrize("backend", BACKENDS, ids=names)
def test_subnormals_round_through_the_integers(backend):
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 0x00800000, 500).astype(np.uint32)
    bits[::2] |= 0x80000000
    words = np.array([plain_word(i, seed=1, param_id=2, t=3) for i in range(500)], dtype=np.uint32)
    got = rounded_with(backend, bits, seed=1, param_id=2, t=3)
    assert np.array_equal(got, (bits + words) & 0xFFFF0000)


@given(st.integers(0, 300), st.integers(0, 300), st.integers(0, 2**40), st.integers(0, 2**64 - 1))
@settings(max_examples=60, deadline=None)
def test_a_piece_rounds_as_the_whole_does(start, length, offset, seed):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(600, generator=generator)
    whole = fc_optim.stochastic_round(x, seed=seed, param_id=7, t=2, offset=offset)
    piece = x[start : start + length]
    got = fc_optim.stochastic_round(piece, seed=seed, param_id=7, t=2, offset=offset + start)
    assert torch.equal(got, whole[start : start + length])


def test_a_strided_input_is_rounded_in_row_major_order():
    x = torch.randn(9, 13)
    a = fc_optim.stochastic_round(x, seed=3, param_id=1, t=0)
    b = fc_optim.stochastic_round(x.t().contiguous().t(), seed=3, param_id=1, t=0)
    assert torch.equal(a, b)


def test_the_mean_over_epochs_is_the_value_and_the_variance_that_of_the_discarded_bits():
    x = torch.full((1 << 16,), 1.0 + 2**-9 + 2**-12)  # 0.28125 of the way to 1 + 2**-7
    out = fc_optim.stochastic_round(x, seed=11, param_id=5, t=1).double()
    share = float((out > 1).double().mean())
    fraction = (2**-9 + 2**-12) / 2**-7
    assert abs(share - fraction) < 5 * (fraction * (1 - fraction) / x.numel()) ** 0.5


def test_rounding_twice_and_rounding_a_grid_value_change_nothing():
    x = torch.randn(1000)
    once = fc_optim.stochastic_round(x, seed=0, param_id=0, t=0)
    assert torch.equal(fc_optim.stochastic_round(once.float(), seed=9, param_id=9, t=9), once)


def test_out_takes_either_container_and_the_global_rng_is_not_touched():
    x = torch.randn(5, 5)
    before = torch.get_rng_state()
    native = torch.empty(5, 5, dtype=torch.bfloat16)
    grid = torch.empty(5, 5)
    assert fc_optim.stochastic_round(x, seed=1, param_id=1, t=1, out=native) is native
    fc_optim.stochastic_round(x, seed=1, param_id=1, t=1, out=grid)
    assert torch.equal(native.float(), grid)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (
            {"x": torch.zeros(3, dtype=torch.float16)},
            TypeError,
            "x: expected float32, got torch.fl",
        ),
        ({"seed": -1}, ValueError, r"seed: -1 is not in \[0, 2\*\*64\)"),
        ({"t": 2**32}, ValueError, "t: 4294967296"),
        ({"param_id": 2**32}, ValueError, "param_id: 4294967296"),
        ({"offset": -8}, ValueError, "offset: -8"),
        ({"out": torch.zeros(3, dtype=torch.float16)}, TypeError, "out: expected bfloat16"),
        ({"out": torch.zeros(4)}, ValueError, "out: needs x's shape"),
        ({"out": torch.zeros(3, 2)[:, 0]}, ValueError, "contiguous"),
    ],
)
def test_bad_arguments_are_named(change, error, match):
    arguments = {"x": torch.zeros(3), "seed": 0, "param_id": 0, "t": 0, **change}
    with pytest.raises(error, match=match):
        fc_optim.stochastic_round(arguments.pop("x"), **arguments)


def test_masters_are_made_canonical_in_pieces(monkeypatch):
    """What is made on the way does not grow with a parameter: the largest embedding has room."""
    sizes, canonical_bits = [], reference.canonical_bits
    monkeypatch.setattr(
        reference, "canonical_bits", lambda x: sizes.append(x.numel()) or canonical_bits(x)
    )
    x = torch.full((1 << 20,), torch.inf).neg_().add_(torch.inf)
    reference.canonical_(Batch([], [x], [[Segment.whole(0, x.numel())]], [], seed=0, epoch=0))
    assert x.view(torch.int32).unique().tolist() == [0x7FC00000]
    assert sum(sizes) == x.numel() and max(sizes) <= reference.CHUNK


def test_the_nearest_bf16_is_torchs_and_nan_is_one_word():
    high = torch.arange(2**16).repeat_interleave(6) << 16
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF]).repeat(2**16)
    x = (high | low).to(torch.int32).view(torch.float32)
    got = reference.nearest_bf16(x)
    same = got.view(torch.int16) == x.bfloat16().view(torch.int16)
    assert same[~x.isnan()].all()
    assert set(got.view(torch.int16)[x.isnan()].tolist()) == {0x7FC0}
    torch.set_flush_denormal(True)
    try:
        flushed = reference.nearest_bf16(x)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(flushed.view(torch.int16), got.view(torch.int16))
    strided = x.view(-1, 64).t()
    assert torch.equal(
        reference.nearest_bf16(strided).view(torch.int16), got.view(-1, 64).t().view(torch.int16)
    )


@pytest.mark.parametrize("size", [0, 1, 2**20 + 7])
def test_a_cast_makes_the_same_of_every_piece(size):
    x = torch.full((size,), torch.nan)
    x[::3] = 1 + 2**-8
    got = reference.cast(x, torch.bfloat16).view(torch.int16)
    assert set(got.tolist()) <= {0x7FC0, 0x3F80} and got.shape == x.shape
    assert reference.cast(x, torch.float32) is x
    rows = torch.zeros(3, 40, dtype=torch.bfloat16)[:, 2:39]
    reference.copy_cast_(rows, torch.full((3, 37), torch.nan))
    assert set(rows.contiguous().view(torch.int16).flatten().tolist()) == {0x7FC0}
    infinite = torch.tensor([torch.inf, -torch.inf, -0.0])
    assert torch.equal(reference.nearest_bf16(infinite), infinite.bfloat16())


@given(st.floats(0, 1), st.integers(0, 2**24))
def test_power_is_within_rounding_of_libm(x, n):
    # Each squaring doubles the relative error and adds half an ulp: at most n ulps in all.
    assert power(x, n) == pytest.approx(x**n, rel=(n + 4) * 2**-52, abs=1e-300)


@given(st.integers(0, 5_000_000))
@settings(max_examples=50, deadline=None)
def test_samples_are_distinct_positions_one_per_stratum(numel):
    at = sample_positions(numel)
    assert at.numel() == (numel if numel <= WHOLE else SAMPLES)
    assert torch.equal(at, at.unique()) and (at.numel() == 0 or int(at[-1]) < numel)


def test_samples_do_not_line_up_with_columns():
    columns = sample_positions(4096 * 4096) % 4096
    assert columns.unique().numel() > 800


def test_segment_split_covers_every_element_once():
    segment = Segment(3, base=100, rows=7, inner=11, row_stride=50, offset=4)
    expected = [(4 + r * 11 + c, 100 + r * 50 + c) for r in range(7) for c in range(11)]
    for size in (1, 3, 11, 30, 1000):
        got = [
            (s.offset + r * s.inner + c, s.base + r * s.row_stride + c)
            for s in segment.split(size)
            for r in range(s.rows)
            for c in range(s.inner)
        ]
        assert sorted(got) == expected
        assert all(s.numel <= max(size, 1) for s in segment.split(size))
