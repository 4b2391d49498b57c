"""What users do to an optimizer between its steps: to its state, its masters, its callers."""

import copy

import pytest
import torch
from models import assert_invariant, backward, bits, tiny, train
from torch import nn

import fc_optim
from fc_optim import FairCastAdamW, FairCastOptimizer
from fc_optim.update.state import EPOCH

DTYPES = [torch.float32, torch.bfloat16]


def trained(dtype=torch.bfloat16, steps=3, **options):
    model = tiny(dtype)
    opt = FairCastAdamW(model.named_parameters(), lr=1e-3, **options)
    train(model, opt, steps)
    return model, opt


def masters(opt):
    return [e.state["master"].clone() for e in opt.managed()]


def assert_masters(opt, expected):
    assert all(torch.equal(m, w) for m, w in zip(masters(opt), expected, strict=True))


# -- masters outlive it ------------------------------------------------------------------------


def clear(opt):
    opt.state.clear()


def fresh(opt):
    for p in list(opt.state):
        opt.state[p] = {}


def pop_masters(opt):
    for own in opt.state.values():
        own.pop("master")


@pytest.mark.parametrize("lose", [clear, fresh, pop_masters])
def test_lost_masters_are_an_error_that_names_the_remedy(lose):
    model, opt = trained()
    state, weights = copy.deepcopy(opt.state_dict()), bits(model)
    lose(opt)
    backward(model)
    for call in (opt.step, opt.publish, lambda: list(opt.served_params())):
        with pytest.raises(RuntimeError, match=r"masters of 0.weight.*adopt_weights\(\)"):
            call()
    assert all(torch.equal(a, b) for a, b in zip(bits(model), weights, strict=True))
    opt.load_state_dict(state)
    expected = [state["state"][i]["master"] for i in range(6)]
    assert_masters(opt, expected)
    lose(opt)
    opt.adopt_weights()  # said explicitly: masters begin from what is served
    assert_masters(opt, [p.detach().float() for p in model.parameters()])


@pytest.mark.parametrize("how", ["zeroed", "popped", "reset_moments"])
def test_moments_may_begin_anew_and_masters_stay(how):
    model, opt = trained()
    before = masters(opt)
    epochs = [int(e.state[EPOCH]) for e in opt.managed()]
    for e in opt.managed() if how != "reset_moments" else ():
        for key in ("exp_avg", "exp_avg_sq", "step"):
            e.state[key].zero_() if how == "zeroed" else e.state.pop(key)
    if how == "reset_moments":
        opt.reset_moments()
    assert opt.check() == {}  # the dither does not hang on torch's step
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    opt.param_groups[0]["weight_decay"] = 0.0
    opt.step()
    assert_masters(opt, before)  # no gradient, no momentum: nothing moves
    assert [int(e.state["step"]) for e in opt.managed()] == [1] * 6
    assert [int(e.state[EPOCH]) for e in opt.managed()] == [t + 1 for t in epochs]
    assert_invariant(opt)


def test_half_a_state_is_refused_by_name():
    model, opt = trained()
    opt.state[model[0].weight].pop("step")
    backward(model)
    with pytest.raises(RuntimeError, match=r"step of '0.weight' is missing.*reset_moments\(\)"):
        opt.step()
    before = masters(opt)
    opt.reset_moments()  # the remedy that it names
    assert_masters(opt, before)
    opt.step()
    assert [int(e.state["step"]) for e in opt.managed()] == [1] * 6
    assert_invariant(opt)


def test_moments_of_another_base_begin_anew():
    model = tiny()
    opt = FairCastOptimizer(torch.optim.SGD, model.named_parameters(), lr=1e-2, momentum=0.9)
    train(model, opt)
    before = masters(opt)
    opt.reset_moments()
    assert all("momentum_buffer" not in e.state for e in opt.managed())
    assert_masters(opt, before)
    train(model, opt, 1)
    assert all("momentum_buffer" in e.state for e in opt.managed())


