"""The numba backend against the torch reference: equal bits, whatever the shape or the threads."""

import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import (
    MUON_OPTIONS,
    OPTIONS,
    WRITTEN,
    assert_same_bits,
    bits_of,
    clone_batch,
    make_batch,
    make_muon_batch,
    option_id,
    refresh_grads,
    sow_specials,
)

import fc_optim
from fc_optim.kernels import cpu, reference
from fc_optim.kernels.batch import Batch, Segment

all_options = pytest.mark.parametrize("options", OPTIONS, ids=option_id)
all_muon_options = pytest.mark.parametrize("options", MUON_OPTIONS)
SIZES = [0, 1, 2, 7, 8, 9, 15, 16, 17, 63, 64, 65, 511, 512, 513, 1000, 1025, 4103, 16384, 20011]


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Torch's thread count; launches of any size use them."""
    monkeypatch.setattr(cpu, "SERIAL", 0)
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def assert_same_step(batch: Batch) -> tuple[Batch, Batch]:
    """Both backends' `adam_` on copies of the batch; returns the copies."""
    expected, actual = clone_batch(batch), clone_batch(batch)
    reference.adam_(expected)
    cpu.adam_(actual)
    assert_same_bits(expected, actual)
    return expected, actual


def assert_same_muon_step(expected: Batch, actual: Batch) -> tuple[Batch, Batch]:
    """Both backends' Muon kernels on equal batches, in place; Newton-Schulz is left out."""
    for name in ("muon_momentum_", "muon_update_"):
        getattr(reference, name)(expected)
        getattr(cpu, name)(actual)
        assert_same_bits(expected, actual)
    return expected, actual


def boxes(shape: tuple[int, int], cuts: tuple[int, int], base: int = 0) -> list[Segment]:
    """The four segments that cut a 2-d parameter at a row and at a column."""
    (rows, columns), (r, c) = shape, cuts
    return [
        Segment(0xFEDCBA98, base + r0 * columns + c0, r1 - r0, c1 - c0, columns)
        for r0, r1 in ((0, r), (r, rows))
        for c0, c1 in ((0, c), (c, columns))
    ]


@all_options
def test_twenty_steps(options: dict[str, Any], threads: int) -> None:
    expected = make_batch(SIZES, **options)
    actual = clone_batch(expected)
    for step in range(20):
        refresh_grads([expected, actual], generator_seed=step)
        reference.adam_(expected)
        cpu.adam_(actual)
        assert_same_bits(expected, actual)


@all_options
def test_every_small_size_and_base(options: dict[str, Any]) -> None:
    sizes = list(range(71))
    segments = [[Segment(n, base=5 * n + (n << 33), rows=1, inner=n, row_stride=n)] for n in sizes]
    assert_same_step(make_batch(sizes, segments=segments, **options))


@all_options
def test_special_values(options: dict[str, Any]) -> None:
    for seed in range(3):
        batch = make_batch([70, 513, 5000], generator_seed=seed, **options)
        sow_specials(batch, generator_seed=seed)
        expected, actual = assert_same_step(batch)
        assert_same_step(actual)
        for x in actual.masters:
            assert torch.equal(reference.canonical_bits(bits_of(x)), bits_of(x))


def nans(batch: Batch) -> set[int]:
    """The patterns of all NaNs in what kernels wrote, those of bf16 widened."""
    found = set()
    for x in [x for name in WRITTEN for x in getattr(batch, name) if x.is_floating_point()]:
        wide = bits_of(x).to(torch.int64) << 16 if x.element_size() == 2 else bits_of(x)
        found |= {b & 0xFFFFFFFF for b in wide[x.isnan()].tolist()}
    return found


@pytest.mark.parametrize("backend", [reference, cpu])
@all_options
def test_every_nan_of_a_step_is_the_same(options: dict[str, Any], backend: Any) -> None:
    """Copied and computed ones, of either sign, in masters, shadows and moments."""
    batch = sow_specials(make_batch([70, 513, 5000], **options))
    assert len(nans(batch)) > 5
    backend.adam_(batch)
    assert nans(batch) == {0x7FC00000}


