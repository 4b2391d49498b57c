"""DeepSpeed trains on the served weights: the bits of the unsharded run, resume, errors."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import caches
import pytest
import torch
from ranks import Worlds, free_port

from fc_optim.integrations.deepspeed import register

CONFIG = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worlds]:
    """Ranks with DeepSpeed in them."""
    import zero  # takes seconds

    worlds = Worlds(tmp_path_factory.mktemp("ranks"), zero.start)
    yield worlds
    worlds.close()


def test_register_sets_what_a_client_optimizer_needs() -> None:
    made = register(CONFIG)
    assert made["zero_allow_untested_optimizer"] is True
    assert made["zero_force_ds_cpu_optimizer"] is False
    assert "zero_allow_untested_optimizer" not in CONFIG


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fp16": {"enabled": True}}, "fp16.enabled"),
        ({"bf16": {}}, "bf16.enabled: must be true"),
        ({"optimizer": {"type": "AdamW"}}, "optimizer: DeepSpeed would build its own"),
        (
            {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
            "masters must be fp32",
        ),
        ({"bf16": {"enabled": True, "bf16_optimizer_states": True}}, "moments must be fp32"),
        ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, "'nvme'"),
        ({"zero_optimization": {"offload_param": {"device": "nvme"}}}, "'nvme'"),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "cpu", "super_offload": True}}},
            "super_offload",
        ),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}}, "ratio"),
        ({"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}}, "zenflow"),
        ({"zero_optimization": {"zero_quantized_weights": True}}, "zero_quantized_weights"),
        ({"zero_optimization": {"elastic_checkpoint": True}}, "elastic_checkpoint"),
        ({"expert_parallel": {"enabled": True, "autoep_size": 2}}, "AutoEP"),
    ],
)
def test_register_refuses_what_cannot_be_served(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        register(CONFIG | change)


@pytest.mark.integration
@pytest.mark.parametrize("options", ["1 offloaded", "2", "3"])
def test_each_kind_of_engine_gives_the_bits_of_the_unsharded_run(options, ranks) -> None:
    """The part of the next test that has the time to run always."""
    import zero

    ranks(2).run(zero.compare, [options])


@pytest.mark.long
@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_stage_gives_the_bits_of_the_unsharded_run(world, ranks) -> None:
    import zero

    ranks(world).run(zero.compare, list(zero.OPTIONS))


@pytest.mark.long
def test_experts_are_served_where_all_ranks_hold_all(ranks, tmp_path) -> None:
    import zero_experts

    ranks(2).run(zero_experts.check, str(tmp_path))


@pytest.mark.long
def test_what_bites_is_found_or_refused(ranks) -> None:
    import zero

    ranks(2).run(zero.check_behaviour)


@pytest.mark.long
def test_foreign_writes_are_found_on_every_rank(ranks, tmp_path) -> None:
    import zero_writes

    ranks(2).run(zero_writes.check, str(tmp_path))


@pytest.mark.long
def test_resume_and_universal_checkpoints_keep_the_masters(ranks, tmp_path) -> None:
    import zero_checkpoints as checkpoints
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    ranks(2).run(checkpoints.resume, str(tmp_path))
    for name in ("1", "3"):
        checkpoints.convert(tmp_path, name)
        saved = torch.load(tmp_path / name / "expected", weights_only=False)["saved"]
        for folder, which in ((name, "served"), (f"{name}-masters", "masters")):
            exported = get_fp32_state_dict_from_zero_checkpoint(tmp_path / folder)
            names = saved[which].keys() - ({"frozen.weight"} if name == "1" else set())
            for n in names:  # DeepSpeed leaves out frozen weights in stage 1
                value = saved[which][n]
                assert torch.equal(exported[n], value.float()), f"{which} {n}"
    for world in (1, 3):
        ranks(world).run(checkpoints.load_universal, str(tmp_path))


@pytest.mark.long
@pytest.mark.parametrize("world", [1, 2])
def test_accelerate_trains_saves_and_resumes(world, ranks, tmp_path) -> None:
    import zero_hugging_face

    ranks(world).run(zero_hugging_face.with_accelerate, str(tmp_path))


@pytest.mark.long
def test_register_says_what_accelerate_did_to_the_optimizer(ranks) -> None:
    import zero_hugging_face

    ranks(2).run(zero_hugging_face.refused_by_register)


@pytest.mark.long
def test_trainer_trains_and_resumes(ranks, tmp_path) -> None:
    import zero_hugging_face

    ranks(2).run(zero_hugging_face.with_trainer, str(tmp_path))


@pytest.mark.long
def test_example_runs_under_the_launcher_and_resumes(tmp_path) -> None:
    import zero

    script = Path(__file__).parents[2] / "examples" / "deepspeed_train.py"
    port = str(free_port())
    command = [
        *(sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "2"),
        *("--master_port", port, str(script), "--steps", "2", "--sync-every", "2"),
        *("--deepspeed_config", str(script.parent / "deepspeed_configs" / "zero3.json")),
    ]
    env = {**os.environ, "DS_ACCELERATOR": "cpu"}

    def run(*more: str) -> str:
        with caches.building_extensions():
            done = subprocess.run([*command, *more], env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout + done.stderr

    assert "version 2: digest" in run("--save", str(tmp_path))
    assert "version 4: digest" in run("--resume", str(tmp_path))
    zero.forget_shared_memory(port)
