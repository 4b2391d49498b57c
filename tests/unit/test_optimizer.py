"""The optimizer as users hold it: construction, groups, hooks, schedulers, refusals."""

import copy
import inspect
import pickle
import warnings
from typing import Any

import pytest
import torch
from models import assert_invariant, assert_same, backward, bits, loss_of, tiny, train
from torch import nn

import fc_optim
from fc_optim import FairCastAdam, FairCastAdamW, FairCastMuon, FairCastOptimizer

untyped: Any = FairCastOptimizer  # for calls that a type checker would refuse


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_three_constructions_and_the_named_class_are_one_optimizer(dtype):
    makers = [
        lambda ps: FairCastOptimizer(torch.optim.AdamW(ps, lr=1e-3), seed=5),
        lambda ps: FairCastOptimizer(torch.optim.AdamW, ps, lr=1e-3, seed=5),
        lambda ps: FairCastOptimizer(torch.optim.AdamW, ps, 1e-3, seed=5),
        lambda ps: FairCastOptimizer(torch.optim.AdamW)(ps, lr=1e-3, seed=5),
        lambda ps: FairCastOptimizer(torch.optim.AdamW, seed=5)(ps, 1e-3),
        lambda ps: FairCastOptimizer(torch.optim.AdamW, lr=1e-3)(ps, seed=5),
        lambda ps: FairCastAdamW(ps, lr=1e-3, seed=5),
    ]
    models = []
    for make in makers:
        model = tiny(dtype)
        opt = make(model.named_parameters())
        assert isinstance(opt, torch.optim.Optimizer) and isinstance(opt, FairCastOptimizer)
        train(model, opt)
        assert_invariant(opt)
        models.append(model)
    for model in models[1:]:
        assert_same(models[0], model)


def test_drop_in_classes_are_classes_cached_and_importable():
    assert FairCastOptimizer(torch.optim.AdamW) is FairCastAdamW is fc_optim.FairCastAdamW
    assert FairCastOptimizer(torch.optim.Adam) is FairCastAdam
    assert FairCastOptimizer(torch.optim.Muon) is FairCastMuon
    made = FairCastOptimizer(torch.optim.SGD, seed=3)
    assert made is FairCastOptimizer(torch.optim.SGD, seed=3)
    assert inspect.isclass(made) and made.__name__ == "FairCastSGD"
    assert "adam" in FairCastAdamW.__name__.lower()
    assert pickle.loads(pickle.dumps(FairCastAdamW)) is FairCastAdamW
    assert not issubclass(FairCastAdamW, torch.optim.AdamW)
    parameters = inspect.signature(FairCastAdamW).parameters
    assert list(parameters)[:3] == ["params", "lr", "betas"] and "dither" in parameters


def test_a_generator_of_parameters_and_defaults_of_the_base():
    model = tiny()
    opt = FairCastAdamW(p for p in model.parameters())
    assert opt.param_groups[0]["lr"] == 1e-3 and opt.param_groups[0]["weight_decay"] == 1e-2
    train(model, opt)
    assert_invariant(opt)


def test_wrapping_takes_over_groups_and_state_as_the_same_objects():
    model = tiny()
    base = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(base, step_size=1, gamma=0.5)
    train(model, base, 2)
    group, state = base.param_groups[0], base.state
    moment = base.state[model[0].weight]["exp_avg"]
    opt = FairCastOptimizer(base)
    assert opt.param_groups[0] is group and opt.state is state
    assert opt.state[model[0].weight]["exp_avg"] is moment
    with pytest.raises(
        RuntimeError, match="call step.. or load_state_dict.. of the FairCastOptimizer"
    ):
        base.step()
    train(model, opt, 1, 2)
    scheduler.step()
    assert opt.param_groups[0]["lr"] == 5e-4
    assert int(opt.state[model[0].weight]["step"]) == 3
    assert_invariant(opt)


