"""Any torch optimizer: its own arithmetic on fp32 masters, then the shadow."""

import pytest
import torch
from models import assert_invariant, backward, bits, tiny, train
from torch import nn

from fc_optim import FairCastOptimizer


class Lion(torch.optim.Optimizer):
    """A user's own optimizer: lazily made state, a group entry that it changes."""

    def __init__(self, params, lr=1e-3, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta, "calls": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["calls"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if len(state) == 0:
                    state["momentum"] = torch.zeros_like(p)
                p.sub_((state["momentum"] + p.grad).sign(), alpha=group["lr"])
                state["momentum"].mul_(group["beta"]).add_(p.grad, alpha=1 - group["beta"])


class UserAdamW(torch.optim.AdamW):
    """A subclass with its own step must not be mistaken for AdamW."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = p.grad.sign()
        return super().step(closure)


CASES = {
    "sgd": (torch.optim.SGD, dict(lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1)),
    "lion": (Lion, dict(lr=1e-3)),
    "user adamw": (UserAdamW, dict(lr=1e-3)),
    "adagrad": (torch.optim.Adagrad, dict(lr=1e-2)),
    "nadam foreach": (torch.optim.NAdam, dict(lr=1e-3, foreach=True)),
    "rmsprop": (torch.optim.RMSprop, dict(lr=1e-3, centered=True)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_masters_are_what_the_base_alone_makes_of_the_same_gradients(name, dtype):
    base, kwargs = CASES[name]
    served, alone = tiny(dtype), tiny(torch.float32)
    opt = FairCastOptimizer(base, served.named_parameters(), **kwargs)
    assert not opt.fused
    theirs = base(alone.parameters(), **kwargs)
    for i in range(6):
        opt.zero_grad()
        backward(served, i)
        for p, q in zip(served.parameters(), alone.parameters(), strict=True):
            q.grad = p.grad.detach().float().clone()
        opt.step()
        theirs.step()
        assert_invariant(opt)
    for p, q in zip(served.parameters(), alone.parameters(), strict=True):
        assert torch.equal(opt.state[p]["master"], q)
        own = {k: v for k, v in opt.state[p].items() if k in theirs.state[q]}
        assert own.keys() == theirs.state[q].keys()
        torch.testing.assert_close(own, dict(theirs.state[q]), rtol=0, atol=0)
    if base is Lion:
        assert opt.param_groups[0]["calls"] == 6


def test_lbfgs_evaluates_its_closure_on_served_weights():
    model = tiny()
    opt = FairCastOptimizer(
        torch.optim.LBFGS, model.named_parameters(), lr=0.5, max_iter=6, history_size=4
    )
    seen = []

    def closure():
        seen.append(all(torch.all(b & 0xFFFF == 0) for b in bits(model)))
        assert all(e.state["master"] is not e.param for e in opt.managed())
        opt.zero_grad()
        return backward(model)

    losses = [float(opt.step(closure).detach()) for _ in range(4)]
    assert len(seen) > 8 and all(seen)
    assert losses[-1] < 0.5 * losses[0]
    assert_invariant(opt)
    assert [int(e.state["dither_step"]) for e in opt.managed()] == [4] * 6


def test_lbfgs_masters_are_those_of_lbfgs_fed_the_same_values():
    """A quadratic of the served weights, replayed: same losses and gradients, same masters."""
    target = torch.linspace(-1, 1, 24)
    p = nn.Parameter(torch.zeros(24))
    opt = FairCastOptimizer(torch.optim.LBFGS, [("w", p)], lr=0.3, max_iter=5)
    record = []

    def closure():
        opt.zero_grad()
        loss = (p - target).square().sum()
        loss.backward()
        record.append((loss.detach().clone(), p.grad.clone()))
        return loss

    opt.step(closure)
    q = nn.Parameter(torch.zeros(24))
    alone, replay = torch.optim.LBFGS([q], lr=0.3, max_iter=5), iter(record)

    def replayed():
        loss, q.grad = next(replay)
        return loss

    alone.step(replayed)
    assert torch.equal(opt.state[p]["master"], q)


def test_an_exception_in_the_closure_leaves_the_invariant():
    model = tiny()
    opt = FairCastOptimizer(torch.optim.SGD, model.named_parameters(), lr=0.1)
    train(model, opt, 2)

    def closure():
        raise KeyError("user")

    with pytest.raises(KeyError, match="user"):
        opt.step(closure)
    assert opt.check() == {}
    train(model, opt, 1)
    assert_invariant(opt)


def test_wrapping_a_used_instance_continues_it():
    model, twin = tiny(), tiny()
    base = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    alone = torch.optim.SGD(twin.parameters(), lr=1e-2, momentum=0.9)
    for _ in range(2):
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            p.grad = q.grad = torch.full_like(p, 0.25)
        base.step()
        alone.step()
    opt = FairCastOptimizer(base)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        p.grad = q.grad = torch.full_like(p, 0.5)
    opt.step()
    alone.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(opt.state[p]["master"], q)


def test_the_fused_and_the_unfused_route_of_adamw_agree_within_rounding():
    class Plain(torch.optim.AdamW):
        pass

    fused, unfused = tiny(), tiny()
    one = FairCastOptimizer(torch.optim.AdamW, fused.parameters(), lr=1e-3)
    two = FairCastOptimizer(Plain, unfused.parameters(), lr=1e-3)
    assert one.fused and not two.fused
    for i in range(5):
        for p, q in zip(fused.parameters(), unfused.parameters(), strict=True):
            p.grad = q.grad = torch.full_like(p, 0.1 * (i - 2))
        one.step()
        two.step()
    for a, b in zip(one.managed(), two.managed(), strict=True):
        torch.testing.assert_close(a.state["master"], b.state["master"], rtol=1e-6, atol=1e-7)


def test_an_overflow_skips_the_unfused_step_and_its_dither():
    model = tiny()
    opt = FairCastOptimizer(torch.optim.SGD, model.parameters(), lr=0.1)
    train(model, opt, 2)
    before = bits(model)
    opt.found_inf, opt.grad_scale = torch.ones(()), torch.full((), 8.0)
    opt.step()
    assert all(torch.equal(a, b) for a, b in zip(before, bits(model), strict=True))
    assert [int(e.state["dither_step"]) for e in opt.managed()] == [2] * 6
    opt.found_inf = torch.zeros(())
    scaled = {e.param: e.state["master"] - 0.1 * e.param.grad / 8 for e in opt.managed()}
    opt.step()
    for e in opt.managed():
        torch.testing.assert_close(e.state["master"], scaled[e.param])


def test_state_that_an_instance_made_for_bf16_parameters_becomes_that_of_masters():
    """In lists too: LBFGS keeps its directions there."""
    model = tiny(torch.bfloat16)
    base = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def closure():
        base.zero_grad()
        return backward(model)

    base.step(closure)
    first = model[0].weight
    assert base.state[first]["old_dirs"][0].dtype == torch.bfloat16
    opt = FairCastOptimizer(base)
    opt.publish()
    kept = opt.state[first]
    assert {t.dtype for key in ("old_dirs", "old_stps") for t in kept[key]} == {torch.float32}
    assert kept["d"].dtype == kept["prev_flat_grad"].dtype == torch.float32
    opt.step(closure)
    assert_invariant(opt)
