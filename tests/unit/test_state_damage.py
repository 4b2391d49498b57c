"""A state that does not fit is refused by name, and nothing at all has changed."""

import copy
import json

import pytest
import torch
from models import assert_equal_states, tiny, train
from state_cases import CASES, B, Case, run, snapshot, two_groups
from torch import nn

import fc_optim
from fc_optim import FairCastAdamW, FairCastOptimizer

ADAMW = Case(torch.optim.AdamW, B)
AMSGRAD = CASES["adamw_amsgrad_bf16"]
MUON = CASES["muon_mixed_fp32"]
SGD = CASES["sgd_momentum_bf16"]
EXCLUDED = CASES["adamw_excluded_fp32"]
RMSPROP = Case(torch.optim.RMSprop, options={"lr": 1e-3})
GROUPS = Case(torch.optim.AdamW, params=two_groups)


def entry(i, **new):
    return lambda s: s["state"][i].update(new)


def without(*keys):
    return lambda s: [s["state"].pop(key) for key in keys]


def every(change):
    """The same change of the state of every parameter."""

    def damage(s):
        for own in s["state"].values():
            change(own)

    return damage


def drop(i, *keys):
    return lambda s: [s["state"][i].pop(key) for key in keys]


def group(i, **new):
    return lambda s: s["param_groups"][i].update(new)


def lacking(i, key):
    return lambda s: s["param_groups"][i].pop(key)


def cast(key, dtype):
    def change(own):
        if key in own:
            own[key] = own[key].to(dtype)

    return change


def through_json(s):
    s["state"] = {k: v for k, v in zip(json.loads(json.dumps(list(map(str, s["state"])))),
                                       s["state"].values(), strict=True)}  # fmt: skip


def as_lists(s):
    s["state"] = {k: {n: v.tolist() for n, v in e.items()} for k, e in s["state"].items()}


def freed(s):
    s["state"][2]["exp_avg"].untyped_storage().resize_(0)


def replace(s, state):
    s["state"] = state