# -- a supported way to change masters ---------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_masters_can_be_edited_and_are_published(dtype):
    model, opt = trained(dtype)
    version = opt.served_version
    with opt.edit_masters() as held:
        assert list(held) == [n for n, _ in model.named_parameters()]
        expected = {n: m * 0.5 for n, m in held.items()}
        for m in held.values():
            m.mul_(0.5)
        with pytest.raises(RuntimeError, match=r"step\(\) inside edit_masters\(\)"):
            opt.step()
    for e in opt.managed():
        assert torch.equal(e.state["master"], expected[e.identity.name])
    assert opt.served_version == version + 1 and opt.check() == {}
    assert_invariant(opt)
    for _ in range(20):  # rounds of it add up in fp32, as written into the weights they would not
        with opt.edit_masters() as held:
            held["0.weight"].add_(1e-6)
    drift = opt.state[model[0].weight]["master"] - expected["0.weight"]
    assert (drift - 2e-5).abs().max() < 20 * 2**-24


def test_an_exception_while_masters_are_edited_leaves_the_shadow_right():
    _, opt = trained()
    with pytest.raises(ZeroDivisionError), opt.edit_masters() as held:
        held["0.weight"].fill_(float("inf")).sub_(float("inf"))
        raise ZeroDivisionError
    assert opt.check() == {}
    words = opt.state[opt.param_groups[0]["params"][0]]["master"].view(torch.int32)
    assert bool((words == 0x7FC00000).all())  # one NaN, whatever was computed


def test_a_write_and_an_exception_in_masters_in_model_are_both_told():
    model, opt = trained(torch.float32)
    with pytest.raises(RuntimeError, match="0.weight were written inside") as error:
        with opt.masters_in_model(), torch.no_grad():
            model[0].weight.add_(1.0)
            raise ZeroDivisionError
    assert isinstance(error.value.__cause__, ZeroDivisionError)
    with pytest.raises(ZeroDivisionError), trained()[1].masters_in_model():
        raise ZeroDivisionError


# -- only what was written counts as written ---------------------------------------------------


@pytest.mark.parametrize("on_the_grid", [True, False])
@pytest.mark.parametrize("base", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adam])
def test_a_second_backward_through_what_was_not_stepped(base, on_the_grid):
    """Actor and critic in one optimizer, with a step between their backwards."""
    torch.manual_seed(0)
    actor, critic = (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)) for _ in range(2))
    for p in [*actor.parameters(), *critic.parameters()] if on_the_grid else ():
        p.data = p.data.bfloat16().float()
    opt = FairCastOptimizer(base, [*actor.parameters(), *critic.parameters()], lr=1e-2)
    for _ in range(3):
        x = torch.randn(3, 4)
        of_actor, of_critic = actor(x).sum(), critic(x).sum()
        of_actor.backward()
        opt.step()
        opt.zero_grad()
        of_critic.backward()
        opt.step()
        opt.zero_grad()
    assert opt.check() == {} and len(opt.managed()) == 8


def test_a_step_from_a_hook_of_the_backward():
    model = tiny(torch.float32)
    opts = {p: FairCastAdamW([(n, p)], lr=1e-3) for n, p in model.named_parameters()}

    def hook(p):
        opts[p].step()
        opts[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)
    for i in range(3):
        backward(model, i)
    twin = tiny(torch.float32)
    opt = FairCastAdamW(twin.named_parameters(), lr=1e-3)
    train(twin, opt)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(opts[p].state[p]["master"], opt.state[q]["master"])
        assert torch.equal(p, q)


# -- torch.compile -----------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")  # dynamo's own
def test_a_compiled_caller_breaks_its_graph():
    plain, opt = trained()
    model, other = trained()

    @torch.compile(backend="eager")
    def step(model, opt):
        backward(model)
        opt.step()
        opt.publish(redraw=True)
        return dict(opt.served_params(copy=True)), opt.served_digest()

    opt.zero_grad(), other.zero_grad()
    backward(plain)
    opt.step()
    served, found = step(model, other)
    assert found == opt.served_digest() == fc_optim.digest(served.items())
    assert_masters(other, masters(opt))
