"""Step metrics against their plain definitions, on every backend and however parameters are cut."""

import copy
import io
import logging
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import (
    MUON_OPTIONS,
    OPTIONS,
    assert_same_bits,
    clone_batch,
    make_batch,
    make_muon_batch,
    option_id,
    sow_specials,
)
from models import assert_same, backward, tiny, train
from torch import Tensor, nn

from fc_optim import FairCastAdamW, FairCastOptimizer, metrics, muon_param_groups
from fc_optim.kernels import cpu, gpu, reference
from fc_optim.kernels.batch import (
    COUNTS,
    Batch,
    Segment,
    count_size,
    is_counted,
    scattered_positions,
)
from fc_optim.kernels.reference import LARGEST_BF16, flat_indices
from fc_optim.metrics.step import HISTORY, Counts

LARGEST = torch.tensor(LARGEST_BF16, dtype=torch.int32).view(torch.float32)
BACKENDS = {"reference": reference, "cpu": cpu, "triton": gpu}
DEVICES = {
    "reference": "cpu",
    "cpu": "cpu",
    "triton": "cuda" if torch.cuda.is_available() else "cpu",
}
both = pytest.mark.parametrize("count_all", [False, True], ids=["sixteenth", "all"])

# Triton's interpreter computes with numpy, which warns of every overflow and NaN.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def words(container: Tensor) -> Tensor:
    """The bf16 words; torch's cast of an fp32 container would drop the sign of a NaN."""
    return (container.float().view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)


def plain(old_m: Tensor, m: Tensor, old_s: Tensor, s: Tensor) -> list[int]:
    """n and COUNTS by the definitions of `fc_optim.metrics`."""
    n = m.numel()
    if not n:
        return [0] * 5
    changed = round(metrics.changed_ratio(words(s), words(old_s)) * n)
    dead = round(metrics.dead_zone_fraction(m, old_m) * n)
    return [n, changed, dead, int((m.abs() == LARGEST).sum()), int((~m.isfinite()).sum())]


def plain_counts(before: Batch, after: Batch) -> list[list[int]]:
    """Of every segment."""
    rows = []
    for i, segments in enumerate(before.segments):
        for s in segments:
            at = slice(s.offset, s.offset + s.numel)
            hit = is_counted(flat_indices(s)) | after.count_all
            lists = (before.masters, after.masters, before.containers, after.containers)
            rows.append(plain(*(x[i].cpu().view(-1)[at][hit] for x in lists)))
    return rows


def check(batch: Batch, count_all: bool, kernel: str, backend: str) -> Batch:
    """A kernel of a backend counts what it does, and does what it does without counting."""
    before = clone_batch(batch, DEVICES[backend])
    counted, silent = clone_batch(before), clone_batch(before)
    rows = sum(map(len, batch.segments))
    device = DEVICES[backend]
    counted.counts = torch.zeros(rows, len(COUNTS), dtype=torch.int64, device=device)
    counted.count_all = count_all
    getattr(BACKENDS[backend], kernel)(counted)
    getattr(BACKENDS[backend], kernel)(silent)
    assert_same_bits(counted, silent)
    expected = plain_counts(before, counted)
    assert [row[1:] for row in expected] == counted.counts.tolist()
    if not count_all:
        sizes = [count_size(s) for segments in batch.segments for s in segments]
        assert [row[0] for row in expected] == sizes
    return counted


def published(batch: Batch) -> Batch:
    reference.round_(batch)
    return batch


CASES = [("adam_", make_batch, options) for options in OPTIONS]
CASES += [("muon_update_", make_muon_batch, options) for options in MUON_OPTIONS]
all_cases = pytest.mark.parametrize(
    ("kernel", "make", "options"), CASES, ids=lambda x: option_id(x) if isinstance(x, dict) else ""
)


@both
@all_cases
def test_counts_are_the_plain_definitions(kernel, make, options, count_all):
    for lr in (1e-2, 1e-5):
        batch = published(make([0, 1, 7, 512, 1025, 20_011, 70_000], lr=lr, **options))
        found = [check(batch, count_all, kernel, b).counts for b in ("reference", "cpu")]
        assert torch.equal(*found)


@both
@all_cases
def test_special_values_are_counted(kernel, make, options, count_all):
    batch = published(sow_specials(make([9, 3000, 20_011], **options)))
    for backend in ("reference", "cpu"):
        counts: Any = check(batch, count_all, kernel, backend).counts.sum(0)
        assert counts[2] > 0 and counts[3] > 0


@both
@pytest.mark.parametrize(("kernel", "make", "options"), [CASES[0], CASES[1], CASES[-1]])
def test_triton_counts_the_same(kernel, make, options, count_all):
    batch = published(make([0, 7, 1023, 1025, 18_000], lr=1e-4, **options))
    expected = check(batch, count_all, kernel, "reference").counts
    assert torch.equal(check(batch, count_all, kernel, "triton").counts.cpu(), expected)
    check(published(sow_specials(make([9, 2500], **options))), count_all, kernel, "triton")


