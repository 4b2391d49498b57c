"""Number formats against torch's own casts, and predictions against plain arithmetic."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fc_optim.audit.formats import BF16, E4M3, FP16
from fc_optim.audit.layers import kind_of, layer_of
from fc_optim.audit.predict import FORMATS, predict
from fc_optim.audit.stored import in_memory
from fc_optim.audit.updates import first_adamw_step, first_muon_step
from fc_optim.metrics import bf16_ulp, dead_zone_fraction

DTYPES = {BF16: torch.bfloat16, FP16: torch.float16, E4M3: torch.float8_e4m3fn}


def grid(fmt):
    """Every finite value of the format."""
    dtype = DTYPES[fmt]
    words = torch.arange(256**dtype.itemsize, dtype=torch.int32)
    values = words.to(torch.int16 if dtype.itemsize == 2 else torch.uint8).view(dtype).double()
    return values[values.isfinite()]


@pytest.mark.parametrize("fmt", DTYPES, ids=lambda f: f.name)
def test_rounding_is_torchs_cast(fmt):
    g = torch.Generator().manual_seed(0)
    words = torch.randint(-(2**31), 2**31, (200_000,), generator=g).to(torch.int32)
    values = [words.view(torch.float32), *(torch.randn(50_000, generator=g) * 10.0**-e
                                           for e in range(-2, 8))]  # fmt: skip
    x = torch.cat(values)
    x = x[x.isfinite()].clamp(-fmt.largest, fmt.largest)
    assert torch.equal(fmt.nearest(x), x.to(DTYPES[fmt]).double())
    truncated = fmt.toward_zero(x)
    assert (truncated.abs() <= x.double().abs()).all()
    assert torch.equal(truncated.to(DTYPES[fmt]).double(), truncated)
    assert (x.double().abs() - truncated.abs() < fmt.ulp(x)).all()


@pytest.mark.parametrize("fmt", DTYPES, ids=lambda f: f.name)
@pytest.mark.parametrize("share", [0.01, 0.25, 0.3, 0.5, 1.0, -0.01, -0.25, -0.3, -0.5, -1.0])
def test_steps_to_cross_from_every_grid_value(fmt, share):
    """At k the copy has changed, at k - 1 it has not: ties and powers of two included."""
    x = grid(fmt)
    x = x[x.abs() < fmt.largest]
    step = fmt.ulp(x) * share
    k = fmt.steps_to_cross(x, step)
    assert (fmt.nearest(x + k * step) != x).all()
    assert ((k == 1) | (fmt.nearest(x + (k - 1) * step) == x)).all()


@given(st.floats(-100, 100, width=32), st.floats(1e-8, 10), st.sampled_from([-1, 1]))
@settings(max_examples=200)
def test_steps_to_cross_from_between_grid_values(x, size, sign):
    master, step = torch.tensor([x], dtype=torch.float64), torch.tensor([sign * size]).double()
    k = BF16.steps_to_cross(master, step)
    copy = BF16.nearest(master)
    assert k >= 1
    # One part in 2**30 of slack: k steps are not exact in float64.
    assert BF16.nearest(master + (k + 1) * step * (1 + 2**-30)) != copy
    assert k == 1 or BF16.nearest(master + (k - 2).clamp(min=0) * step) == copy


def test_no_update_never_crosses():
    assert BF16.steps_to_cross(torch.ones(1).double(), torch.zeros(1).double()).isinf().all()


def test_bf16_ulp_is_the_one_of_the_metrics():
    x = torch.randn(1000) * torch.logspace(-38, 38, 1000)
    assert torch.equal(BF16.ulp(x), bf16_ulp(x))


# Five standard errors, at most sqrt(1/4 / 65536) each, of a share of 65536 weights: how they lie in
# the ranges that are predicted as one is chance.
SHARE = 5 * 0.5 / 256


def weights(shape, seed=0, scale=0.05):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=g) * scale).bfloat16()


@pytest.mark.parametrize("lr", [1e-6, 3e-5, 1e-4, 1e-3])
def test_predicted_share_is_what_a_real_adamw_step_leaves_unchanged(lr):
    w = weights((256, 256))
    p = torch.nn.Parameter(w.float())
    p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(1))
    torch.optim.AdamW([p], lr=lr).step()
    measured = float((p.detach().bfloat16() == w).float().mean())
    row = predict("layers.0.mlp.up_proj.weight", in_memory(w),
                  first_adamw_step("w", lr, 0.01), ["bf16"], 1)  # fmt: skip
    assert row.tallies["bf16"].share == pytest.approx(measured, abs=SHARE)
    dead = dead_zone_fraction(p.detach(), w.float())
    tally = row.tallies["bf16"]
    assert tally.dead / tally.elements == pytest.approx(dead, abs=SHARE)


@pytest.mark.parametrize("shape", [(256, 256), (512, 128)])
@pytest.mark.parametrize("fn", ["original", "match_rms_adamw"])
def test_predicted_share_is_what_a_real_muon_step_leaves_unchanged(shape, fn):
    w = weights(shape)
    p = torch.nn.Parameter(w.float())
    p.grad = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    torch.optim.Muon([p], lr=1e-3, weight_decay=0.0, adjust_lr_fn=fn).step()
    measured = float((p.detach().bfloat16() == w).float().mean())
    update = first_muon_step("w", shape, 1e-3, 0.0, fn)
    row = predict("layers.0.mlp.up_proj.weight", in_memory(w), update, ["bf16"], 1)
    assert 0.05 < measured < 0.95
    assert row.tallies["bf16"].share == pytest.approx(measured, abs=0.03)  # singular values


def test_median_steps_and_ratio_of_one_value():
    w = torch.full((1000,), 1.5)
    row = predict("x", in_memory(w), lambda m, a, b: torch.full_like(m, 1e-6), ["bf16"], 1)
    tally = row.tallies["bf16"]
    half = 2.0**-8
    assert tally.median_steps == pytest.approx(half / 1e-6, rel=0.02)
    assert tally.median_ratio == pytest.approx(1e-6 / half, rel=0.02)
    assert tally.share == 1.0
    lag = dict(tally.lag())
    assert lag[1000] == pytest.approx(1000)  # nothing arrived yet
    assert dict(tally.unmoved())[4096] == 0.0  # half / 1e-6 is 3906


@pytest.mark.parametrize("fmt", ["fp8-tensor", "fp8-block"])
def test_fp8_share_is_that_of_torchs_cast_with_the_scale(fmt):
    w = weights((256, 300), scale=0.05).float()
    w[3, 7] = 2.0  # one outlier: it takes the tensor's scale, and one block's
    lr = 2e-3
    row = predict("layers.0.mlp.up_proj.weight", in_memory(w),
                  lambda m, a, b: torch.full_like(m, lr), [fmt], 1)  # fmt: skip
    scale = torch.full_like(w, float(w.abs().max()) / 448)
    if fmt == "fp8-block":
        for i in range(0, 256, 128):
            for j in range(0, 300, 128):
                block = w[i : i + 128, j : j + 128]
                scale[i : i + 128, j : j + 128] = block.abs().max() / 448
    old, new = ((v / scale).to(torch.float8_e4m3fn).float() for v in (w, (w + lr).clamp(max=2.0)))
    assert row.tallies[fmt].share == pytest.approx(float((old == new).float().mean()), abs=2e-3)


def test_fp8_is_only_for_linear_matrices():
    for name, shape, n in (("model.norm.weight", (8,), 2), ("embed_tokens.weight", (8, 8), 2),
                           ("layers.0.mlp.up_proj.weight", (8, 8), 4)):  # fmt: skip
        row = predict(name, in_memory(torch.ones(shape)),
                      first_adamw_step("w", 1e-6, 0.0), FORMATS, 1)  # fmt: skip
        assert len(row.tallies) == n


def test_nonfinite_and_still_elements_are_counted_apart():
    w = torch.tensor([1.0, math.nan, math.inf, 2.0])
    row = predict("x", in_memory(w), lambda m, a, b: torch.zeros_like(m), ["bf16"], 1)
    tally = row.tallies["bf16"]
    assert (tally.elements, tally.nonfinite, tally.still, tally.discarded) == (2, 2, 2, 2)
    assert math.isinf(tally.median_steps) and math.isnan(tally.median_ratio)


@pytest.mark.parametrize(
    "name, dims, kind, layer",
    [
        ("model.layers.12.self_attn.q_proj.weight", 2, "attention", 12),
        ("model.layers.3.input_layernorm.weight", 1, "norm", 3),
        ("model.layers.3.mlp.experts.7.down_proj.weight", 2, "mlp", 3),
        ("model.embed_tokens.weight", 2, "embedding", None),
        ("lm_head.weight", 2, "head", None),
        ("transformer.h.0.ln_1.weight", 1, "norm", 0),
        ("transformer.wte.weight", 2, "embedding", None),
        ("transformer.h.0.attn.c_attn.bias", 1, "bias", 0),
        ("model.norm.weight", 1, "norm", None),
        ("layers.0.self_attn.q_norm.weight", 1, "norm", 0),
    ],
)
def test_kinds_and_layers(name, dims, kind, layer):
    assert (kind_of(name, dims), layer_of(name)) == (kind, layer)
