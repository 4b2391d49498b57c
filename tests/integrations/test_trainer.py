"""transformers' Trainer: every way to give it the optimizer, resuming, and the logged figures."""

import copy
import json
from typing import Any

import pytest
import torch
from models import assert_equal_states, assert_same, assert_served

from fc_optim import FairCastAdamW, metrics

pytestmark = pytest.mark.integration

VOCABULARY, LENGTH = 32, 8


def tiny_model(dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM, Qwen2Config

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


def dataset(size: int = 48) -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(VOCABULARY, (size, LENGTH), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in ids]


def arguments(folder, **kwargs: Any) -> Any:
    from transformers import TrainingArguments

    options: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": 6,
        "save_steps": 3,
        "logging_steps": 1,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.5,
        "learning_rate": 1e-3,
        "weight_decay": 0.1,
        "lr_scheduler_type": "linear",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return TrainingArguments(**{**options, **kwargs})


OPTIONS = {"lr": 1e-3, "seed": 3, "dither": "fresh"}


def trainer_for(folder, model, how: str, **kwargs: Any) -> Any:
    from transformers import Trainer

    callbacks = kwargs.pop("callbacks", None)
    given: dict[str, Any]
    if how == "optimizers":
        opt = FairCastAdamW(model.named_parameters(), **OPTIONS)
        given = {"optimizers": (opt, None)}
    else:
        given = {"optimizer_cls_and_kwargs": (FairCastAdamW, dict(OPTIONS))}
    args = arguments(folder, **kwargs)
    return Trainer(model, args, train_dataset=dataset(), callbacks=callbacks, **given)


KINDS = [(torch.float32, False), (torch.float32, True), (torch.bfloat16, False)]  # dtype, autocast


@pytest.mark.parametrize("how", ["optimizers", "optimizer_cls_and_kwargs"])
@pytest.mark.parametrize(("dtype", "bf16"), KINDS)
def test_a_resumed_run_equals_the_uninterrupted_one(how, dtype, bf16, tmp_path):
    whole = trainer_for(tmp_path, tiny_model(dtype), how, bf16=bf16)
    whole.train()
    opt = whole.optimizer.optimizer
    assert isinstance(opt, FairCastAdamW)
    assert_served(opt)

    saved = torch.load(tmp_path / "checkpoint-3/optimizer.pt", weights_only=True)
    masters = [entry["master"] for entry in saved["state"].values()]
    assert {m.dtype for m in masters} == {torch.float32}
    assert not all(torch.equal(m, m.bfloat16().float()) for m in masters), "masters were rounded"

    again = trainer_for(tmp_path, tiny_model(dtype), how, bf16=bf16)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert_same(whole.model, again.model)
    assert_equal_states(opt.state_dict(), again.optimizer.optimizer.state_dict())
    assert opt.served_version == 6
    assert whole.state.log_history[-2]["loss"] == again.state.log_history[-2]["loss"]


def test_the_trainers_groups_clipping_and_schedule_reach_the_optimizer(tmp_path):
    trainer = trainer_for(tmp_path, tiny_model(torch.float32), "optimizer_cls_and_kwargs")
    trainer.train()
    decay, rest = trainer.optimizer.param_groups
    assert (decay["weight_decay"], rest["weight_decay"]) == (0.1, 0.0)
    rates = [row["learning_rate"] for row in trainer.state.log_history if "learning_rate" in row]
    assert rates == pytest.approx([1e-3 * (1 - i / 6) for i in range(6)])
    norms = [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row]
    assert min(norms) > 0.5  # so that clipping did something


def recorder() -> Any:
    """Keeps whole masters and served weights after every step."""
    from transformers import TrainerCallback

    class Recorder(TrainerCallback):
        def __init__(self) -> None:
            self.masters: list[dict[str, torch.Tensor]] = []
            self.served: list[dict[str, torch.Tensor]] = []
            self.logged: list[dict[str, float]] = []

        def on_train_begin(self, args, state, control, **kwargs: Any) -> None:
            opt = kwargs["optimizer"].optimizer
            self.masters.append(dict(opt.master_params(copy=True, managed_only=True)))
            self.served.append(dict(opt.served_params(copy=True, managed_only=True)))

        on_step_end = on_train_begin

        def on_log(self, args, state, control, **kwargs: Any) -> None:
            self.logged.append(dict(kwargs["logs"]))

    return Recorder()


@pytest.mark.parametrize(("dtype", "bf16"), KINDS)
def test_the_callback_logs_the_figures_of_the_plain_definitions(dtype, bf16, tmp_path):
    from fc_optim.integrations.transformers import FairCastCallback

    record, model = recorder(), tiny_model(dtype)
    trainer = trainer_for(
        tmp_path, model, "optimizer_cls_and_kwargs", callbacks=[FairCastCallback(), record],
        bf16=bf16, learning_rate=1e-5,
    )  # fmt: skip
    trainer.train()
    start = {name: s.float() for name, s in record.served[0].items()}
    flat = [torch.cat([m.flatten() for m in named.values()]) for named in record.masters]
    flat[0] = torch.cat([s.flatten() for s in start.values()])  # W0
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert len(rows) == 6
    assert [row for row in record.logged if "loss" in row] == [
        {k: v for k, v in row.items() if k != "step"} for row in rows
    ]
    for t, row in enumerate(rows, 1):
        masters, served = record.masters[t], record.served[t]
        seen = torch.cat([s.flatten() for s in served.values()])
        expected = {
            "served_version": t,
            "changed_ratio": metrics.changed_ratio(served, record.served[t - 1]),
            "captured": metrics.captured(served, masters, start),
            "lag_steps": metrics.lag_steps(seen, list(enumerate(flat[: t + 1])), flat[0]),
            "export_rms_ulp": metrics.export_rms_ulp(served, masters),
        }
        assert {k: row[k] for k in expected} == pytest.approx(expected, rel=1e-6)


def test_the_callback_follows_a_bounded_sample_and_survives_a_resume(tmp_path):
    from fc_optim.integrations.transformers import FairCastCallback

    def train(**kwargs: Any) -> Any:
        callback = FairCastCallback(sample=500, history=2)
        model = tiny_model(torch.float32)
        trainer = trainer_for(tmp_path, model, "optimizers", callbacks=[callback])
        trainer.train(**kwargs)
        return trainer, callback

    _, callback = train()
    assert callback._tracker._start.numel() == 500
    trainer, _ = train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert [row["served_version"] for row in rows] == [1, 2, 3, 4, 5, 6]
    state = (tmp_path / "checkpoint-6/trainer_state.json").read_text()
    assert "NaN" not in state and len(json.loads(state)["log_history"]) == 6


def test_the_callback_says_what_optimizer_it_needs(tmp_path):
    from transformers import Trainer

    from fc_optim.integrations.transformers import FairCastCallback

    trainer = Trainer(
        tiny_model(torch.float32), arguments(tmp_path), train_dataset=dataset(),
        callbacks=[FairCastCallback()],
    )  # fmt: skip
    with pytest.raises(TypeError, match="AdamW is not a FairCastOptimizer; pass one"):
        trainer.train()


# ---- TRL, which builds on the Trainer


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [f"w{i}" for i in range(VOCABULARY - 2)] + ["<pad>", "<eos>"]
    table = {word: i for i, word in enumerate(words)}
    tokens = Tokenizer(models.WordLevel(table, unk_token="<pad>"))
    tokens.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="<pad>", eos_token="<eos>")