def test_schedulers_hooks_and_closures():
    model = tiny()
    opt = FairCastAdamW(model.parameters(), lr=1e-3)
    calls = []
    opt.register_step_pre_hook(lambda *a: calls.append("pre"))
    opt.register_step_post_hook(lambda *a: calls.append("post"))
    scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda i: 0.5**i)

    def closure():
        opt.zero_grad()
        return backward(model)

    for _ in range(3):
        loss = opt.step(closure)
        assert loss.item() > 0
        scheduler.step()
    assert calls == ["pre", "post"] * 3
    assert opt.param_groups[0]["lr"] == pytest.approx(1e-3 / 8)
    twin = tiny()
    twin_opt = FairCastAdamW(twin.parameters(), lr=1e-3)
    for i in range(3):
        twin_opt.param_groups[0]["lr"] = 1e-3 * 0.5**i
        twin_opt.zero_grad()
        backward(twin)
        twin_opt.step()
    assert_same(model, twin)


def test_lr_and_betas_as_tensors_give_the_bits_of_floats():
    plain, tensors = tiny(), tiny()
    train(plain, FairCastAdamW(plain.parameters(), lr=2**-10, betas=(0.5, 0.75)))
    lr = torch.tensor(2**-10)
    betas = (torch.tensor(0.5), torch.tensor(0.75))
    opt = FairCastAdamW(tensors.parameters(), lr=lr, betas=betas, capturable=False, foreach=False)
    train(tensors, opt)
    assert_same(plain, tensors)


def test_excluded_groups_are_stepped_as_torch_does():
    model, twin = tiny(), tiny()
    groups = [
        {"params": list(model[0].parameters()) + list(model[1].parameters())},
        {"params": list(model[2].parameters()), "served_dtype": None, "lr": 1e-2},
    ]
    opt = FairCastAdamW(groups, lr=1e-3)
    torch_opt = torch.optim.AdamW(twin[2].parameters(), lr=1e-2)
    for i in range(3):
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            p.grad = q.grad = torch.full_like(p, 0.1 * (i + 1))
        opt.step()
        torch_opt.step()
    for p, q in zip(model[2].parameters(), twin[2].parameters(), strict=True):
        assert torch.equal(p, q)
        assert "master" not in opt.state[p] and int(opt.state[p]["step"]) == 3
    served = dict(opt.bind(model).served_params())
    assert served["2.weight"].dtype == torch.float32
    assert served["0.weight"].dtype == torch.bfloat16
    assert_invariant(opt)


def test_add_param_group_and_frozen_parameters():
    model = tiny()
    model[1].weight.requires_grad_(False)
    frozen = model[1].weight.detach().clone()
    opt = FairCastAdamW(list(model[0].parameters()) + list(model[1].parameters()), lr=1e-3)
    train(model, opt, 2)
    opt.add_param_group({"params": list(model[2].parameters()), "lr": 1e-2})
    train(model, opt, 2, 2)
    assert torch.equal(model[1].weight, frozen) and "master" not in opt.state[model[1].weight]
    assert [int(opt.state[p]["step"]) for p in (model[0].weight, model[2].weight)] == [4, 2]
    assert_invariant(opt)
    model[1].weight.requires_grad_(True)
    train(model, opt, 1, 4)
    assert_invariant(opt)
    assert len({e.identity.param_id for e in opt.managed()}) == 6


def test_empty_groups_and_empty_parameters():
    p, empty = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(0, 4))
    opt = FairCastAdamW([{"params": []}, {"params": [empty, p]}], lr=1e-3)
    p.grad, empty.grad = torch.ones(3), torch.ones(0, 4)
    opt.step()
    assert opt.check() == {} and [t.shape for _, t in opt.served_params()] == [(0, 4), (3,)]
    opt.load_state_dict(opt.state_dict())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("base", [torch.optim.AdamW, torch.optim.SGD])
