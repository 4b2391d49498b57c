"""States and sequences that must be refused by name, or survive: nothing is lost or overwritten."""

import copy
import logging
import pickle

import pytest
import torch
from models import assert_equal_states, assert_invariant, bits, loss_of, tiny, train
from torch import nn

import fc_optim
from fc_optim import FairCastAdamW, FairCastMuon, FairCastOptimizer, metrics


def stepped(*shape, base=torch.optim.AdamW, **kwargs):
    p = nn.Parameter(torch.ones(*shape, dtype=torch.float32))
    opt = FairCastOptimizer(base, [("w", p)], lr=1e-2, **kwargs)
    p.grad = torch.ones_like(p)
    opt.step()
    return p, opt


def grads(model):
    for p in model.parameters():
        p.grad = torch.ones_like(p)


# -- state that does not fit never reaches a kernel --------------------------------------------


@pytest.mark.parametrize("base", [torch.optim.AdamW, torch.optim.Muon])
def test_moments_of_another_shape_are_refused(base):
    small, large = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(64, 64))
    torch_opt = base([small])
    small.grad = torch.ones(4, 4)
    torch_opt.step()
    opt = FairCastOptimizer(base, [("w", large)])
    with pytest.raises(ValueError, match=r"of 'w' has shape \(4, 4\), the parameter \(64, 64\)"):
        opt.load_state_dict(torch_opt.state_dict())
    wrapped = FairCastOptimizer(torch_opt)
    small.data = torch.ones(64, 64)
    small.grad = torch.ones(64, 64)
    with pytest.raises(ValueError, match=r"has shape \(4, 4\)"):
        wrapped.step()


def test_fp64_moments_become_fp32():
    w = nn.Parameter(torch.ones(64, dtype=torch.float64))
    base = torch.optim.AdamW([w], lr=1e-2)
    w.grad = torch.ones_like(w)
    base.step()
    w.grad, w.data = None, w.data.float()
    opt = FairCastOptimizer(base)
    w.grad = torch.ones(64)
    opt.step()
    assert opt.state[w]["exp_avg"].dtype == torch.float32 and w.detach().isfinite().all()
    assert_invariant(opt)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_master_that_somebody_cast_is_refused_by_name(dtype):
    p, opt = stepped(64)
    opt.state[p]["master"] = opt.state[p]["master"].to(dtype)
    for call in (opt.step, opt.publish, opt.state_dict):
        with pytest.raises(TypeError, match=f"the master of 'w' is {dtype}"):
            call()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("base", [torch.optim.AdamW, torch.optim.SGD])
def test_step_counts_are_fp32_whatever_torchs_default_dtype(dtype, base):
    torch.set_default_dtype(dtype)
    try:
        _, opt = stepped(8, base=base)
        assert opt.check() == {}
    finally:
        torch.set_default_dtype(torch.float32)
    (entry,) = opt.managed()
    if base is torch.optim.AdamW:
        assert entry.state["step"].dtype == torch.float32 and float(entry.state["step"]) == 1
    assert entry.state["dither_step"].dtype == torch.int64 and int(entry.state["dither_step"]) == 1


@pytest.mark.parametrize("shape", [(4, 8), (2, 4), (64, 4)])
def test_a_parameter_of_another_shape_is_refused(shape):
    p, opt = stepped(8, 4)
    p.data, p.grad = torch.ones(shape), None
    for call in (opt.step, opt.publish, opt.served_params):
        with pytest.raises(ValueError, match=r"the master of 'w' has shape \(8, 4\)"):
            call()


def test_two_parameters_in_one_memory_are_refused():
    a, b = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))
    b.data = a.data
    opt = FairCastAdamW([("a", a), ("b", b)])
    with pytest.raises(ValueError, match="'a' and 'b' share their memory"):
        opt.publish()


def test_expanded_and_inference_parameters_are_refused_by_name():
    with pytest.raises(TypeError, match="'w' is expanded"):
        FairCastAdamW([("w", nn.Parameter(torch.ones(1, 3).expand(4, 3)))])
    with torch.inference_mode():
        p = nn.Parameter(torch.ones(3))
    with pytest.raises(TypeError, match="'w' was made in inference mode"):
        FairCastAdamW([("w", p)])


