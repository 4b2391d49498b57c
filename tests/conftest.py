"""What must be chosen before anything is imported, and how tests are spread over processes."""

import os
from collections.abc import Iterator

import caches
import pytest
import torch
from ranks import Worlds

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

caches.claim()

# A worker has one core, and so has what it starts.
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)

WORKERS = 4  # at most: there are no more files that take long
LONGEST = ("test_gpu_kernels", "test_aot", "test_sharded_checkpoint", "test_sharding")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """A file is never split, so one file is run here."""
    one = len(config.args) == 1 and config.args[0].partition("::")[0].endswith(".py")
    return 0 if one else min(WORKERS, os.cpu_count() or 1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, so that workers end together."""
    place = {name: i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))


def pytest_sessionstart(session: pytest.Session) -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:  # before there are workers
        caches.compile_kernels()


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worlds]:
    """`ranks(world).run(job, *args)` runs `job(*args)` in `world` processes, of one gloo group."""
    worlds = Worlds(tmp_path_factory.mktemp("ranks"))
    yield worlds
    worlds.close()
