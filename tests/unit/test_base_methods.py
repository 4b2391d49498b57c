"""Base optimizers with methods and settings of their own: run on the masters, or refused."""

import copy
import io
import pickle

import prodigyopt
import pytest
import pytorch_optimizer
import schedulefree
import torch
from models import (
    assert_equal_states,
    assert_invariant,
    assert_same,
    backward,
    bits,
    loss_of,
    tiny,
    train,
)
from torch import nn

from fc_optim import FairCastAdamW, FairCastOptimizer

DTYPES = (torch.float32, torch.bfloat16)


def hand_grads(model, alone):
    """The gradients of the served weights, for the base alone on fp32 weights."""
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        q.grad = None if p.grad is None else p.grad.detach().float().clone()


def assert_masters(opt, alone):
    for e, q in zip(opt.managed(), alone.parameters(), strict=True):
        assert torch.equal(e.state["master"], q.detach()), e.identity.name


# ---- Schedule-free: two sets of weights in one state


FREE = {
    "AdamW": (schedulefree.AdamWScheduleFree, dict(lr=1e-2, warmup_steps=2, weight_decay=0.1)),
    "AdamW, one by one": (schedulefree.AdamWScheduleFree, dict(lr=1e-2, foreach=False)),
    "SGD": (schedulefree.SGDScheduleFree, dict(lr=0.1)),
    "RAdam": (schedulefree.RAdamScheduleFree, dict(lr=1e-2)),
    "another package's": (pytorch_optimizer.ScheduleFreeAdamW, dict(lr=1e-2)),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FREE)
def test_schedule_free_changes_between_its_weights_on_the_masters(name, dtype):
    base, kwargs = FREE[name]
    model, alone = tiny(dtype), tiny()
    opt, theirs = (
        FairCastOptimizer(base, model.parameters(), **kwargs),
        base(alone.parameters(), **kwargs),
    )
    for i in range(12):
        for o in (opt, theirs):
            o.train()
        opt.zero_grad()
        backward(model, i)
        hand_grads(model, alone)
        opt.step()
        theirs.step()
        assert_masters(opt, alone)
        trained, version = bits(model), opt.served_version
        for o in (opt, theirs):
            o.eval()
        assert_masters(opt, alone)
        assert_invariant(opt)
        moved = any(not torch.equal(a, b) for a, b in zip(trained, bits(model), strict=True))
        assert opt.served_version == version + moved  # an engine must hear of other weights
    assert moved
    assert opt.param_groups[0]["train_mode"] is False


def test_a_method_that_changes_no_weight_publishes_nothing():
    """transformers calls `train()` before every micro-batch."""
    model = tiny()
    opt = FairCastOptimizer(schedulefree.AdamWScheduleFree, model.parameters(), lr=1e-2)
    opt.train()
    train(model, opt, 3)
    before, version = bits(model), opt.served_version
    steps = [int(e.state["dither_step"]) for e in opt.managed()]
    stream = opt.served_params()
    next(stream)
    opt.train()
    next(stream)  # still of this version
    assert opt.served_version == version == 3
    assert all(torch.equal(a, b) for a, b in zip(before, bits(model), strict=True))
    assert [int(e.state["dither_step"]) for e in opt.managed()] == steps
    opt.eval()
    with pytest.raises(RuntimeError, match="version 3 to 4"):
        next(stream)


@pytest.mark.parametrize("evaluated", [True, False])
def test_schedule_free_resumes_bit_for_bit(evaluated):
    make = FairCastOptimizer(schedulefree.AdamWScheduleFree)
    model = tiny(torch.bfloat16)
    opt = make(model.named_parameters(), lr=1e-2)
    opt.train()
    train(model, opt, 3)
    if evaluated:
        opt.eval()
    saved = io.BytesIO()
    torch.save(opt.state_dict(), saved)
    saved.seek(0)
    fresh = tiny(torch.bfloat16, seed=1)
    fresh_opt = make(fresh.named_parameters(), lr=1e-2)
    fresh_opt.load_state_dict(torch.load(saved))
    assert_same(model, fresh)
    others = [
        (fresh, fresh_opt),
        copy.deepcopy((model, opt)),
        pickle.loads(pickle.dumps((model, opt))),
    ]
    for m, o in ((model, opt), *others):
        o.train()
        train(m, o, 3, 3)
        o.eval()
    for m, o in others:
        assert_same(model, m)
        assert o.served_version == opt.served_version
        assert_equal_states(o.state_dict()["state"], opt.state_dict()["state"])


