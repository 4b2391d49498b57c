"""DeepSpeed's mixture of experts, with parameter groups of its own."""

from typing import Any

import deepspeed
import pytest
import strategies
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from torch import nn
from zero import STEPS, config, differences, result, weights

from fc_optim import FairCastOptimizer
from fc_optim.integrations.deepspeed import attach, register

ZERO = {
    "0": config(0),
    "1": config(1),
    "1 fp32": config(1, top={"data_types": {"grad_accum_dtype": "fp32"}}),
    "2 offloaded": config(2, True),
}


class Mixture(strategies.Leaf):
    """Linear in its weights, for gradients of few bits; with tokens, it routes them."""

    def __init__(self, ep_size: int):
        torch.manual_seed(0)
        moe = MoE(8, nn.Linear(8, 8), num_experts=4, ep_size=ep_size, use_rts=False)
        super().__init__(plain=nn.Linear(8, 8), moe=moe)

    def forward(self, grads: Any, prefix: str = "") -> torch.Tensor:
        if isinstance(grads, dict):
            return super().forward(grads, prefix)
        out, balance, _ = self.moe(self.plain(grads))  # type: ignore[operator]
        return out.float().square().mean() + balance.float()


def gradients(model: nn.Module, step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        n: torch.randint(-8, 9, p.shape, generator=generator) / 16
        for n, p in model.named_parameters()
    }


def optimizer(model: nn.Module) -> FairCastOptimizer:
    names = {p: n for n, p in model.named_parameters()}
    groups = split_params_into_different_moe_groups_for_optimizer(
        {"params": list(model.parameters()), "name": "dense"}
    )
    assert len(groups) == 2 and groups[1]["moe"]
    return strategies.optimizer(
        [{**g, "params": [(names[p], p) for p in g["params"]]} for g in groups]
    )


def initialize(ds_config: dict[str, Any], ep_size: int = 1) -> tuple[Any, FairCastOptimizer]:
    model = Mixture(ep_size).bfloat16()
    opt = optimizer(model)
    engine, *_ = deepspeed.initialize(model=model, optimizer=opt, config=register(ds_config))
    return engine, opt


def check(folder: str) -> None:
    for name, ds_config in ZERO.items():
        engine, opt = initialize(ds_config)
        attach(engine)
        model = Mixture(1).bfloat16().float()
        ref = optimizer(model).bind(model)

        def train(engine: Any, steps: Any) -> None:
            for i in steps:
                engine.backward(engine(gradients(engine.module, i)))
                engine.step()

        train(engine, range(2))
        engine.save_checkpoint(f"{folder}/{name}")
        train(engine, range(2, STEPS))
        for i in range(STEPS):
            for n, g in gradients(model, i).items():
                model.get_parameter(n).grad = g
            ref.step()
        expected = result(ref)
        assert not differences(expected, result(opt)), name
        again, other = initialize(ds_config)
        again.load_checkpoint(f"{folder}/{name}")
        attach(again)
        train(again, range(2, STEPS))
        assert not differences(expected, result(other)), name

        engine.backward(engine(torch.ones(6, 8).bfloat16() * dist.get_rank()))  # a real forward
        engine.step()
        served = dict(opt.served_params())
        assert all(torch.equal(v, served[n]) for n, v in weights(engine).items()), name
        assert any(not torch.equal(v, served[n]) for n, v in expected["served"].items())
    for ds_config in ZERO.values():
        engine, _ = initialize(ds_config, ep_size=2)
        with pytest.raises(TypeError, match="ranks hold different experts .* ep_size=1"):
            attach(engine)
    with pytest.raises(AssertionError, match="MoE is not supported with ZeRO Stage 3"):
        initialize(config(3))  # DeepSpeed's own limit
