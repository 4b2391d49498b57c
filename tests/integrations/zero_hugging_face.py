"""What accelerate and the transformers Trainer make of DeepSpeed's engines."""

from typing import Any

import pytest
import strategies
import torch
from strategies import Model, gradients
from zero import STEPS, clip_scale, config, differences, reference, result, train, weights

from fc_optim import FairCastOptimizer
from fc_optim.integrations.deepspeed import attach
from fc_optim.integrations.deepspeed import register as register_config

SAVED = 2
ZERO = {
    "1": config(1, top={"data_types": {"grad_accum_dtype": "fp32"}}),
    "1 offloaded": config(1, True),
    "2 offloaded": config(2, True, top={"gradient_clipping": 1.0}),
    "3": config(3, stage3_param_persistence_threshold=20),
}


def reset() -> None:
    """Forget the last Accelerator: its state is the process's."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def accelerator_for(ds_config: dict[str, Any]) -> Any:
    from accelerate import Accelerator, DataLoaderConfiguration
    from accelerate.utils import DeepSpeedPlugin

    reset()
    return Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=ds_config),
        dataloader_config=DataLoaderConfiguration(split_batches=True),  # schedulers step once
    )


def prepare(name: str) -> tuple[Any, ...]:
    accelerator = accelerator_for(register_config(ZERO[name] | {"gradient_accumulation_steps": 2}))
    model = Model().bfloat16()
    opt = strategies.optimizer(model.named_parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 1, gamma=0.5)
    return accelerator, *accelerator.prepare(model, opt, scheduler)


def run(prepared: tuple[Any, ...], steps: Any) -> list[Any]:
    """Two micro-batches a step; what gradients were multiplied by in each."""
    accelerator, engine, wrapped, scheduler = prepared
    scales = []
    for i in steps:
        for _ in range(2):
            with accelerator.accumulate(engine):
                accelerator.backward(engine(gradients(i)))
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(engine.parameters(), 1.0)
                    expected = torch.cat([g.flatten() for g in gradients(i).values()]).norm()
                    assert norm == pytest.approx(expected.item(), rel=1e-2)
                    scales.append(clip_scale(engine))
                wrapped.step()
                scheduler.step()
                wrapped.zero_grad()
    return scales


def with_accelerate(folder: str) -> None:
    """Trained, saved and loaded by accelerate; gone back to in the middle of a run as well."""
    from fc_optim.integrations.accelerate import register

    for name in ZERO:
        prepared = prepare(name)
        opt = register(prepared[0], prepared[2])
        plain, ref = reference(prepared[1])
        scheduler = torch.optim.lr_scheduler.StepLR(ref, 1, gamma=0.5)
        scales = run(prepared, range(SAVED))
        prepared[0].save_state(f"{folder}/{name}")
        scales += run(prepared, range(SAVED, STEPS))
        for i, scale in enumerate(scales):
            train(plain, ref, [i], scale)
            scheduler.step()
        expected = result(ref)
        assert not differences(expected, result(opt)), name
        served = expected["served"].items()
        assert all(torch.equal(v, weights(prepared[1])[n].to(v.dtype)) for n, v in served), name

        prepared[0].load_state(f"{folder}/{name}")
        run(prepared, range(SAVED, STEPS))
        assert not differences(expected | {"version": opt.served_version}, result(opt)), name
        again = prepare(name)
        if name != "3":  # both orders
            again[0].load_state(f"{folder}/{name}")
        other = register(again[0], again[2])
        if name == "3":
            again[0].load_state(f"{folder}/{name}")
        run(again, range(SAVED, STEPS))
        assert not differences(expected, result(other)), name


def refused_by_register() -> None:
    from accelerate.utils import DummyOptim

    from fc_optim.integrations.accelerate import register

    def make() -> tuple[Model, FairCastOptimizer]:
        model = Model().bfloat16()
        return model, strategies.optimizer(model.named_parameters())

    accelerator = accelerator_for(config(2, True, top={"zero_force_ds_cpu_optimizer": True}))
    model, opt = make()
    _, wrapped = accelerator.prepare(model, opt)
    assert type(wrapped.optimizer.optimizer).__name__ == "DeepSpeedCPUAdam"
    for given in (wrapped, opt):
        with pytest.raises(TypeError, match="replaced .* zero_force_ds_cpu_optimizer is not false"):
            register(accelerator, given)

    adamw = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
    accelerator = accelerator_for(config(2, top={"optimizer": adamw}))
    model, opt = make()
    _, wrapped = accelerator.prepare(model, DummyOptim(model.parameters()))
    for given in (wrapped, DummyOptim(model.parameters()), opt):
        with pytest.raises(TypeError, match="from `optimizer` in its config"):
            register(accelerator, given)

    accelerator = accelerator_for(config(2))
    model, opt = make()
    _, wrapped = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(TypeError, match="AdamW is not a FairCastOptimizer"):
        register(accelerator, wrapped)
    with pytest.raises(ValueError, match="none of its prepared models is trained by"):
        register(accelerator, opt)

    ds_config = config(2)
    del ds_config["bf16"]  # and no mixed precision
    accelerator = accelerator_for(ds_config)
    model, opt = make()
    _, wrapped = accelerator.prepare(model.float(), strategies.optimizer(model.named_parameters()))
    with pytest.raises(ValueError, match="bf16.enabled: must be true"):
        register(accelerator, wrapped)


def with_trainer(folder: str) -> None:
    """Trainer(deepspeed=...) trains on served weights and resumes bit for bit."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    from fc_optim import FairCastAdamW
    from fc_optim.integrations.deepspeed import trainer_callback

    reset()
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
                f"{folder}/{stage}", deepspeed=register_config(ds_config), bf16=True, max_steps=4,
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