T = torch.tensor
DAMAGES = {
    # entries
    "one is missing": (ADAMW, without(3), "no state for '1.bias'"),
    "one is empty": (ADAMW, lambda s: s["state"].update({3: {}}), "no state for '1.bias'"),
    "one is missing, unfused": (SGD, without(3), "no state for '1.bias'"),
    "all are missing": (ADAMW, lambda s: s["state"].clear(), "version 3, but the masters of '0.w"),
    "those of a group are missing": (GROUPS, without(0, 1), "no state for '0.weight'"),
    "keys are strings": (ADAMW, through_json, r"no group has the parameters \['0', '1'"),
    "keys are others": (ADAMW, lambda s: replace(s, {k + 9: v for k, v in s["state"].items()}),
                        r"no group has the parameters \[9, 10"),
    "keys are names, groups have numbers": (
        ADAMW, lambda s: replace(s, {f"w{k}": v for k, v in s["state"].items()}),
        r"no group has the parameters \['w0', 'w1'"),
    "tensors are lists": (ADAMW, as_lists, "param_id|not a tensor"),
    "an entry is no dict": (ADAMW, lambda s: s["state"].update({0: 3}), "0 is 3, no dict"),
    "entries changed places": (
        ADAMW, lambda s: s["state"].update({1: s["state"][3], 3: s["state"][1]}),
        "the entry of '0.bias' has the identity .* of '1.bias'"),
    # masters
    "a master is missing": (ADAMW, drop(0, "master"), "master of '0.weight' is missing"),
    "all masters are missing": (ADAMW, every(lambda e: e.pop("master")), "masters? .*without"),
    "masters have another name": (
        ADAMW, every(lambda e: e.update(master_param=e.pop("master"))), "missing.*without_ma"),
    "nothing of ours is left": (
        ADAMW, every(lambda e: [e.pop(k) for k in ("master", "param_id", "dither_step")]),
        "but the masters of"),
    "masters are bf16": (ADAMW, every(cast("master", B)), "master of '0.weight' is torch.bfl"),
    "masters are fp16": (SGD, every(cast("master", torch.half)), "'0.weight' is torch.float16"),
    "masters are fp64": (ADAMW, every(cast("master", torch.double)), "torch.float64, not float32"),
    "a master is None": (ADAMW, entry(0, master=None), "master of '0.weight' is None"),
    "a master is truncated": (ADAMW, entry(0, master=torch.zeros(9, 5)), r"has shape \(9, 5\)"),
    "a master is flat": (ADAMW, entry(0, master=torch.zeros(54)), r"has shape \(54,\)"),
    "a master is on meta": (ADAMW, entry(0, master=torch.zeros(9, 6, device="meta")), "the meta"),
    # moments and counts
    "the step is missing": (ADAMW, every(lambda e: e.pop("step")), "'0.weight' lacks 'step'"),
    "a step is missing": (ADAMW, drop(3, "step"), "'1.bias' lacks 'step'"),
    "a moment is missing": (ADAMW, drop(4, "exp_avg_sq"), "'2.weight' lacks 'exp_avg_sq'"),
    "a moment is None": (ADAMW, entry(4, exp_avg=None), "'2.weight' lacks 'exp_avg'"),
    "amsgrad's maximum is missing": (AMSGRAD, drop(0, "max_exp_avg_sq"), "lacks 'max_exp_avg_sq'"),
    "amsgrad, of a state without": (ADAMW, group(0, amsgrad=True), "lacks 'max_exp_avg_sq'"),
    "muon's momentum is missing": (MUON, drop(1, "momentum_buffer"), "lacks 'momentum_buffer'"),
    "muon's count is missing": (MUON, drop(1, "dither_step"), "lacks 'dither_step'"),
    "an unfused count is missing": (SGD, drop(1, "dither_step"), "'0.bias' lacks 'dither_step'"),
    "an excluded moment is missing": (EXCLUDED, drop(3, "exp_avg"), "lacks 'exp_avg'"),
    "an excluded step is missing": (EXCLUDED, drop(3, "step"), "lacks 'step'"),
    "moments are bf16": (ADAMW, every(cast("exp_avg_sq", B)), "exp_avg_sq of .* is torch.bf"),
    "moments are fp16": (MUON, every(cast("momentum_buffer", torch.half)), "is torch.float16"),
    "moments are whole numbers": (ADAMW, entry(0, exp_avg=torch.zeros(9, 6).int()), "torch.int32"),
    "unfused momentum is bf16": (SGD, every(cast("momentum_buffer", B)), "'0.weight' is torch.bf"),
    "unfused averages are fp16": (RMSPROP, every(cast("square_avg", torch.half)), "torch.float16"),
    "a moment is truncated": (ADAMW, entry(1, exp_avg=torch.zeros(8)), r"has shape \(8,\)"),
    "an unfused one is truncated": (RMSPROP, entry(1, square_avg=torch.zeros(8)), r"shape \(8,\)"),
    "its step too": (RMSPROP, entry(1, step=torch.zeros(2)), r"step of '0.bias' has shape \(2,\)"),
    "an excluded one is truncated": (EXCLUDED, entry(3, exp_avg=torch.zeros(8)), r"shape \(8,\)"),
    "a moment's memory was freed": (ADAMW, freed, "memory of the exp_avg of '1.weight' was freed"),
    "a moment is sparse": (ADAMW, entry(0, exp_avg=torch.zeros(9, 6).to_sparse()), "not dense"),
    "a step is bf16": (ADAMW, every(cast("step", B)), "step of '0.weight' is torch.bfloat16"),
    "a step is negative": (ADAMW, entry(0, step=T(-1.0)), "step of '0.weight' is -1.0"),
    "a step is nan": (ADAMW, entry(0, step=T(torch.nan)), "step of '0.weight' is nan"),
    "a step is a fraction": (ADAMW, entry(0, step=2.5), "step of '0.weight' is 2.5"),
    "a step is two numbers": (ADAMW, entry(0, step=torch.ones(2)), r"has shape \(2,\), not one"),
    "a step is text": (ADAMW, entry(0, step="3"), "step of '0.weight' is '3'"),
    "a count is text": (SGD, entry(0, dither_step="3"), "dither_step of '0.weight' is '3'"),
    # identities
    "an identity is missing": (ADAMW, drop(2, "param_id"), "param_id of '1.weight' is missing"),
    "identities are floats": (ADAMW, every(cast("param_id", torch.float32)), "id of '0.weight'"),
    "identities are bf16": (ADAMW, every(cast("param_id", B)), "id of '0.weight' is torch.bf"),
    "an identity is too large": (ADAMW, entry(0, param_id=T(2**32)), "param_id of '0.weight'"),
    "an identity is text": (ADAMW, entry(0, param_id="q"), "param_id of '0.weight' is 'q'"),
    # groups
    "the seed is missing": (GROUPS, lacking(1, "seed"), "group 1 lacks 'seed'"),
    "the dither is missing": (GROUPS, lacking(0, "dither"), "group 0 lacks 'dither'"),
    "all of ours is missing": (
        ADAMW, lambda s: [s["param_groups"][0].pop(k) for k in fc_optim.params.names.GROUP_KEYS],
        "group 0 lacks 'algorithm', 'dither'"),
    "the rate is missing": (GROUPS, lacking(1, "lr"), "group 1 lacks 'lr'"),
    "betas are missing": (ADAMW, lacking(0, "betas"), "group 0 lacks 'betas'"),
    "muon's momentum is no option": (MUON, lacking(0, "momentum"), "group 0 lacks 'momentum'"),
    "an unfused option is missing": (SGD, lacking(0, "dampening"), "group 0 lacks 'dampening'"),
    "the rate is text": (ADAMW, group(0, lr="1e-3"), "lr of group 0 is '1e-3'"),
    "the rate is many": (ADAMW, group(0, lr=torch.ones(3)), "lr of group 0 is tensor"),
    "the rate is on meta": (ADAMW, group(0, lr=torch.ones((), device="meta")), "lr of group 0"),
    "betas are one": (ADAMW, group(0, betas=0.9), "betas of group 0 is 0.9"),
    "betas are three": (ADAMW, group(0, betas=(0.9, 0.9, 0.9)), "betas of group 0 is"),
    "a flag is text": (ADAMW, group(0, maximize="no"), "maximize of group 0 is 'no'"),
    "the seed is text": (ADAMW, group(0, seed="1"), "seed of group 0 is '1', not an integer"),
    "the seed is true": (ADAMW, group(0, seed=True), "seed of group 0 is True, not an integer"),
    "the seed is negative": (ADAMW, group(0, seed=-1), "seed of group 0 is -1, not in"),
    "the epoch is a float": (ADAMW, group(0, epoch=1.0), "epoch of group 0 is 1.0, not an integer"),
    "the version is None": (ADAMW, group(0, served_version=None), "served_version of group 0 is"),
    "two seeds": (GROUPS, group(1, seed=4), "seed is 0 in group 0 and 4 in group 1"),
    "two epochs": (GROUPS, group(1, epoch=4), "epoch is 0 in group 0 and 4 in group 1"),
    "another algorithm": (MUON, group(0, algorithm="adamw"), "algorithm of group 0 is 'adamw'"),
    "served_dtype is None": (ADAMW, group(0, served_dtype=None), "served_dtype of group 0 is None"),
    "params are missing": (ADAMW, lacking(0, "params"), "params of group 0 is None"),
    "params are one": (ADAMW, group(0, params=0), "params of group 0 is 0"),
    "a parameter twice": (ADAMW, group(0, params=[0, 1, 2, 3, 4, 4]), "'2.bias' has the identity"),
    # the whole
    "groups are a dict": (ADAMW, lambda s: s.update(param_groups={}), "param_groups is {}"),
    "unnamed, a parameter twice": (
        CASES["adamw_held_unnamed_bf16"], group(1, params=[2, 3, 3, 5]), "groups have '3' twice"),
    "the state is a list": (ADAMW, lambda s: s.update(state=[1]), r"state is \[1\], not a dict"),
    "names are numbers": (ADAMW, lambda s: s.update(names={0: [3]}), r"names has \[3\]"),
}  # fmt: skip