def trl_trainer(kind: str, folder, model, **given: Any) -> Any:
    import datasets
    import trl

    given["processing_class"] = tokenizer()
    options: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": 2,
        "per_device_train_batch_size": 4,
        "report_to": "none",
        "use_cpu": True,
        "bf16": True,
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_steps": 1,
    }
    if kind == "sft":
        rows = datasets.Dataset.from_dict({"text": ["w1 w2 w3 w4"] * 16})
        sft = trl.SFTConfig(**options, max_length=LENGTH)
        return trl.SFTTrainer(model, sft, train_dataset=rows, **given)

    def reward(completions: list[str], **kwargs: Any) -> list[float | None]:
        return [float(len(text)) for text in completions]

    rows = datasets.Dataset.from_dict({"prompt": ["w1 w2"] * 16})
    grpo = trl.GRPOConfig(**options, num_generations=4, max_completion_length=4)
    return trl.GRPOTrainer(model, reward, args=grpo, train_dataset=rows, **given)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", ["sft", "grpo"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_trl_keeps_the_masters_bit_for_bit(kind, dtype, tmp_path):
    """accelerate passes the state through `load_state_dict()`; torch's own would cast it."""
    from transformers import TrainerCallback

    from fc_optim.integrations.transformers import FairCastCallback

    model = tiny_model(dtype)
    opt = FairCastAdamW(model.named_parameters(), lr=1e-3)
    for p in model.parameters():
        p.grad = torch.full_like(p, 0.5)
    opt.step()
    before = copy.deepcopy(opt.state_dict()["state"])
    for entry in before.values():
        assert not torch.equal(entry["master"], entry["master"].bfloat16().float())

    class AtStart(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs: Any) -> None:
            assert kwargs["optimizer"].optimizer is opt
            assert_equal_states(opt.state_dict()["state"], before)

    callbacks = [AtStart(), FairCastCallback()]
    trainer = trl_trainer(kind, tmp_path, model, optimizers=(opt, None), callbacks=callbacks)
    trainer.train()
    assert opt.served_version == 3
    assert_served(opt)
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert [row["served_version"] for row in rows] == [2, 3]