CUT = [  # runs on any base, boxes (shards of columns), empty segments
    [Segment(7, 3, 1, 10, 0), Segment(8, 2**35 + 5, 1, 1500, 0, offset=10)],
    [Segment(9, 16_000, 1, 1030, 0)],
    [Segment(7, 16_390, 7, 10, 33), Segment(8, 2**35 + 5, 30, 50, 64, offset=70)],
    [Segment(10, 0, 3, 0, 5), Segment(11, 0, 0, 4, 5), Segment(12, 9, 1100, 1, 17)],
]


@both
@pytest.mark.parametrize("container", [torch.bfloat16, torch.float32], ids=str)
def test_any_segments_on_every_backend(container, count_all):
    sizes = [max(s.offset + s.numel for s in x) for x in CUT]
    batch = published(make_batch(sizes, segments=CUT, lr=1e-4, container=container))
    muon = published(make_muon_batch(sizes, segments=CUT, lr=1e-4, container=container))
    for kernel, b in (("adam_", batch), ("muon_update_", muon)):
        expected, *others = (check(b, count_all, kernel, name).counts for name in BACKENDS)
        assert all(torch.equal(x.cpu(), expected) for x in others)


segments_of_any_kind = st.builds(
    lambda base, rows, inner, gap: Segment(5, base, rows, inner, inner + gap),
    st.integers(0, 2**40), st.integers(0, 60), st.integers(0, 3000), st.integers(0, 20_000),
)  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(segments_of_any_kind)
def test_the_size_of_what_is_counted(segment):
    assert count_size(segment) == int(is_counted(flat_indices(segment)).sum())


@settings(max_examples=100, deadline=None)
@given(segments_of_any_kind, st.integers(1, 40), st.integers(0, 3000))
def test_a_sample_does_not_depend_on_the_cut(segment, every, cut):
    """The positions are those of the elements, and about one in `every`."""
    positions = scattered_positions(segment, every)
    assert positions.unique().numel() == positions.numel()
    whole = flat_indices(segment)[positions]
    parts = [s for s in segment.split(max(cut, 1)) if s.numel] if segment.numel < 20_000 else []
    found = [flat_indices(s)[scattered_positions(s, every)] for s in parts]
    if parts:
        assert torch.equal(torch.cat(found).sort().values, whole.sort().values)
    if every == 1:
        assert positions.numel() == segment.numel