@pytest.mark.parametrize("backend", [reference, cpu])
@all_muon_options
def test_every_nan_of_muon_is_the_same(options: dict[str, Any], backend: Any) -> None:
    batch = sow_specials(make_muon_batch([70, 513, 5000], **options))
    assert len(nans(batch)) > 5
    backend.muon_update_(batch)
    backend.muon_momentum_(batch)
    assert nans(batch) == {0x7FC00000}


def test_the_larger_of_two_zeros_is_the_older() -> None:
    """Where torch's maximum gives one or the other, as vectors and their remainders have it."""
    batch = make_batch([69], amsgrad=True)
    batch.max_exp_avg_sqs[0].fill_(-0.0)
    for x in (batch.exp_avg_sqs[0], batch.grads[0]):
        x.zero_()
    _, stepped = assert_same_step(batch)
    assert set(bits_of(stepped.max_exp_avg_sqs[0]).tolist()) == {-(2**31)}
    assert set(bits_of(stepped.exp_avg_sqs[0]).tolist()) == {0}


@pytest.mark.parametrize("taken", [2**24 - 1, 2**24, 2**32 - 2, 2**40, 2**62])
def test_the_dither_epoch_is_the_low_half_of_the_steps_taken(taken: int) -> None:
    """Whatever torch's count says, which has stopped."""
    batch = make_batch([40, 9], step=2**24, taken=taken)
    muon = make_muon_batch([40, 9], taken=taken)
    for after in (assert_same_step(batch)[1], assert_same_muon_step(muon, clone_batch(muon))[1]):
        assert [int(x) for x in after.epochs] == [taken + 1, taken + 2]
        for i, (w, s) in enumerate(zip(after.masters, after.containers, strict=True)):
            (segment,) = after.segments[i]
            t, key = (taken + 1 + i) % 2**32, segment.param_id
            expected = fc_optim.stochastic_round(w, seed=after.seed, param_id=key, t=t)
            assert torch.equal(s, expected)
        assert cpu.flag_foreign(after).tolist() == reference.flag_foreign(after).tolist() == [0, 0]
    assert int(batch.epochs[0]) == taken and int(batch.steps[0]) == 2**24


@pytest.mark.parametrize("backend", [reference, cpu])
def test_an_epoch_that_is_given_needs_no_counts(backend: Any) -> None:
    """And steps are counted all the same."""
    batch = make_batch([40], epoch=5, taken=7)
    backend.adam_(batch)
    assert int(batch.epochs[0]) == 8
    bare = replace(batch, epochs=[], cache={})
    assert backend.flag_foreign(bare).tolist() == [0]
    backend.round_(bare)
    assert backend.adopt_(bare, torch.ones(1, dtype=torch.int32)).tolist() == [0]


@all_muon_options
def test_ten_steps_of_muon(options: dict[str, Any], threads: int) -> None:
    expected = make_muon_batch(SIZES, **options)
    actual = clone_batch(expected)
    for step in range(10):
        refresh_grads([expected, actual], generator_seed=step)
        assert_same_muon_step(expected, actual)


@all_muon_options
def test_muon_special_values(options: dict[str, Any]) -> None:
    for seed in range(4):
        batch = make_muon_batch([70, 513, 20000], generator_seed=seed, **options)
        sow_specials(batch, generator_seed=seed)
        both = batch, clone_batch(batch)
        for name in ("muon_update_", "muon_momentum_", "muon_update_"):
            getattr(reference, name)(both[0])
            getattr(cpu, name)(both[1])
            assert_same_bits(*both)


def test_muon_rounds_its_update_to_nearest() -> None:
    """All bf16 patterns, with what decides a tie, a carry and a NaN in the lower half."""
    high = torch.arange(2**16).repeat_interleave(6) << 16
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF]).repeat(2**16)
    x = (high | low).to(torch.int32).view(torch.float32)
    batch = make_muon_batch([x.numel()], momentum=0.0)
    batch.grads, batch.momentum_buffers = [x], [x.clone()]
    assert_same_muon_step(batch, clone_batch(batch))


