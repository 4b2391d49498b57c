"""What step metrics cost FairCastAdamW on a CPU, as ratios measured in pairs within one run.

    python examples/benchmarks/metrics.py            # 50 M parameters, 100 tensors, 2 threads

Each pair times one step with metrics and one without, back to back, in alternating order: with
`metrics=True` (a sixteenth is counted; the history of captured and lag is sampled in both) and
"all". The figures are not read. `--read` reads them after every step, as a logger would.
"""

import argparse
from pathlib import Path

import results
import torch
from cpu import containers, weights
from timing import Step, pairs, print_header, print_row, row_of
from torch import Tensor

from fc_optim import FairCastAdamW
from fc_optim.metrics.step import Telemetry, flatten


def steppers(
    start: list[Tensor],
    grads: list[Tensor],
    container: str,
    grad: str,
    mode: bool | str,
    read: bool,
) -> tuple[Step, Step]:
    """A step with metrics and one without, of one optimizer.

    Two optimizers in different memory differ by more than what is to be measured.
    """
    opt = FairCastAdamW(containers(start, grads, container, grad), lr=1e-6)
    counting, silent = Telemetry(mode), Telemetry(False)

    def on() -> None:
        opt._telemetry = counting
        opt.step()
        if read:
            flatten(opt.metrics())

    def off() -> None:
        opt._telemetry = silent
        opt.step()

    return on, off


def main() -> None:
    parser = argparse.ArgumentParser(description="The cost of step metrics in paired ratios.")
    parser.add_argument("--params", type=int, default=50_000_000)
    parser.add_argument("--tensors", type=int, default=100)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=41)
    parser.add_argument("--read", action="store_true", help="read the figures after every step")
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
        for metrics in (True, "all"):
            on, off = steppers(start, grads, container, grad, metrics, args.read)
            mine, theirs = pairs(on, off, args.pairs)
            names = f"{container}, {grad} grads", f"metrics={metrics!r} / off"
            row = row_of(*names, mine, theirs, args.params, tensors=args.tensors, read=args.read)
            rows.append(row)
            print_row(row)
    if args.csv:
        results.append(args.csv, rows)


if __name__ == "__main__":
    main()