def test_schedule_free_says_itself_that_train_was_forgotten_and_the_weights_stay():
    model = tiny()
    opt = FairCastOptimizer(schedulefree.AdamWScheduleFree, model.parameters(), lr=1e-2)
    before = bits(model)
    backward(model)
    with pytest.raises(Exception, match="not in train mode"):
        opt.step()
    assert all(torch.equal(a, b) for a, b in zip(before, bits(model), strict=True))
    opt.train()
    opt.step()
    assert_invariant(opt)


# ---- Sharpness-aware: two gradients in one step, an optimizer in the optimizer


def sam(params, inner=torch.optim.AdamW, **kwargs):
    return pytorch_optimizer.SAM(params, inner, **{"rho": 0.5, "lr": 1e-2, **kwargs})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inner", [torch.optim.AdamW, torch.optim.SGD])
def test_sam_in_two_calls(dtype, inner):
    model, alone = tiny(dtype), tiny()
    opt, theirs = FairCastOptimizer(sam(model.parameters(), inner)), sam(alone.parameters(), inner)
    for i in range(5):
        start = bits(model)
        backward(model, i)
        hand_grads(model, alone)
        opt.first_step(zero_grad=True)
        theirs.first_step(zero_grad=True)
        assert_masters(opt, alone)  # at the top of the hill
        assert_invariant(opt)
        assert any(not torch.equal(a, b) for a, b in zip(start, bits(model), strict=True))
        assert all(p.grad is None for p in model.parameters())  # else the second adds to the first
        backward(model, i)
        hand_grads(model, alone)
        opt.second_step(zero_grad=True)
        theirs.second_step(zero_grad=True)
        assert_masters(opt, alone)
        assert_invariant(opt)
        assert all(p.grad is None for p in model.parameters())
    assert opt.check() == {}


@pytest.mark.parametrize("zeroed", ["by the closure", "by SAM alone"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sam_with_a_closure_sees_the_weights_at_the_top_of_the_hill(dtype, zeroed):
    model, alone = tiny(dtype), tiny()
    opt, theirs = FairCastOptimizer(sam(model.parameters())), sam(alone.parameters())
    for i in range(4):
        opt.zero_grad()
        backward(model, i)
        hand_grads(model, alone)
        below, seen = bits(model), []

        def closure(i=i, below=below, seen=seen):
            seen.append(any(not torch.equal(a, b) for a, b in zip(below, bits(model), strict=True)))
            if zeroed == "by the closure":
                opt.zero_grad()
            return backward(model, i)

        opt.step(closure)
        theirs.step(lambda: hand_grads(model, alone))
        assert seen == [True]
        assert_masters(opt, alone)
        assert_invariant(opt)


def test_sam_is_copied_pickled_and_resumed_with_what_is_inside():
    model = tiny()
    opt = FairCastOptimizer(sam(model.parameters()))
    opt.publish()  # AdamW's own __setstate__ would look for a step in state that has none yet
    pickle.loads(pickle.dumps(opt))

    def steps(m, o, first):
        for i in range(first, first + 2):
            for half in (o.first_step, o.second_step):
                backward(m, i)
                half(zero_grad=True)

    steps(model, opt, 0)
    fresh = tiny(seed=1)
    fresh_opt = FairCastOptimizer(sam(fresh.parameters()))
    fresh_opt.load_state_dict(opt.state_dict())
    others = [
        (fresh, fresh_opt),
        copy.deepcopy((model, opt)),
        pickle.loads(pickle.dumps((model, opt))),
    ]
    for m, o in ((model, opt), *others):
        steps(m, o, 2)
        inner = vars(o)["_base"].base_optimizer
        assert inner.state is vars(o)["_base"].state
        with pytest.raises(RuntimeError, match="owns its groups"):
            inner.step()
    for m, _ in others:
        assert_same(model, m)


# ---- What cannot work is refused when it is built


def look(params, **kwargs):
    return pytorch_optimizer.Lookahead(torch.optim.AdamW(params), **kwargs)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (look, "Lookahead steps an AdamW inside, which keeps a state of its own"),
        (
            lambda ps: pytorch_optimizer.ScheduleFreeWrapper(torch.optim.SGD(ps, lr=0.1)),
            "ScheduleFreeWrapper steps an SGD inside",
        ),
        (
            lambda ps: pytorch_optimizer.LookSAM(ps, torch.optim.SGD, lr=0.1),
            "LookSAM steps an SGD inside",
        ),
        (pytorch_optimizer.Magma, r"state_dict\(\) of Magma has .*'magma_state'"),
    ],
)
def test_state_that_is_elsewhere_is_refused_by_name(make, match):
    model = tiny()
    base = make(model.parameters())
    before = bits(model)
    with pytest.raises(TypeError, match=match):
        FairCastOptimizer(base)
    if hasattr(base, "train"):
        base.train()
    backward(model)
    if not hasattr(base, "first_step"):  # alone it works as before
        base.step()
        assert any(not torch.equal(a, b) for a, b in zip(before, bits(model), strict=True))


