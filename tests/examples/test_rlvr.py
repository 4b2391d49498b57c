"""examples/rlvr.py at tiny settings: its figures show the mechanism, and twice the same."""

import csv
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib.image import imread

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = pytest.mark.integration


def run(*flags: str | Path, examples: Path = EXAMPLES) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", str(examples / "rlvr.py"), *map(str, flags)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def figures(out: Path) -> dict[str, list[dict[str, float]]]:
    """Arm -> the rows of its steps. Scores are empty (NaN here) before the last step."""
    lines = (out / "rlvr.csv").read_text().splitlines()
    about = [line for line in lines if line.startswith("# ")]
    assert [line.split(":")[0] for line in about] == ["# command", "# versions", "# hardware"]
    arms: dict[str, list[dict[str, float]]] = {}
    for row in csv.DictReader(lines[len(about) :]):
        arm = row.pop("arm")
        arms.setdefault(arm, []).append({k: float(v or "nan") for k, v in row.items()})
    return arms


def test_fair_cast_delivers_what_rtn_withholds(tmp_path: Path) -> None:
    flags = ("--steps", "4", "--arms", "rtn,held", "--out")
    for out in ("first", "second"):
        result = run(*flags, tmp_path / out)
        assert result.returncode == 0, result.stderr
    csvs = [(tmp_path / out / "rlvr.csv").read_bytes() for out in ("first", "second")]
    assert csvs[0] == csvs[1]

    arms = figures(tmp_path / "first")
    rtn, held = arms["rtn"], arms["held"]
    assert [row["step"] for row in rtn] == [row["step"] for row in held] == [1, 2, 3, 4]
    # Of n weights that moved by a share s of their step, the standard error of held's `captured` is
    # 1 / sqrt(n s): 0.012 after a step (n = 338,000, s = 0.02), and less later. Five of them:
    for r, h in zip(rtn, held, strict=True):
        assert r["captured"] < 0.5 < h["captured"] == pytest.approx(1, abs=0.06)
        assert h["lag_steps"] < 0.2 < r["lag_steps"]
        assert 0 < r["update_half_ulp"] < 0.2
        assert 0 < h["hidden_sequence_ess"] <= 1
    # Nothing but rounding tells the arms apart in the first step: one rollout, one gradient.
    assert rtn[0]["dead_zone_fraction"] == pytest.approx(held[0]["dead_zone_fraction"], abs=1e-3)
    assert all(0 <= rtn[-1][f"score_{which}"] <= 1 for which in ("served", "masters"))

    image = imread(tmp_path / "first" / "rlvr.png")
    assert image.shape[0] > 500
    assert image[..., :3].std() > 0.05

    refused = run(*flags, tmp_path / "first")
    assert refused.returncode == 2
    assert "--force" in refused.stderr.splitlines()[-1]
    assert (tmp_path / "first" / "rlvr.csv").read_bytes() == csvs[0]


def test_muon_on_bf16_parameters(tmp_path: Path) -> None:
    """Several updates per rollout, too."""
    flags = ("--optimizer", "muon", "--container", "native", "--updates-per-rollout", "2")
    result = run(*flags, "--steps", "2", "--arms", "rtn,sync", "--out", tmp_path)
    assert result.returncode == 0, result.stderr
    arms = figures(tmp_path)
    assert arms["rtn"][-1]["captured"] < 0.7
    assert arms["sync"][-1]["captured"] == pytest.approx(1, abs=0.06)


@pytest.mark.parametrize("damage", ["missing", "cut short", "one bit"])
def test_a_bad_start_is_refused(tmp_path: Path, damage: str) -> None:
    for script in EXAMPLES.glob("*.py"):
        shutil.copy(script, tmp_path)
    start = tmp_path / "data" / "start-96.safetensors"
    start.parent.mkdir()
    if damage != "missing":
        content = bytearray((EXAMPLES / "data" / start.name).read_bytes())
        content[-1] ^= 1
        start.write_bytes(content if damage == "one bit" else content[:-1000])
    result = run("--out", tmp_path / "out", examples=tmp_path)
    assert result.returncode == 1
    assert "`python examples/rlvr.py --make-start --size 96`" in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr
