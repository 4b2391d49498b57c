"""One batch over many steps: what the caller may replace in it, and what backends look at again."""

import random
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from kernel_cases import (
    MUON_OPTIONS,
    OPTIONS,
    assert_same_bits,
    clone_batch,
    make_batch,
    make_muon_batch,
    option_id,
)

from fc_optim.kernels import cpu, cpu_tables, reference
from fc_optim.kernels.batch import Batch, Segment, distinct_hypers

SIZES = [0, 1, 70, 1030]


def replaced(batch: Batch, step: int) -> dict[str, Any]:
    """What a caller may give a batch before a step."""
    generator = torch.Generator().manual_seed(step)
    new: dict[str, Any] = {
        "grads": [torch.randn(x.shape, generator=generator).to(x.dtype) for x in batch.grads],
        "grad_scale": [None, torch.tensor([8.0]), torch.tensor(2.0)][step % 3],
        "found_inf": [None, torch.tensor([0.0]), torch.tensor(1.0)][step // 2 % 3],
        "epoch": [None, 3, 2**33 + step][step // 3 % 3],
        "counts": torch.zeros(len(batch.masters), 4, dtype=torch.int64) if step % 2 else None,
        "count_all": step % 4 == 3,
    }
    if step % 3 == 1:
        kind = "muon_hypers" if batch.muon_hypers else "hypers"
        new[kind] = [replace(h, lr=1e-3 / (1 + step)) for h in getattr(batch, kind)]
    return new


@pytest.mark.parametrize(
    ("make", "options"),
    [
        *(pytest.param(make_batch, o, id=option_id(o)) for o in OPTIONS),
        *(pytest.param(make_muon_batch, o, id=f"muon {option_id(o)}") for o in MUON_OPTIONS),
    ],
)
def test_a_kept_batch_steps_as_a_new_one(make: Any, options: dict[str, Any]) -> None:
    kept = make(SIZES, **options)
    fresh = clone_batch(kept)
    muon = bool(kept.muon_hypers)
    for step in range(12):
        for name, value in replaced(kept, step).items():
            setattr(kept, name, value)
            counts = name == "counts" and value is not None
            setattr(fresh, name, value.clone() if counts else value)
        fresh = replace(fresh, cache={}, shared={})
        for name in ("muon_momentum_", "muon_update_") if muon else ("adam_",):
            getattr(reference, name)(fresh)
            getattr(cpu, name)(kept)
        assert_same_bits(fresh, kept)
        if kept.counts is not None:
            assert fresh.counts is not None and torch.equal(fresh.counts, kept.counts)
        assert torch.equal(cpu.flag_foreign(kept), reference.flag_foreign(fresh))


def test_only_the_addresses_of_gradients_are_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no segment: nothing else takes time with the number of tensors."""
    read: list[str] = []
    addresses = cpu_tables._addresses

    def spy(name: str, tensors: Any) -> Any:
        read.append(name)
        return addresses(name, tensors)

    monkeypatch.setattr(cpu_tables, "_addresses", spy)
    batch = make_batch(SIZES, amsgrad=True)
    cpu.adam_(batch)
    assert sorted(read) == sorted(
        ["containers", "masters", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs"]
        + ["steps", "epochs"]
    )
    read.clear()
    monkeypatch.setattr(Segment, "numel", property(lambda s: pytest.fail("a segment was read")))
    cpu.adam_(batch)
    batch.grads = [x.clone() for x in batch.grads]
    cpu.adam_(batch)
    assert read == ["grads", "grads"]
    cpu.round_(batch)
    cpu.canonical_(batch)
    assert read == ["grads", "grads"]


def test_a_cache_keeps_no_gradient_alive() -> None:
    batch = make_batch(SIZES)
    cpu.adam_(batch)
    gradient = weakref.ref(batch.grads[3])
    batch.grads = []
    assert gradient() is None


def test_batches_may_share_a_cache_in_turn() -> None:
    """Other lists and other segments are seen as such."""
    batch = make_batch([100, 5000])
    cpu.adam_(batch)
    moved = replace(clone_batch(batch), cache=batch.cache)
    moved.segments = [[Segment.whole(7, 100)], [Segment.whole(9, 5000)]]
    for b in (moved, batch, moved):
        expected = clone_batch(b)
        reference.adam_(expected)
        cpu.adam_(b)
        assert_same_bits(expected, b)


def test_tensors_of_a_batch_may_have_any_step_counts() -> None:
    """Each gets the scalars of its own count and hyper-parameters."""
    batch = make_batch([5] * 400, beta2=0.999)
    random.seed(0)
    batch.steps = [torch.tensor(float(random.choice([0, 1, 7, i, 2**20 + i]))) for i in range(400)]
    expected = clone_batch(batch)
    for _ in range(2):
        reference.adam_(expected)
        cpu.adam_(batch)
        assert_same_bits(expected, batch)


def test_equal_hypers_are_one_and_tensors_are_themselves() -> None:
    (a, b) = {id(h): h for h in make_batch([1, 1]).hypers}.values()
    rate = torch.tensor(0.1)
    c, d = replace(a, lr=rate), replace(a, lr=rate.clone())
    hypers = [a, replace(a), b, c, replace(c), d, replace(a, lr=0.5)]
    index, distinct = distinct_hypers(hypers)
    assert index == [0, 0, 1, 2, 2, 3, 4]
    assert [x is y for x, y in zip(distinct, [a, b, c, d, hypers[-1]], strict=True)] == [True] * 5
