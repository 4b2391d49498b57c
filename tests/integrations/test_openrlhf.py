"""OpenRLHF's own strategy trains on served weights, and its broadcast sends them.

Runs where openrlhf is installed (`pip install --no-deps openrlhf==0.11.2 peft torchdata`).
flash_attn, which needs CUDA to install, is an empty module here, and `setup_distributed`, which
asks for CUDA, is replaced by the attributes that it sets.
"""

import importlib.machinery
import os
import sys
import types
from argparse import Namespace
from typing import Any

import pytest
import torch
from ranks import spawn

FLASH = ("bert_padding", "utils", "utils.distributed")


def empty_flash_attn() -> None:
    import peft  # noqa: F401  # looks for flash_attn, as transformers does
    import transformers  # noqa: F401

    for name in ("flash_attn", *(f"flash_attn.{n}" for n in FLASH)):
        module: Any = sys.modules.setdefault(name, types.ModuleType(name))
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        module.__path__ = []
    names = ("index_first_axis", "pad_input", "rearrange", "unpad_input", "all_gather")
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("flash_attn"):
            vars(module).update(dict.fromkeys(names))


def openrlhf_strategy(stage: int) -> Any:
    import torch.distributed as dist
    from openrlhf.utils.deepspeed import DeepspeedStrategy

    args = Namespace(
        ds=Namespace(param_dtype="bf16", adam_offload=False, use_universal_ckpt=False),
        train=Namespace(dynamic_batch_enable=False),
    )
    world = dist.get_world_size()
    strategy = DeepspeedStrategy(
        max_norm=1.0, micro_train_batch_size=1, train_batch_size=world, zero_stage=stage, args=args
    )
    strategy.world_size, strategy.accumulated_gradient = world, 1
    return strategy


def tiny_actor() -> Any:
    from openrlhf.models import Actor
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2,
    )  # fmt: skip
    return Actor(LlamaForCausalLM(config).bfloat16())


CONFIG = {
    "optim": "adam",
    "adam": {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1},
    "lr_scheduler": "constant",
    "lr_warmup_ratio": 0.0,
    "max_norm": 1.0,
    "scheduler_steps": 10,
}


def train(rank: int, world: int, rendezvous: str, folder: str) -> None:
    import zero

    empty_flash_attn()
    from fc_optim.integrations.deepspeed import attach
    from fc_optim.integrations.openrlhf import use_faircast

    zero.start(rank, world, rendezvous)
    tokens = torch.arange(8).unsqueeze(0) + rank
    for stage in (2, 3):
        plain = openrlhf_strategy(stage)
        strategy = use_faircast(plain, dither="held", seed=7, backend="cpu")
        with pytest.raises(ValueError, match="muon"):
            strategy.prepare((tiny_actor(), CONFIG | {"optim": "muon"}))
        results = []
        for resumed in (False, True):
            actor, optimizer, scheduler = strategy.prepare((tiny_actor(), CONFIG))
            engine = actor.model
            if resumed:
                strategy.load_ckpt(engine, f"{folder}/{stage}", "two")
            opt = attach(engine)
            assert opt.seed == 7 and opt.dither == "held"
            assert opt.param_groups[0]["betas"] == (0.9, 0.95)
            for step in range(2 if resumed else 0, 4):
                strategy.backward(engine(tokens, labels=tokens).loss, actor, optimizer)
                strategy.optimizer_step(optimizer, actor, scheduler)
                if step == 1:
                    engine.save_checkpoint(f"{folder}/{stage}", "two")
                served = dict(opt.served_params(copy=True))
                for name, value in zero.weights(engine).items():  # what broadcast_to_vllm sends
                    assert torch.equal(value, served[name]), (stage, step, name)
            assert opt.served_version == 4
            results.append(zero.result(opt))
        assert not zero.differences(*results)
        masters = torch.cat([m.flatten() for m in results[0]["masters"].values()])
        assert (masters != masters.bfloat16()).sum() > 1000
    torch.distributed.destroy_process_group()


@pytest.mark.long
def test_strategy_trains_and_broadcasts_served_weights(tmp_path) -> None:
    pytest.importorskip("openrlhf", reason="pip install --no-deps openrlhf==0.11.2 peft torchdata")
    os.environ["DS_ACCELERATOR"] = "cpu"
    spawn(train, 2, tmp_path, str(tmp_path))