def test_something_else_in_a_state_dict_is_said(caplog):
    model = tiny()
    opt = FairCastOptimizer(pytorch_optimizer.StableSPAM, model.parameters(), lr=1e-3)
    (said,) = caplog.messages
    assert said.startswith("base: StableSPAM saves total_step beside its state")
    train(model, opt)
    assert_invariant(opt)


# ---- Optimizers of other packages, by their own step


OTHERS = {
    "Prodigy": (prodigyopt.Prodigy, dict(weight_decay=0.1, safeguard_warmup=True)),
    "Adafactor, bf16 momentum": (pytorch_optimizer.AdaFactor, dict(lr=1e-2)),
    "AggMo, a dict of buffers": (pytorch_optimizer.AggMo, dict(lr=1e-2)),
    "Amos, scalars for moments": (pytorch_optimizer.Amos, dict(lr=1e-2)),
    "SPAM, counters in the state": (pytorch_optimizer.SPAM, dict(lr=1e-2)),
    "SOAP": (pytorch_optimizer.SOAP, dict(lr=1e-2)),
    "CAME": (pytorch_optimizer.CAME, dict(lr=1e-2)),
    "ScalableShampoo": (pytorch_optimizer.ScalableShampoo, dict(lr=1e-2)),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OTHERS)
def test_others_make_the_masters_that_they_make_alone_and_resume(name, dtype):
    base, kwargs = OTHERS[name]
    model, alone = tiny(dtype), tiny()
    opt, theirs = (
        FairCastOptimizer(base, model.parameters(), **kwargs),
        base(alone.parameters(), **kwargs),
    )

    def both(i):
        opt.zero_grad()
        backward(model, i)
        hand_grads(model, alone)
        for o in (opt, theirs):
            torch.manual_seed(i)
            o.step()
        assert_masters(opt, alone)
        assert_invariant(opt)

    for i in range(4):
        both(i)
    fresh = tiny(dtype, seed=1)
    fresh_opt = FairCastOptimizer(base, fresh.parameters(), **kwargs)
    fresh_opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    for i in range(4, 6):
        both(i)
        fresh_opt.zero_grad()
        backward(fresh, i)
        torch.manual_seed(i)
        fresh_opt.step()
    assert_same(model, fresh)


# ---- Methods and settings of any class


class Helper:
    """Not an optimizer, not a list: nobody looks inside."""


class Own(torch.optim.Optimizer):
    """Methods that write weights, gradients, state; settings; containers of parameters."""

    scale = 2.0

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})
        self.rho = 0.5
        self.order = list(self.param_groups[0]["params"])
        self.helper = Helper()
        self.masks = {p: torch.ones_like(p) for p in self.order}

    @property
    def radius(self):
        return self.rho * self.scale

    @radius.setter
    def radius(self, value):
        self.rho = value / self.scale

    @staticmethod
    def halved(x):
        return x / 2

    def step(self, closure=None):
        for p in self.order:
            if p.requires_grad and p.grad is not None:
                p.sub_(p.grad * self.masks[p], alpha=self.param_groups[0]["lr"] * self.rho)
                self.state[p]["seen"] = p.clone()

    def shrink(self, factor, *, only=None):
        """Weights times a factor."""
        for p in self.order if only is None else [self.order[only]]:
            p.data.mul_(factor)  # bumps no version
        return factor

    def clip(self, most):
        for p in self.order:
            p.grad.clamp_(-most, most)

    def negate(self):
        for p in self.order:
            p.grad = -p.grad

    def forget(self, number):
        self.order[number].grad = None

    def backward(self, loss):
        loss.backward()

    def drop(self, model):
        model.zero_grad()

    def evaluate(self, closure):
        self.shrink(0.5)
        loss = closure(3)
        for p in self.order:
            self.state[p]["held"] = p.grad.clone()
        return loss


