"""Bits do not hang on the instructions that a compiler chose: other processors, in this one."""

import hashlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_cases import (
    MUON_OPTIONS,
    OPTIONS,
    WRITTEN,
    bits_of,
    clone_batch,
    make_batch,
    make_muon_batch,
    sow_specials,
)

from fc_optim.kernels import cpu, reference
from fc_optim.kernels.batch import Batch

PROCESSORS = {  # numba's features, torch's capability
    "SSE2": ("+sse2", "default"),
    "AVX2": ("+sse2,+sse4.2,+avx,+avx2,+fma,+bmi,+bmi2", "avx2"),
}
SIZES = [9, 70, 3001, 20_011]  # whole vectors and what is left of them


def digest(batch: Batch) -> str:
    h = hashlib.sha256()
    for x in (x for name in WRITTEN for x in getattr(batch, name)):
        h.update(bits_of(x).numpy().tobytes())
    return h.hexdigest()


def batches() -> list[Batch]:
    """Of ordinary and of special values."""
    made = [make_batch(SIZES, **options) for options in OPTIONS]
    made += [make_muon_batch(SIZES, **options) for options in MUON_OPTIONS]
    return made + [sow_specials(clone_batch(batch)) for batch in made]


def digests(backend: Any, batches: Sequence[Batch]) -> list[str]:
    """Of all that kernels write in a few steps on copies."""
    found = []
    for batch in map(clone_batch, batches):
        for _ in range(3):
            if batch.muon_hypers:
                backend.muon_momentum_(batch)
                backend.muon_update_(batch)
            else:
                backend.adam_(batch)
        assert not backend.flag_foreign(batch).any()
        found.append(digest(batch))
    return found


@pytest.mark.long
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="x86's instruction sets")
@pytest.mark.parametrize("name", PROCESSORS)
def test_another_processor_gives_the_same_bits(name: str, tmp_path: Path) -> None:
    features, capability = PROCESSORS[name]
    env = os.environ | {
        "NUMBA_CPU_NAME": "generic",
        "NUMBA_CPU_FEATURES": features,
        "NUMBA_CACHE_DIR": str(tmp_path),
        "ATEN_CPU_CAPABILITY": capability,
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    made = batches()  # here: torch's normal numbers depend on the processor
    torch.save(made, tmp_path / "batches")
    command = [sys.executable, __file__, str(tmp_path / "batches")]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    expected = digests(reference, made)
    assert digests(cpu, made) == expected
    assert json.loads(done.stdout) == [expected, expected]


if __name__ == "__main__":
    loaded = torch.load(sys.argv[1], weights_only=False)
    json.dump([digests(reference, loaded), digests(cpu, loaded)], sys.stdout)
