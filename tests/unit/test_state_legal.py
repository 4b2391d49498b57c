"""States that are as they should be load, whoever made them and whenever."""

import copy
import re

import pytest
import torch
from models import assert_equal_states, tiny, train
from state_cases import CASES, B, Case, excluded, run, snapshot

import fc_optim
from fc_optim import FairCastAdamW, FairCastOptimizer

ADAMW = Case(torch.optim.AdamW, B)
AMSGRAD = CASES["adamw_amsgrad_bf16"]
MUON = CASES["muon_mixed_fp32"]
SGD = CASES["sgd_momentum_bf16"]
EXCLUDED = CASES["adamw_excluded_fp32"]
RMSPROP = Case(torch.optim.RMSprop, options={"lr": 1e-3})


def test_states_of_before_the_first_step_load():
    for case in (ADAMW, SGD, MUON, EXCLUDED):
        for steps in (None, 0):
            early = Case(case.base, case.dtype, case.params, steps, case.options)
            source_model, source = early.trained(lr=3e-2)
            state = copy.deepcopy(source.state_dict())
            model, opt = early.build(seed=4)
            opt.load_state_dict(state)
            assert opt.param_groups[0]["lr"] == 3e-2
            if steps is None:
                assert not opt.state
            else:
                assert_equal_states(opt.state_dict()["state"], state["state"])
            model.load_state_dict(source_model.state_dict())
            opt.restore_weights()
            for m, o in ((source_model, source), (model, opt)):
                run(m, o, 0, 2)
            assert_equal_states(opt.state_dict(), source.state_dict())


def test_parameters_that_are_never_stepped_and_frozen_ones_load():
    def make(seed):
        model = tiny(seed=seed)
        model[1].requires_grad_(False)
        return model, FairCastAdamW(model.named_parameters(), lr=1e-2)

    def step(model, opt):
        for p in model[0].parameters():
            p.grad = torch.ones_like(p)
        opt.step()

    source_model, source = make(0)
    step(source_model, source)
    state = copy.deepcopy(source.state_dict())
    assert set(state["state"]) == {0, 1, 4, 5} and int(state["state"][4]["step"]) == 0
    for running in (False, True):
        model, opt = make(4)
        if running:
            step(model, opt)
        opt.load_state_dict(state)
        assert_equal_states(opt.state_dict()["state"], state["state"])
    model[1].requires_grad_(True)
    with pytest.raises(ValueError, match="no state for '1.weight'.*freeze it while loading"):
        opt.load_state_dict(state)


def test_a_group_that_joined_after_the_last_publish_survives_its_own_state():
    model = tiny()
    opt = FairCastAdamW(list(model[0].parameters()), lr=1e-2)
    for p in model[0].parameters():
        p.grad = torch.ones_like(p)
    opt.step()
    opt.add_param_group({"params": list(model[2].parameters())})
    state = copy.deepcopy(opt.state_dict())
    before = snapshot(model, opt)
    opt.load_state_dict(state)
    after = snapshot(model, opt)
    assert_equal_states(after["state"], before["state"])
    other_model = tiny(seed=4)
    other = FairCastAdamW([{"params": list(other_model[i].parameters())} for i in (0, 2)])
    with pytest.raises(ValueError, match="load before add_param_group"):
        other.load_state_dict(state)


def test_a_running_optimizer_goes_back_to_an_older_state():
    for case in (ADAMW, AMSGRAD, MUON, SGD, EXCLUDED, RMSPROP):
        model, opt = case.trained()
        state = copy.deepcopy(opt.state_dict())
        weights = copy.deepcopy(model.state_dict())
        run(model, opt, 3, 6)
        opt.load_state_dict(state)
        assert_equal_states(opt.state_dict()["state"], state["state"])
        if case.params is not excluded:
            assert_equal_states(dict(model.state_dict()), dict(weights))


class Adafactors(torch.optim.Optimizer):
    """A user's own: state of other shapes, whole numbers, half precision, lists, nothing at all."""

    def __init__(self, params, lr=1e-3, warm=None):
        super().__init__(params, {"lr": lr, "warm": warm})

    @torch.no_grad()
    def step(self, closure=None):
        for given in self.param_groups:
            for p in given["params"]:
                if p.grad is None or p.ndim == 1:
                    continue
                own = self.state[p]
                own.setdefault("rows", torch.zeros(p.shape[0], dtype=torch.bfloat16))
                own.setdefault("exp_avg_sq", torch.zeros(1, p.shape[1]))
                own["history"] = [p.grad.clone(), {"n": own.get("calls", 0)}]
                own["calls"] = own.get("calls", 0) + 1
                p.sub_(p.grad, alpha=given["lr"])
        self.state["all"] = {"total": torch.ones(3)}


@pytest.mark.parametrize("running", [False, True])
def test_state_of_any_base_loads_whatever_it_is(running):
    case = Case(Adafactors)
    model, opt = case.trained()
    state = copy.deepcopy(opt.state_dict())
    other_model, other = case.build(seed=4)
    if running:
        run(other_model, other, 0, 1)
    other.load_state_dict(state)
    assert_equal_states(other.state_dict()["state"], state["state"])
    assert_equal_states(other.state["all"], {"total": torch.ones(3)})
    assert other.state["all"]["total"] is not state["state"]["all"]["total"]
    for m, o in ((model, opt), (other_model, other)):
        run(m, o, 3, 5)
    assert_equal_states(other.state_dict(), opt.state_dict())


