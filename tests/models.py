"""Small models and training steps that several test files share."""

from typing import Any

import torch
from torch import nn

import fc_optim
from fc_optim import metrics
from fc_optim.update.state import EPOCH


def tiny(dtype=torch.float32, seed=0) -> nn.Sequential:
    """A model whose weights start on the bf16 grid, as a released checkpoint does."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 9), nn.LayerNorm(9), nn.Linear(9, 4))
    for p in model.parameters():
        p.data = (torch.randn(p.shape, generator=generator) * 0.1).bfloat16().float()
    return model.to(dtype)


def loss_of(model: nn.Module, seed: int = 0) -> torch.Tensor:
    dtype = next(model.parameters()).dtype
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return model(x).float().square().mean()


def backward(model: nn.Module, seed: int = 0) -> torch.Tensor:
    loss = loss_of(model, seed)
    loss.backward()
    return loss


def train(model, opt, steps=3, first=0):
    for i in range(first, first + steps):
        opt.zero_grad()
        backward(model, i)
        opt.step()


def bits(model):
    return [p.detach().float().view(torch.int32).clone() for p in model.parameters()]


def assert_same(a, b):
    assert all(torch.equal(x, y) for x, y in zip(bits(a), bits(b), strict=True))


def assert_equal_states(a, b):
    """Two state dicts hold equal tensors (dtype, device, bits) and equal plain values."""
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_equal_states(a[key], b[key])
    elif isinstance(a, list | tuple):
        for x, y in zip(a, b, strict=True):
            assert_equal_states(x, y)
    elif isinstance(a, torch.Tensor):
        assert (a.dtype, a.device) == (b.dtype, b.device) and torch.equal(a, b)
    else:
        assert a == b


def assert_invariant(opt):
    """Every managed parameter is the rounded image of its master."""
    for e in opt.managed():
        t = {"fresh": int(e.state[EPOCH]), "held": 0}[opt.dither]
        want = fc_optim.stochastic_round(
            e.state["master"], seed=opt.seed, param_id=e.identity.param_id, t=t
        )
        assert torch.equal(e.param.detach().to(torch.bfloat16), want)
        assert torch.equal(e.param.detach().float(), want.float())


def assert_served(opt: Any) -> None:
    """Managed parameters are the rounded images of fp32 masters that left the grid."""
    assert opt.check() == {}
    for e in opt.managed():
        master = e.state["master"]
        assert master.dtype == torch.float32
        error = (e.param.detach().float() - master).abs() / metrics.bf16_ulp(master)
        assert error.max() < 1
        assert torch.equal(e.param.detach().float(), e.param.detach().bfloat16().float())
