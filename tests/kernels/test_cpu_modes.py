"""The floating-point mode of a thread changes no bit: flushed subnormals, other roundings."""

import contextlib
import ctypes
import platform
from collections.abc import Iterator
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

from fc_optim.kernels import cpu, reference
from fc_optim.kernels.batch import Batch

TINY = 1e-39  # among fp32's subnormal numbers
SIZES = [70, 20_000, 300_000]  # some twenty blocks, and more than torch gives to one thread


@contextlib.contextmanager
def flushing() -> Iterator[None]:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def flushes() -> bool:
    return (torch.full((1,), TINY) * 0.5).view(torch.int32).item() == 0


def subnormal(batch: Batch) -> Batch:
    """Masters, gradients and moments between fp32's smallest and a few normal numbers."""
    for tensors in (batch.masters, batch.grads, batch.exp_avgs, batch.momentum_buffers):
        for x in tensors:
            x.mul_(TINY)
    for x in batch.exp_avg_sqs + batch.max_exp_avg_sqs:
        x.mul_(TINY * 100)
    for x in batch.updates:
        x.mul_(TINY)
    return batch


def step(backend: Any, batch: Batch) -> Batch:
    for _ in range(3):
        if batch.muon_hypers:
            backend.muon_momentum_(batch)
            backend.muon_update_(batch)
        else:
            backend.adam_(batch)
    return batch


CASES = [
    *(pytest.param(make_batch, {**o, "lr": TINY}, id=option_id(o)) for o in OPTIONS),
    *(pytest.param(make_muon_batch, o, id=f"muon {option_id(o)}") for o in MUON_OPTIONS),
]


@pytest.mark.parametrize(("make", "options"), CASES)
def test_flushing_threads_change_no_bit(
    make: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the caller's thread, in those of an older pool, and in those that it starts."""
    monkeypatch.setattr(cpu, "SERIAL", 0)
    batch = subnormal(make(SIZES, **options))
    expected = step(reference, clone_batch(batch))
    assert any((x.abs() < 2**-126).any() and (x != 0).any() for x in expected.masters)
    for threads in (1, 2, 5):
        monkeypatch.setattr(torch, "get_num_threads", lambda n=threads: n)
        assert_same_bits(expected, step(cpu, clone_batch(batch)))
        with flushing():
            assert_same_bits(expected, step(cpu, clone_batch(batch)))
            monkeypatch.setattr(cpu, "_pool", None)
            cpu.flag_foreign(batch)  # integers alone: it starts threads in the mode that it finds
            assert_same_bits(expected, step(cpu, clone_batch(batch)))
            assert flushes()
        assert_same_bits(expected, step(cpu, clone_batch(batch)))
        assert not flushes()


@pytest.mark.parametrize(("make", "options"), CASES[:2] + CASES[-2:])
def test_the_reference_does_not_flush_either(make: Any, options: dict[str, Any]) -> None:
    """Nor do torch's own threads, which inherit the mode of the thread that starts them."""
    batch = subnormal(make(SIZES, **options))
    expected = step(reference, clone_batch(batch))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with flushing():
            torch.rand(1 << 20).mul_(2)  # starts them
            assert_same_bits(expected, step(reference, clone_batch(batch)))
            assert flushes()
        assert_same_bits(expected, step(reference, clone_batch(batch)))
        assert not flushes()
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(platform.system() != "Linux", reason="needs the C library's fesetround")
@pytest.mark.parametrize("make", [make_batch, make_muon_batch])
def test_another_rounding_mode_changes_no_bit(make: Any) -> None:
    upward = {"x86_64": 0x800, "aarch64": 0x400000}[platform.machine()]
    libm = ctypes.CDLL("libm.so.6")
    batch = make([5000, 70])
    expected = step(reference, clone_batch(batch))
    assert libm.fesetround(upward) == 0
    try:
        got = step(cpu, clone_batch(batch))
        assert libm.fegetround() == upward
    finally:
        libm.fesetround(0)
    assert_same_bits(expected, got)
