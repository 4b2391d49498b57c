"""Each metric against a slow plain definition, and against a case with a known answer."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fc_optim import metrics


def plain_ulp(x: float) -> float:
    """The gap from |x| rounded toward zero in bf16 to its neighbour away from zero."""
    bits = int(np.float32(abs(x)).view(np.uint32)) >> 16
    low, high = (np.uint32(b << 16).view(np.float32) for b in (bits, bits + 1))
    return float(np.float64(high) - np.float64(low))


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
@settings(max_examples=300)
def test_ulp_is_the_gap_between_neighbours(x):
    if abs(x) < 2.0**127:  # above it the neighbour is Inf
        assert float(metrics.bf16_ulp(torch.tensor(x))) == plain_ulp(x)


def test_ulp_of_chosen_values():
    x = torch.tensor([1.0, -1.0, 1.99, 2.0, 0.0, 2.0**-126, 2.0**-130, 3e38])
    want = [2**-7, 2**-7, 2**-7, 2**-6, 2**-133, 2**-133, 2**-133, 2.0**120]
    assert metrics.bf16_ulp(x).tolist() == want
    assert metrics.bf16_ulp(torch.tensor([math.nan, math.inf])).isnan().all()


def random_weights(seed, step=3e-4):
    g = torch.Generator().manual_seed(seed)
    start = {n: (torch.randn(s, generator=g) * 0.05).bfloat16().float() for n, s in
             (("a", (7, 5)), ("b", (11,)))}  # fmt: skip
    masters = {n: w + step * torch.randn(w.shape, generator=g) for n, w in start.items()}
    served = {n: m.bfloat16() for n, m in masters.items()}
    return start, masters, served


def flat(weights):
    return [float(x) for w in weights.values() for x in w.flatten()]


@pytest.mark.parametrize("seed", range(5))
def test_figures_follow_their_plain_definitions(seed):
    start, masters, served = random_weights(seed)
    w, m, s = flat(start), flat(masters), flat(served)
    n = len(w)
    changed = sum(a != b for a, b in zip(s, w, strict=True)) / n
    assert metrics.changed_ratio(served, start) == pytest.approx(changed)
    dead = sum(abs(a - b) < plain_ulp(b) / 2 for a, b in zip(m, w, strict=True)) / n
    assert metrics.dead_zone_fraction(masters, start) == pytest.approx(dead)
    paper = sum(abs(a - b) < abs(b) / 256 for a, b in zip(m, w, strict=True)) / n
    assert metrics.dead_zone_fraction(masters, start, "paper") == pytest.approx(paper)
    halves = (abs(a - b) / (plain_ulp(b) / 2) for a, b in zip(m, w, strict=True))
    median = sorted(halves)[(n - 1) // 2]
    assert metrics.update_half_ulp(masters, start) == pytest.approx(median)
    dot = sum((a - c) * (b - c) for a, b, c in zip(s, m, w, strict=True))
    square = sum((b - c) ** 2 for b, c in zip(m, w, strict=True))
    assert metrics.captured(served, masters, start) == pytest.approx(dot / square)
    rms = (sum(((a - b) / plain_ulp(b)) ** 2 for a, b in zip(s, m, strict=True)) / n) ** 0.5
    assert metrics.export_rms_ulp(served, masters) == pytest.approx(rms)


def test_captured_and_changed_in_closed_form():
    start = torch.ones(4)
    masters = start + 0.5
    assert metrics.captured(masters, masters, start) == 1
    assert metrics.captured(start, masters, start) == 0
    assert metrics.captured(start + 0.25, masters, start) == 0.5
    assert math.isnan(metrics.captured(start, start, start))
    assert metrics.changed_ratio(torch.tensor([1.0, -0.0]), torch.tensor([1.0, 0.0])) == 0.5
    assert metrics.dead_zone_fraction(torch.tensor([1 + 2**-9, 1 + 2**-8]), torch.ones(2)) == 0.5


def test_export_noise_of_both_roundings_is_what_theory_says():
    from fc_optim import stochastic_round

    x = torch.rand(200_000, generator=torch.Generator().manual_seed(0)) + 1
    nearest = metrics.export_rms_ulp(x.bfloat16(), x)
    stochastic = metrics.export_rms_ulp(stochastic_round(x, seed=0, param_id=0, t=0), x)
    # Of a root mean square of n errors the relative standard error is 0.45 / sqrt(n) for an even
    # distribution (of nearest), 0.59 / sqrt(n) for SR's triangular one: below 0.0015 here.
    assert nearest == pytest.approx((1 / 12) ** 0.5, rel=0.01)
    assert stochastic == pytest.approx((1 / 6) ** 0.5, rel=0.01)


@pytest.mark.parametrize("lag", [0, 1, 2.5, 4])
def test_lag_of_an_engine_that_is_so_many_steps_behind(lag):
    g = torch.Generator().manual_seed(0)
    start, direction = torch.randn(50, generator=g).double(), torch.randn(50, generator=g).double()
    history = [(t, start + t * direction) for t in range(8)]
    served = start + (7 - lag) * direction
    assert metrics.lag_steps(served, history, start) == pytest.approx(lag)
    assert metrics.lag_steps(start, history[3:], start) == 4  # older than the history
    assert metrics.lag_steps(start + 9 * direction, history, start) == 0


def test_the_tracker_gives_the_figures_of_the_functions():
    start, _, _ = random_weights(0)
    tracker = metrics.MovementTracker(start)
    before = previous = start
    before_served = start
    for t in range(1, 5):
        masters = {n: w + t * 1e-3 for n, w in start.items()}
        served = {n: m.bfloat16() for n, m in masters.items()}
        row = tracker.record(masters, served)
        assert row.step == t
        assert row.changed_ratio == metrics.changed_ratio(served, before_served)
        assert row.dead_zone_fraction == metrics.dead_zone_fraction(masters, previous)
        assert row.update_half_ulp == metrics.update_half_ulp(masters, previous)
        assert row.captured == pytest.approx(metrics.captured(served, masters, before))
        assert row.export_rms_ulp == pytest.approx(metrics.export_rms_ulp(served, masters))
        previous, before_served = masters, served


def test_the_tracker_samples_every_tensor_evenly():
    start = {"a": torch.zeros(30_000), "b": torch.zeros(70_000)}
    tracker = metrics.MovementTracker(start, sample=10_000)
    served = {"a": torch.ones(30_000), "b": torch.zeros(70_000)}
    assert tracker.record(served, served).changed_ratio == pytest.approx(0.3, abs=0.02)
    with pytest.raises(ValueError, match="sample, history: 0"):
        metrics.MovementTracker(start, sample=0)


def test_the_tracker_goes_by_names():
    start, masters, served = random_weights(0)
    want = metrics.MovementTracker(start).record(masters, served)
    tracker = metrics.MovementTracker(start)
    with pytest.raises(ValueError, match="not the names that it follows: b"):
        tracker.record(masters, {"a": served["a"]})
    back = dict(reversed(served.items()))
    assert tracker.record(masters, back) == want


def test_log_ratio_follows_its_plain_definition():
    g = torch.Generator().manual_seed(0)
    p, q = torch.randn(6, 9, generator=g) * 0.1, torch.randn(6, 9, generator=g) * 0.1
    mask = torch.rand(6, 9, generator=g) > 0.3
    r = [[float(a) - float(b) for a, b, k in zip(x, y, m, strict=True) if k]
         for x, y, m in zip(p, q, mask, strict=True)]  # fmt: skip
    tokens = [x for row in r for x in row]
    got = metrics.log_ratio(p, q, mask)
    assert got.mean == pytest.approx(sum(tokens) / len(tokens))
    assert got.mean_abs == pytest.approx(sum(map(abs, tokens)) / len(tokens))
    assert got.p99 == pytest.approx(float(np.quantile(np.abs(tokens), 0.99)))
    assert got.k3 == pytest.approx(sum(math.exp(x) - 1 - x for x in tokens) / len(tokens))
    assert got.sequence_sums.tolist() == pytest.approx([sum(row) for row in r])
    for bad, match in ((p[0], "expected one shape"), (p, "selects no token")):
        with pytest.raises(ValueError, match=match):
            metrics.log_ratio(bad, bad, torch.zeros(bad.shape))


def test_effective_sample_size_in_closed_form_and_without_overflow():
    assert metrics.effective_sample_size(torch.zeros(10)) == pytest.approx(1)
    assert metrics.effective_sample_size(torch.tensor([0.0] * 4 + [-math.inf] * 4)) == 0.5
    assert metrics.effective_sample_size(torch.tensor([5000.0, 0.0])) == pytest.approx(0.5)
    x = torch.randn(100, generator=torch.Generator().manual_seed(0))
    w = x.double().exp()
    assert metrics.effective_sample_size(x) == pytest.approx(float(w.sum() ** 2 / (w @ w) / 100))
    with pytest.raises(ValueError, match="empty"):
        metrics.effective_sample_size(torch.zeros(0))


def test_weights_that_do_not_match_are_named():
    with pytest.raises(ValueError, match="same names: b, c"):
        metrics.changed_ratio({"a": torch.ones(1), "b": torch.ones(1)},
                              {"a": torch.ones(1), "c": torch.ones(1)})  # fmt: skip
    with pytest.raises(ValueError, match=r"'a' has shapes \(1,\) and \(2,\)"):
        metrics.changed_ratio({"a": torch.ones(1)}, {"a": torch.ones(2)})
    with pytest.raises(ValueError, match="rule: 'both'"):
        metrics.dead_zone_fraction(torch.ones(1), torch.ones(1), "both")
