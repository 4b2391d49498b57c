"""What sharding costs a step: the kernels on shards against the same elements unsharded.

    python examples/benchmarks/sharded.py            # 32 M elements on the rank that is timed

Two gloo ranks; the second holds shards that do not begin at element 0, and is timed while the
first waits. A pair is one step on the shards and one on plain parameters of the same local shapes.
Two sets of tensors in different memory differ by several percent: so both are made anew --builds
times, and the first row compares plain parameters with plain parameters.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import results
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from timing import Step, pairs, print_header, print_row, row_of
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Shard

from fc_optim import FairCastAdamW, FlatPiece

ROWS, COLUMNS = 1024, 2048  # of a local shard


def stepper(params: list[nn.Parameter], **flat: Any) -> Step:
    for p in params:
        p.grad = torch.ones_like(p) * 1e-3
    opt = FairCastAdamW(params, lr=1e-6)
    for p, pieces in zip(params, flat.get("pieces", ()), strict=False):
        opt.declare_flat(p, pieces)
    return opt.step


def plain(local: list[Tensor]) -> Step:
    return stepper([nn.Parameter(t.clone()) for t in local])


def dtensors(local: list[Tensor], placement: Placement, mesh: DeviceMesh) -> Step:
    whole = [DTensor.from_local(t.clone(), mesh, [placement], run_check=False) for t in local]
    return stepper([nn.Parameter(t) for t in whole])


def flat(local: list[Tensor], start: int) -> Step:
    """One buffer whose pieces begin at element `start` of their parameters."""
    size = local[0].numel()
    shape = (2 * size,)
    pieces = [FlatPiece(f"w{i}", shape, start, size, i * size) for i in range(len(local))]
    return stepper([nn.Parameter(torch.cat([t.view(-1) for t in local]))], pieces=[pieces])


def timed_rank(rank: int, rendezvous: str, args: argparse.Namespace, argv: list[str]) -> None:
    sys.argv = argv
    torch.set_num_threads(args.threads)
    dist.init_process_group("gloo", f"file://{rendezvous}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))  # every rank takes part
    generator = torch.Generator().manual_seed(0)
    count = args.params // (ROWS * COLUMNS)
    local = [torch.randn(ROWS, COLUMNS, generator=generator) * 0.02 for _ in range(count)]
    cases = {
        "unsharded (the noise)": lambda: plain(local),
        "DTensor, Shard(0)": lambda: dtensors(local, Shard(0), mesh),
        "DTensor, Shard(1)": lambda: dtensors(local, Shard(1), mesh),
        "flat buffer, start % 8 = 0": lambda: flat(local, 800),
        "flat buffer, start % 8 = 3": lambda: flat(local, 803),
    }
    rows = []
    if rank == 1:
        print_header()
        for name, build in cases.items():
            mine: list[float] = []
            theirs: list[float] = []
            for _ in range(args.builds):
                a, b = pairs(build(), plain(local), args.pairs)
                mine, theirs = mine + a, theirs + b
            size = count * ROWS * COLUMNS
            rows.append(row_of(name, "unsharded", mine, theirs, size, builds=args.builds))
            print_row(rows[-1])
        if args.csv:
            results.append(args.csv, rows)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description="The sharded step in paired ratios, on a CPU.")
    parser.add_argument("--params", type=int, default=32 * 2**20, help="elements of one rank")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=15, help="of each build")
    parser.add_argument("--builds", type=int, default=7)
    parser.add_argument("--csv", type=Path, help="append the rows to this file")
    args = parser.parse_args()
    if args.params < ROWS * COLUMNS or min(args.threads, args.pairs, args.builds) < 1:
        parser.error(f"--params must be at least {ROWS * COLUMNS}, and all of them positive")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(timed_rank, (f"{folder}/rendezvous", args, sys.argv), nprocs=2)


if __name__ == "__main__":
    main()
