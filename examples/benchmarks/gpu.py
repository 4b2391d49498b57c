"""The Triton kernels on a GPU: first that they are right, to the bit, then how fast they are.

    python examples/benchmarks/gpu.py --csv examples/benchmarks/results/gpu.csv    # under 4 minutes
    TRITON_INTERPRET=1 python examples/benchmarks/gpu.py --dry         # no GPU: correctness alone

Correctness: every kernel against the torch reference on the CPU, on random, special and misaligned
inputs; a captured CUDA graph against eager steps. Speed: medians of pairs taken in turn in one run,
on the parameter shapes of Qwen3, against torch's fused AdamW alone, with a round-to-nearest copy,
and with the eager stochastic export; a device copy is the bandwidth ceiling.
"""

import argparse
import copy
import platform
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import results
import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor, nn

from fc_optim import FairCastAdamW
from fc_optim.kernels import gpu, reference
from fc_optim.kernels.batch import AdamHyper, Batch, MuonHyper, Segment

Step = Callable[[], None]
SPECIALS = [0x0, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7FFFFFFF, 0xFF800001, 0x1,
            0x7F7F0000, 0x7F7F0001, 0x7F7FFFFF, 0xFF7FFFFF, 0x00010000, 0x807FFFFF]  # fmt: skip


# -- Correctness -------------------------------------------------------------------------------


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
        ("amsgrad", torch.bfloat16, torch.float32, whole),
        ("muon", torch.bfloat16, torch.bfloat16, whole),
        ("muon", torch.float32, torch.float32, misaligned),
    ):
        for special in (False, True):
            cpu = make_batch(sizes, container, grad, kind, places, special)
            dev = on_device(cpu, device)
            what = f"{kind}, {container}, {grad}, {places.__name__}, special={special}"
            for _ in range(steps):
                for backend, batch in ((reference, cpu), (gpu, dev)):
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
            cases += 1
    return cases


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


# -- Speed -------------------------------------------------------------------------------------


def qwen3_shapes(hidden: int, intermediate: int) -> list[tuple[int, ...]]:
    """Qwen3 with 28 layers, 16 heads and 8 key-value heads of 128, tied embedding: 310 tensors."""
    layer: list[tuple[int, ...]] = [
        (2048, hidden), (1024, hidden), (1024, hidden), (hidden, 2048), (128,), (128,),
        (intermediate, hidden), (intermediate, hidden), (hidden, intermediate),
        (hidden,), (hidden,),
    ]  # fmt: skip
    return [(151936, hidden), *layer * 28, (hidden,)]


MODELS = {"Qwen3-0.6B": (1024, 3072), "Qwen3-1.7B": (2048, 6144)}


def ours(shapes: list[tuple[int, ...]], container: torch.dtype, grad: torch.dtype) -> Step:
    params = []
    for shape in shapes:
        p = nn.Parameter(torch.randn(shape, device="cuda").mul_(0.02).to(container))
        if grad != container:
            p.grad_dtype = grad
        p.grad = torch.randn(shape, device="cuda").mul_(1e-3).to(grad)
        params.append(p)
    return FairCastAdamW(params, lr=1e-6).step


def torch_fused(shapes: list[tuple[int, ...]], export: str | None) -> Step:
    params = [nn.Parameter(torch.randn(s, device="cuda").mul_(0.02)) for s in shapes]
    for p in params:
        p.grad = torch.randn_like(p).mul_(1e-3)
    opt = torch.optim.AdamW(params, lr=1e-6, fused=True)

    @torch.no_grad()
    def step() -> None:
        opt.step()
        for p in params if export else ():
            if export == "rtn":
                p.to(torch.bfloat16)
            else:
                random = torch.randint_like(p, 1 << 16, dtype=torch.int32)
                (p.view(torch.int32) + random & -0x10000).view(torch.float32).bfloat16()

    return step


def milliseconds(step: Step) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    step()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def paired(a: Step, b: Step, pairs: int) -> tuple[list[float], list[float]]:
    for _ in range(3):
        a()
        b()
    times: tuple[list[float], list[float]] = ([], [])
    for i in range(pairs):
        for which in ((0, 1), (1, 0))[i % 2]:
            times[which].append(milliseconds((a, b)[which]))
    return times


def copy_bandwidth() -> float:
    """GB/s of a device copy, read and write counted."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)

    def step() -> None:
        target.copy_(source)

    times, _ = paired(step, lambda: None, 20)
    return 2 * source.numel() / statistics.median(times) / 1e6


def measure(pairs: int) -> Iterator[dict[str, Any]]:
    ceiling = copy_bandwidth()
    print(f"device copy: {ceiling:.0f} GB/s")
    for model, size in MODELS.items():
        shapes = qwen3_shapes(*size)
        elements = sum(torch.Size(s).numel() for s in shapes)
        for container, grad in ((torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32),
                                (torch.float32, torch.float32)):  # fmt: skip
            step = ours(shapes, container, grad)
            # gradient, and master and both moments read and written, and the container written
            moved = elements * (grad.itemsize + 24 + container.itemsize)
            for export in (None, "rtn", "sr"):
                baseline = torch_fused(shapes, export)
                mine, theirs = paired(step, baseline, pairs)
                ms, base = statistics.median(mine), statistics.median(theirs)
                ratios = [x / y for x, y in zip(mine, theirs, strict=True)]
                yield {
                    "model": model,
                    "container": str(container).removeprefix("torch."),
                    "grads": str(grad).removeprefix("torch."),
                    "ms": f"{ms:.3f}",
                    "GB_per_s": f"{moved / ms / 1e6:.0f}",
                    "share_of_copy": f"{moved / ms / 1e6 / ceiling:.3f}",
                    "baseline": "torch fused AdamW" + (f" + {export}" if export else " alone"),
                    "baseline_ms": f"{base:.3f}",
                    "ratio_median": f"{statistics.median(ratios):.3f}",
                    "marginal_ms": f"{ms - base:.3f}" if export is None else "",
                    "pairs": pairs,
                }
                del baseline
                torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dry", action="store_true", help="correctness only, on the CPU")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--csv", type=Path, help="append the rows to this file")
    args = parser.parse_args()
    if args.dry and not triton.knobs.runtime.interpret:
        parser.error("--dry needs TRITON_INTERPRET=1 in the environment")
    if not args.dry and not torch.cuda.is_available():
        parser.error("no CUDA device; --dry checks the kernels in Triton's interpreter")
    device = torch.device("cpu" if args.dry else "cuda")
    if args.dry:  # the interpreter computes in numpy, which warns of NaN and overflow
        warnings.simplefilter("ignore", RuntimeWarning)
    sizes = [1, 9, 1025] if args.dry else [1, 7, 8, 9, 1023, 1024, 1025, 4096, 100_003, 1_000_000]
    cases = check_kernels(device, sizes, steps=2 if args.dry else 5)
    print(f"bit for bit equal to the reference: {cases} cases")
    if args.dry:
        return
    check_graph()
    print("a captured graph gives the bits of eager steps")
    hardware = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "command": "python " + " ".join(sys.argv),
    }
    rows = []
    for row in measure(args.pairs):
        print("  ".join(f"{k} {v}" for k, v in row.items() if v != ""), flush=True)
        rows.append({**row, **hardware})
    if args.csv:
        results.append(args.csv, rows)


if __name__ == "__main__":
    main()
