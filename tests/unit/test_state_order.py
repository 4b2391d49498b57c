"""Models, optimizers and groups in another order than saved: everything keeps its name."""

import copy
import json

import pytest
import torch
from models import assert_equal_states, assert_invariant, bits
from state_cases import run
from torch import nn

import fc_optim
from fc_optim import FairCastAdamW, FairCastOptimizer

NAMES = ("q", "k", "v", "o")


def net(names=NAMES, dtype=torch.bfloat16, seed=0):
    """Equal shapes, so that only names tell the parameters apart."""
    generator = torch.Generator().manual_seed(seed)
    made = {n: nn.Linear(4, 4, bias=False) for n in names}
    for n in sorted(names):
        made[n].weight.data = torch.randn(4, 4, generator=generator).bfloat16().float()
    return nn.ModuleDict({n: made[n] for n in names}).to(dtype)


def halves(model):
    """Two groups with rates of their own, by name."""
    named = list(model.named_parameters())
    return [
        {"params": [(n, p) for n, p in named if n[0] in "qk"], "lr": 1e-2},
        {"params": [(n, p) for n, p in named if n[0] in "vo"], "lr": 3e-2, "weight_decay": 0.5},
    ]


def stepped(model, opt, first=0, end=3):
    """Steps whose gradients belong to names, in whatever order."""
    for i in range(first, end):
        for name, p in model.named_parameters():
            generator = torch.Generator().manual_seed(100 * i + ord(name[0]))
            p.grad = (torch.randint(-9, 9, p.shape, generator=generator) / 16).to(p.dtype)
        opt.step()
    return opt


def by_name(model, opt):
    """Everything that is kept of a parameter, by the model's names."""
    names = {p: n for n, p in model.named_parameters()}
    groups = {p: g for g in opt.param_groups for p in g["params"]}
    return copy.deepcopy(
        {n: {**opt.state[p], "weight": p.detach(), "lr": groups[p]["lr"]} for p, n in names.items()}
    )


