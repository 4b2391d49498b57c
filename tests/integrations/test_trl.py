"""TRL with transformers' generation: what `register` sets up, resuming, and refusals."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import trl_runs
from models import assert_equal_states, assert_same, assert_served
from ranks import spawn, start

from fc_optim import FairCastAdamW

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("model")
    trl_runs.save_model(out, torch.float32)  # off the bf16 grid
    return out


def register(trainer: Any, **kwargs: Any) -> Any:
    from fc_optim.integrations import trl

    return trl.register(trainer, **kwargs)


@pytest.mark.parametrize("dither", ["fresh", "sync", "held"])
@pytest.mark.parametrize("kind", ["SFT", "GRPO", "RLOO"])
def test_register_publishes_before_the_first_forward_and_logs(kind, dither, folder, tmp_path):
    model = trl_runs.load(folder, torch.float32)
    trainer = trl_runs.trainer_for(kind, model, folder, tmp_path)
    trainer.optimizer_cls_and_kwargs = (FairCastAdamW, {"lr": 1e-5, "dither": dither})
    opt = register(trainer)
    off_grid = [not torch.equal(p, p.bfloat16().float()) for p in model.parameters() if p.ndim == 2]
    assert all(off_grid)
    seen: list[bool] = []

    def look(*args: Any) -> None:
        seen.append(all(torch.equal(p, p.bfloat16().float()) for p in model.parameters()))

    model.model.register_forward_pre_hook(look)
    trainer.train()
    assert seen and all(seen)
    assert trainer.optimizer.optimizer is opt
    assert opt.dither == dither
    assert {e.identity.name for e in opt.managed()} == {n for n, _ in model.named_parameters()}
    assert_served(opt)
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert [row["served_version"] for row in rows] == [1, 2]
    assert all(row["changed_ratio"] > 0 and "captured" in row for row in rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_rloo_run_equals_the_uninterrupted_one(dtype, folder, tmp_path):
    def run(resume: str | None = None) -> Any:
        model = trl_runs.load(folder, dtype)
        opt = FairCastAdamW(model.named_parameters(), lr=1e-4, seed=5)
        trainer = trl_runs.trainer_for(
            "RLOO", model, folder, tmp_path, optimizers=(opt, None), max_steps=4,
            save_strategy="steps", save_steps=2,
        )  # fmt: skip
        assert register(trainer) is opt
        trainer.train(resume_from_checkpoint=resume)
        return trainer, opt

    whole, opt = run()
    again, other = run(str(tmp_path / "checkpoint-2"))
    assert_same(whole.model, again.model)
    assert_equal_states(opt.state_dict(), other.state_dict())
    assert opt.served_version == other.served_version == 4


def replica(rank: int, world: int, rendezvous: str, folder: Path, out: Path) -> None:
    start(rank, world, rendezvous)
    found = []
    for seed in (3, rank):
        model = trl_runs.load(folder, torch.float32)
        opt = FairCastAdamW(model.named_parameters(), lr=1e-4, seed=seed)
        trainer = trl_runs.trainer_for(
            "GRPO", model, folder, out, optimizers=(opt, None), per_device_train_batch_size=4
        )
        register(trainer)
        try:
            trainer.train()
            found.append(str(opt.served_digest().total))
        except RuntimeError as e:
            found.append(str(e))
    (out / f"{rank}.json").write_text(json.dumps([type(trainer.model_wrapped).__name__, *found]))
    torch.distributed.destroy_process_group()


def test_replicas_serve_the_same_and_are_compared(folder, tmp_path):
    spawn(replica, 2, tmp_path, folder, tmp_path)
    (kind, one, text), (_, other, _) = (
        json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)
    )
    assert kind == "DistributedDataParallel"
    assert one == other
    assert "the ranks of this job disagree about seed" in text


# ---- Refusals


def sft(folder: Path, out: Path, dtype: torch.dtype = torch.float32, **kwargs: Any) -> Any:
    return trl_runs.trainer_for("SFT", trl_runs.load(folder, dtype), folder, out, **kwargs)


def test_another_optimizer_is_refused_and_not_created(folder, tmp_path):
    trainer = sft(folder, tmp_path)
    with pytest.raises(TypeError, match="AdamW is not a FairCastOptimizer; pass one to the"):
        register(trainer)
    assert trainer.optimizer is None


FAIR_CAST = (FairCastAdamW, {"lr": 1e-5})


def test_fp16_is_refused(folder, tmp_path):
    trainer = sft(folder, tmp_path, torch.float16, optimizer_cls_and_kwargs=FAIR_CAST)
    with pytest.raises(TypeError, match="torch.float16: a served parameter is bfloat16, or"):
        register(trainer)
    trainer = sft(folder, tmp_path, optimizer_cls_and_kwargs=FAIR_CAST, bf16=False, fp16=True)
    with pytest.raises(ValueError, match="trainer.args.fp16: True casts the weights to fp16"):
        register(trainer)


def test_deepspeed_and_fsdp1_are_refused(folder, tmp_path, monkeypatch):
    trainer = sft(folder, tmp_path, optimizer_cls_and_kwargs=FAIR_CAST)
    monkeypatch.setattr(trainer, "is_deepspeed_enabled", True)
    with pytest.raises(NotImplementedError, match="under DeepSpeed the Trainer hands"):
        register(trainer)
    monkeypatch.undo()
    monkeypatch.setattr(trainer, "is_fsdp_enabled", True)
    with pytest.raises(NotImplementedError, match="under FSDP1 the Trainer creates"):
        register(trainer)
    assert trainer.optimizer is None


def test_an_optimizer_that_was_replaced_is_noticed(folder, tmp_path):
    trainer = sft(folder, tmp_path, optimizer_cls_and_kwargs=FAIR_CAST)
    register(trainer)
    trainer.optimizer = FairCastAdamW(trainer.model.parameters(), lr=1e-5)
    with pytest.raises(RuntimeError, match="another one than when register"):
        trainer.train()
    opt = register(trainer)
    trainer.train()
    assert opt.served_version == 2
    names = [type(c).__name__ for c in trainer.callback_handler.callbacks]
    assert names[:2] == ["_Begin", "FairCastCallback"]
    assert len(set(names)) == len(names)


def test_a_trl_without_the_method_is_named(folder, tmp_path):
    trainer = trl_runs.trainer_for("GRPO", trl_runs.load(folder, torch.float32), folder, tmp_path)
    trainer.optimizer_cls_and_kwargs = FAIR_CAST
    trainer.use_vllm = True  # of which a later TRL might keep the engine elsewhere
    with pytest.raises(RuntimeError, match=r"has no sync_weights\(\) to wrap; tested is 1.16"):
        register(trainer, verify=False)
