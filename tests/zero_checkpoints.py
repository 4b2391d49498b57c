"""Checkpoints of DeepSpeed, and what Hugging Face makes of its engines."""

from pathlib import Path
from typing import Any

import strategies
import torch
import torch.distributed as dist
from strategies import Model, gradients
from zero import (
    OPTIONS,
    STEPS,
    config,
    differences,
    initialize,
    reference,
    result,
    start,
    train,
    train_engine,
    weights,
)

from fc_optim import FairCastOptimizer
from fc_optim.integrations.deepspeed import attach, register

SAVED = [("0", "fresh"), ("1", "held"), ("1 fp32 gradients", "fresh"), ("2 offloaded", "sync"),
         ("3", "fresh"), ("3 offloaded", "held")]  # fmt: skip


def other(params: Any) -> FairCastOptimizer:
    """An optimizer whose options a checkpoint overrides."""
    return FairCastOptimizer(torch.optim.AdamW, params, lr=1e-3, weight_decay=0.1, backend="cpu")


def go_on(engine: Any, opt: FairCastOptimizer, steps: Any) -> dict[str, Any]:
    train_engine(engine, steps)
    opt.publish(redraw=True)
    if opt.dither == "sync":
        moved = [n for n, v in weights(engine).items() if n != "frozen.weight"
                 and not torch.equal(v, dict(opt.served_params(copy=True))[n])]  # fmt: skip
        assert not moved, f"the model does not hold the new shadow of {moved}"
    return result(opt)


def resume(rank: int, world: int, rendezvous: str, folder: str) -> None:
    start(rank, world, rendezvous)
    for k, (name, dither) in enumerate(SAVED):
        ds_config, how = OPTIONS[name]
        where = f"{folder}/{name}"
        engine, opt = initialize(ds_config, **how, dither=dither)
        attach(engine)
        saved = go_on(engine, opt, [0, 1])
        engine.save_checkpoint(where, client_state={"mine": 3})
        end = go_on(engine, opt, [2, 3])
        if rank == 0:
            torch.save({"saved": saved, "end": end}, f"{where}/expected")
        engine, opt = initialize(ds_config, **how, make=other)
        if k % 2:
            attach(engine)
        _, client = engine.load_checkpoint(where)
        assert client["mine"] == 3
        attach(engine)
        held = weights(engine)
        got = result(opt)
        bad = differences(saved, got)
        bad += [n for n, v in held.items() if not torch.equal(v, got["served"][n])]
        assert opt.seed == 11 and opt.dither == dither
        bad += differences(end, go_on(engine, opt, [2, 3]))
        assert not bad, f"{name}: {bad[:5]}"
    for stage in (1, 3):
        zero = {"stage3_gather_16bit_weights_on_model_save": True} if stage == 3 else {}
        engine, opt = initialize(config(stage, **zero))
        attach(engine)
        served = go_on(engine, opt, [0])["served"]
        engine.save_16bit_model(folder, f"{stage}.bin")
        if rank == 0:
            written = torch.load(f"{folder}/{stage}.bin")
            assert all(torch.equal(v, written[n]) for n, v in served.items())
    dist.destroy_process_group()


def load_universal(rank: int, world: int, rendezvous: str, folder: str) -> None:
    start(rank, world, rendezvous)
    for name in ("1", "3"):
        ds_config, how = OPTIONS[name]
        expected = torch.load(f"{folder}/{name}/expected", weights_only=False)
        engine, opt = initialize(
            ds_config | {"checkpoint": {"load_universal": True}}, **how, make=other
        )
        if world == 1:  # both orders
            attach(engine)
        engine.load_checkpoint(f"{folder}/{name}-masters", tag="universal")
        attach(engine)
        bad = differences(expected["saved"], result(opt))
        bad += differences(expected["end"], go_on(engine, opt, [2, 3]))
        assert not bad, f"{name} on {world}: {bad[:5]}"
        assert attach(engine) is opt  # changes nothing now
        assert not differences(expected["end"], result(opt))
    dist.destroy_process_group()


def convert(folder: Path, name: str) -> None:
    """By our tool and DeepSpeed's own."""
    from argparse import Namespace

    from deepspeed.checkpoint import ds_to_universal

    from fc_optim.integrations.deepspeed_masters import masters_as_fp32

    tag = (folder / name / "latest").read_text()
    masters_as_fp32(folder / name / tag, folder / f"{name}-masters" / tag)
    ds_to_universal.main(
        Namespace(
            input_folder=str(folder / f"{name}-masters" / tag),
            output_folder=str(folder / f"{name}-masters" / "universal"),
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,
        )
    )


# ---- Hugging Face


def with_accelerate(rank: int, world: int, rendezvous: str) -> None:
    """accelerate keeps the optimizer when the config is registered, under offloading as well."""
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin

    start(rank, world, rendezvous)
    ds_config = register(config(2, True))
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=ds_config))
    model = Model().bfloat16()
    opt = strategies.optimizer(model.named_parameters())
    engine, wrapped = accelerator.prepare(model, opt)
    assert wrapped.optimizer.optimizer is opt
    plain, ref = reference(engine)
    assert attach(engine) is opt
    for i in range(STEPS):
        accelerator.backward(engine(gradients(i)))
        wrapped.step()
    train(plain, ref, range(STEPS))
    assert not differences(result(ref), result(opt))
    dist.destroy_process_group()


def with_trainer(rank: int, world: int, rendezvous: str, folder: str) -> None:
    """Trainer(deepspeed=...) trains on served weights and resumes bit for bit."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    from fc_optim import FairCastAdamW
    from fc_optim.integrations.deepspeed import trainer_callback

    start(rank, world, rendezvous)
    data = [{"input_ids": torch.arange(8) + i, "labels": torch.arange(8) + i} for i in range(16)]

    def run(stage: int, resume: str | None) -> tuple[dict[str, Any], FairCastOptimizer]:
        torch.manual_seed(0)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=32,
                hidden_size=32,
                intermediate_size=32,
                num_hidden_layers=1,
                num_attention_heads=2,
            )  # fmt: skip
        )
        ds_config = config(stage)
        for key in ("train_micro_batch_size_per_gpu", "gradient_clipping"):
            ds_config[key] = "auto"
        trainer = Trainer(
            model,
            TrainingArguments(
                f"{folder}/{stage}", deepspeed=register(ds_config), bf16=True, max_steps=4,
                save_steps=2, per_device_train_batch_size=2, report_to=[], use_cpu=True,
                learning_rate=1e-3, logging_strategy="no", disable_tqdm=True,
            ),
            train_dataset=data,
            optimizer_cls_and_kwargs=(FairCastAdamW, {"lr": 1e-3, "backend": "cpu"}),
        )  # fmt: skip
        trainer.add_callback(trainer_callback(trainer))
        trainer.train(resume_from_checkpoint=resume)
        opt = attach(trainer.model_wrapped)
        served = dict(opt.served_params(copy=True))
        for name, value in weights(trainer.model_wrapped).items():
            assert torch.equal(value, served[name]), name
        return result(opt), opt

    for stage in (2, 3):
        whole, opt = run(stage, None)
        assert opt.served_version == 4
        again, _ = run(stage, f"{folder}/{stage}/checkpoint-2")
        assert not differences(whole, again), stage
    dist.destroy_process_group()
