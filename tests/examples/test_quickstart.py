"""examples/quickstart.py at tiny settings: its table shows the mechanism, and twice the same."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "quickstart.py"
TINY = ("--fit-steps", "5", "--steps", "3", "--puzzles", "400")

pytestmark = pytest.mark.integration


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", str(SCRIPT), *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def table(stdout: str) -> dict[int, list[float]]:
    """Step -> the row's numbers: four pairs (RTN, Fair Cast)."""
    rows = re.findall(r"^ *(\d+)((?: +[\d.]+%?){8})$", stdout, re.MULTILINE)
    return {int(step): [float(x.rstrip("%")) for x in cells.split()] for step, cells in rows}


def without_times(stdout: str) -> str:
    return stdout[: stdout.index("\nfit ")]


def test_fair_cast_delivers_what_rtn_withholds() -> None:
    first = run(*TINY)
    assert first.returncode == 0, first.stderr
    rows = table(first.stdout)
    assert list(rows) == [1, 3]
    for ratio, _, rtn, fair_cast, rtn_changed, fair_cast_changed, *scores in rows.values():
        assert 0 < ratio < 0.2
        assert rtn < 0.4
        assert fair_cast == pytest.approx(1, abs=0.08)  # its standard error here is about 0.01
        assert 0 < rtn_changed < fair_cast_changed < 50
        assert all(0 <= score <= 1 for score in scores)

    second = run(*TINY)
    assert without_times(second.stdout) == without_times(first.stdout)


def test_bad_flags_are_refused() -> None:
    result = run("--lr", "0")
    assert result.returncode == 2
    assert "--lr must be" in result.stderr.splitlines()[-1]
