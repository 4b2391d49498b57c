"""CPU speed of FairCastAdamW, as ratios measured in pairs within one run.

    python examples/benchmarks/cpu.py                # 50 M parameters, 100 tensors, 2 threads

Each pair times one step of ours and one of a baseline, back to back, in alternating order; the
ratio of a pair is free of the machine's drift, and the median over pairs is what to quote.
Baselines: torch's fused AdamW on fp32 parameters, followed by (rtn) a round-to-nearest copy to
bf16, or (sr) the eager stochastic export: add random bits, mask, cast.
"""

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import results
import torch
from torch import Tensor, nn

from fc_optim import FairCastAdamW

Step = Callable[[], None]


def weights(total: int, tensors: int, generator: torch.Generator) -> list[Tensor]:
    size = total // tensors
    return [(torch.randn(size, generator=generator) * 0.02).bfloat16() for _ in range(tensors)]


def ours(start: list[Tensor], grads: list[Tensor], container: str, grad: str) -> Step:
    dtype = {"native": torch.bfloat16, "grid": torch.float32}[container]
    params = [nn.Parameter(w.to(dtype, copy=True)) for w in start]
    for p, g in zip(params, grads, strict=True):
        if grad == "fp32" and container == "native":
            p.grad_dtype = torch.float32
        p.grad = g.to(torch.float32 if grad == "fp32" else torch.bfloat16)
    return FairCastAdamW(params, lr=1e-6).step


def torch_fused(start: list[Tensor], grads: list[Tensor], export: str) -> Step:
    params = [nn.Parameter(w.float()) for w in start]
    served = [w.clone() for w in start]
    for p, g in zip(params, grads, strict=True):
        p.grad = g.clone()
    opt = torch.optim.AdamW(params, lr=1e-6, fused=True)

    @torch.no_grad()
    def step() -> None:
        opt.step()
        for p, s in zip(params, served, strict=True):
            if export == "rtn":
                s.copy_(p)
            else:
                random = torch.randint_like(p, 1 << 16, dtype=torch.int32)
                bits = p.view(torch.int32) + random & -0x10000
                s.copy_(bits.view(torch.float32))

    return step


def seconds(step: Step) -> float:
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


def pairs(a: Step, b: Step, count: int) -> tuple[list[float], list[float]]:
    """Times of `a` and `b`, taken in turn after two warm-up steps of each."""
    for _ in range(2):
        a()
        b()
    times_a, times_b = [], []
    for i in range(count):
        first, second = (a, b) if i % 2 == 0 else (b, a)
        x, y = seconds(first), seconds(second)
        times_a.append(x if i % 2 == 0 else y)
        times_b.append(y if i % 2 == 0 else x)
    return times_a, times_b


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(x.split(":")[1].strip() for x in lines if x.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU speed of FairCastAdamW in paired ratios.")
    parser.add_argument("--params", type=int, default=50_000_000)
    parser.add_argument("--tensors", type=int, default=100)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--csv", type=Path, help="append the rows to this file")
    args = parser.parse_args()
    if args.params < args.tensors or min(args.tensors, args.threads, args.pairs) < 1:
        parser.error("--params must be at least --tensors, and all of them positive")
    torch.set_num_threads(args.threads)

    generator = torch.Generator().manual_seed(0)
    start = weights(args.params, args.tensors, generator)
    grads = [torch.randn(w.shape, generator=generator) * 1e-3 for w in start]
    rows = []
    print(f"{'ours':22} {'baseline':18} {'ratio':>6} {'min':>6} {'max':>6}  ns/element")
    for container, grad in (("native", "fp32"), ("native", "bf16"), ("grid", "fp32")):
        for export, count in (("rtn", args.pairs), ("sr", max(3, args.pairs // 3))):
            step, baseline = ours(start, grads, container, grad), torch_fused(start, grads, export)
            mine, theirs = pairs(step, baseline, count)
            ratios = [x / y for x, y in zip(mine, theirs, strict=True)]
            ns = [statistics.median(t) / args.params * 1e9 for t in (mine, theirs)]
            row = {
                "ours": f"{container}, {grad} grads",
                "baseline": f"torch fused + {export}",
                "ratio_median": f"{statistics.median(ratios):.3f}",
                "ratio_min": f"{min(ratios):.3f}",
                "ratio_max": f"{max(ratios):.3f}",
                "ours_ns_per_element": f"{ns[0]:.2f}",
                "baseline_ns_per_element": f"{ns[1]:.2f}",
                "pairs": count,
                "params": args.params,
                "tensors": args.tensors,
                "threads": args.threads,
                "cpu": cpu_name(),
                "cores": os.cpu_count(),
                "torch": torch.__version__,
                "python": platform.python_version(),
                "command": "python " + " ".join(sys.argv),
            }
            rows.append(row)
            print(
                f"{row['ours']:22} {row['baseline']:18} {row['ratio_median']:>6} "
                f"{row['ratio_min']:>6} {row['ratio_max']:>6}  {ns[0]:.2f} / {ns[1]:.2f}"
            )
    if args.csv:
        results.append(args.csv, rows)


if __name__ == "__main__":
    main()
