"""The device tables of the Triton backend: when they are made, by whom, what a capture sees.

Kernels do not run here but where bits are compared; streams and the capture are played.
"""

import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from kernel_cases import assert_same_bits, clone_batch, make_batch, make_muon_batch
from torch import Tensor

from fc_optim.kernels import gpu, gpu_kernels, gpu_tables, reference
from fc_optim.kernels.batch import Batch, Segment

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KERNELS = [name for name in vars(gpu_kernels) if name.endswith("_kernel")]


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel is launched."""

    class Idle:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *args, **kwargs: None

    for name in KERNELS:
        monkeypatch.setattr(gpu_kernels, name, Idle())


@pytest.fixture
def uploads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tensor]]:
    """The host tensors that went to pinned memory, as each upload does."""
    seen: list[Tensor] = []
    pin = gpu_tables._pin

    def spy(host: Tensor, device: torch.device) -> Tensor:
        seen.append(host)
        return pin(host, device)

    monkeypatch.setattr(gpu_tables, "_pin", spy)
    yield seen


def all_entry_points(batch: Batch, muon: Batch) -> None:
    gpu.round_(batch)
    gpu.canonical_(batch)
    gpu.adopt_(batch, gpu.flag_foreign(batch))
    gpu.adam_(batch)
    gpu.muon_momentum_(muon)
    gpu.muon_update_(muon)


def test_nothing_is_uploaded_again_while_nothing_changes(
    idle: None, uploads: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, muon = make_batch([5, 17, 3000]), make_muon_batch([5, 17])
    all_entry_points(batch, muon)
    uploads.clear()
    monkeypatch.setattr(Segment, "numel", property(lambda s: pytest.fail("a segment was read")))
    for _ in range(2):
        all_entry_points(batch, muon)
        batch.grads = list(batch.grads)
    assert uploads == []
    batch.grads = [x.clone() for x in batch.grads]
    gpu.adam_(batch)
    assert [tuple(x.shape) for x in uploads] == [(3, gpu_tables.SEGMENT_COLUMNS.value)]
    uploads.clear()
    batch.found_inf = torch.zeros(1)
    gpu.adam_(batch)
    assert [tuple(x.shape) for x in uploads] == [(3, gpu_tables.TENSOR_COLUMNS.value)]
    uploads.clear()
    batch.hypers = [replace(h, lr=0.5) for h in batch.hypers]
    batch.epoch = 3
    gpu.adam_(batch)
    assert sorted(len(x) for x in uploads) == [1, 2]  # the epoch, and two distinct hypers


def test_a_kept_batch_steps_as_a_new_one() -> None:
    kept = clone_batch(make_batch([0, 7, 70, 1030], grad=torch.bfloat16), DEVICE)
    fresh = clone_batch(kept, "cpu")
    for step in range(6):
        generator = torch.Generator().manual_seed(step)
        new = [torch.randn(x.shape, generator=generator).bfloat16() for x in fresh.grads]
        kept.grads, fresh.grads = [x.to(DEVICE) for x in new], new
        scale = [None, torch.tensor([8.0])][step % 2]
        found = [None, torch.tensor([0.0]), torch.tensor(1.0)][step % 3]
        for b, device in ((kept, DEVICE), (fresh, "cpu")):
            b.grad_scale = None if scale is None else scale.to(device)
            b.found_inf = None if found is None else found.to(device)
            b.epoch = [None, 5][step // 3]
        if step == 4:
            kept.hypers = fresh.hypers = [replace(h, lr=1e-2, beta1=0.3) for h in kept.hypers]
        fresh = replace(fresh, cache={}, shared={})
        reference.adam_(fresh)
        gpu.adam_(kept)
        assert_same_bits(fresh, kept)


def test_a_cache_keeps_no_gradient_alive(idle: None) -> None:
    batch = make_batch([5, 17])
    gpu.adam_(batch)
    gradient = weakref.ref(batch.grads[1])
    batch.grads = []
    assert gradient() is None


def test_strided_tensors_are_refused(idle: None) -> None:
    batch = make_batch([50])
    batch.grads = [torch.randn(100)[::2]]
    with pytest.raises(ValueError, match="batch.grads: kernels need contiguous tensors"):
        gpu.adam_(batch)


# ---- Streams


class Stream:
    """Stands for a stream of the device; notes what waits for what."""

    def __init__(self, name: str, log: list[tuple[str, str]]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: "Stream") -> None:
        self.log.append((self.name, other.name))


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`current` stream to choose; `waits`; and for each stream the tables recorded on it."""

    class Played:
        waits: list[tuple[str, str]] = []
        recorded: list[tuple[str, Tensor]] = []
        a, b = Stream("a", waits), Stream("b", waits)
        current = a
        capturing = False

    def record(table: Tensor, stream: Stream) -> None:
        Played.recorded.append((stream.name, table))

    monkeypatch.setattr(gpu_tables, "_current_stream", lambda device: Played.current)
    monkeypatch.setattr(gpu_tables, "_record", record)
    monkeypatch.setattr(gpu_tables, "_is_capturing", lambda device: Played.capturing)
    return Played


def tables_of(batch: Batch) -> dict[str, Tensor]:
    entries = {**batch.cache, **batch.shared}
    return {k: x.table for k, x in entries.items() if isinstance(x, gpu_tables._Entry)}


