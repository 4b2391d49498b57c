"""Folders of compiled code that belong to the tests: one set per checkout, for all its processes.

What must not be done twice at once is done under a lock that ends with the process that holds it,
so that nothing waits for a run that was killed.
"""

import fcntl
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CHECKOUT = Path(__file__).parents[1]
ROOT = CHECKOUT / ".cache" / "tests"
NUMBA, TORCH_EXTENSIONS = ROOT / "numba", ROOT / "torch_extensions"


def claim() -> None:
    """For this process and those it starts."""
    os.environ["NUMBA_CACHE_DIR"] = str(NUMBA)
    os.environ["TORCH_EXTENSIONS_DIR"] = str(TORCH_EXTENSIONS)
    os.environ["TRITON_CACHE_DIR"] = str(ROOT / "triton")
    os.environ["HF_HOME"] = str(ROOT / "huggingface")
    os.environ["HF_HUB_OFFLINE"] = "1"  # models and data are made here


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """One process at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "one-at-a-time", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def building_extensions() -> Iterator[None]:
    """Around everything that may build one.

    torch marks a build by a file, and waits for ever for that of a process that was killed. Whoever
    is here is alone, so such a file is nobody's.
    """
    with alone(TORCH_EXTENSIONS):
        for left in TORCH_EXTENSIONS.rglob("lock"):
            left.unlink()
        yield


def compile_kernels() -> None:
    """Fill numba's cache, if it is not: processes that compile at once can spoil its index."""
    if importlib.util.find_spec("numba") is None:
        return
    made_of: list[object] = [importlib.metadata.version("numba")]
    made_of += [os.environ.get(f"NUMBA_CPU_{x}") for x in ("NAME", "FEATURES")]
    sources = [p.stat() for p in sorted((CHECKOUT / "kernels").glob("cpu*.py"))]
    made_of += [(s.st_mtime_ns, s.st_size) for s in sources]  # as numba tells them apart
    stamp, note = NUMBA / "complete", repr(made_of)
    if not stamp.exists() or stamp.read_text() != note:
        # Not here: vLLM, which some tests start in their process, does not after numba.
        script, path = Path(__file__).with_name("warm.py"), os.pathsep.join(sys.path)
        subprocess.run([sys.executable, script], check=True, env=os.environ | {"PYTHONPATH": path})
        stamp.write_text(note)


def run_kernels() -> None:
    """Each once, or they are compiled when a test needs them."""
    from models import tiny, train

    from fc_optim import FairCastAdamW, muon_param_groups

    for metrics in (False, True):
        model = tiny()
        opt = FairCastAdamW(muon_param_groups(model), metrics=metrics, backend="cpu")
        train(model, opt, 2)
