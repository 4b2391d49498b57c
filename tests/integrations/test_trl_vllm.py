"""TRL with a real vLLM: the engine holds what the trainer serves, at every sync.

One process runs all arms, on a colocated vLLM and on a server, in eager mode on a CPU, and writes
what it saw; the tests read it. A small Qwen2 is made here. Not run: TRL's own NCCL transfer, which
wants a CUDA device, and AsyncGRPO's attention kernel.
"""

import json
from typing import Any

import pytest
import torch.multiprocessing as mp
import trl_runs
import trl_vllm
from trl_vllm import DITHERS, DTYPES, STEPS

pytestmark = pytest.mark.vllm

LARGEST = 2.5 * 2**-7  # of a log-prob's differences: logits are below 2, bf16 has steps of 2**-7


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder, out = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("runs")
    trl_runs.save_model(folder)
    mp.spawn(trl_vllm.process, (folder, out), nprocs=1)
    found: dict[str, Any] = json.loads((out / "results.json").read_text())
    return found


def ran(results: dict[str, Any], arm: str) -> dict[str, Any]:
    found: dict[str, Any] = results[arm]
    assert "error" not in found, found["error"]
    print(arm, found)
    return found


@pytest.mark.parametrize("dither", DITHERS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_engine_holds_what_the_trainer_serves_at_every_sync(dtype, dither, results):
    found = ran(results, f"{dtype}-{dither}")
    assert found["equal"] == [True] * STEPS
    assert 0.9 < found["captured"] < 1.1
    per_step = 2 if dither == "sync" else 1  # the step and the redraw before the sync
    assert found["logged"] == [per_step * (i + 1) for i in range(STEPS)]
    assert found["changed"] < 0.03 if dither == "held" else 0.05 < found["changed"] < 0.3


@pytest.mark.parametrize("arm", ["rtn", *(f"{t}-{d}" for t in DTYPES for d in DITHERS)])
def test_log_probs_of_engine_and_trainer_agree(arm, results):
    """Both compute in bf16, by other kernels, so that roundings fall the other way."""
    found = ran(results, arm)
    assert found["logprob_mean"] < 2**-9  # two bf16 steps of an ordinary logit, 0.2
    assert found["logprob_max"] < LARGEST
    if arm != "rtn":
        assert found["visible"] == pytest.approx(found["logprob_max"], abs=5e-3)  # TRL's own


def test_rloo_syncs_by_the_same_method(results):
    found = ran(results, "rloo")
    assert found["equal"] == [True] * STEPS
    assert found["logged"] == [2 * (i + 1) for i in range(STEPS)]


def test_frozen_weights_may_be_fused_with_trained_ones(results):
    found = ran(results, "frozen")
    assert found["equal"] == [True] * STEPS
    assert found["logged"] == list(range(1, STEPS + 1))


def test_dither_sync_redraws_once_per_sync_of_two_steps(results):
    found = ran(results, "several")
    assert found["equal"] == [True] * (STEPS // 2)
    assert found["logged"] == [2, 3, 5, 6, 8, 9, 11, 12]


def test_round_to_nearest_lags(results):
    found = ran(results, "rtn")
    assert found["equal"] == [True] + [False] * (STEPS - 1)
    assert found["captured"] < 0.5
    assert found["changed"] < 0.03


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_resumed_run_equals_the_uninterrupted_one(dtype, results):
    found = ran(results, f"resumed-{dtype}")
    assert found["syncs"] == [8, 4] and all(found["equal"])
    assert found["kinds"] == ["exp_avg", "exp_avg_sq", "master", "param_id", "step"]
    assert found["weights"] and found["state"] and found["groups"] and found["held"]


def test_an_engine_that_holds_something_else_stops_the_run(results):
    found = ran(results, "broken")
    problem, text, step = found["lost"]
    assert (problem, step) == ("stale", "2") and "model.norm.weight" in text
    problem, text, step = found["written"]
    assert (problem, step) == ("changed", "1") and "something else writes into it" in text


@pytest.mark.parametrize("dtype", DTYPES)
def test_trl_rounds_merged_adapters_to_nearest_and_moves_the_base(dtype, results):
    found = ran(results, f"lora-{dtype}")
    assert found["refused"].startswith("verify: True cannot be with a merged adapter.")
    assert found["managed"] and found["checked"]
    assert found["adapters"] == ["torch.float32"]  # PEFT's default, also on a bf16 model
    assert found["nearest"] > 0.95
    assert 0 < found["drifted"] < 0.5 and not found["elsewhere"]  # unmerging restores no bits


@pytest.mark.parametrize("dither", DITHERS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_async_grpo_serves_through_the_weight_transfer(dtype, dither, results):
    found = ran(results, f"async-{dtype}-{dither}")
    assert len(found["equal"]) == 12 and all(found["equal"])
    served = 9 if dither == "sync" else 4
    assert found["versions"] == [5, served, served] and found["digest"]
    assert "call fc_optim.integrations.trl.register(trainer)" in found["unregistered"]


def test_server_mode_but_for_nccl(results):
    found = ran(results, "server")
    assert "NCCL weight-transfer engine, which needs a CUDA device" in found["on a CPU"]
    assert found["version"] == 8 and found["visible"] < LARGEST
    assert found["problem"] == ["stale", "model.embed_tokens.weight"]
    # AsyncGRPO, proved five times each: its own transfer, but for NCCL, and ours, as it is
    assert found["async"] == {"theirs": [5, 4], "ours": [5, 9, 9], "digest": True}
