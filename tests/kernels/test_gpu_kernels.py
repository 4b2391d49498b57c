"""The Triton backend against the reference, bit for bit: in triton's interpreter without a GPU."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from kernel_cases import (
    FEW_OR_LONG,
    OPTIONS,
    assert_same_bits,
    bits_of,
    clone_batch,
    make_batch,
    make_muon_batch,
    option_id,
    refresh_grads,
    sow_specials,
)
from torch import Tensor

from fc_optim.kernels import gpu, gpu_kernels, gpu_tables, reference
from fc_optim.kernels.batch import AdamHyper, Batch, MuonHyper, Segment

# The interpreter computes with numpy, which warns of every overflow and NaN.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
few_or_long = pytest.mark.parametrize("options", FEW_OR_LONG, ids=option_id)
SIZES = [0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 64, 255, 1000, 1023, 1024, 1025, 1031, 2048, 3001]


def run(*batches: Batch, steps: int = 1, function: str = "adam_") -> None:
    """The same function of both backends; the first batch is the reference's."""
    for _ in range(steps):
        getattr(reference, function)(batches[0])
        getattr(gpu, function)(batches[1])


def pair(batch: Batch) -> tuple[Batch, Batch]:
    return batch, clone_batch(batch, DEVICE)


def misaligned(x: Tensor) -> Tensor:
    """A copy whose address is one element past an aligned one."""
    return torch.cat((x[:1], x))[1:]


@pytest.mark.parametrize("steps", [3, pytest.param(20, marks=pytest.mark.long)])
@few_or_long
def test_adam_and_round_equal_the_reference(options: dict[str, Any], steps: int) -> None:
    a, b = pair(make_batch(SIZES, **options))
    for step in range(steps):
        refresh_grads([a, b], step)
        run(a, b)
        assert_same_bits(a, b)
    a.epoch = b.epoch = 2**32 + 5
    run(a, b, function="round_")
    assert_same_bits(a, b)


def test_every_size_up_to_70() -> None:
    a, b = pair(make_batch(range(71), seed=2**64 - 1))
    run(a, b)
    assert_same_bits(a, b)


@few_or_long
def test_special_values(options: dict[str, Any]) -> None:
    a, b = pair(sow_specials(make_batch([9, 2500], **options)))
    run(a, b, function="round_")
    assert_same_bits(a, b)
    run(a, b, steps=2)
    assert_same_bits(a, b)


RUNS = [  # offsets and bases that are no multiples of 4, 8 and 1024; a base beyond 32 bits
    [Segment(7, 3, 1, 10, 0), Segment(8, 2**35 + 5, 1, 1500, 0, offset=10)],
    [Segment(9, 16, 1, 1030, 0)],
    [Segment(10, 4, 1, 2050, 1, offset=2), Segment(11, 1, 1, 0, 0)],
]
BOXES = [  # column shards, empty shards, and runs among them
    [Segment(7, 3, 7, 10, 33), Segment(8, 2**35 + 5, 30, 50, 64, offset=70)],
    [Segment(9, 19, 1, 1030, 0)],
    [Segment(10, 0, 3, 0, 5), Segment(11, 0, 0, 4, 5), Segment(12, 9, 1100, 1, 17)],
]
KINDS = [  # all three in one batch: column shards by groups of 8, rows that are one run, any others
    [Segment(7, 8, 30, 72, 240), Segment(8, 2**35 + 64, 5, 8, 2**34, offset=2160)],
    [Segment(9, 19, 40, 33, 33), Segment(10, 3, 2, 5, 8, offset=1320)],
    [Segment(11, 16, 3, 1024, 2048), Segment(12, 16, 9, 16, 20, offset=3072)],
]
PLACES = pytest.mark.parametrize("segments", [RUNS, BOXES, KINDS], ids=["runs", "boxes", "kinds"])


@PLACES
@pytest.mark.parametrize("container", [torch.bfloat16, torch.float32], ids=str)
def test_segments(segments: list[Sequence[Segment]], container: torch.dtype) -> None:
    sizes = [max(s.offset + s.numel for s in x) for x in segments]
    a, b = pair(make_batch(sizes, segments=segments, container=container))
    run(a, b, steps=2)
    assert_same_bits(a, b)
    foreign = [(0, slice(100, 700)), (2, slice(1, 900))]
    check_adoption(a, b, foreign)


def test_each_kind_of_segment_has_its_own_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard of columns slows no other segment down, and draws once for 8 elements if it can."""
    sizes = [max(s.offset + s.numel for s in x) for x in KINDS]
    a, b = pair(make_batch(sizes, segments=KINDS))
    names = ("adam_kernel", "round_kernel", "canonical_kernel")
    launches = {name: Launches(getattr(gpu_kernels, name)) for name in names}
    for name, kernel in launches.items():
        monkeypatch.setattr(gpu_kernels, name, kernel)
    for function in ("adam_", "round_", "canonical_"):
        run(a, b, function=function)
        assert_same_bits(a, b)
    runs, groups, scattered = (x.value for x in gpu_tables.KINDS)
    for name in names[:2]:
        programs = {kwargs["KIND"]: grid for grid, _, kwargs in launches[name].calls}
        assert programs == {runs: (2,), groups: (3 + 1 + 3,), scattered: (1 + 1,)}
        assert len(launches[name].calls) == 3


def test_masters_are_made_canonical() -> None:
    a, b = pair(sow_specials(make_batch([0, 9, 2500, 1024])))
    for x in (a, b):
        x.containers = x.grads = x.epochs = x.steps = []
    run(a, b, function="canonical_")
    assert_same_bits(a, b)
    for master in b.masters:
        assert torch.equal(reference.canonical_bits(bits_of(master)), bits_of(master))


def test_unaligned_tensors() -> None:
    batch = make_batch([2048, 2048, 5], amsgrad=True)
    a, b = pair(batch)
    b.grads[0] = misaligned(b.grads[0])
    b.containers[1] = misaligned(b.containers[1])
    run(a, b)
    assert_same_bits(a, b)
    table = b.cache["gpu segments"].table
    assert table[:, gpu_tables.ALIGNED.value].tolist() == [0, 0, 1]
    run(a, b, function="round_")
    assert_same_bits(a, b)


@pytest.mark.parametrize("container", [torch.bfloat16, torch.float32], ids=str)
def test_flags_and_adoption(container: torch.dtype) -> None:
    a, b = pair(make_batch([3000, 0, 40, 1500], container=container, epoch=3))
    run(a, b, function="round_")
    for x, module in ((a, reference), (b, gpu)):
        assert module.flag_foreign(x).tolist() == [0] * 4
        assert module.adopt_(x, module.flag_foreign(x)).tolist() == [0] * 4
    check_adoption(a, b, [(0, slice(5, None, 2)), (2, slice(7, 8))])


def check_adoption(a: Batch, b: Batch, foreign: list[tuple[int, slice]]) -> None:
    for x in (a, b):
        for i, at in foreign:
            x.containers[i][at] = 3.0
        x.containers[foreign[-1][0]][8:10] = torch.nan
    flags, found = reference.flag_foreign(a), gpu.flag_foreign(b)
    assert found.dtype == torch.int32 and found.tolist() == flags.tolist()
    assert {i for i, flag in enumerate(flags.tolist()) if flag} == {i for i, _ in foreign}
    counts, adopted = reference.adopt_(a, flags), gpu.adopt_(b, found)
    assert adopted.dtype == torch.int64 and adopted.tolist() == counts.tolist()
    assert_same_bits(a, b)


def test_adoption_obeys_the_flags() -> None:
    a, b = pair(make_batch([2] * 300))  # more segments than a program scans at a time
    for x in (a, b):
        for container in x.containers:
            container.fill_(3.0)
    flags = torch.zeros(300, dtype=torch.int32)
    flags[[2, 299]] = torch.tensor([1, 5], dtype=torch.int32)
    counts, adopted = reference.adopt_(a, flags), gpu.adopt_(b, flags.to(DEVICE))
    assert adopted.tolist() == counts.tolist() and adopted.sum() == 4
    assert_same_bits(a, b)


def test_found_inf_leaves_everything_alone() -> None:
    a, b = pair(make_batch([1030, 7], found_inf=1.0, grad_scale=8.0, amsgrad=True))
    run(a, b, steps=2)
    assert_same_bits(clone_batch(a), b)
    assert [x.item() for x in b.steps] == [0.0, 1.0]
    for x in (a, b):
        assert x.found_inf is not None
        x.found_inf.zero_()
    run(a, b)
    assert_same_bits(a, b)
    assert [x.item() for x in b.steps] == [1.0, 2.0]


def test_step_counts_up_to_the_last() -> None:
    a, b = pair(make_batch([3] * 5, step=2**24 - 3, beta2=0.9999999))
    run(a, b, steps=4)
    assert_same_bits(a, b)
    assert b.steps[0].item() == 2**24


@pytest.mark.parametrize("taken", [2**24 - 1, 2**32 - 2])
def test_the_dither_epoch_is_a_number_of_its_own(taken: int) -> None:
    a, b = pair(make_batch([9] * 5, step=2**24, taken=taken))
    run(a, b, steps=2)
    assert_same_bits(a, b)
    assert [x.item() for x in b.epochs] == [taken + 2 + i % 4 for i in range(5)]
    assert gpu.flag_foreign(b).tolist() == [0] * 5
    check_muon(*pair(make_muon_batch([9] * 5, taken=taken)))
    bare = replace(b, epochs=[], steps=[], epoch=3, cache={}, shared={})
    gpu.round_(bare)
    assert gpu.flag_foreign(bare).tolist() == [0] * 5


def test_nothing_to_do() -> None:
    empty = Batch([], [], [], [], seed=0, epoch=None)
    gpu.round_(empty)
    gpu.adam_(empty)
    a, b = pair(make_batch([0, 0]))
    run(a, b)
    assert_same_bits(a, b)
    assert gpu.flag_foreign(b).tolist() == gpu.adopt_(b, gpu.flag_foreign(b)).tolist() == [0, 0]


class Launches:
    """Stands for a kernel and records the grid and the arguments of every launch."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.calls = kernel, list[tuple[Any, Any, Any]]()

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            self.calls.append((grid, [x for x in args if not isinstance(x, Tensor)], kwargs))
            self.kernel[grid](*args, **kwargs)

        return launch