@pytest.mark.parametrize("running", [False, True], ids=["fresh", "running"])
@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_refused_by_name_and_changes_nothing(name, running):
    case, change, match = DAMAGES[name]
    _, source = case.trained(lr=3e-2)
    state = copy.deepcopy(source.state_dict())
    change(state)
    model, opt = case.build(seed=4)
    if running:
        run(model, opt, 5, 7)
    before = snapshot(model, opt)
    with pytest.raises(ValueError, match=match):
        opt.load_state_dict(state)
    assert_equal_states(snapshot(model, opt), before)
    if running:
        assert opt.check() == {}
    opt.load_state_dict(source.state_dict())  # it still loads what fits


PLAIN = {
    "a step is missing": (torch.optim.AdamW, drop(3, "step"), "'1.bias' lacks 'step'"),
    "a moment is missing": (torch.optim.Adam, drop(3, "exp_avg"), "'1.bias' lacks 'exp_avg'"),
    "of another optimizer": (torch.optim.SGD, lambda s: None, "'0.weight' lacks 'exp_avg'"),
    "a moment is truncated": (torch.optim.Adam, entry(0, exp_avg=torch.zeros(9, 5)), "shape"),
    "keys are strings": (torch.optim.Adam, through_json, r"no group has the parameters \['0'"),
    "eps is missing": (torch.optim.AdamW, lacking(0, "eps"), "group 0 lacks 'eps'"),
    "a step is bf16": (torch.optim.AdamW, every(cast("step", B)), "step of '0.weight' is torch.bf"),
}  # fmt: skip


