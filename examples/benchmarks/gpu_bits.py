"""The Triton kernels against the torch reference on the CPU, bit for bit; for `gpu.py`.

Random, special and misaligned inputs, all kinds of segments, several streams, captured graphs.
"""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fc_optim import FairCastAdamW
from fc_optim.kernels import gpu, reference
from fc_optim.kernels.batch import COUNTS, AdamHyper, Batch, MuonHyper, Segment

SPECIALS = [0x0, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7FFFFFFF, 0xFF800001, 0x1,
            0x7F7F0000, 0x7F7F0001, 0x7F7FFFFF, 0xFF7FFFFF, 0x00010000, 0x807FFFFF]  # fmt: skip


def whole(numel: int, i: int) -> list[Segment]:
    return [Segment.whole(i * 7919 + 1, numel)]


def misaligned(numel: int, i: int) -> list[Segment]:
    """Two segments that start anywhere, as a flat partition has them."""
    cut = numel // 3
    return [
        Segment(i + 1, base=5 + i, rows=1, inner=cut, row_stride=cut),
        Segment(2**32 - 1 - i, 2**33 + 3, rows=1, inner=numel - cut, row_stride=numel, offset=cut),
    ]


def columns(numel: int, i: int) -> list[Segment]:
    """Rows of a wider matrix, as a shard along columns has them; what does not divide is left."""
    inner = max(1, int(numel**0.5))
    rows = numel // inner
    return [Segment(i + 1, base=inner + 3, rows=rows, inner=inner, row_stride=3 * inner + 1)]