@pytest.fixture(params=DTYPES, ids=str)
def own(request):
    model = tiny(request.param)
    return model, FairCastOptimizer(Own, model.named_parameters())


def test_a_method_writes_masters_and_their_shadow_follows(own):
    model, opt = own
    assert opt.shrink.__doc__ == "Weights times a factor."
    opt.publish()
    masters = [e.state["master"].clone() for e in opt.managed()]
    assert opt.shrink(0.7) == 0.7
    assert opt.served_version == 1
    for e, before in zip(opt.managed(), masters, strict=True):
        assert torch.equal(e.state["master"], before * 0.7)
        assert not e.state["master"].requires_grad and e.state["master"].grad is None
    assert_invariant(opt)
    assert opt.shrink(0.5, only=0) == 0.5
    assert opt.served_version == 2 and opt.check() == {}
    train(model, opt, 2)
    assert all(torch.equal(e.state["seen"], e.state["master"]) for e in opt.managed())
    assert vars(opt)["_base"].order == list(model.parameters())
    assert list(vars(opt)["_base"].masks) == list(model.parameters())


def test_a_closure_of_a_method_runs_on_the_published_weights(own):
    model, opt = own
    opt.publish()
    before = [e.state["master"].clone() for e in opt.managed()]

    def closure(seed):
        for e, master in zip(opt.managed(), before, strict=True):
            assert torch.equal(e.state["master"], master * 0.5)
        assert_invariant(opt)
        opt.zero_grad()
        return backward(model, seed)

    loss = opt.evaluate(closure)
    assert loss.requires_grad
    for e in opt.managed():
        assert torch.equal(e.state["held"], e.param.grad.float())


def test_gradients_that_a_method_changes_or_drops_are_the_parameters(own):
    model, opt = own
    backward(model)
    held = [p.grad for p in model.parameters()]
    values = [g.float().clone() for g in held]
    opt.clip(1e-3)
    for p, grad, value in zip(model.parameters(), held, values, strict=True):
        assert p.grad is grad  # in the memory that DDP's buckets have
        assert torch.equal(grad, value.clamp(-1e-3, 1e-3).to(grad.dtype))
    clipped = [g.float().clone() for g in held]
    opt.negate()
    assert all(
        torch.equal(p.grad.float(), -g) for p, g in zip(model.parameters(), clipped, strict=True)
    )
    opt.forget(1)
    assert [p.grad is None for p in model.parameters()] == [False, True, *[False] * 4]
    opt.drop(model)
    assert all(p.grad is None for p in model.parameters())
    assert opt.served_version == 0


def test_a_method_that_computes_gradients_itself_is_refused(own):
    model, opt = own
    opt.publish()
    loss = loss_of(model)
    with pytest.raises(RuntimeError, match=r"backward\(\): it changed the gradient of '0.weight'"):
        opt.backward(loss)
    assert_invariant(opt)


def test_settings_are_read_and_set_where_the_base_looks(own):
    model, opt = own
    assert (opt.rho, opt.radius, opt.scale, opt.halved(4)) == (0.5, 1.0, 2.0, 2.0)
    opt.rho = 0.25
    assert vars(opt)["_base"].rho == 0.25 and "rho" not in vars(opt)
    opt.radius = 4.0
    assert opt.rho == 2.0
    p = model[0].weight
    backward(model)
    opt.publish()
    want = opt.state[p]["master"] - 0.1 * 2.0 * p.grad.float()
    opt.step()
    torch.testing.assert_close(opt.state[p]["master"], want)
    opt.mine = 3  # nobody's: an attribute as any
    assert vars(opt)["mine"] == 3
    twin = copy.deepcopy(opt)
    twin.rho = 1.0
    assert (opt.rho, twin.rho, twin.mine) == (2.0, 1.0, 3)


def test_what_there_is_not_is_an_attribute_error():
    opt = FairCastAdamW(tiny().parameters())
    assert not hasattr(opt, "train") and not hasattr(opt, "optimizer")
    with pytest.raises(
        AttributeError, match="'FairCastAdamW' object has no attribute 'train'.*AdamW"
    ):
        opt.train()  # noqa: B018
    with pytest.raises(AttributeError, match="_private"):
        opt._private  # noqa: B018


