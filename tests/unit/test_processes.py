"""The tests' own processes and caches: failures are told, and nothing waits for what was killed."""

import os
import signal
from pathlib import Path
from typing import Any

import caches
import pytest
from ranks import Worlds, processes


def nothing(rank: int, world: int, rendezvous: str) -> None:
    pass


def fail(text: str) -> None:
    raise ValueError(text)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_failure_is_told_and_the_next_job_gets_new_ranks(tmp_path: Path) -> None:
    worlds = Worlds(tmp_path, nothing)
    first = worlds(2)
    first.run(os.getpid)
    assert worlds(2) is first
    with pytest.raises(AssertionError, match="fail: rank . *(?s:.*)ValueError: what went wrong"):
        first.run(fail, "what went wrong")
    assert first.closed
    with pytest.raises(AssertionError, match="die: a process ended"):
        worlds(2).run(die)
    worlds(2).run(os.getpid)
    worlds.close()


def build_and_wait(pipe: Any, folder: Path) -> None:
    caches.TORCH_EXTENSIONS = folder
    with caches.building_extensions():
        (folder / "op").mkdir()
        (folder / "op" / "lock").touch()  # as torch does while it compiles
        pipe.send("building")
        signal.pause()


def test_a_build_that_was_killed_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = processes()
    here, there = context.Pipe()
    process = context.Process(target=build_and_wait, args=(there, tmp_path))
    process.start()
    there.close()
    with here:
        assert here.recv() == "building"
        process.kill()
    process.join()
    process.close()
    monkeypatch.setattr(caches, "TORCH_EXTENSIONS", tmp_path)
    with caches.building_extensions():
        assert not (tmp_path / "op" / "lock").exists()