def groups(numel: int, i: int) -> list[Segment]:
    """The same where whole groups of 8 were cut; what does not divide is a run."""
    inner = max(8, int(numel**0.5) // 8 * 8)
    rows = numel // inner
    box = Segment(i + 1, base=2**33 + inner, rows=rows, inner=inner, row_stride=3 * inner)
    rest = numel - rows * inner
    return [box, Segment(i + 1, base=5, rows=1, inner=rest, row_stride=rest, offset=rows * inner)]


def make_batch(sizes: list[int], container: torch.dtype, grad: torch.dtype, kind: str, places: Any,
               special: bool) -> Batch:  # fmt: skip
    g = torch.Generator().manual_seed(len(sizes))

    def values(scale: float) -> list[Tensor]:
        made = [torch.randn(n, generator=g) * scale for n in sizes]
        for x in made if special else []:
            bits = torch.tensor(SPECIALS, dtype=torch.int64).to(torch.int32)[: x.numel()]
            x.view(torch.int32)[: bits.numel()] = bits
        return made

    masters = values(0.02)
    batch = Batch(
        containers=[w.to(container, copy=True) for w in masters],
        masters=masters,
        segments=[places(n, i) for i, n in enumerate(sizes)],
        epochs=[torch.tensor(2**32 - 2 + i % 4) for i in range(len(sizes))],
        seed=2**63 + 11,
        epoch=None,
        grads=[x.to(grad) for x in values(1e-3)],
    )
    if kind == "muon":
        hyper = MuonHyper(1e-3, 0.95, nesterov=True, weight_decay=0.1, lr_ratio=1.5)
        batch.momentum_buffers, batch.muon_hypers = values(1e-3), [hyper] * len(sizes)
        batch.updates = [torch.zeros(n, dtype=torch.bfloat16) for n in sizes]
    else:
        hyper_adam = AdamHyper(1e-3, 0.9, 0.99, 1e-8, 0.1, decoupled=kind != "l2", maximize=False)
        batch.steps = [torch.tensor(float(i % 5)) for i in range(len(sizes))]
        batch.exp_avgs, batch.hypers = values(1e-3), [hyper_adam] * len(sizes)
        batch.exp_avg_sqs = [x.abs() for x in values(1e-6)]
        if kind == "amsgrad":
            batch.max_exp_avg_sqs = [x.abs() for x in values(1e-6)]
    return batch


def tensors_of(batch: Batch) -> Iterator[tuple[str, Tensor]]:
    for name in ("containers", "masters", "epochs", "steps", "grads", "exp_avgs", "exp_avg_sqs",
                 "max_exp_avg_sqs", "momentum_buffers", "updates"):  # fmt: skip
        for i, x in enumerate(getattr(batch, name)):
            yield f"{name}[{i}]", x


def on_device(batch: Batch, device: torch.device) -> Batch:
    """A copy on the device whose streams share no memory with the original."""
    twin = copy.copy(batch)
    twin.cache, twin.shared = {}, {}
    for name in {n.partition("[")[0] for n, _ in tensors_of(batch)}:
        setattr(twin, name, [x.to(device, copy=True) for x in getattr(batch, name)])
    return twin


def assert_same(a: Batch, b: Batch, what: str) -> None:
    for (name, x), (_, y) in zip(tensors_of(a), tensors_of(b), strict=True):
        y = y.cpu()
        as_int = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
        same = x.view(as_int) == y.view(as_int)
        if not same.all():
            at = int((~same).flatten().nonzero()[0])
            raise SystemExit(
                f"{what}: {name} differs in {int((~same).sum())} elements, first at {at}: "
                f"reference {x.flatten()[at].item()!r}, kernel {y.flatten()[at].item()!r}"
            )


def check_kernels(device: torch.device, sizes: list[int], steps: int) -> int:
    """Raises SystemExit at the first bit that differs; returns the number of cases."""
    cases = 0
    for kind, container, grad, places in (
        ("adamw", torch.bfloat16, torch.float32, whole),
        ("adamw", torch.bfloat16, torch.bfloat16, misaligned),
        ("adamw", torch.float32, torch.float32, columns),
        ("l2", torch.float32, torch.bfloat16, misaligned),
        ("amsgrad", torch.bfloat16, torch.float32, groups),
        ("muon", torch.bfloat16, torch.bfloat16, whole),
        ("muon", torch.float32, torch.float32, misaligned),
    ):
        for special in (False, True):
            cpu = make_batch(sizes, container, grad, kind, places, special)
            dev = on_device(cpu, device)
            what = f"{kind}, {container}, {grad}, {places.__name__}, special={special}"
            for _ in range(steps):
                for backend, batch in ((reference, cpu), (gpu, dev)):
                    batch.grads = [x.neg() for x in batch.grads]  # elsewhere, and another list
                    if kind == "muon":
                        backend.muon_momentum_(batch)
                        backend.muon_update_(batch)
                    else:
                        backend.adam_(batch)
                assert_same(cpu, dev, what)
            for batch in (cpu, dev):
                for container_tensor in batch.containers:
                    container_tensor[: container_tensor.numel() // 2] = 1.5
            flags = reference.flag_foreign(cpu), gpu.flag_foreign(dev).cpu()
            counts = reference.adopt_(cpu, flags[0]), gpu.adopt_(dev, flags[1].to(device)).cpu()
            if not torch.equal(*flags) or not torch.equal(*counts):
                raise SystemExit(f"{what}: foreign writes: flags {flags}, counts {counts}")
            reference.round_(cpu)
            gpu.round_(dev)
            assert_same(cpu, dev, what + ", adopted and rounded")
            for batch in (cpu, dev):
                for master in batch.masters if special else ():
                    master[:2] = (
                        torch.tensor(SPECIALS[-2:]).int().view(torch.float32)[: len(master)]
                    )
            reference.canonical_(cpu)
            gpu.canonical_(dev)
            assert_same(cpu, dev, what + ", canonical")
            cases += 1
    return cases


def check_counts(device: torch.device) -> None:
    """What a step did to masters and words, counted on the way, is what the reference counts."""
    for places in (whole, misaligned, groups, columns):
        cpu = make_batch([5000, 40_000], torch.bfloat16, torch.float32, "adamw", places, False)
        dev = on_device(cpu, device)
        for batch, where in ((cpu, "cpu"), (dev, device)):
            rows = sum(map(len, batch.segments))
            batch.counts = torch.zeros(rows, len(COUNTS), dtype=torch.int64, device=where)
        reference.adam_(cpu)
        gpu.adam_(dev)
        assert_same(cpu, dev, f"counting, {places.__name__}")
        assert cpu.counts is not None and dev.counts is not None
        if not torch.equal(cpu.counts, dev.counts.cpu()):
            raise SystemExit(f"counts, {places.__name__}: {cpu.counts} != {dev.counts}")


def check_streams() -> None:
    """Steps on two streams in turn, each after the other's, equal steps on one."""
    cpu = make_batch([3000, 100_003], torch.bfloat16, torch.float32, "adamw", misaligned, False)
    device, streams = torch.device("cuda"), [torch.cuda.Stream() for _ in range(2)]
    dev = on_device(cpu, device)
    torch.cuda.synchronize()
    for step in range(10):
        reference.adam_(cpu)
        stream, other = streams[step % 2], streams[1 - step % 2]
        stream.wait_stream(other)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(1_000_000)  # the step before is still under way
            dev.grads = [x.clone() for x in dev.grads]
            gpu.adam_(dev)
    torch.cuda.synchronize()
    assert_same(cpu, dev, "two streams")


def check_graph() -> None:
    """Ten replays of a captured step equal ten eager steps."""
    models = []
    for captured in (False, True):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(n, device="cuda").bfloat16()) for n in (1000, 4099)]
        opt = FairCastAdamW(params, lr=torch.tensor(1e-3, device="cuda"))
        for p in params:
            p.grad = torch.full_like(p, 0.01)
        for _ in range(3):
            opt.step()
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                opt.step()
            for _ in range(10):
                graph.replay()
        else:
            for _ in range(10):
                opt.step()
        torch.cuda.synchronize()
        models.append([p.detach().float().cpu() for p in params])
    if not all(torch.equal(a, b) for a, b in zip(*models, strict=True)):
        raise SystemExit("a captured graph does not give the bits of eager steps")
