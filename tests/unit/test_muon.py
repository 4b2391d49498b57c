"""Muon: torch's mathematics on fp32 masters, mixed with AdamW in one optimizer."""

import copy

import pytest
import torch
from models import assert_equal_states, assert_invariant, assert_same, backward, tiny
from torch import nn

from fc_optim import FairCastAdamW, FairCastMuon, muon_param_groups
from fc_optim.update.muon import lr_ratio, orthogonalise

SHAPES = [(64, 32), (32, 64), (1, 17), (17, 1), (40, 40)]


def run_both(shape, steps, lr, adjust_lr_fn, dtype=torch.float32, **kwargs):
    """Our parameter and optimizer, torch's, the path length of torch's and its largest |w|."""
    g = torch.Generator().manual_seed(0)
    start = (torch.randn(shape, generator=g) * 0.02).bfloat16()
    ours, theirs = nn.Parameter(start.to(dtype)), nn.Parameter(start.float())
    opt = FairCastMuon([("w", ours)], lr=lr, adjust_lr_fn=adjust_lr_fn, **kwargs)
    torch_opt = torch.optim.Muon([theirs], lr=lr, adjust_lr_fn=adjust_lr_fn, **kwargs)
    path, largest = torch.zeros(shape), theirs.detach().abs()
    for _ in range(steps):
        grad = (torch.randn(shape, generator=g) * 1e-2).to(dtype)
        ours.grad, theirs.grad = grad, grad.float()
        before = theirs.detach().clone()
        opt.step()
        torch_opt.step()
        path += (theirs.detach() - before).abs()
        largest = torch.maximum(largest, theirs.detach().abs())
    return ours, opt, theirs, torch_opt, path, largest


