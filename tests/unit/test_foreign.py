"""Foreign writes: adopted by step() with a warning, refused by everything else."""

import copy
import warnings

import pytest
import torch
from models import assert_invariant, assert_same, backward, bits, tiny, train
from torch import nn

from fc_optim import FairCastAdamW, FairCastOptimizer, fp32_copy

BASES = [torch.optim.AdamW, torch.optim.SGD]


def trained(dtype=torch.float32, base=torch.optim.AdamW, **kwargs):
    model = tiny(dtype)
    opt = FairCastOptimizer(base, model.named_parameters(), lr=1e-3, **kwargs)
    train(model, opt, 3)
    return model, opt


def masters(opt):
    return [e.state["master"].clone() for e in opt.managed()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("base", BASES)
def test_a_late_load_is_adopted_at_the_next_step(dtype, base):
    model, opt = trained(dtype, base)
    other = tiny(dtype, seed=5)
    before, shadow = masters(opt), [p.detach().float().clone() for p in model.parameters()]
    model.load_state_dict(other.state_dict())
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    for group in opt.param_groups:
        group["weight_decay"] = group["momentum"] = 0.0
    for group in opt.param_groups:
        group["lr"] = 0.0
    with pytest.warns(UserWarning, match="adopted as masters: 0.weight, 0.bias"):
        opt.step()
    for e, m, s, q in zip(opt.managed(), before, shadow, other.parameters(), strict=True):
        want = torch.where(s == q.float(), m, q.float())  # equal words are no write
        assert torch.equal(e.state["master"], want)
        assert not opt.fused or e.state["exp_avg"].any()  # moments stay
    assert_invariant(opt)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_data_write_is_adopted_and_only_where_it_differs(backend):
    model, opt = trained(backend=backend)
    before = masters(opt)
    weight = model[0].weight
    version = weight._version
    weight.data[2:4] += 1.0
    wrote = weight.detach().clone()
    assert weight._version == version
    for p in model.parameters():
        p.grad = None
    with pytest.warns(UserWarning, match="adopted as masters: 0.weight\\. "):
        opt.step()
    after = masters(opt)
    written = torch.zeros(9, 6, dtype=torch.bool)
    written[2:4] = True
    assert torch.equal(after[0][~written], before[0][~written])
    assert torch.equal(after[0][written], wrote[written])
    assert_invariant(opt)  # though the parameter was not stepped
    assert all(torch.equal(a, b) for a, b in zip(after[1:], before[1:], strict=True))


@pytest.mark.parametrize("share", [0.01, 0.05])
@pytest.mark.parametrize("pattern", ["slice", "random", "columns"])
def test_data_writes_to_one_percent_of_a_tensor_are_always_seen(share, pattern):
    g = torch.Generator().manual_seed(0)
    p = nn.Parameter(torch.randn(500, 400, generator=g).bfloat16())
    opt = FairCastAdamW([("w", p)])
    opt.publish()
    for trial in range(20):
        mask = torch.zeros(500, 400, dtype=torch.bool)
        count = int(p.numel() * share)
        if pattern == "slice":
            start = int(torch.randint(p.numel() - count, (), generator=g))
            mask.view(-1)[start : start + count] = True
        elif pattern == "random":
            mask.view(-1)[torch.randperm(p.numel(), generator=g)[:count]] = True
        else:
            mask[:, torch.randperm(400, generator=g)[: int(400 * share)]] = True
        p.data[mask] += 1.0
        with pytest.raises(RuntimeError, match="w changed"):
            opt.publish()
        opt.restore_weights()
        assert opt.check() == {}, trial


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_an_adopted_strided_parameter_is_published_though_it_is_not_stepped(backend):
    p = nn.Parameter(torch.ones(40, 30).t())
    opt = FairCastAdamW([("w", p)], backend=backend)
    opt.publish()
    with torch.no_grad():
        p.fill_(1.0 + 2**-10)
    with pytest.warns(UserWarning, match="masters: w"):
        opt.step()
    assert torch.all(opt.state[p]["master"] == 1.0 + 2**-10)
    assert_invariant(opt)
    assert opt.check() == {}


def test_an_off_grid_write_becomes_the_master_and_is_published():
    p = nn.Parameter(torch.ones(2000))
    opt = FairCastAdamW([("w", p)])
    opt.publish()
    with torch.no_grad():
        p.fill_(1.0 + 2**-10)
    opt.adopt_weights()
    assert torch.all(opt.state[p]["master"] == 1.0 + 2**-10)
    assert set(p.tolist()) == {1.0, 1.0 + 2**-7}
    assert opt.check() == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_ema_swap_with_restore_leaves_every_master_bit(dtype):
    model, opt = trained(dtype)
    before, held = masters(opt), [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)
    for read in (opt.served_params, opt.master_params, opt.publish, opt.served_digest):
        with pytest.raises(RuntimeError, match=r"adopt_weights\(\).*restore_weights\(\)"):
            read()
    with torch.no_grad():
        for p, h in zip(model.parameters(), held, strict=True):
            p.copy_(h)
    list(opt.served_params())
    opt.zero_grad()
    opt.step()  # no gradients: nothing but the check runs; warnings are errors here
    assert all(torch.equal(a, b) for a, b in zip(before, masters(opt), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_trip_to_another_device_and_dtype_and_back_is_no_write(dtype):
    model, opt = trained(dtype)
    before = masters(opt)
    model.to("meta", copy=True) if False else None
    moved = [p.data.clone() for p in model.parameters()]
    for p, m in zip(model.parameters(), moved, strict=True):
        p.data = m
    model.double().to(dtype)
    model.float().to(dtype)
    list(opt.served_params())
    opt.zero_grad()
    opt.step()
    assert all(torch.equal(a, b) for a, b in zip(before, masters(opt), strict=True))


def test_changing_the_container_keeps_masters_and_bits():
    grid, native = trained()[0:2], trained()[0:2]
    grid[0].bfloat16()
    for model, opt in (grid, native):
        for i, p in enumerate(model.parameters()):
            p.grad = torch.full_like(p, 0.25 * (i + 1))
        opt.step()
    assert_same(grid[0], native[0])
    assert_invariant(grid[1])


def test_remedies():
    model, opt = trained()
    before, shadow = masters(opt), bits(model)
    with torch.no_grad():
        model[0].weight.add_(1.0)
    assert opt.check() == {"0.weight": 54}
    opt.restore_weights()
    assert opt.check() == {} and all(
        torch.equal(a, b) for a, b in zip(shadow, bits(model), strict=True)
    )
    with torch.no_grad():
        model[0].weight.add_(1.0)
        model[0].bias.view(-1)[0] = 3.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt.adopt_weights()
    assert opt.check() == {}
    after = masters(opt)
    assert not torch.equal(after[0], before[0]) and float(after[1][0]) == 3.0
    assert torch.equal(after[1][1:], before[1][1:])


def test_state_dict_of_a_swapped_model_is_refused_so_that_nothing_wrong_is_saved():
    model, opt = trained()
    with torch.no_grad():
        model[0].weight.add_(1.0)
    with pytest.raises(RuntimeError, match="state_dict"):
        opt.state_dict()


def test_masters_in_model_runs_on_masters_and_gives_the_storage_back():
    for dtype in (torch.float32, torch.bfloat16):
        model, opt = trained(dtype)
        opt.bind(model)
        model.register_buffer("extra", torch.ones(2, dtype=dtype))
        shadow, storage = bits(model), [p.data_ptr() for p in model.parameters()]
        x = torch.randn(4, 6)
        with opt.masters_in_model():
            for e in opt.managed():
                assert torch.equal(e.param, e.state["master"])
            inside = model(x)
            assert model.extra.dtype == torch.float32
            for call in (opt.step, opt.publish, opt.served_params, opt.state_dict):
                with pytest.raises(RuntimeError, match=r"inside masters_in_model\(\)"):
                    call()
        assert [p.data_ptr() for p in model.parameters()] == storage
        assert all(torch.equal(a, b) for a, b in zip(shadow, bits(model), strict=True))
        assert model.extra.dtype == dtype and next(model.parameters()).dtype == dtype
        assert torch.equal(fp32_copy(model, opt, "master")(x), inside)
        with pytest.raises(ZeroDivisionError), opt.masters_in_model():
            raise ZeroDivisionError
        assert opt.check() == {}


def test_masters_in_model_refuses_autocast_and_names_the_way():
    model, opt = trained()
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError, match="fp32_copy"):
        with opt.masters_in_model():
            pass
    assert opt.check() == {}


def test_fp32_copies_differ_by_the_weights_only():
    model, opt = trained(torch.bfloat16)
    served, master = fp32_copy(model, opt, "served"), fp32_copy(model, opt)
    for name, value in opt.served_params():
        assert torch.equal(served.get_parameter(name), value.float())
    for name, value in opt.master_params():
        assert torch.equal(master.get_parameter(name), value)
    assert all(p.dtype == torch.float32 and not p.requires_grad for p in master.parameters())
    assert not master.training and model.training
    with pytest.raises(ValueError, match="which: 'both'"):
        fp32_copy(model, opt, "both")
    with pytest.raises(RuntimeError, match="trains none"):
        fp32_copy(tiny(), opt)


def test_copies_compare_everything_before_they_trust():
    model, opt = trained()
    other_model, other = copy.deepcopy((model, opt))
    other_model[0].bias.data[0] += 1
    with pytest.warns(UserWarning, match="0.bias"):
        other.zero_grad()
        backward(other_model)
        other.step()
