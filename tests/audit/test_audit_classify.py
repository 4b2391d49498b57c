"""The classifier on pipelines whose rounding is known."""

from collections import Counter

import pytest
import torch

from fc_optim.audit.classify import LEAST_ELEMENTS, Evidence, fp8_fit
from fc_optim.serving.rounding import stochastic_round

SEEDS = 100
ELEMENTS = 100_000


def sr(m, seed, t):
    return stochastic_round(m, seed=seed, param_id=7, t=t)


def truncated(m):
    return (m.view(torch.int32) & -65536).view(torch.float32)


def fp8(m, block):
    tiles = m.view(-1, block)
    scale = tiles.abs().amax(1, keepdim=True) / 448
    return ((tiles / scale).to(torch.float8_e4m3fn).float() * scale).bfloat16().flatten()


def pipeline(kind, seed, n=ELEMENTS):
    """(served, masters, previously served) after many small steps from bf16 weights."""
    g = torch.Generator().manual_seed(seed)
    start = (torch.randn(n, generator=g) * 0.05).bfloat16().float()
    step = torch.randn(n, generator=g).clamp(-3, 3) * 5e-7
    before = start + torch.randn(n, generator=g) * 2e-4
    masters = before + step
    if kind in ("regridded", "regridded stochastic"):
        masters, before = start + step, start
    serve = {
        "rtn": lambda m, t: m.bfloat16(),
        "regridded": lambda m, t: m.bfloat16(),
        "regridded stochastic": lambda m, t: sr(m, seed, t),
        "truncation": lambda m, t: truncated(m),
        "fresh": lambda m, t: sr(m, seed, t),
        "held": lambda m, t: sr(m, seed, 0),
        "fp16": lambda m, t: m.half(),
        "fp16_bf16": lambda m, t: m.half().bfloat16(),
        "fp8": lambda m, t: fp8(m, n),
        "fp8 block": lambda m, t: fp8(m, 100),
        "other weights": lambda m, t: (torch.randn(n, generator=g) * 0.05).bfloat16(),
        "other step": lambda m, t: (m - step).bfloat16(),
        "other step, stochastic": lambda m, t: sr(m - step, seed, t),
    }[kind]
    return serve(masters, 5), masters, serve(before, 4)


WANT = {
    "rtn": ("rtn", False),
    "regridded": ("rtn", True),
    "truncation": ("truncation", False),
    "fresh": ("stochastic_fresh", False),
    "held": ("stochastic_held", False),
    "fp16": ("fp16", False),
    "fp8": ("fp8", False),
    "other weights": ("wrong_master", False),
    "other step": ("wrong_master", False),
}
FEWER = {
    "fp16_bf16": ("fp16_bf16", False),
    "fp8 block": ("fp8", False),
    "other step, stochastic": ("wrong_master", False),
    "regridded stochastic": ("stochastic", True),
}


def verdict(served, masters, previous=None, lr=1e-6):
    evidence = Evidence(lr=lr)
    evidence.add(served, masters, previous)
    width = min(100, len(masters))
    whole = len(masters) // width * width
    evidence.sample_fp8(served[:whole].view(-1, width), masters[:whole].view(-1, width))
    return evidence.verdict()


def named(kind, seeds):
    found = (verdict(*pipeline(kind, seed)) for seed in range(seeds))
    return Counter((v.rule, v.regridded) for v in found)


@pytest.mark.long
@pytest.mark.parametrize("kind", WANT)
def test_names_each_pipeline_right_in_99_of_100_seeds(kind):
    assert named(kind, SEEDS)[WANT[kind]] >= 99


@pytest.mark.parametrize("kind", WANT | FEWER)
def test_names_each_pipeline_right(kind):
    assert named(kind, 2)[(WANT | FEWER)[kind]] == 2


@pytest.mark.parametrize("kind", ["rtn", "truncation", "fresh", "held", "fp16", "other step"])
def test_cannot_tell_below_the_stated_size(kind):
    assert verdict(*pipeline(kind, 0, LEAST_ELEMENTS - 1)).rule == "cannot_tell"
    many = Counter(verdict(*pipeline(kind, s, 2 * LEAST_ELEMENTS)).rule for s in range(10))
    assert set(many) <= {WANT[kind][0], "cannot_tell"}, many


def test_fresh_and_held_need_the_previous_copy():
    for kind in ("fresh", "held"):
        served, masters, _ = pipeline(kind, 0)
        found = verdict(served, masters)
        assert found.rule == "stochastic" and "previous copy" in found.detail


def test_masters_on_the_grid_tell_nothing():
    grid = torch.randn(ELEMENTS).bfloat16()
    found = verdict(grid, grid.float())
    assert found.rule == "cannot_tell" and "grid" in found.detail
    assert verdict(grid.roll(1), grid.float()).rule == "wrong_master"


def test_masters_near_the_grid_but_far_from_the_previous_copy_are_an_early_run():
    g = torch.Generator().manual_seed(0)
    start = (torch.randn(ELEMENTS, generator=g) * 0.05).bfloat16().float()
    masters = start + torch.randn(ELEMENTS, generator=g) * 1e-5  # ten steps of 1e-6 and more
    assert not verdict(masters.bfloat16(), masters, start.bfloat16()).regridded


def test_an_exact_fp32_copy_is_not_a_rounding():
    masters = pipeline("rtn", 0)[1]
    assert verdict(masters, masters).rule == "exact"


def test_pieces_and_pools_give_the_verdict_of_the_whole():
    served, masters, previous = pipeline("held", 3)
    parts = []
    for i in range(0, ELEMENTS, 10_000):
        piece = Evidence(lr=1e-6)
        piece.add(*(x[i : i + 10_000] for x in (served, masters, previous)))
        parts.append(piece)
    pool = parts[0]
    for piece in parts[1:]:
        pool += piece
    assert pool.verdict() == verdict(served, masters, previous)


def test_nonfinite_elements_are_left_out():
    served, masters, previous = pipeline("rtn", 0)
    served[::7] = float("nan")
    masters[::11] = float("inf")
    found = verdict(served, masters, previous)
    assert found.rule == "rtn" and found.elements < ELEMENTS


def test_bf16_weights_are_not_taken_for_fp8():
    served, masters, _ = pipeline("rtn", 0)
    assert fp8_fit(served.view(100, -1), masters.view(100, -1)) is None