@pytest.mark.parametrize("base", [torch.optim.AdamW, torch.optim.SGD])
def test_a_step_looks_nothing_up_in_the_base(base, monkeypatch):
    """Attributes that the class lacks are looked for in it, which costs as much as a small step."""
    model = tiny()
    opt = FairCastOptimizer(base, model.parameters(), lr=1e-2)
    asked: list[str] = []

    def count(self, name):
        asked.append(name)
        raise AttributeError(name)

    monkeypatch.setattr(FairCastOptimizer, "__getattr__", count)
    train(model, opt, 2)
    assert asked == []
    assert not hasattr(opt, "rho") and asked == ["rho"]


def test_the_wrapped_instance_has_no_methods_any_more():
    base = schedulefree.AdamWScheduleFree(tiny().parameters())
    opt = FairCastOptimizer(base)
    for method in (base.train, base.eval, base.step):
        with pytest.raises(RuntimeError, match="of the FairCastOptimizer"):
            method()
    opt.train()
    assert opt.param_groups[0]["train_mode"]
    opt.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert len(base.param_groups) == 2


def test_hooks_of_a_wrapped_instance_run_once():
    model = tiny()
    base = Own(model.parameters())
    calls: list[str] = []
    base.register_step_pre_hook(lambda *_: calls.append("pre"))
    base.register_step_post_hook(lambda *_: calls.append("post"))
    opt = FairCastOptimizer(base)
    train(model, opt, 2)
    assert calls == ["pre", "post"] * 2


def test_a_method_inside_a_closure_or_masters_in_model_is_refused(own):
    model, opt = own
    with opt.masters_in_model():
        with pytest.raises(RuntimeError, match=r"shrink\(\) inside masters_in_model"):
            opt.shrink(0.5)
    with pytest.raises(RuntimeError, match=r"shrink\(\) inside evaluate\(\)"):
        opt.evaluate(lambda _: opt.shrink(0.5))
    opt.shrink(0.5)
    assert_invariant(opt)


def test_weights_that_somebody_wrote_are_not_lost_in_a_method(own):
    model, opt = own
    train(model, opt, 1)
    with torch.no_grad():
        model[0].weight.add_(1)
    with pytest.raises(RuntimeError, match="0.weight changed since"):
        opt.shrink(0.5)


def test_excluded_and_frozen_parameters_are_the_bases_own():
    model = tiny(torch.bfloat16)
    model[2].bias.requires_grad_(False)
    groups = [
        {"params": [p for n, p in model.named_parameters() if n != "1.weight"]},
        {"params": [model[1].weight], "served_dtype": None},
    ]
    opt = FairCastOptimizer(schedulefree.SGDScheduleFree, groups, lr=0.1)
    opt.train()
    frozen = model[2].bias.detach().clone()
    train(model, opt, 3)
    assert "z" in opt.state[model[1].weight] and "master" not in opt.state[model[1].weight]
    before = model[1].weight.detach().clone()
    opt.eval()
    assert not torch.equal(model[1].weight, before)
    assert torch.equal(model[2].bias, frozen) and model[2].bias not in opt.state
    assert_invariant(opt)


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_lightning_calls_them_through_its_wrappers():
    from lightning.fabric import Fabric
    from lightning.pytorch.core.optimizer import LightningOptimizer

    plain = tiny()
    made = FairCastOptimizer(schedulefree.AdamWScheduleFree, plain.parameters(), lr=1e-2)
    model, wrapped = Fabric(accelerator="cpu", devices=1).setup(plain, made)
    for wrapper in (wrapped, LightningOptimizer(made)):
        wrapper.train()
        assert made.param_groups[0]["train_mode"] is True
        train(model, made, 3)
        version = made.served_version
        wrapper.eval()
        assert made.served_version == version + 1
        assert made.param_groups[0]["train_mode"] is False
        assert_invariant(made)


@pytest.mark.integration
def test_accelerate_calls_them_through_its_wrapper():
    from accelerate import Accelerator

    model = tiny()
    made = FairCastOptimizer(schedulefree.AdamWScheduleFree, model.parameters(), lr=1e-2)
    _, wrapped = Accelerator(cpu=True).prepare(model, made)
    wrapped.train()
    assert made.param_groups[0]["train_mode"] is True
    train(model, wrapped, 2)
    wrapped.eval()
    assert made.param_groups[0]["train_mode"] is False
    assert_invariant(made)
    plain = Accelerator(cpu=True).prepare(FairCastAdamW(tiny().parameters()))
    plain.train()  # nothing to call
