"""Processes for tests: new ones for each test, or ones that several tests share.

All are forked from one process that has imported what most of them need, so that a start takes a
tenth of a second; every process is as new as a spawned one.
"""

import datetime
import itertools
import os
import socket
import sys
import traceback
import warnings
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT = 600  # seconds for a job; the first may wait for an extension to be compiled


def processes() -> Any:
    """The context of multiprocessing that forks them."""
    mp.set_forkserver_preload(
        [
            *("torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.tensor"),
            *("torch.nn.parallel", "torch._dynamo", "pytest", "warm"),
        ]
    )
    path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # else it finds none of the tests' modules
    try:
        forkserver.ensure_running()
    finally:
        if path is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = path
    return mp.get_context("forkserver")


def free_port() -> int:
    """For what takes no file to meet at."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start(rank: int, world: int, rendezvous: str) -> None:
    """What every rank does first; frameworks find the environment of a launcher."""
    sizes = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ.update({name: str(value) for name, value in sizes.items()})
    torch.set_num_threads(1)
    torch.manual_seed(rank)  # the global RNG must not matter
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=120),
    )


def spawn(
    worker: Callable[..., None], world: int, folder: Path, *args: Any, join: bool = True
) -> Any:
    """Run `worker(rank, world, rendezvous, *args)` in `world` processes; raises what they raise.

    The rendezvous is a file in `folder`. Without `join`, gives torch's context to wait with.
    """
    processes()
    rendezvous = str(folder / f"{worker.__name__}-{world}")
    return mp.start_processes(
        worker, (world, rendezvous, *args), nprocs=world, join=join, start_method="forkserver"
    )


class Ranks:
    """`world` processes; `begin(rank, world, rendezvous)` runs in each of them first."""

    def __init__(self, world: int, begin: Callable[[int, int, str], None], rendezvous: str):
        context = processes()
        ends = [context.Pipe() for _ in range(world)]
        self._pipes = [here for here, _ in ends]
        self._processes = [
            context.Process(target=_serve, args=(begin, rank, world, rendezvous, there))
            for rank, (_, there) in enumerate(ends)
        ]
        for process, (_, there) in zip(self._processes, ends, strict=True):
            process.daemon = True
            process.start()
            there.close()

    def run(self, job: Callable[..., object], *args: Any) -> None:
        """Run `job(*args)` in every process; raises what the first one raised, as text."""
        for pipe in self._pipes:
            pipe.send((job, args))
        waiting = list(self._pipes)
        while waiting:
            ready: list[Any] = wait(waiting, TIMEOUT)
            failed = _failure(ready[0]) if ready else f"no answer within {TIMEOUT} s"
            if failed:
                self.close()  # the others may wait for it
                raise AssertionError(f"{job.__name__}: {failed}")
            waiting.remove(ready[0])

    @property
    def closed(self) -> bool:
        return not self._processes

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
            process.close()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []


class Worlds:
    """Ranks for all who ask, the same for all who ask for as many."""

    def __init__(self, folder: Path, begin: Callable[[int, int, str], None] = start):
        self._folder, self._begin = folder, begin
        self._number = itertools.count()
        self._made: dict[int, Ranks] = {}

    def __call__(self, world: int) -> Ranks:
        if world not in self._made or self._made[world].closed:
            rendezvous = self._folder / f"rendezvous-{next(self._number)}"
            self._made[world] = Ranks(world, self._begin, str(rendezvous))
        return self._made[world]

    def close(self) -> None:
        for ranks in self._made.values():
            ranks.close()


def _failure(pipe: Any) -> str | None:
    try:
        return pipe.recv()
    except EOFError:
        return "a process ended"


def _serve(
    begin: Callable[[int, int, str], None], rank: int, world: int, rendezvous: str, pipe: Any
) -> None:
    begin(rank, world, rendezvous)
    while True:
        job, args = pipe.recv()
        torch.manual_seed(rank)
        try:
            with warnings.catch_warnings():
                job(*args)
            pipe.send(None)
        except BaseException:
            pipe.send(f"rank {rank}\n{traceback.format_exc()}")