def test_lazily_negated_gradients_count_with_their_sign():
    p = nn.Parameter(torch.zeros(8))
    opt = FairCastAdamW([p])
    p.grad = torch._neg_view(torch.ones(8))
    opt.step()
    assert torch.all(opt.state[p]["exp_avg"] < 0)


# -- resume ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_excluded_groups_of_any_dtype_resume(dtype):
    def make():
        p = nn.Parameter(torch.ones(8, dtype=dtype))
        return p, FairCastAdamW([{"params": [p], "served_dtype": None}], lr=1e-2)

    def step(p, opt):
        p.grad = torch.ones_like(p)
        opt.step()

    p, opt = make()
    step(p, opt)
    q, other = make()
    other.load_state_dict(copy.deepcopy(opt.state_dict()))
    q.data.copy_(p.data)
    step(p, opt)
    step(q, other)
    assert torch.equal(p, q)
    assert_equal_states(opt.state_dict(), other.state_dict())


def test_a_flattened_distributed_checkpoint_keeps_seed_dither_and_counters():
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    def make(seed):
        model = tiny()
        return model, FairCastAdamW(model.named_parameters(), seed=seed, dither="sync", lr=1e-2)

    for flatten in (True, False):
        model, opt = make(7)
        train(model, opt)
        opt.publish(redraw=True)
        options = StateDictOptions(flatten_optimizer_state_dict=flatten)
        saved = copy.deepcopy(get_optimizer_state_dict(model, opt, options=options))
        other_model, other = make(7)
        set_optimizer_state_dict(other_model, other, saved, options=options)
        assert other.served_version >= opt.served_version
        assert all(isinstance(k, torch.Tensor) for k in other.state)
        assert other.served_digest() == opt.served_digest()
        train(model, opt, 2, 3)
        train(other_model, other, 2, 3)
        assert other.served_digest() == opt.served_digest()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda s: s["state"][5].update(step=torch.ones(2)), "step of '2.bias' has shape"),
        (lambda s: s["state"][5].update(exp_avg=3.0), "exp_avg of '2.bias' is 3.0, not a tensor"),
        (lambda s: s["param_groups"][0].update(seed="x"), "seed of group 0 is 'x'"),
        (lambda s: s["param_groups"][0].update(algorithm="sgd"), "algorithm of group 0 is 'sgd'"),
        (lambda s: s["param_groups"][0].update(served_dtype=None), "served_dtype of group 0"),
    ],
)
def test_a_bad_state_is_refused_before_anything_changes(change, match):
    model = tiny()
    opt = FairCastAdamW(model.named_parameters())
    train(model, opt)
    good = copy.deepcopy(opt.state_dict())
    bad = copy.deepcopy(good)
    bad["param_groups"][0]["lr"] = 9.0
    bad["state"][0]["master"] += 1
    change(bad)
    with pytest.raises(ValueError, match=match):
        opt.load_state_dict(bad)
    assert_equal_states(opt.state_dict(), good)


def test_a_plain_adam_state_leaves_adamw_decoupled():
    model = tiny()
    torch_opt = torch.optim.Adam(model.parameters())
    train(model, torch_opt)
    opt = FairCastAdamW(model.parameters())
    opt.load_state_dict(torch_opt.state_dict())
    assert opt.param_groups[0]["algorithm"] == "adamw"
    assert opt.param_groups[0]["decoupled_weight_decay"] is True


