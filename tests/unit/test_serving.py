"""served_params, master_params, versions and digests."""

import pytest
import torch
from models import backward, tiny, train
from torch import nn

import fc_optim
from fc_optim import FairCastAdamW, FairCastOptimizer


def trained(dtype=torch.float32, **kwargs):
    model = tiny(dtype)
    opt = FairCastAdamW(model.named_parameters(), lr=1e-3, **kwargs).bind(model)
    train(model, opt, 2)
    return model, opt


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_served_is_bitwise_the_parameter_in_model_order(dtype):
    model, opt = trained(dtype)
    served = list(opt.served_params())
    assert [n for n, _ in served] == [n for n, _ in model.named_parameters()]
    for (_, s), p in zip(served, model.parameters(), strict=True):
        assert s.dtype == torch.bfloat16 and not s.requires_grad
        assert torch.equal(s.float(), p.detach().float())
        assert (s.data_ptr() == p.data_ptr()) == (dtype == torch.bfloat16)
    for _, s in opt.served_params(copy=True):
        s.zero_()
    for name, m in opt.master_params():
        assert m.dtype == torch.float32
        assert m.data_ptr() == opt.state[model.get_parameter(name)]["master"].data_ptr()
    for _, m in opt.master_params(copy=True):
        m.zero_()
    assert opt.check() == {}


def test_frozen_and_excluded_parameters_come_as_they_are():
    model = tiny()
    model[1].weight.requires_grad_(False)
    groups = [
        {"params": [model[0].weight, model[0].bias, model[1].bias]},
        {"params": [model[2].weight, model[2].bias], "served_dtype": None},
    ]
    opt = FairCastAdamW(groups).bind(model)
    dtypes = {n: t.dtype for n, t in opt.served_params()}
    fp32 = {n for n, d in dtypes.items() if d == torch.float32}
    assert fp32 == {"1.weight", "2.weight", "2.bias"}
    assert {n for n, _ in opt.served_params(managed_only=True)} == dtypes.keys() - fp32


def test_the_iterator_refuses_to_go_on_after_a_step():
    model, opt = trained()
    it = opt.served_params()
    next(it)
    backward(model)
    opt.step()
    with pytest.raises(RuntimeError, match="from version 2 to 3"):
        next(it)
    it = opt.served_params()
    list(it)


def test_redraw_ends_an_iteration_too_and_serving_draws_nothing():
    model, opt = trained(dither="sync")
    state = torch.get_rng_state()
    one, two = opt.served_digest(), opt.served_digest()
    assert one == two and opt.served_version == 2
    it = opt.served_params()
    next(it)
    opt.publish(redraw=True)
    with pytest.raises(RuntimeError, match="from version 2 to 3"):
        next(it)
    assert opt.served_digest() != one
    assert torch.equal(torch.get_rng_state(), state)


def test_arguments_are_checked_at_the_call():
    _, opt = trained()
    with pytest.raises(ValueError, match="tied: 'no'"):
        opt.served_params(tied="no")
    with pytest.raises(ValueError, match="at least one"):
        fc_optim.served_params(tiny())


def test_a_model_whose_parameters_were_replaced_is_refused():
    model, opt = trained()
    for module in (model[0], model[1], model[2]):
        for name, p in list(module.named_parameters()):
            setattr(module, name, nn.Parameter(p.detach().clone()))
    with pytest.raises(RuntimeError, match="replaced after the optimizer was"):
        opt.served_params()


def test_several_optimizers_serve_one_model():
    model = tiny()
    one = FairCastAdamW(model[0].parameters(), lr=1e-3)
    two = FairCastOptimizer(torch.optim.SGD, model[2].parameters(), lr=1e-3)
    served = dict(fc_optim.served_params(model, one, two))
    assert list(served) == [n for n, _ in model.named_parameters()]
    assert served["0.weight"].dtype == served["2.bias"].dtype == torch.bfloat16
    assert served["1.weight"].dtype == torch.float32
    it = fc_optim.served_params(model, one, two)
    next(it)
    backward(model)
    two.step()
    with pytest.raises(RuntimeError, match="from version 0 to 1"):
        next(it)


def plain_digest(name, tensor):
    """The definition with Python integers."""
    import hashlib

    mask = 2**64 - 1

    def mix(x):
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
        return x ^ x >> 31

    key = f"{name}:{str(tensor.dtype).removeprefix('torch.')}".encode()
    seed = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
    size = tensor.element_size()
    raw = tensor.contiguous().view(torch.uint8).reshape(-1, size).tolist()
    words = [int.from_bytes(bytes(r), "little") for r in raw]
    return sum(mix(mix(i + seed & mask) ^ w) for i, w in enumerate(words)) & mask


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.uint8])
def test_digest_follows_its_definition(dtype):
    x = (torch.randn(7, 5) * 50).to(dtype)
    got = fc_optim.digest([("w", x)])
    assert got.parameters == {"w": plain_digest("w", x)} and got.total == got.parameters["w"]
    assert fc_optim.digest([("w", x.t().contiguous().t())]) == got


def test_digest_tells_apart_what_engines_get_wrong():
    model, opt = trained()
    named = [(n, t.clone()) for n, t in opt.served_params()]
    right = opt.served_digest()
    assert fc_optim.digest(named) == right
    assert fc_optim.digest(named[::-1]).total == right.total

    def wrong(index, change):
        altered = list(named)
        name, tensor = altered[index]
        altered[index] = change(name, tensor)
        return fc_optim.digest(altered)

    assert wrong(0, lambda n, t: (n, t.view(-1).flip(0).view(t.shape))) != right
    assert wrong(0, lambda n, t: (n + "x", t)) != right
    assert wrong(0, lambda n, t: (n, t.float())) != right
    assert wrong(0, lambda n, t: (n, t.half())) != right
    flipped = named[0][1].clone()
    flipped.view(torch.int16)[0, 0] ^= 1
    bad = wrong(0, lambda n, t: (n, flipped))
    assert {n for n in bad.parameters if bad.parameters[n] != right.parameters[n]} == {"0.weight"}
    with pytest.raises(ValueError, match="comes twice"):
        fc_optim.digest(named + named[:1])


def test_serving_from_masters_that_were_moved_away():
    """verl moves the state between phases; here to another dtype-preserving storage."""
    model, opt = trained()
    for e in opt.managed():
        for key, value in e.state.items():
            e.state[key] = value.clone()
    before = opt.served_digest()
    train(model, opt, 1, 2)
    assert opt.served_digest() != before and opt.check() == {}