def test_strides_do_not_change_the_bits(dtype, base):
    values = torch.randn(4, 3, 2, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    grad = torch.randn(values.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    layouts = [
        values.clone(),
        values.clone().to(memory_format=torch.channels_last),
        values.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
    ]
    results = []
    for layout in layouts:
        p = nn.Parameter(layout)
        opt = FairCastOptimizer(base, [("w", p)], lr=1e-2)
        for _ in range(3):
            p.grad = grad.clone(memory_format=torch.preserve_format)
            opt.step()
        assert p.stride() == layout.stride() and opt.check() == {}
        results.append(p.detach().contiguous())
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_tied_weights_are_stepped_once():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(7, 6)
            self.head = nn.Linear(6, 7, bias=False)
            self.head.weight = self.embed.weight

    model = Tied()
    opt = FairCastAdamW(model.parameters(), lr=1e-2).bind(model)
    model.head.weight.grad = torch.ones(7, 6)
    opt.step()
    assert int(opt.state[model.embed.weight]["step"]) == 1
    assert [n for n, _ in opt.served_params()] == ["embed.weight"]
    assert [n for n, _ in opt.served_params(tied="all")] == ["embed.weight", "head.weight"]
    with pytest.raises(ValueError, match="twice"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        FairCastAdamW([model.embed.weight, model.head.weight])


def test_fp32_gradients_accumulate_on_bf16_parameters():
    p = nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    opt = FairCastAdamW([p], lr=1e-3, fp32_grads=True)
    for _ in range(2):
        for _ in range(300):  # in bf16 a running sum of ones sticks at 256
            (p.float().sum()).backward()
        assert p.grad.dtype == torch.float32 and torch.all(p.grad == 300)
        opt.step()
        opt.zero_grad()
    assert_invariant(opt)
    again = copy.deepcopy(opt)
    q = again.param_groups[0]["params"][0]
    q.float().sum().backward()
    assert q.grad.dtype == torch.float32


def test_one_group_may_mix_containers_and_gradient_dtypes():
    torch.manual_seed(0)
    ps = [nn.Parameter(torch.randn(9)), nn.Parameter(torch.randn(9).bfloat16())]
    ps.append(nn.Parameter(torch.randn(9).bfloat16()))
    ps[2].grad_dtype = torch.float32
    opt = FairCastAdamW(ps, lr=1e-2)
    for p, dtype in zip(ps, (torch.float32, torch.bfloat16, torch.float32), strict=True):
        p.grad = torch.ones(9, dtype=dtype)
    opt.step()
    assert_invariant(opt)
    assert all(e.state["master"].dtype == torch.float32 for e in opt.managed())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pickle_and_deepcopy_continue_bit_for_bit(dtype):
    made = FairCastOptimizer(torch.optim.AdamW, seed=9, dither="held")
    for make in (FairCastAdamW, made, FairCastOptimizer(torch.optim.SGD)):
        model = tiny(dtype)
        opt = make(model.named_parameters(), lr=1e-2)
        torch.optim.lr_scheduler.StepLR(opt, 1)
        train(model, opt)
        copies = [copy.deepcopy((model, opt)), pickle.loads(pickle.dumps((model, opt)))]
        train(model, opt, 2, 3)
        for other_model, other in copies:
            assert type(other) is type(opt) and other.served_version == 3
            train(other_model, other, 2, 3)
            assert_same(model, other_model)
            with pytest.raises(RuntimeError, match="owns its groups"):
                other._base.step()


def test_grad_scaler_hands_over_scale_and_overflow():
    scaled, plain = tiny(), tiny()
    opt, other = FairCastAdamW(scaled.parameters()), FairCastAdamW(plain.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for i in range(4):
        opt.zero_grad()
        scaler.scale(loss_of(scaled, i)).backward()
        if i == 2:  # an overflow skips everything: step, moments, dither
            before = bits(scaled)
            scaled[0].weight.grad[0, 0] = float("inf")
            scaler.step(opt)
            assert all(torch.equal(a, b) for a, b in zip(before, bits(scaled), strict=True))
            assert int(opt.state[scaled[0].weight]["step"]) == 2
        else:
            scaler.step(opt)
            other.zero_grad()
            backward(plain, i)
            other.step()
        scaler.update(1024.0)
    assert_same(scaled, plain)
    assert opt.check() == {}


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda p: FairCastAdamW([("w", p)], dither="random"), ValueError, "dither: 'random'"),
        (lambda p: FairCastAdamW([p], seed=-1), ValueError, "seed: -1"),
        (lambda p: FairCastAdamW([p], seed=True), ValueError, "seed: True"),
        (lambda p: FairCastAdamW([p], masters="split"), ValueError, "masters: 'split'"),
        (lambda p: FairCastAdamW([p], backend="cuda"), ValueError, "backend: 'cuda'"),
        (lambda p: FairCastAdamW([p], lr=-1.0), ValueError, "Invalid learning rate"),
        (lambda p: FairCastAdamW([p], momentum=0.9), TypeError, "momentum"),
        (lambda p: FairCastAdamW([p], differentiable=True), ValueError, "differentiable"),
        (lambda p: FairCastAdamW([]), ValueError, "empty parameter list"),
        (lambda p: untyped("AdamW", [p]), TypeError, "base: 'AdamW' is neither"),
        (lambda p: untyped(dict), TypeError, "not a torch.optim.Optimizer class"),
        (lambda p: FairCastOptimizer(FairCastAdamW, [p]), TypeError, "already"),
        (lambda p: FairCastOptimizer(FairCastAdamW([p])), TypeError, "already"),
        (
            lambda p: FairCastOptimizer(torch.optim.AdamW([p]), lr=1e-3),
            TypeError,
            "lr: not taken with an optimizer instance",
        ),
        (
            lambda p: FairCastAdamW([{"params": [p], "served_dtype": torch.float16}]),
            ValueError,
            "served_dtype: torch.float16",
        ),
        (
            lambda p: FairCastAdamW([{"params": [p], "algorithm": "lion"}]),
            ValueError,
            "algorithm: 'lion' is none of",
        ),
        (
            lambda p: FairCastAdamW([("a", p), ("a", nn.Parameter(torch.ones(1)))]),
            ValueError,
            "'a' names two parameters",
        ),
    ],
)
def test_bad_arguments_are_named(make, error, match):
    with pytest.raises(error, match=match):
        make(nn.Parameter(torch.ones(3)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.complex64])
def test_other_dtypes_are_refused_by_name_unless_excluded(dtype):
    p = nn.Parameter(torch.ones(3, dtype=dtype))
    with pytest.raises(TypeError, match="'layer.weight' is .*served_dtype=None"):
        FairCastAdamW([("layer.weight", p)])
    opt = FairCastAdamW([{"params": [("layer.weight", p)], "served_dtype": None}])
    p.grad = torch.ones_like(p)
    opt.step()


def test_integers_may_only_be_frozen():
    p = nn.Parameter(torch.ones(3, dtype=torch.int32), requires_grad=False)
    opt = FairCastAdamW([{"params": [nn.Parameter(torch.ones(2)), p]}])
    opt.publish()
    assert "master" not in opt.state[p]


def test_a_model_cast_after_construction_is_refused_by_name():
    model = tiny()
    opt = FairCastAdamW(model.named_parameters())
    model.half()
    with pytest.raises(TypeError, match="'0.weight' is torch.float16"):
        opt.publish()


def test_sparse_gradients_are_refused_by_name():
    embedding = nn.Embedding(5, 3, sparse=True)
    opt = FairCastAdamW(embedding.named_parameters())
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(TypeError, match="gradient of 'weight'.*sparse=False"):
        opt.step()


def test_a_refused_group_leaves_the_optimizer_as_it_was():
    model = tiny()
    opt = FairCastAdamW(model.parameters())
    with pytest.raises(TypeError, match="float16"):
        opt.add_param_group({"params": [nn.Parameter(torch.ones(2, dtype=torch.float16))]})
    assert len(opt.param_groups) == 1
    train(model, opt)


def test_replaced_parameters_are_followed_before_masters_and_refused_after():
    model = tiny()
    opt = FairCastAdamW(model.named_parameters(), lr=1e-2)
    ids = [e.identity.param_id for e in opt.managed()]

    def replace():
        for i, p in enumerate(opt.param_groups[0]["params"]):
            opt.param_groups[0]["params"][i] = nn.Parameter(p.detach().clone())

    replace()
    opt.publish()
    assert [int(e.state["param_id"]) for e in opt.managed()] == ids
    replace()
    with pytest.raises(RuntimeError, match="6 parameters that have masters were replaced"):
        opt.step()
    opt.param_groups[0]["params"].pop()
    with pytest.raises(RuntimeError, match=r"now have \[5\] parameters, they had \[6\]"):
        opt.step()


def test_seed_and_dither_cannot_be_assigned():
    opt = FairCastAdamW(tiny().parameters())
    for name in ("seed", "dither", "served_version"):
        with pytest.raises(AttributeError):
            setattr(opt, name, 1)


def test_names_arriving_late_change_labels_and_no_bit():
    named, late = tiny(), tiny()
    opt = FairCastAdamW(late.parameters(), lr=1e-2)
    assert [n for n, _ in opt.served_params()][:2] == ["param.0", "param.1"]
    train(late, opt, 2)
    before = [e.identity.param_id for e in opt.managed()]
    opt.bind(late)
    assert [e.identity.param_id for e in opt.managed()] == before
    assert [n for n, _ in opt.served_params()][:2] == ["0.weight", "0.bias"]
    never = tiny()
    never_opt = FairCastAdamW(never.parameters(), lr=1e-2)
    train(never, never_opt, 3)
    train(late, opt, 1, 2)
    assert_same(late, never)
    with pytest.raises(ValueError, match="trains none"):
        opt.bind(named)


def test_wrapper_prefixes_are_cleaned():
    clean = fc_optim.clean_name
    assert clean("module._orig_mod.layers.0._fsdp_wrapped_module.w") == "layers.0.w"
    assert clean("layers._checkpoint_wrapped_module.module.w") == "layers.module.w"
    assert fc_optim.param_id("a") == int.from_bytes(
        __import__("hashlib").blake2b(b"a", digest_size=4).digest(), "little"
    )


def test_publish_is_idempotent_and_redraw_works_with_sync_only():
    for dither, redraws in (("fresh", 0), ("held", 0), ("sync", 2)):
        model = tiny()
        opt = FairCastAdamW(model.parameters(), lr=1e-3, dither=dither)
        opt.publish()
        start = bits(model)
        opt.publish()
        assert all(torch.equal(a, b) for a, b in zip(start, bits(model), strict=True))
        train(model, opt, 2)
        stepped = bits(model)
        opt.publish(redraw=True)
        opt.publish(redraw=True)
        changed = any(not torch.equal(a, b) for a, b in zip(stepped, bits(model), strict=True))
        assert changed == (dither == "sync")
        assert opt.served_version == 2 + redraws
        assert opt.check() == {}


def test_the_first_step_publishes_and_the_forward_sees_the_grid():
    model = tiny()
    opt = FairCastAdamW(model.parameters())
    opt.publish()
    for p in model.parameters():
        assert torch.all(p.detach().view(torch.int32) & 0xFFFF == 0)


def test_autograd_learns_of_the_write():
    p = nn.Parameter(torch.ones(3))
    opt = FairCastAdamW([p])
    opt.publish()
    loss = (p * p).sum()
    p.grad = torch.ones(3)
    opt.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