BASES = {
    "adamw": (torch.optim.AdamW, {}),
    "sgd": (torch.optim.SGD, {"momentum": 0.9}),
    "muon": (torch.optim.Muon, {}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("order", [("k", "q", "v", "o"), ("o", "v", "k", "q")])
@pytest.mark.parametrize("how", ["named", "bound", "named there", "groups"])
def test_another_order_of_declaration_swaps_nothing(order, base, dtype, how):
    def make(model, side):
        cls, options = BASES[base]
        if how == "groups":
            groups = halves(model)
            params = groups if side == "there" else groups[::-1]
        else:
            named = how == "named" or (how == "named there" and side == "there")
            params = model.named_parameters() if named else model.parameters()
        opt = FairCastOptimizer(cls, params, **options)
        return opt if how == "groups" else opt.bind(model)

    model = net(dtype=dtype)
    opt = stepped(model, make(model, "there"))
    other_model = net(order, dtype, seed=5)
    other = make(other_model, "here")
    other.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert_equal_states(by_name(other_model, other), by_name(model, opt))
    for m, o in ((model, opt), (other_model, other)):
        stepped(m, o, 3, 5)
    assert_equal_states(by_name(other_model, other), by_name(model, opt))


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
@pytest.mark.parametrize("side", ["there", "here"])
def test_prefixes_of_wrappers_are_no_names(prefix, side):
    def named(model, wrapped):
        return [(prefix * wrapped + n, p) for n, p in model.named_parameters()]

    model, other_model = net(), net(("o", "k", "v", "q"), seed=5)
    opt = stepped(model, FairCastAdamW(named(model, side == "there")))
    other = FairCastAdamW(named(other_model, side == "here"))
    other.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert_equal_states(by_name(other_model, other), by_name(model, opt))


@pytest.mark.parametrize("named", [True, False])
def test_a_plain_torch_state_is_matched_by_its_names(named):
    model = net(dtype=torch.float32)
    theirs = torch.optim.AdamW(model.named_parameters() if named else model.parameters())
    stepped(model, theirs)
    other_model = net(("k", "q", "v", "o"), torch.float32)
    other = FairCastAdamW(other_model.named_parameters())
    other.load_state_dict(copy.deepcopy(theirs.state_dict()))
    source = "k" if named else "q"  # without names it is torch's way: by position
    assert torch.equal(
        other.state[other_model["k"].weight]["exp_avg"],
        theirs.state[model[source].weight]["exp_avg"],
    )


def test_without_masters_is_matched_by_name_too():
    model, other_model = net(), net(("k", "q", "o", "v"), seed=5)
    opt = stepped(model, FairCastAdamW(model.named_parameters()))
    other = FairCastAdamW(other_model.named_parameters())
    held = bits(other_model)
    other.load_state_dict(fc_optim.without_masters(opt.state_dict()))
    other.publish()
    for name in NAMES:
        mine, theirs = other.state[other_model[name].weight], opt.state[model[name].weight]
        assert torch.equal(mine["exp_avg"], theirs["exp_avg"])
        assert torch.equal(mine["master"], other_model[name].weight.float())
    assert all(torch.equal(a, b) for a, b in zip(held, bits(other_model), strict=True))
    assert_invariant(other)


REFUSED = {
    "a new parameter": (NAMES, (*NAMES, "x"), "Only this optimizer has 'x.weight'"),
    "one that is gone": ((*NAMES, "x"), NAMES, "Only the state has 'x.weight'"),
    "one that is called otherwise": (
        NAMES, ("q", "k", "v", "x"),
        "Only the state has 'o.weight'. Only this optimizer has 'x.weight'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", ["named", "bound"])
@pytest.mark.parametrize("name", REFUSED)
def test_other_parameters_are_refused_by_name(name, how):
    saved, mine, match = REFUSED[name]

    def make(names, seed):
        model = net(names, seed=seed)
        if how == "named":
            return model, FairCastAdamW(model.named_parameters())
        return model, FairCastAdamW(model.parameters()).bind(model)

    opt = stepped(*make(saved, 0))
    model, other = make(mine, 5)
    stepped(model, other)
    before = by_name(model, other)
    with pytest.raises(ValueError, match=match):
        other.load_state_dict(opt.state_dict())
    assert_equal_states(by_name(model, other), before)


def test_a_parameter_that_moved_to_another_group_is_refused_by_name():
    model, other_model = net(), net()
    opt = stepped(model, FairCastAdamW(halves(model)))
    groups = halves(other_model)
    groups[1]["params"].append(groups[0]["params"].pop())
    other = FairCastAdamW(groups)
    with pytest.raises(ValueError, match="'k.weight' moved from group 0 of the state to group 1"):
        other.load_state_dict(opt.state_dict())
    assert not other.state and other.param_groups[1]["lr"] == 3e-2


def test_entries_that_were_reordered_without_their_names_are_refused():
    model = net()
    opt = stepped(model, FairCastAdamW(model.named_parameters()))
    before = by_name(model, opt)
    state = opt.state_dict()  # the very tensors of the optimizer
    state["state"] = {0: state["state"][1], 1: state["state"][0], 2: state["state"][2],
                      3: state["state"][3]}  # fmt: skip
    with pytest.raises(ValueError, match="the entry of 'q.weight' has the identity .* of 'k.we"):
        opt.load_state_dict(state)
    assert_equal_states(by_name(model, opt), before)
    # Where names go with them, nothing is copied over what is still to be read.
    state["param_groups"][0]["param_names"] = ["k.weight", "q.weight", "v.weight", "o.weight"]
    opt.load_state_dict(state)
    assert_equal_states(by_name(model, opt), before)


def test_identities_of_a_named_run_stay_with_their_parameter():
    """Named, then resumed without names, then with names in another order."""
    model = net()
    opt = stepped(model, FairCastAdamW(model.named_parameters()))
    between = net(seed=5)
    unnamed = FairCastAdamW(between.parameters())
    unnamed.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert "param_names" not in unnamed.state_dict()["param_groups"][0]
    last = net(("o", "v", "k", "q"), seed=6)
    other = FairCastAdamW(last.named_parameters())
    other.load_state_dict(copy.deepcopy(unnamed.state_dict()))
    assert_equal_states(by_name(last, other), by_name(model, opt))


def test_names_of_a_bound_model_are_saved_and_harmless_to_torch():
    model = net()
    opt = FairCastAdamW(model.parameters())
    assert "names" not in opt.state_dict()
    stepped(model, opt.bind(model))
    state = opt.state_dict()
    assert state["names"] == {i: [f"{n}.weight"] for i, n in enumerate(NAMES)}
    json.dumps(state["names"])
    torch.optim.AdamW(model.parameters()).load_state_dict(state)
    named = FairCastAdamW(model.named_parameters()).bind(model)
    assert "names" not in named.state_dict()  # param_names say it


def test_a_moved_group_takes_its_own_rate_and_options():
    model = net()
    opt = stepped(model, FairCastAdamW(halves(model), dither="sync", seed=3))
    opt.publish(redraw=True)
    other_model = net(seed=5)
    other = FairCastAdamW(halves(other_model)[::-1])
    other.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert [g["lr"] for g in other.param_groups] == [3e-2, 1e-2]
    assert [g["weight_decay"] for g in other.param_groups] == [0.5, 1e-2]
    assert (other.seed, other.dither, other.served_version) == (3, "sync", opt.served_version)
    assert other.check() == {}


def test_flat_buffers_are_matched_by_what_they_hold():
    def make(order, inner="ab"):
        params = {n: nn.Parameter(torch.randn(8)) for n in ("first", "second")}
        opt = FairCastAdamW([params[n] for n in order])
        for name, p in params.items():
            pieces = [
                fc_optim.FlatPiece(f"{name}.{part}", (4,), 0, 4, 4 * i)
                for i, part in enumerate(inner)
            ]
            opt.declare_flat(p, pieces)
            p.grad = torch.full((8,), float(len(name)))
        opt.step()
        return params, opt

    params, opt = make(("first", "second"))
    state = copy.deepcopy(opt.state_dict())
    assert "param_id" not in state["state"][0]
    others, other = make(("second", "first"))
    other.load_state_dict(state)
    for name, p in params.items():
        assert torch.equal(p, others[name])
        assert_equal_states(opt.state[p], other.state[others[name]])
    _, turned = make(("first", "second"), "ba")
    before = copy.deepcopy(turned.state_dict())
    with pytest.raises(ValueError, match="hold the parameters in another way"):
        turned.load_state_dict(state)
    assert_equal_states(turned.state_dict(), before)


def test_the_weights_follow_the_masters_at_once():
    model, other_model = net(), net(("k", "q", "v", "o"), seed=5)
    opt = stepped(model, FairCastAdamW(model.named_parameters()))
    other = FairCastAdamW(other_model.named_parameters())
    other.load_state_dict(opt.state_dict())
    for name in NAMES:
        assert torch.equal(model[name].weight, other_model[name].weight)
    assert other.check() == {}
    run(other_model, other, 0, 1)
    assert_invariant(other)
