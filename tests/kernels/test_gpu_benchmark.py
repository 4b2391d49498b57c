"""The benchmark goes the whole way where there is no GPU, so that it does where there is one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "benchmarks" / "gpu.py"


@pytest.mark.long
def test_the_rehearsal_checks_bits_and_times_everything(tmp_path: Path) -> None:
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(SCRIPT), "--dry", "--csv", str(tmp_path / "out.csv")]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "bit for bit equal to the reference: 14 cases" in done.stdout
    for row in ("adam_, a shard of columns", "canonical_", "torch fused AdamW + sr"):
        assert row in done.stdout
    assert not (tmp_path / "out.csv").exists()  # an interpreter's figures are no results
