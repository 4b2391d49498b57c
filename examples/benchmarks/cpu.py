"""CPU speed of FairCastAdamW, as ratios measured in pairs within one run.

    python examples/benchmarks/cpu.py                # 50 M parameters, 100 tensors, 2 threads

Each pair times one step of ours and one of a baseline, back to back, in alternating order; the
ratio of a pair is free of the machine's drift, and the median over pairs is what to quote.
Baselines: torch's fused AdamW on fp32 parameters, followed by (rtn) a round-to-nearest copy to
bf16, or (sr) the eager stochastic export: add random bits, mask, cast.
"""

import argparse
from pathlib import Path

import results
import torch
from timing import Step, pairs, print_header, print_row, row_of
from torch import Tensor, nn

from fc_optim import FairCastAdamW


def weights(total: int, tensors: int, generator: torch.Generator) -> list[Tensor]:
    size = total // tensors
    return [(torch.randn(size, generator=generator) * 0.02).bfloat16() for _ in range(tensors)]


def containers(
    start: list[Tensor], grads: list[Tensor], container: str, grad: str
) -> list[nn.Parameter]:
    """Parameters of our optimizer with their gradients, in memory of their own."""
    dtype = {"native": torch.bfloat16, "grid": torch.float32}[container]
    params = [nn.Parameter(w.to(dtype, copy=True)) for w in start]
    for p, g in zip(params, grads, strict=True):
        if grad == "fp32" and container == "native":
            p.grad_dtype = torch.float32
        p.grad = g.to(torch.float32 if grad == "fp32" else torch.bfloat16)
    return params


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
    print_header()
    for container, grad in (("native", "fp32"), ("native", "bf16"), ("grid", "fp32")):
        for export, count in (("rtn", args.pairs), ("sr", max(3, args.pairs // 3))):
            ours = FairCastAdamW(containers(start, grads, container, grad), lr=1e-6)
            mine, theirs = pairs(ours.step, torch_fused(start, grads, export), count)
            names = f"{container}, {grad} grads", f"torch fused + {export}"
            row = row_of(*names, mine, theirs, args.params, tensors=args.tensors)
            rows.append(row)
            print_row(row)
    if args.csv:
        results.append(args.csv, rows)


if __name__ == "__main__":
    main()
