"""The step of ZeRO-Offload on a CPU: ours against DeepSpeedCPUAdam, each with its bf16 copy-back.

    DS_ACCELERATOR=cpu python examples/benchmarks/offload.py       # 50 M parameters, 2 threads

A pair is one step on a flat fp32 partition with an fp32 gradient, then DeepSpeed's own copy to the
bf16 partition (`copy_`, as in its ZeRO 2). DeepSpeedCPUAdam is compiled with g++ at first use,
which takes minutes.
"""

import argparse
from pathlib import Path

import deepspeed
import results
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from timing import Step, pairs, print_header, print_row, row_of
from torch import Tensor, nn

from fc_optim import FairCastAdamW


def partition(size: int) -> tuple[nn.Parameter, Tensor]:
    """A flat partition on the bf16 grid with its gradient, and the bf16 copy of it."""
    generator = torch.Generator().manual_seed(0)
    weights = (torch.randn(size, generator=generator) * 0.02).bfloat16()
    flat = nn.Parameter(weights.float())
    flat.grad = torch.randn(size, generator=generator) * 1e-3
    return flat, weights


def stepper(make: type, size: int) -> Step:
    flat, copy = partition(size)
    opt = make([flat], lr=1e-6, weight_decay=0.01)

    def step() -> None:
        opt.step()
        copy.copy_(flat.data)

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description="The offloaded step in paired ratios, on a CPU.")
    parser.add_argument("--params", type=int, default=50_000_000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--csv", type=Path, help="append the row to this file")
    args = parser.parse_args()
    if min(args.params, args.threads, args.pairs) < 1:
        parser.error("all of them must be positive")
    torch.set_num_threads(args.threads)
    times = pairs(
        stepper(FairCastAdamW, args.params), stepper(DeepSpeedCPUAdam, args.params), args.pairs
    )
    row = row_of(
        "FairCastAdamW + copy", "DeepSpeedCPUAdam + copy", *times, args.params,
        deepspeed=deepspeed.__version__,
    )  # fmt: skip
    print_header()
    print_row(row)
    if args.csv:
        results.append(args.csv, [row])


if __name__ == "__main__":
    main()