BASES = [
    (torch.optim.Adadelta, {}), (torch.optim.Adafactor, {}), (torch.optim.Adagrad, {}),
    (torch.optim.Adamax, {}), (torch.optim.ASGD, {}), (torch.optim.LBFGS, {}),
    (torch.optim.NAdam, {}), (torch.optim.RAdam, {}), (torch.optim.Rprop, {}),
    (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}), (torch.optim.SGD, {}),
]  # fmt: skip


@pytest.mark.parametrize(("base", "options"), BASES, ids=lambda v: getattr(v, "__name__", ""))
def test_state_of_every_optimizer_of_torch_loads(base, options):
    def make(seed):
        model = tiny(seed=seed)
        return model, FairCastOptimizer(base, model.named_parameters(), lr=1e-2, **options)

    def step(model, opt):
        def closure():
            opt.zero_grad()
            loss = sum(p.square().sum() for p in model.parameters())
            loss.backward()
            return loss

        opt.step(closure)

    model, opt = make(0)
    for _ in range(3):
        step(model, opt)
    state = copy.deepcopy(opt.state_dict())
    other_model, other = make(4)
    other.load_state_dict(state)
    assert_equal_states(other.state_dict()["state"], state["state"])
    for m, o in ((model, opt), (other_model, other)):
        step(m, o)
    assert_equal_states(other.state_dict(), opt.state_dict())
    shaped = [
        (i, key)
        for i, own in state["state"].items()
        for key, v in own.items()
        if isinstance(v, torch.Tensor) and v.numel() > 1 and base is not torch.optim.LBFGS
    ]
    for i, key in shaped[:4]:
        bad = copy.deepcopy(state)
        bad["state"][i][key] = bad["state"][i][key].flatten()[:-1]
        with pytest.raises(ValueError, match=re.escape(f"the {key} of") + ".*shape"):
            other.load_state_dict(bad)


# ---- Masters are given up only if that is said


@pytest.mark.parametrize("case", [ADAMW, MUON, SGD, EXCLUDED], ids=["adamw", "muon", "sgd", "excl"])
def test_without_masters_says_so_and_says_it_once(case):
    _, source = case.trained(lr=3e-2)
    state = copy.deepcopy(source.state_dict())
    moments = fc_optim.without_masters(state)
    assert_equal_states(state, source.state_dict())  # the input is left as it is
    model, opt = case.build(seed=4)
    run(model, opt, 5, 7)
    held = copy.deepcopy(model.state_dict())
    opt.load_state_dict(moments)
    assert not any("master" in own for own in opt.state.values())
    opt.publish()
    for e in opt.managed():
        assert torch.equal(e.state["master"], e.param.detach().float())
    assert_equal_states(dict(model.state_dict()), dict(held))
    assert all("masters_from" not in g for g in opt.param_groups)
    again = opt.state_dict()
    assert all("masters_from" not in g for g in again["param_groups"])
    for key in ("exp_avg", "momentum_buffer"):
        for i, own in state["state"].items():
            if key in own:
                assert torch.equal(again["state"][i][key], own[key])


def test_without_masters_says_so_through_a_distributed_checkpoint():
    from torch.distributed.checkpoint.state_dict import (
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    source_model, source = ADAMW.trained()
    model, opt = ADAMW.build(seed=4)
    run(model, opt, 5, 7)
    saved = copy.deepcopy(get_optimizer_state_dict(source_model, source))
    with pytest.raises(ValueError, match="masters?.*without_masters"):
        lost = {k: {n: v for n, v in e.items() if n != "master"} for k, e in saved["state"].items()}
        set_optimizer_state_dict(model, opt, {**saved, "state": lost})
    set_optimizer_state_dict(model, opt, fc_optim.without_masters(saved))
    assert not any("master" in own for own in opt.state.values())
    moment = opt.state[model[0].weight]["exp_avg"]
    assert torch.equal(moment, saved["state"]["0.weight"]["exp_avg"])


def test_without_masters_wants_a_state_dict():
    with pytest.raises(ValueError, match="expected the keys 'state' and 'param_groups'"):
        fc_optim.without_masters({"optimizer": {}})


def test_a_missing_moment_is_refused_without_masters_too():
    _, source = ADAMW.trained()
    state = copy.deepcopy(source.state_dict())
    del state["state"][0]["exp_avg"]
    model, opt = ADAMW.build(seed=4)
    with pytest.raises(ValueError, match="'0.weight' lacks 'exp_avg'"):
        opt.load_state_dict(fc_optim.without_masters(state))
    assert not opt.state


def test_groups_of_earlier_torch_versions_load():
    """They lack what torch itself adds when it loads them."""
    for base in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD):
        theirs_model = tiny()
        theirs = base(theirs_model.parameters(), lr=1e-2)
        train(theirs_model, theirs)
        state = copy.deepcopy(theirs.state_dict())
        for given in state["param_groups"]:
            for key in ("maximize", "foreach", "capturable", "differentiable", "fused"):
                given.pop(key, None)
        model = tiny()
        opt = FairCastOptimizer(base, model.parameters())
        opt.load_state_dict(state)
        assert opt.param_groups[0]["lr"] == 1e-2 and opt.param_groups[0]["maximize"] is False