def test_a_sixteenth_of_any_columns_is_counted():
    """No column of a matrix is favoured, whatever its width; small parameters are counted whole."""
    e = torch.arange(1 << 24)
    hit = is_counted(e)
    assert hit.float().mean() == 1 / 16 and hit[:1024].all()
    for width in (2048, 4096, 16_384):
        per_block = hit.view(-1, width).view(-1, width // 1024, 1024)[:, :, 0].float().mean(0)
        assert (per_block * 16 - 1).abs().max() < 0.1


def test_sampling_reads_the_values_at_the_positions():
    for dtype in (torch.bfloat16, torch.float32):
        tensors = [torch.randn(n).to(dtype) for n in (1, 900, 5000)]
        positions = [
            torch.randint(t.numel(), (k,)) for t, k in zip(tensors, (1, 0, 700), strict=True)
        ]
        expected = torch.cat([t[p].float() for t, p in zip(tensors, positions, strict=True)])
        for name, backend in BACKENDS.items():
            cache: Any = {}
            there = [t.to(DEVICES[name]) for t in tensors]
            for _ in range(2):
                assert torch.equal(backend.sample(there, positions, cache).cpu(), expected)
            there = [t.clone() for t in there]  # at other addresses
            assert torch.equal(backend.sample(there, positions, cache).cpu(), expected)


# ---- The optimizer


class Lion(torch.optim.Optimizer):
    """An optimizer without a kernel."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad.sign(), alpha=group["lr"])
        return loss


def wide(dtype=torch.float32) -> nn.Module:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(300, 260), nn.LayerNorm(260), nn.Linear(260, 9))
    return model.to(dtype)


def muon(model: nn.Module, **options: Any) -> FairCastOptimizer:
    return FairCastAdamW(muon_param_groups(model), lr=1e-4, **options)


def optimizers(dtype: torch.dtype) -> Iterator[tuple[str, nn.Module, Any]]:
    for name, base in (("adamw", torch.optim.AdamW), ("adam", torch.optim.Adam), ("lion", Lion)):
        yield (
            name,
            wide(dtype),
            lambda m, base=base, **kw: FairCastOptimizer(base, m.named_parameters(), lr=1e-5, **kw),
        )
    yield "muon", wide(dtype), muon


def snapshot(opt) -> dict[str, tuple[Tensor, Tensor]]:
    return {
        e.identity.name: (e.state["master"].clone().flatten(), e.param.detach().clone().flatten())
        for e in opt.managed()
    }


@pytest.mark.parametrize("dither", ["fresh", "sync", "held"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_optimizers_figures(dtype, dither):
    """Counts of every parameter, captured and lag, against full copies of all weights."""
    for mode in (True, "all"):
        for name, model, make in optimizers(dtype):
            opt = make(model, dither=dither, metrics=mode)
            opt.publish()
            first = before = snapshot(opt)
            served_start = torch.cat([s.float() for _, s in first.values()])
            history = [(0, served_start)]
            for step in range(1, 6):
                opt.zero_grad()
                x = torch.randn(4, 300, generator=torch.Generator().manual_seed(step)).to(dtype)
                model(x).float().square().mean().backward()
                opt.step()
                after, figures = snapshot(opt), opt.metrics()
                assert list(figures.parameters) == list(after) and figures.sampled == (mode is True)
                for key, counts in figures.parameters.items():
                    hit = is_counted(torch.arange(len(after[key][0]))) | (mode == "all")
                    (old_m, old_s), (m, s) = before[key], after[key]
                    expected = plain(old_m[hit], m[hit], old_s[hit], s[hit])
                    assert counts == Counts(*expected), (name, key, step)
                if dither == "sync" and step == 3:
                    opt.publish(redraw=True)
                    after = snapshot(opt)
                before = after
                # Every third coordinate or so is in the sample of so small a model.
                strands = [s for kind in figures._strands.values() for s in kind]
                m, s = (torch.cat([getattr(x, a) if a == "served" else x.masters[-1]
                                   for x in strands]) for a in ("masters", "served"))  # fmt: skip
                w0 = torch.cat([x.start for x in strands])
                assert figures.captured == pytest.approx(metrics.captured(s, m, w0))
                masters = [(i, torch.cat([x.masters[i] for x in strands])) for i in range(step + 1)]
                assert figures.lag_steps == pytest.approx(
                    metrics.lag_steps(s, masters, w0), abs=1e-9
                )
                history.append((step, m))
            total = figures.total
            assert total.n == sum(c.n for c in figures.parameters.values())
            assert figures.steps == (0, 1, 2, 3, 4, 5)


def test_the_sample_of_a_small_model_is_all_of_it():
    model = tiny()
    opt = FairCastAdamW(model.named_parameters(), lr=1e-4, metrics=True)
    opt.publish()
    start = {n: s.float() for n, (_, s) in snapshot(opt).items()}
    tracker = metrics.MovementTracker(start)
    for i in range(8):
        train(model, opt, steps=1, first=i)
        now = snapshot(opt)
        expected = tracker.record(
            {n: m for n, (m, _) in now.items()}, {n: s for n, (_, s) in now.items()}
        )
        figures = opt.metrics()
        assert figures.captured == pytest.approx(expected.captured)
        assert figures.lag_steps == pytest.approx(expected.lag_steps, abs=1e-9)
        assert figures.total.changed_ratio == pytest.approx(expected.changed_ratio)
        assert figures.total.dead_zone_fraction == pytest.approx(expected.dead_zone_fraction)


@pytest.mark.parametrize("base", [torch.optim.AdamW, Lion])
def test_counting_changes_no_bit(base):
    models = [tiny() for _ in range(3)]
    for model, mode in zip(models, (False, True, "all"), strict=True):
        train(model, FairCastOptimizer(base, model.named_parameters(), lr=1e-3, metrics=mode))
    assert_same(models[0], models[1])
    assert_same(models[0], models[2])


def test_figures_are_those_of_the_last_step_and_stay():
    model = tiny()
    opt = FairCastAdamW(model.named_parameters(), lr=1e-3, metrics="all")
    empty = opt.metrics()
    assert empty.total.n == 0 and math.isnan(empty.total.changed_ratio)
    assert math.isnan(empty.captured) and math.isnan(empty.lag_steps)
    train(model, opt, steps=1)
    first, kept = opt.metrics(), copy.deepcopy(opt.metrics().parameters)
    captured = opt.metrics().captured
    train(model, opt, steps=1, first=1)
    assert opt.metrics().served_version == 2 and first.served_version == 1
    assert first.parameters == kept and first.captured == captured
    assert opt.metrics().parameters != kept
    opt.zero_grad()
    opt.step()  # nothing has a gradient
    assert opt.metrics().total == Counts(0, 0, 0, 0, 0)


@pytest.mark.parametrize("base", [torch.optim.AdamW, Lion])
def test_a_skipped_step_counts_nothing(base):
    model = tiny()
    opt = FairCastOptimizer(base, model.named_parameters(), lr=1e-3, metrics="all")
    train(model, opt, steps=1)
    opt.grad_scale, opt.found_inf = torch.ones(1), torch.ones(1)
    backward(model)
    opt.step()
    assert opt.metrics().total == Counts(0, 0, 0, 0, 0)
    opt.found_inf = torch.zeros(1)
    opt.step()
    assert opt.metrics().total.n == sum(p.numel() for p in model.parameters())


def test_a_closure_of_an_unfused_optimizer():
    model = tiny()
    opt = FairCastOptimizer(Lion, model.named_parameters(), lr=1e-3, metrics="all")
    opt.publish()
    before = snapshot(opt)

    def closure():
        opt.zero_grad()
        return backward(model)

    opt.step(closure)
    after = snapshot(opt)
    for name, counts in opt.metrics().parameters.items():
        assert counts == Counts(
            *plain(before[name][0], after[name][0], before[name][1], after[name][1])
        )


def test_a_load_begins_anew():
    model = tiny()
    opt = FairCastAdamW(model.named_parameters(), lr=1e-3, metrics=True)
    train(model, opt)
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert opt.metrics().total.n == 0
    train(model, opt, steps=1)
    assert opt.metrics().steps == (0, 1)
    with torch.no_grad():
        model[0].weight.add_(1.0)
    opt.adopt_weights()
    train(model, opt, steps=2)
    assert opt.metrics().steps == (0, 1, 2)
    opt.add_param_group({"params": [nn.Parameter(torch.ones(3))], "param_names": ["late"]})
    train(model, opt, steps=1)
    assert opt.metrics().steps == (0, 1) and "late" in opt.metrics().parameters


def test_history_is_bounded():
    p = nn.Parameter(torch.ones(3))
    opt = FairCastAdamW([p], lr=1e-3, metrics=True)
    for _ in range(HISTORY + 5):
        p.grad = torch.ones(3)
        opt.step()
    assert len(opt.metrics().steps) == HISTORY + 1 and opt.metrics().steps[-1] == HISTORY + 5
    assert opt.metrics().captured == pytest.approx(1.0, abs=0.1)


def test_the_option():
    model = tiny()
    off = FairCastAdamW(model.parameters())
    with pytest.raises(RuntimeError, match="metrics=True"):
        off.metrics()
    with pytest.raises(ValueError, match="metrics: 'some'"):
        FairCastAdamW(model.parameters(), metrics="some")
    cls = FairCastOptimizer(torch.optim.AdamW, metrics="all")
    opt = cls(model.parameters(), lr=1e-3)
    train(model, opt, steps=1)
    twin = copy.deepcopy(opt)
    assert twin.metrics().total.n == 0
    buffer = io.BytesIO()
    torch.save(opt, buffer)
    buffer.seek(0)
    again = torch.load(buffer, weights_only=False)
    assert again._telemetry.mode == "all"


# ---- The precision report


def test_the_report_lists_groups():
    model = tiny(torch.bfloat16)
    head = nn.Linear(4, 2)
    groups = [
        {"params": list(model.parameters()), "lr": 1e-3},
        {"params": list(head.parameters()), "served_dtype": None},
    ]
    opt = FairCastAdamW(groups, backend="reference", fp32_grads=True)
    first, second = opt.report().groups
    assert (first.master, first.forward, first.grad, first.served) == (
        "fp32",
        "bf16",
        "fp32",
        "bf16",
    )
    assert (first.algorithm, first.backend, first.parameters) == ("adamw", "reference", 6)
    assert first.elements == sum(p.numel() for p in model.parameters())
    assert (second.master, second.served, second.backend) == ("-", "fp32", "-")
    lines = str(opt.report()).splitlines()
    assert lines[0].split()[:3] == ["group", "parameters", "elements"] and len(lines) == 4
    column = lines[0].index("master")
    assert lines[1][column:].startswith("fp32") and lines[2][column:].startswith("-")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert FairCastAdamW(tiny().parameters()).report().groups[0].forward == "bf16"


def test_one_line_at_the_first_step(caplog):
    model = tiny()
    opt = FairCastAdamW(model.parameters())
    with caplog.at_level(logging.INFO, logger="fc_optim"):
        train(model, opt)
    (record,) = [r for r in caplog.records if "master fp32" in r.message]
    assert "6 parameters" in record.message and "\n" not in record.message


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_nothing_waits_for_the_device():
    model = wide().cuda()
    opt = FairCastAdamW(model.named_parameters(), lr=1e-5, metrics=True)
    for i in range(3):
        torch.cuda.set_sync_debug_mode("error" if i == 2 else "default")
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        opt.step()
        figures = opt.metrics()
    torch.cuda.set_sync_debug_mode("default")
    assert figures.total.n == sum(
        count_size(Segment.whole(0, p.numel())) for p in model.parameters()
    )