@pytest.mark.parametrize("tensors", [40, pytest.param(310, marks=pytest.mark.long)])
def test_one_launch_for_many_tensors(monkeypatch: pytest.MonkeyPatch, tensors: int) -> None:
    launches = Launches(gpu_kernels.adam_kernel)
    monkeypatch.setattr(gpu_kernels, "adam_kernel", launches)
    a, b = pair(make_batch([1 + i % 16 for i in range(tensors)]))
    run(a, b)
    assert [grid for grid, _, _ in launches.calls] == [(tensors,)]
    assert_same_bits(a, b)


def test_steps_and_rates_change_no_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that a launch passes by value differs between steps (`test_aot` covers the rest)."""
    adam, prepare = Launches(gpu_kernels.adam_kernel), Launches(gpu_kernels.prepare_adam_kernel)
    monkeypatch.setattr(gpu_kernels, "adam_kernel", adam)
    monkeypatch.setattr(gpu_kernels, "prepare_adam_kernel", prepare)
    a, b = pair(make_batch([1, 17]))
    for step in range(20):
        hyper = AdamHyper(step * 1e-3, 0.9, 0.99, 1e-8, step * 0.1, True, False)
        a.hypers = b.hypers = [hyper, replace(hyper, lr=1e-3)]
        b.grads = [x.clone() for x in b.grads]
        a.epoch = b.epoch = step if step > 15 else None
        run(a, b)
        assert_same_bits(a, b)
    for launches in (adam, prepare):
        assert len(launches.calls) == 20
        assert all(call == launches.calls[0] for call in launches.calls)


def test_a_tensor_rate_is_read_on_the_device() -> None:
    a, b = pair(make_batch([5, 17], tensor_lr=True))
    for lr in (1e-3, 0.0, 2e-3):
        for x in (a, b):
            for rate in {id(h): h.lr for h in x.hypers}.values():
                assert isinstance(rate, Tensor)
                rate.fill_(lr)
        run(a, b)
        assert_same_bits(a, b)
    a.hypers = b.hypers = [replace(h, lr=0.0) for h in a.hypers]
    run(a, b)
    assert_same_bits(a, b)


MUON_CASES = [  # each pair of momentum and Nesterov with one of the pairwise sets of the rest
    pytest.param(
        {**options, "momentum": momentum, "nesterov": nesterov},
        marks=() if (momentum, nesterov) in ((0.95, True), (0.3, False)) else pytest.mark.long,
    )
    for options, (momentum, nesterov) in zip(
        OPTIONS, product((0.95, 0.3, 0.0), (True, False)), strict=True
    )
]
MUON_SIZES = [0, 1, 3, 8, 9, 17, 64, 1000, 1024, 1031, 2048]


def check_muon(a: Batch, b: Batch, *, steps: int = 1) -> None:
    """Both kernels; the update takes the momentum's output as it is, for Newton-Schulz's."""
    for function in ("muon_momentum_", "muon_update_") * steps:
        run(a, b, function=function)
        assert_same_bits(a, b)


@pytest.mark.parametrize("options", MUON_CASES, ids=option_id)
def test_muon_equals_the_reference(options: dict[str, Any]) -> None:
    a, b = pair(make_muon_batch(MUON_SIZES, **options))
    check_muon(a, b)
    for step in range(2):
        refresh_grads([a, b], step)
        b.updates = [torch.empty_like(x) for x in b.updates]
        check_muon(a, b)
        assert b.epochs[1].item() == step + 3


@pytest.mark.parametrize("options", MUON_CASES, ids=option_id)
def test_muon_special_values(options: dict[str, Any]) -> None:
    a, b = pair(sow_specials(make_muon_batch([9, 2500], **options)))
    run(a, b, function="muon_update_")  # a sown update, before any that was computed
    assert_same_bits(a, b)
    check_muon(a, b, steps=2)


def test_updates_round_to_nearest_even() -> None:
    """Without an average the update is the gradient: ties, carries into Inf, subnormals, NaN."""
    high = torch.tensor([0, 1, 0x007F, 0x3F80, 0x3F81, 0x7F7E, 0x7F7F, 0x7FC0, 0x7FFF])
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    bits = ((high[:, None] << 16) + low).flatten().to(torch.int32)
    grad = torch.cat((bits, bits | -0x80000000)).view(torch.float32)
    a, b = pair(make_muon_batch([grad.numel()], momentum=0.0))
    for x in (a, b):
        x.grads[0].copy_(grad)
        x.momentum_buffers[0].zero_()
    run(a, b, function="muon_momentum_")
    assert_same_bits(a, b)
    expected, found = grad.bfloat16(), b.updates[0].cpu()
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0, equal_nan=True)


def test_a_zero_rate_keeps_the_sign_of_zero() -> None:
    """-lr is then -0, which leaves a master of -0 alone where +0 would not."""
    for (a, b), function in (
        (pair(make_batch([64], lr=0.0)), "adam_"),
        (pair(make_muon_batch([64], lr=0.0)), "muon_update_"),
    ):
        for x in (a, b):
            x.masters[0].fill_(-0.0)
            for positive in x.exp_avgs + x.grads + x.updates:
                positive.fill_(1.0)
        run(a, b, function=function)
        assert_same_bits(a, b)
        assert b.masters[0].signbit().all()


@PLACES
@pytest.mark.parametrize("container", [torch.bfloat16, torch.float32], ids=str)
def test_muon_segments(segments: list[Sequence[Segment]], container: torch.dtype) -> None:
    sizes = [max(s.offset + s.numel for s in x) for x in segments]
    check_muon(*pair(make_muon_batch(sizes, segments=segments, container=container)))


def test_muon_on_unaligned_tensors() -> None:
    a, b = pair(make_muon_batch([2048, 2048, 5], grad=torch.bfloat16))
    b.grads[0], b.updates[1] = misaligned(b.grads[0]), misaligned(b.updates[1])
    b.containers[0], b.momentum_buffers[1] = map(
        misaligned, (b.containers[0], b.momentum_buffers[1])
    )
    check_muon(a, b)


def test_found_inf_stops_muon() -> None:
    a, b = pair(make_muon_batch([1030, 7], found_inf=1.0, grad_scale=8.0))
    _, before = pair(a)
    check_muon(a, b)
    assert_same_bits(before, b)
    for x in (a, b):
        assert x.found_inf is not None
        x.found_inf.zero_()
    check_muon(a, b)
    assert [x.item() for x in b.epochs] == [1, 2]


def test_muon_reads_a_tensor_rate_on_the_device() -> None:
    a, b = pair(make_muon_batch([5, 17, 3, 2, 9, 4]))
    for lr in (1e-3, 0.0, 2e-3):
        for x in (a, b):
            rates = [torch.tensor(y, device=x.masters[0].device) for y in (lr, lr / 2)]
            hypers = enumerate(x.muon_hypers)
            x.muon_hypers = [replace(h, lr=rates[i // 2 % 2]) for i, h in hypers]
        check_muon(a, b)
    assert len(b.cache["gpu hypers"].table) == 4  # equal ones share a row, whatever the objects
    a.muon_hypers = b.muon_hypers = [replace(h, lr=0.0) for h in a.muon_hypers]
    check_muon(a, b)


def test_muon_with_nothing_to_do() -> None:
    empty = Batch([], [], [], [], seed=0, epoch=None)
    gpu.muon_momentum_(empty)
    gpu.muon_update_(empty)
    check_muon(*pair(make_muon_batch([0, 0])))


def test_muon_launches_once_and_with_the_same_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("prepare_muon_kernel", "muon_momentum_kernel", "muon_update_kernel")
    launches = {name: Launches(getattr(gpu_kernels, name)) for name in names}
    for name, kernel in launches.items():
        monkeypatch.setattr(gpu_kernels, name, kernel)
    a, b = pair(make_muon_batch([1 + i for i in range(20)]))
    for step in range(3):
        hyper = MuonHyper(step * 1e-3, step * 0.4, step == 1, step * 0.1, 1.0 + step)
        a.muon_hypers = b.muon_hypers = [replace(hyper, lr_ratio=1.0 + i) for i in range(20)]
        a.epoch = b.epoch = step or None
        check_muon(a, b)
    prepare, momentum, update = (kernel.calls for kernel in launches.values())
    assert len(prepare) == 6 and len(momentum) == len(update) == 3
    assert momentum[0][0] == update[0][0] == (20,)
    for calls in (prepare[::2], prepare[1::2], momentum, update):
        assert all(call == calls[0] for call in calls)