def test_tables_are_safe_on_other_streams(idle: None, played: Any) -> None:
    """A stream waits for the one that wrote them, and none is given away while it reads them."""
    batch = make_batch([5, 17])
    gpu.adam_(batch)
    gpu.adam_(batch)
    assert played.waits == [] and played.recorded == []
    tables = tables_of(batch)
    assert set(tables) == {"gpu segments", "gpu blocks 0", "gpu tensors", "gpu epoch", "gpu hypers"}
    played.current = played.b
    gpu.adam_(batch)
    assert set(played.waits) == {("b", "a")}
    recorded = [x for name, x in played.recorded if name == "b"]
    assert all(sum(x is y for y in recorded) == 1 for x in tables.values())
    played.waits.clear()
    gpu.adam_(batch)
    assert played.waits == []
    played.current = played.a
    batch.grads = [x.clone() for x in batch.grads]
    batch.hypers = [replace(h, lr=0.5) for h in batch.hypers]
    gpu.adam_(batch)  # it overwrites what `b` may be reading: only after it
    assert ("a", "b") in played.waits


def test_a_table_of_pointers_is_never_overwritten(idle: None) -> None:
    """Whoever still reads the old one finds the old addresses; values are overwritten."""
    batch = make_batch([5, 17])
    gpu.adam_(batch)
    before = tables_of(batch)
    values = {k: x.clone() for k, x in before.items()}
    batch.grads = [x.clone() for x in batch.grads]
    batch.found_inf = torch.zeros(1)
    batch.hypers = [replace(h, lr=0.5) for h in batch.hypers]
    batch.epoch = 9
    gpu.adam_(batch)
    after = tables_of(batch)
    for name in ("gpu segments", "gpu tensors"):
        assert after[name] is not before[name] and torch.equal(before[name], values[name])
    for name in ("gpu hypers", "gpu epoch"):
        assert after[name] is before[name] and not torch.equal(before[name], values[name])


# ---- Captures


def test_captured_tables_stay_as_they_are(idle: None, played: Any) -> None:
    """What a capture makes is kept and does not enter the cache; it waits for no other stream."""
    batch = make_batch([5, 17])
    gpu.adam_(batch)
    before = tables_of(batch)
    values = {k: x.clone() for k, x in before.items()}
    played.capturing, played.current = True, played.b
    batch.grads = [x.clone() for x in batch.grads]
    batch.hypers = [replace(h, lr=0.5) for h in batch.hypers]
    gpu.adam_(batch)
    played.capturing, played.current = False, played.a
    assert played.waits == [] and played.recorded == []
    assert all(tables_of(batch)[k] is x for k, x in before.items())
    assert all(torch.equal(x, values[k]) for k, x in before.items())
    (kept,) = batch.cache["gpu captured"]
    uses = {k: sum(x is y for y in kept) for k, x in before.items()}
    assert uses["gpu tensors"] and uses["gpu epoch"] and uses["gpu blocks 0"]
    assert not uses["gpu hypers"] and not uses["gpu segments"]  # `lr` and the gradients are new
    batch.epoch = 9
    gpu.adam_(batch)  # eager: uploads what only the capture has
    assert tables_of(batch)["gpu segments"] is not before["gpu segments"]
    assert before["gpu hypers"][0, 0].item() == 0.5 and before["gpu epoch"].item() == 9


def test_a_redraw_reaches_other_batches_of_the_optimizer(idle: None) -> None:
    """`round_` in a new epoch overwrites the epoch that a captured `adam_` reads."""
    batch = make_batch([5], epoch=1)
    gpu.adam_(batch)
    table = batch.shared["gpu epoch"].table
    gpu.round_(replace(batch, epoch=2, cache={}))
    assert table.item() == 2 and batch.shared["gpu epoch"].table is table


def test_no_entry_point_reads_the_device(idle: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step can be captured: nothing on the way of any kernel waits for a number."""
    batch = make_batch([5, 17], tensor_lr=True, amsgrad=True, grad_scale=8.0, found_inf=0.0)
    muon = make_muon_batch([5, 17], tensor_lr=True, grad_scale=8.0, found_inf=1.0)
    batch.counts = torch.zeros(2, 4, dtype=torch.int64)
    positions = [torch.arange(3), torch.arange(4)]

    def refuse(name: str) -> Any:
        return lambda *args, **kwargs: pytest.fail(f"Tensor.{name} waits for the device")

    names = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__")
    for step in range(3):
        with monkeypatch.context() as patch:
            for name in names + ("nonzero", "__contains__", "__iter__"):
                patch.setattr(Tensor, name, refuse(name))
            all_entry_points(batch, muon)
            gpu.sample(batch.masters, positions, batch.cache)
        batch.grads = [x.clone() for x in batch.grads]
        batch.epoch = step


def test_a_sample_follows_its_tensors() -> None:
    """In a capture, too, whose addresses do not stay."""
    tensors = [torch.randn(20, device=DEVICE), torch.randn(9, device=DEVICE)]
    positions, cache = [torch.tensor([3, 4, 19]), torch.tensor([0])], dict[Any, Any]()
    for _ in range(3):
        expected = reference.sample(tensors, positions, {})
        assert torch.equal(gpu.sample(tensors, positions, cache), expected)
        tensors = [x + 1 for x in tensors]
