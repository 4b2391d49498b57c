"""What a step costs beside its arithmetic: many small tensors, paired ratios within one run.

    python examples/benchmarks/host.py           # 310 and 2,000 tensors of 64 elements

Each pair times one step of FairCastAdamW and one of torch.optim.AdamW(fused=True), which makes no
bf16 copy, back to back in alternating order, in one thread. The clock is this thread's CPU time, in
which a busy machine shows less than in seconds on the wall.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import results
import torch
from timing import Step, pairs, print_header, print_row, row_of

from fc_optim import FairCastAdamW

ELEMENTS = 64


def step_of(cls: Any, tensors: int, **options: Any) -> Step:
    generator = torch.Generator().manual_seed(0)
    params = []
    for _ in range(tensors):
        p = torch.nn.Parameter(torch.randn(ELEMENTS, generator=generator).bfloat16().float())
        p.grad = torch.randn(ELEMENTS, generator=generator) * 1e-3
        params.append(p)
    optimizer = cls(params, lr=1e-6, **options)
    return optimizer.step


def main() -> None:
    parser = argparse.ArgumentParser(description="Host time of a step in paired ratios.")
    parser.add_argument("--tensors", type=int, nargs="+", default=[310, 2000])
    parser.add_argument("--pairs", type=int, default=201)
    parser.add_argument("--csv", type=Path, help="append the rows to this file")
    args = parser.parse_args()
    if min(*args.tensors, args.pairs) < 1:
        parser.error("--tensors and --pairs must be positive")
    torch.set_num_threads(1)
    rows = []
    print_header()
    for tensors in args.tensors:
        ours = step_of(FairCastAdamW, tensors)
        theirs = step_of(torch.optim.AdamW, tensors, fused=True)
        mine, baseline = pairs(ours, theirs, args.pairs, time.thread_time)
        names = f"step(), {tensors} tensors", "torch AdamW(fused=True)"
        rows.append(row_of(*names, mine, baseline, tensors * ELEMENTS, tensors=tensors))
        print_row(rows[-1])
    if args.csv:
        results.append(args.csv, rows)


if __name__ == "__main__":
    main()
