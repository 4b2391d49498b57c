"""Processes of one job that several tests run in: to import DeepSpeed takes longer than a test."""

import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

import torch.multiprocessing as mp

TIMEOUT = 300  # seconds for a job


class Ranks:
    """`world` processes; `start(rank, world, rendezvous)` runs in each of them first."""

    def __init__(self, world: int, start: Callable[[int, int, str], None], rendezvous: str):
        context = mp.get_context("spawn")
        ends = [context.Pipe() for _ in range(world)]
        self._pipes = [here for here, _ in ends]
        self._processes = [
            context.Process(target=_serve, args=(start, rank, world, rendezvous, there))
            for rank, (_, there) in enumerate(ends)
        ]
        for process, (_, there) in zip(self._processes, ends, strict=True):
            process.daemon = True
            process.start()
            there.close()

    def run(self, job: Callable[..., None], *args: Any) -> None:
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
        self._processes = []


def _failure(pipe: Any) -> str | None:
    try:
        return pipe.recv()
    except EOFError:
        return "a process ended"


def _serve(
    start: Callable[[int, int, str], None], rank: int, world: int, rendezvous: str, pipe: Any
) -> None:
    start(rank, world, rendezvous)
    while True:
        job, args = pipe.recv()
        try:
            job(*args)
            pipe.send(None)
        except BaseException:
            pipe.send(f"rank {rank}\n{traceback.format_exc()}")