@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_torch_state_that_does_not_fit_is_refused(name):
    base, change, match = PLAIN[name]
    options = {"lr": 1e-3, "momentum": 0.9} if base is torch.optim.SGD else {}
    theirs_model = tiny()
    theirs = base(theirs_model.named_parameters(), **options)
    train(theirs_model, theirs)
    state = copy.deepcopy(theirs.state_dict())
    for given in state["param_groups"]:  # torch's SGD has other options as well
        given.update({"betas": (0.9, 0.999), "eps": 1e-8, "amsgrad": False} if options else {})
    change(state)
    model = tiny(seed=4)
    opt = FairCastAdamW(model.named_parameters())
    before = snapshot(model, opt)
    with pytest.raises(ValueError, match=match):
        opt.load_state_dict(state)
    assert_equal_states(snapshot(model, opt), before)


class Uncopyable:
    def __deepcopy__(self, memo):
        raise TypeError("cannot be copied")


@pytest.mark.parametrize("running", [False, True])
@pytest.mark.parametrize(
    "where", ["a group", "an entry", "what is no parameter's", "the last weight"]
)
def test_what_fails_late_changes_nothing(where, running):
    """In copies, and even when the first weights were rewritten already."""
    case = ADAMW
    model, opt = case.build(seed=4)
    if running:
        run(model, opt, 0, 2)
    state = copy.deepcopy(case.trained()[1].state_dict())
    if where == "a group":
        state["param_groups"][0]["mine"] = Uncopyable()
    elif where == "an entry":
        state["state"][5]["mine"] = [Uncopyable()]
    elif where == "what is no parameter's":
        state["state"]["mine"] = Uncopyable()
    else:
        model[2].bias.data = model[2].bias.data.half()  # found when it is to be written
    before = snapshot(model, opt)
    with pytest.raises((ValueError, TypeError), match="copied|torch.float16"):
        opt.load_state_dict(state)
    assert_equal_states(snapshot(model, opt), before)


def test_a_load_that_fails_at_a_weight_did_rewrite_others_before():
    """Else the test above would prove nothing of putting them back."""
    model, opt = ADAMW.build(seed=4)
    state = ADAMW.trained()[1].state_dict()
    versions = [p._version for p in model.parameters()]
    model[2].bias.data = model[2].bias.data.half()
    with pytest.raises(TypeError, match="2.bias"):
        opt.load_state_dict(state)
    assert model[0].weight._version > versions[0]


def test_half_a_state_of_muon_alone_is_refused():
    model = nn.Linear(4, 4, bias=False)
    opt = FairCastOptimizer(torch.optim.Muon, model.named_parameters())
    model.weight.grad = torch.ones(4, 4)
    opt.step()
    state = copy.deepcopy(opt.state_dict())
    del state["state"][0]["momentum_buffer"]
    before = snapshot(model, opt)
    with pytest.raises(ValueError, match="lacks 'momentum_buffer'"):
        opt.load_state_dict(state)
    assert_equal_states(snapshot(model, opt), before)