@pytest.mark.parametrize("container", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("epoch", [None, 0, 2**32 + 5])
def test_round_keeps_special_values(container: torch.dtype, epoch: int | None) -> None:
    batch = sow_specials(make_batch(SIZES, container=container, epoch=epoch, step=3))
    expected, actual = clone_batch(batch), clone_batch(batch)
    reference.round_(expected)
    cpu.round_(actual)
    assert_same_bits(expected, actual)
    assert_same_bits(replace(batch, containers=actual.containers), actual)


@pytest.mark.parametrize("container", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("shape", "cuts"), [((33, 70), (9, 23)), ((5, 2000), (2, 640)), ((700, 3), (100, 1))]
)
def test_a_sharded_parameter_has_the_elements_of_the_whole(
    container: torch.dtype, shape: tuple[int, int], cuts: tuple[int, int], threads: int
) -> None:
    numel = shape[0] * shape[1]
    segment = [Segment(0xFEDCBA98, base=3, rows=1, inner=numel, row_stride=numel)]
    whole = make_batch([numel], segments=[segment], container=container)
    parts = boxes(shape, cuts, base=3)

    def shards(x: torch.Tensor) -> list[torch.Tensor]:
        row_parts = x.view(shape).split([cuts[0], shape[0] - cuts[0]])
        sizes = [cuts[1], shape[1] - cuts[1]]
        return [y.clone().flatten() for rows in row_parts for y in rows.split(sizes, dim=1)]

    def cut(batch: Batch) -> Batch:
        names = ("containers", "masters", "grads", "exp_avgs", "exp_avg_sqs")
        lists: dict[str, Any] = {n: shards(getattr(batch, n)[0]) for n in names}
        lists |= {n: [getattr(batch, n)[0].clone() for _ in parts] for n in ("epochs", "steps")}
        lists |= {"segments": [[s] for s in parts], "hypers": batch.hypers * 4}
        return replace(batch, **lists)

    def in_one_buffer(batch: Batch) -> Batch:
        lists: dict[str, Any] = {
            n: [torch.cat(shards(getattr(batch, n)[0]))]
            for n in ("containers", "masters", "grads", "exp_avgs", "exp_avg_sqs")
        }
        offsets = [sum(s.numel for s in parts[:k]) for k in range(4)]
        placed = [replace(s, offset=o) for s, o in zip(parts, offsets, strict=True)]
        return replace(clone_batch(batch), **lists, segments=[placed])

    sharded, joined = cut(whole), in_one_buffer(whole)
    assert_same_step(sharded)
    for batch in (whole, sharded, joined):
        cpu.adam_(batch)
    assert_same_bits(cut(whole), sharded)
    assert_same_bits(in_one_buffer(whole), joined)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_segments(data: st.DataObject) -> None:
    """Several segments per tensor, in any order and with gaps, on bases that no 8 divides."""
    small, large = st.integers(0, 40), st.integers(0, 2**40)
    sizes, segments = [], []
    for _ in range(data.draw(st.integers(1, 3))):
        offset, placed = data.draw(small), []
        for _ in range(data.draw(st.integers(0, 4))):
            rows, inner = data.draw(small), data.draw(small)
            stride = inner + data.draw(small)
            base, param_id = data.draw(large), data.draw(st.integers(0, 2**32 - 1))
            placed.append(Segment(param_id, base, rows, inner, stride, offset))
            offset += rows * inner + data.draw(small)
        random.Random(offset).shuffle(placed)
        sizes.append(offset)
        segments.append(placed)
    options = data.draw(st.sampled_from(OPTIONS))
    _, stepped = assert_same_step(make_batch(sizes, segments=segments, **options))
    assert cpu.flag_foreign(stepped).tolist() == [0] * len(sizes)
    options = data.draw(st.sampled_from(MUON_OPTIONS))
    muon = make_muon_batch(sizes, segments=segments, **options)
    assert_same_muon_step(muon, clone_batch(muon))


@pytest.mark.parametrize("found_inf", [0.0, 1.0])
def test_found_inf_leaves_all_alone(found_inf: float) -> None:
    batch = make_batch([0, 100, 5000], grad_scale=8.0, found_inf=found_inf)
    _, actual = assert_same_step(batch)
    if found_inf:
        assert_same_bits(batch, actual)
    muon = make_muon_batch([0, 100, 5000], grad_scale=8.0, found_inf=found_inf)
    _, actual = assert_same_muon_step(clone_batch(muon), clone_batch(muon))
    if found_inf:
        assert_same_bits(muon, actual)


def test_an_empty_batch() -> None:
    empty = make_batch([])
    cpu.adam_(empty)
    cpu.muon_momentum_(empty)
    cpu.muon_update_(empty)
    cpu.round_(empty)
    assert cpu.flag_foreign(empty).shape == (0,)


@pytest.mark.parametrize("container", [torch.bfloat16, torch.float32], ids=str)
def test_flags_are_those_of_the_reference(container: torch.dtype, threads: int) -> None:
    sizes = [0, 1, 9, 1000, 1024, 1025, 30_000, 30_000, 2_500, 70, 4096, 4097]
    segments: list[Any] = [[Segment.whole(i, n)] for i, n in enumerate(sizes)]
    segments[8] = [
        Segment(5, base=77, rows=50, inner=30, row_stride=101),
        Segment(5, base=11, rows=1, inner=1000, row_stride=1000, offset=1500),
    ]
    batch = sow_specials(make_batch(sizes, container=container, segments=segments, epoch=3))
    cpu.round_(batch)
    assert cpu.flag_foreign(batch).tolist() == [0] * len(sizes)
    for seed in range(5):
        changed = clone_batch(batch)
        for x in changed.containers:
            generator = torch.Generator().manual_seed(seed)
            hit = torch.rand(x.shape, generator=generator) < 20 / max(x.numel(), 1) * (seed / 2)
            x[hit] += 1.0
        flags = cpu.flag_foreign(changed)
        assert flags.dtype == torch.int32
        assert torch.equal(flags, reference.flag_foreign(changed))
    assert flags.any() and not flags.all()


@pytest.mark.parametrize("container", [torch.bfloat16, torch.float32], ids=str)
def test_masters_are_made_canonical(container: torch.dtype, threads: int) -> None:
    batch = make_batch([0, 3, 70, 1030, 40_000], container=container)
    for x in batch.masters[:-1]:
        x.view(torch.int32)[::2] = torch.randint(-(2**31), 2**31, x[::2].shape).to(torch.int32)
    batch.masters[-1].view(torch.int32)[[700, -1]] = torch.tensor([-1, 0x7F7FFFFF]).int()
    bare = Batch([], batch.masters, batch.segments, [], seed=0, epoch=0)
    expected, actual = clone_batch(bare), clone_batch(bare)
    reference.canonical_(expected)
    cpu.canonical_(actual)
    assert_same_bits(expected, actual)
    for before, after in zip(bare.masters, actual.masters, strict=True):
        assert torch.equal(bits_of(after), reference.canonical_bits(bits_of(before)))
    assert nans(actual) == {0x7FC00000}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_does_not_wait_for_its_parents_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu, "SERIAL", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    batch = make_batch([100_000])
    expected = clone_batch(batch)
    cpu.adam_(expected)  # starts the pool
    pairs = [
        *zip(expected.masters + expected.containers, batch.masters + batch.containers, strict=True)
    ]
    child = os.fork()
    if not child:  # numpy compares: torch's own threads hang after a fork
        code = 2
        try:
            cpu.adam_(batch)
            code = int(any((bits_of(x).numpy() != bits_of(y).numpy()).any() for x, y in pairs))
        finally:
            os._exit(code)
    deadline, ended, status = time.monotonic() + 20, 0, 0
    while not ended and time.monotonic() < deadline:
        time.sleep(0.01)
        ended, status = os.waitpid(child, os.WNOHANG)
    if not ended:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert ended, "the child hangs"
    assert os.waitstatus_to_exitcode(status) == 0


def test_strided_tensors_are_refused() -> None:
    batch = make_batch([50])
    batch.grads = [torch.randn(100)[::2]]
    with pytest.raises(ValueError, match=r"batch.grads\[0\]: strides \(2,\) .* contiguous"):
        cpu.adam_(batch)
    assert batch.steps[0] == batch.epochs[0] == 0
    muon = make_muon_batch([50])
    muon.updates = [torch.zeros(100, dtype=torch.bfloat16)[::2]]
    for kernel in (cpu.muon_momentum_, cpu.muon_update_):
        with pytest.raises(ValueError, match="contiguous"):
            kernel(muon)
    assert muon.epochs[0] == 0