@pytest.mark.parametrize("adjust_lr_fn", [None, "original", "match_rms_adamw"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("lr", [1e-3, 1e-6])
@pytest.mark.parametrize("nesterov", [True, False])
def test_masters_follow_torch(adjust_lr_fn, shape, lr, nesterov):
    """Bounds: one step differs by fp32 rounding. Later, an ulp of fp32 in the momentum can move
    its bf16 cast, so that single elements of an update differ as bf16 values do."""
    for steps in (1, 20):
        p, opt, q, torch_opt, path, largest = run_both(
            shape, steps, lr, adjust_lr_fn, nesterov=nesterov
        )
        error = (opt.state[p]["master"] - q.detach()).abs()
        rounding = 4 * 2**-23 * (largest + path)
        assert torch.all(error <= rounding + (2**-5 * path if steps > 1 else 0))
        assert error.norm() <= rounding.norm() + 2**-8 * path.norm()
        torch.testing.assert_close(
            opt.state[p]["momentum_buffer"],
            torch_opt.state[q]["momentum_buffer"],
            rtol=1e-5,
            atol=1e-8,
        )
        assert_invariant(opt)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_momentum_buffer_is_the_plain_average_after_a_step(dtype):
    """It is fp32, never aliased with Newton-Schulz's input nor normalised in place."""
    p = nn.Parameter(torch.zeros(6, 5, dtype=dtype))
    opt = FairCastMuon([p], lr=1e-3, momentum=0.9)
    average = torch.zeros(6, 5)
    for i in range(5):
        p.grad = torch.full((6, 5), 0.1 * (i + 1)).to(dtype)
        opt.step()
        average = 0.9 * average + 0.1 * p.grad.float()
        buffer = opt.state[p]["momentum_buffer"]
        assert buffer.dtype == torch.float32
        torch.testing.assert_close(buffer, average, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("shape", SHAPES)
def test_zero_gradients_stay_finite_and_only_decay(shape):
    p = nn.Parameter(torch.ones(shape))
    opt = FairCastMuon([p], lr=0.1, weight_decay=0.5)
    p.grad = torch.zeros(shape)
    opt.step()
    assert torch.all(opt.state[p]["master"] == torch.tensor(1 - 0.1 * 0.5))
    assert_invariant(opt)


@pytest.mark.parametrize("shape", SHAPES)
def test_newton_schulz_brings_singular_values_near_one_and_leaves_its_input(shape):
    group = {"ns_coefficients": (3.4445, -4.775, 2.0315), "ns_steps": 5, "eps": 1e-7}
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    held = x.clone()
    y = orthogonalise(x, group)
    assert torch.equal(x, held) and y.dtype == torch.bfloat16 and y.is_contiguous()
    values = torch.linalg.svdvals(y.float())
    assert 0.3 < float(values.min()) and float(values.max()) < 1.4


def test_lr_ratios_are_those_of_torch():
    assert lr_ratio(None, torch.Size((8, 2))) == lr_ratio("original", torch.Size((8, 2))) == 2
    assert lr_ratio(None, torch.Size((2, 8))) == 1
    assert lr_ratio("match_rms_adamw", torch.Size((4, 25))) == pytest.approx(1.0)
    with pytest.raises(ValueError, match="adjust_lr_fn: 'x'"):
        FairCastAdamW([{"params": [nn.Parameter(torch.ones(2, 2))], "algorithm": "muon",
                        "adjust_lr_fn": "x"}])  # fmt: skip


class Decoder(nn.Module):
    def __init__(self, tied=False):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8, bias=False)
        self.lm_head = nn.Linear(8, 11, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight
        for p in self.parameters():
            p.data = p.data.bfloat16().float()

    def forward(self, ids):
        x = self.embed(ids)
        return self.lm_head(x + self.down(self.up(self.norm(x)).relu()))


def step(model, opt, seed):
    ids = torch.randint(11, (3, 5), generator=torch.Generator().manual_seed(seed))
    opt.zero_grad()
    model(ids).logsumexp(-1).mean().backward()
    opt.step()


@pytest.mark.parametrize("tied", [False, True])
def test_param_groups_send_hidden_matrices_to_muon_only(tied):
    model = Decoder(tied)
    model.norm.bias.requires_grad_(False)
    muon, adamw = muon_param_groups(model, muon={"lr": 2e-3}, adamw={"weight_decay": 0.0})
    assert [n for n, _ in muon["params"]] == ["up.weight", "down.weight"]
    rest = ["embed.weight", "norm.weight", "up.bias"] + ([] if tied else ["lm_head.weight"])
    assert [n for n, _ in adamw["params"]] == rest
    opt = FairCastAdamW([muon, adamw], lr=1e-4)
    assert [g["algorithm"] for g in opt.param_groups] == ["muon", "adamw"]
    assert [g["lr"] for g in opt.param_groups] == [2e-3, 1e-4]
    assert [g["weight_decay"] for g in opt.param_groups] == [0.1, 0.0]
    assert opt.param_groups[0]["ns_steps"] == 5 and opt.param_groups[0]["eps"] == 1e-7


def test_mixed_groups_do_what_each_alone_does():
    mixed, hidden, rest = Decoder(), Decoder(), Decoder()
    for twin in (hidden, rest):
        twin.load_state_dict(mixed.state_dict())
    opt = FairCastAdamW(muon_param_groups(mixed, muon={"lr": 2e-3}), lr=1e-3)
    one = FairCastMuon(muon_param_groups(hidden)[0]["params"], lr=2e-3)
    two = FairCastAdamW(muon_param_groups(rest)[1]["params"], lr=1e-3)
    for i in range(4):
        step(mixed, opt, i)
        for twin, twin_opt in ((hidden, one), (rest, two)):
            for p, q in zip(mixed.parameters(), twin.parameters(), strict=True):
                q.grad = p.grad.clone()
            twin_opt.step()
    assert_invariant(opt)
    for name, p in mixed.named_parameters():
        twin = hidden if name in ("up.weight", "down.weight") else rest
        assert torch.equal(p, twin.get_parameter(name)), name


def test_mixed_state_saves_loads_and_copies_bit_for_bit():
    model = Decoder()
    opt = FairCastAdamW(muon_param_groups(model), lr=1e-3)
    for i in range(3):
        step(model, opt, i)
    twin, twin_opt = copy.deepcopy((model, opt))
    other = Decoder()
    other_opt = FairCastAdamW(muon_param_groups(other), lr=1e-3)
    other_opt.load_state_dict(opt.state_dict())
    other.load_state_dict(model.state_dict())
    for m, o in ((model, opt), (twin, twin_opt), (other, other_opt)):
        for i in range(3, 5):
            step(m, o, i)
    assert_same(model, twin)
    assert_same(model, other)
    assert_equal_states(opt.state_dict(), other_opt.state_dict())


def test_a_plain_muon_state_dict_loads_and_goes_back():
    p, q = nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(4, 3))
    theirs, opt = torch.optim.Muon([q]), FairCastMuon([p])
    q.grad = torch.rand(4, 3)
    theirs.step()
    opt.load_state_dict(theirs.state_dict())
    opt.publish()
    assert torch.equal(opt.state[p]["momentum_buffer"], theirs.state[q]["momentum_buffer"])
    p.grad = q.grad
    opt.step()
    state = opt.to_torch_state_dict()
    assert state["state"][0].keys() == {"momentum_buffer"}
    torch.optim.Muon([p]).load_state_dict(state)


@pytest.mark.parametrize(
    ("group", "match"),
    [
        (
            {"params": [("norm", nn.Parameter(torch.ones(3)))]},
            r"'norm' has shape \(3,\).*muon_param",
        ),
        ({"params": [("w", nn.Parameter(torch.ones(3, 3)))], "maximize": True}, "maximize"),
        ({"params": [("w", nn.Parameter(torch.ones(3, 3)))], "served_dtype": None}, "leave it out"),
    ],
)
def test_what_muon_cannot_do_is_refused(group, match):
    with pytest.raises(ValueError, match=match):
        FairCastAdamW([{**group, "algorithm": "muon"}])


def test_an_overflow_skips_a_mixed_step_whole():
    model = Decoder()
    opt = FairCastAdamW(muon_param_groups(model), lr=1e-3)
    step(model, opt, 0)
    before = copy.deepcopy(opt.state_dict())
    opt.found_inf, opt.grad_scale = torch.ones(()), torch.full((), 4.0)
    step(model, opt, 1)
    del opt.found_inf, opt.grad_scale
    after = opt.state_dict()
    assert_equal_states(after["state"], before["state"])
    assert opt.check() == {}


def test_the_other_algorithm_in_a_muon_optimizer():
    model = tiny()
    matrices = [model[0].weight, model[2].weight]
    opt = FairCastMuon([{"params": matrices[:1]}, {"params": matrices[1:], "algorithm": "adamw"}])
    backward(model)
    opt.step()
    assert {"exp_avg", "step"} <= opt.state[matrices[1]].keys()
    assert {"momentum_buffer", "dither_step"} <= opt.state[matrices[0]].keys()
    assert_invariant(opt)
