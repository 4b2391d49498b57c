"""What must be chosen before anything is imported: Triton's interpreter, the tests' own caches."""

import os
from collections.abc import Iterator

import caches
import pytest
import torch
from ranks import Worlds

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

caches.claim()


def pytest_sessionstart(session: pytest.Session) -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:  # before there are workers
        caches.compile_kernels()


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worlds]:
    """`ranks(world).run(job, *args)` runs `job(*args)` in `world` processes, of one gloo group."""
    worlds = Worlds(tmp_path_factory.mktemp("ranks"))
    yield worlds
    worlds.close()