@pytest.mark.parametrize("base", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_masters_made_in_inference_mode_can_be_trained(base, backend):
    model = tiny()
    opt = FairCastOptimizer(base, model.named_parameters(), lr=1e-3, backend=backend)
    with torch.inference_mode():
        list(opt.served_params())
    train(model, opt)
    opt.load_state_dict(opt.state_dict())
    assert_invariant(opt)


def test_masters_are_dropped_only_if_that_is_said(caplog):
    model = tiny()
    opt = FairCastAdamW(model.named_parameters())
    empty = opt.state_dict()
    train(model, opt)
    before = copy.deepcopy(opt.state_dict())
    with pytest.raises(ValueError, match=r"those of '0.weight'.* here would be replaced"):
        opt.load_state_dict(empty)
    assert_equal_states(opt.state_dict(), before)
    with caplog.at_level(logging.INFO, "fc_optim"):
        opt.load_state_dict(fc_optim.without_masters(empty))
    assert "publish() makes masters from the parameters" in caplog.text
    opt.publish()
    assert torch.equal(opt.state[model[0].weight]["master"], model[0].weight.float())


# -- the invariant, through writes and exceptions ----------------------------------------------


@pytest.mark.parametrize("base", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("how", ["no gradient", "overflow"])
def test_an_adopted_write_is_published_even_where_nothing_is_stepped(base, how):
    model = tiny()
    opt = FairCastOptimizer(base, model.named_parameters(), lr=1e-3)
    train(model, opt)
    with torch.no_grad():
        model[0].weight.copy_(torch.randn(9, 6))
    grads(model)
    if how == "overflow":
        opt.found_inf = torch.ones(())
    else:
        model[0].weight.grad = None
    with pytest.warns(UserWarning, match="0.weight"):
        opt.step()
    assert_invariant(opt)
    opt.step()  # and no second warning
    opt.state_dict()


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("key", ["betas", "lr"])
def test_an_exception_in_a_step_leaves_masters_and_counts_alone(backend, key):
    model = tiny()
    opt = FairCastAdamW(model.named_parameters(), backend=backend)
    train(model, opt)
    before = copy.deepcopy(opt.state_dict()["state"])
    good = opt.param_groups[0][key]
    opt.param_groups[0][key] = (1.0, 0.999) if key == "betas" else None
    grads(model)
    with pytest.raises((ZeroDivisionError, TypeError)):
        opt.step()
    opt.param_groups[0][key] = good
    assert opt.check() == {}
    assert_equal_states(opt.state_dict()["state"], before)


def test_a_step_that_fails_half_way_is_a_new_version():
    model = tiny()
    embedding = nn.Embedding(4, 3, sparse=True)
    groups = [
        {"params": list(model.parameters())},
        {"params": [embedding.weight], "served_dtype": None},
    ]
    opt = FairCastAdamW(groups, lr=1e-2)
    opt.publish()
    it = opt.served_params()
    next(it)
    grads(model)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse"):
        opt.step()
    with pytest.raises(RuntimeError, match="from version 0 to 1"):
        next(it)
    assert opt.check() == {}


def test_weights_written_by_a_closure():
    for base, error in ((torch.optim.AdamW, None), (torch.optim.SGD, RuntimeError)):
        model = tiny()
        opt = FairCastOptimizer(base, model.named_parameters(), lr=0.0)

        def closure(model=model, opt=opt):
            opt.zero_grad()
            loss = loss_of(model)
            loss.backward()
            with torch.no_grad():
                model[0].bias.fill_(5.0)
            return loss

        if error is None:
            with pytest.warns(UserWarning, match="0.bias"):
                opt.step(closure)
            assert torch.all(opt.state[model[0].bias]["master"] == 5.0)
        else:
            with pytest.raises(error, match="closure: it wrote the weights 0.bias"):
                opt.step(closure)


def test_masters_written_inside_masters_in_model_are_reported():
    model = tiny()
    opt = FairCastAdamW(model.named_parameters())
    train(model, opt)
    with pytest.raises(RuntimeError, match=r"masters of 0.weight.*restore_weights\(\)"):
        with opt.masters_in_model(), torch.no_grad():
            model[0].weight.fill_(7.0)
    opt.restore_weights()
    assert torch.all(model[0].weight == 7.0) and opt.check() == {}


# -- serving -----------------------------------------------------------------------------------


def test_copies_keep_their_model_and_pickles_ask_for_it():
    model = tiny()
    model[1].weight.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    opt = FairCastAdamW(trained, lr=1e-2).bind(model)
    train(model, opt)
    other_model, other = copy.deepcopy((model, opt))
    assert other.model is other_model and other.served_digest() == opt.served_digest()
    thawed_model, thawed = pickle.loads(pickle.dumps((model, opt)))
    with pytest.raises(RuntimeError, match=r"bind\(model\)"):
        thawed.served_params()
    assert thawed.bind(thawed_model).served_digest() == opt.served_digest()


def test_a_model_with_one_replaced_parameter_is_not_served():
    model = tiny()
    opt = FairCastAdamW(model.named_parameters()).bind(model)
    opt.publish()
    model[2].weight = nn.Parameter(torch.ones(4, 9))
    with pytest.raises(RuntimeError, match="replaced .*: 2.weight"):
        opt.served_params()


# -- the base optimizer ------------------------------------------------------------------------


class Diary(torch.optim.Optimizer):
    """Keeps state that is no parameter's, drops keys, counts on itself."""

    def __init__(self, params, lr=0.1):
        self.count = 0
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        self.count += 1
        self.state["global"]["k"] = self.state["global"].get("k", 0) + 1
        for p in self.param_groups[0]["params"]:
            self.state[p].pop(f"only {self.count - 1}", None)
            self.state[p][f"only {self.count}"] = torch.ones(1)
            p.sub_(p.grad, alpha=self.param_groups[0]["lr"])


def test_whatever_a_base_keeps_is_kept():
    model = tiny()
    opt = FairCastOptimizer(Diary, model.named_parameters())
    train(model, opt, 3)
    assert opt.state["global"] == {"k": 3}
    assert [k for k in opt.state[model[0].weight] if k.startswith("only")] == ["only 3"]
    other_model, other = copy.deepcopy((model, opt))
    train(other_model, other, 1, 3)
    assert other._base.count == 4 and other.state["global"] == {"k": 4}


def test_sparse_gradients_on_the_unfused_route_are_refused_by_name():
    embedding = nn.Embedding(5, 3, sparse=True)
    opt = FairCastOptimizer(torch.optim.SGD, embedding.named_parameters(), lr=0.1)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(TypeError, match="gradient of 'weight'.*sparse=False"):
        opt.step()


def test_a_wrapped_instance_cannot_be_loaded_or_wrapped_again():
    base = torch.optim.AdamW(tiny().parameters())
    calls = []
    base.register_state_dict_post_hook(lambda o, s: calls.append(1))
    opt = FairCastOptimizer(base)
    opt.state_dict()
    assert calls == [1]
    with pytest.raises(RuntimeError, match="of the FairCastOptimizer"):
        base.load_state_dict({})
    with pytest.raises(ValueError, match="wrapped already"):
        FairCastOptimizer(base)


def test_replaced_lists_and_states_are_lived_with():
    model = tiny()
    opt = FairCastAdamW(list(model[0].parameters()))
    opt.param_groups = list(opt.param_groups)
    opt.add_param_group({"params": list(model[2].parameters())})
    assert len(opt.param_groups) == 2
    opt.state = {}
    train(model, opt)
    assert_invariant(opt)


def test_another_default_device_does_not_reach_the_kernels():
    model = tiny()
    opt = FairCastAdamW(model.named_parameters(), metrics=True)
    held: dict[str, torch.Tensor] = {}

    class Engine:
        def load(self, weights, version):
            held.update((n, t.clone()) for n, t in weights)
            self.version = version

        def held(self):
            return fc_optim.manifest(self.version, held.items())

    torch.set_default_device("meta")
    try:
        opt.publish()
        tracker = metrics.MovementTracker(dict(opt.served_params()))
        sync = fc_optim.Sync(opt, Engine())
        sync()
        grads(model)
        opt.step()
        assert sync().digest == opt.served_digest()
        tracker.record(dict(opt.master_params()), held)
        assert opt.metrics().over_ranks().total.changed_ratio > 0
        assert opt.check() == {}
    finally:
        torch.set_default_device("cpu")
    assert_invariant(opt)
    assert all(torch.all(b & 0xFFFF == 0) for b in bits(model))


def test_muon_state_of_another_shape_set_by_hand_is_refused():
    p = nn.Parameter(torch.ones(4, 4))
    opt = FairCastMuon([("w", p)])
    p.grad = torch.ones(4, 4)
    opt.step()
    opt.state[p]["momentum_buffer"] = torch.zeros(2, 2)
    with pytest.raises(ValueError, match="momentum_buffer of 'w' has shape"):
        opt.step()
