"""Names: those of the plain model, whatever wraps it, and what is said where there are none."""

import gc
import logging

import pytest
import torch
import torch.distributed as dist
from models import tiny, train
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

import fc_optim
from fc_optim import FairCastAdamW, FairCastMuon, muon_param_groups, param_id
from fc_optim.params import unnamed
from fc_optim.params.modules import named_modules, named_parameters
from fc_optim.params.registry import Registry

pytestmark = pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")


class Own(nn.Module):
    """Its attributes are called as those of wrappers are."""

    def __init__(self):
        super().__init__()
        self.module = nn.Linear(4, 4)
        self.weight = nn.Parameter(self.module.weight.detach().clone())
        self.head = nn.ModuleDict({"_orig_mod": nn.Linear(4, 4, bias=False)})

    def forward(self, x):
        return self.head["_orig_mod"](self.module(x)) @ self.weight


OWN = ["weight", "module.weight", "module.bias", "head._orig_mod.weight"]


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/r", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def compiled(model):
    return torch.compile(model, backend="eager")


WRAPPERS = {
    "none": lambda m: m,
    "compiled": compiled,
    "DataParallel": nn.DataParallel,
    "DDP": DistributedDataParallel,
    "DDP of compiled": lambda m: DistributedDataParallel(compiled(m)),
    "compiled DDP": lambda m: compiled(DistributedDataParallel(m)),
    "checkpoint": checkpoint_wrapper,
    "offload of checkpoint": lambda m: offload_wrapper(checkpoint_wrapper(m)),
    "FSDP1": lambda m: FullyShardedDataParallel(
        m, use_orig_params=True, device_id=torch.device("cpu")
    ),
    "FSDP1 of DDP's kind inside": lambda m: FullyShardedDataParallel(
        inside(m), use_orig_params=True, device_id=torch.device("cpu")
    ),
    "inside": lambda m: inside(m),
    "average": torch.optim.swa_utils.AveragedModel,
}


def inside(model):
    """A submodule that is wrapped, in a model that is not."""
    model.module = checkpoint_wrapper(model.module)
    return model


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_wrappers_leave_no_trace_and_a_model_keeps_its_own_names(wrap, group):
    model = WRAPPERS[wrap](Own())
    named = dict(named_parameters(model))
    assert list(named) == OWN
    assert list(named.values()) == list(model.parameters())
    assert [n for n, _ in named_parameters(model, remove_duplicate=False)] == OWN


@pytest.mark.parametrize("wrap", ["none", "compiled", "DDP", "FSDP1", "checkpoint"])
def test_what_is_served_has_these_names(wrap, group):
    model = WRAPPERS[wrap](Own())
    opt = FairCastAdamW(model.parameters(), lr=1e-3).bind(model)
    served = dict(opt.served_params())
    assert list(served) == OWN
    assert list(opt.served_digest().parameters) == OWN
    assert opt.served_digest() == fc_optim.digest(served.items())
    assert [n for n, _ in fc_optim.served_params(model, opt)] == OWN
    first = next(model.parameters())
    assert next(e.identity.name for e in opt.managed() if e.param is first) in OWN
    into = fc_optim.fp32_copy(model, opt, "served", into=compiled(Own()))
    for name, p in named_parameters(into):
        assert torch.equal(p, served[name].float())


def test_the_names_in_a_flat_parameter(group):
    flat = FullyShardedDataParallel(Own(), use_orig_params=False, device_id=torch.device("cpu"))
    opt = FairCastAdamW(flat.named_parameters(), lr=1e-3)
    (ids,) = [e.identity.ids for e in opt.managed()]
    opt.bind(flat)
    assert sorted(n for n, _ in opt.served_params()) == sorted(["head.weight", *OWN[:3]])
    assert [e.identity.ids for e in opt.managed()] == [ids]


def test_tied_parameters_and_shared_modules():
    model = Own()
    model.twin = model.module
    model.tied = model.weight
    wrapped = compiled(model)
    assert [n for n, _ in named_parameters(wrapped)] == ["weight", *OWN[1:]]
    every = [n for n, _ in named_parameters(wrapped, remove_duplicate=False)]
    assert every == [n for n, _ in model.named_parameters(remove_duplicate=False)]
    modules = [n for n, _ in named_modules(wrapped)]
    assert modules == ["", "", "module", "head", "head._orig_mod"]
    opt = FairCastAdamW(wrapped.parameters(), lr=1e-3).bind(wrapped)
    assert [n for n, _ in opt.served_params(tied="all")] == every


# ---- Identities


def test_identities_of_names_that_are_given_do_not_change():
    """A checkpoint of an older version holds masters that were rounded with these."""
    for given, clean in (
        ("module.layers.0.w", "layers.0.w"),
        ("module.module.w", "w"),
        ("module._orig_mod.w", "w"),
        ("a._orig_mod.b._fsdp_wrapped_module.w", "a.b.w"),
        ("a._checkpoint_wrapped_module.module.w", "a.module.w"),
        ("_forward_module.w", "_forward_module.w"),
    ):
        opt = FairCastAdamW([(given, nn.Parameter(torch.ones(3)))], lr=1e-3)
        opt.publish()
        (entry,) = opt.managed()
        assert entry.identity.param_id == int(entry.state["param_id"]) == param_id(clean)


def test_binding_changes_labels_alone():
    class Policy(nn.Module):  # all of it is in an attribute of the name
        def __init__(self):
            super().__init__()
            self.module = nn.Linear(3, 3)

    model = Policy()
    opt = FairCastAdamW(model.named_parameters(), lr=1e-3)
    assert [e.identity.name for e in opt.managed()] == ["weight", "bias"]  # as ever
    opt.bind(model)
    assert [n for n, _ in opt.served_params()] == ["module.weight", "module.bias"]
    assert [e.identity.param_id for e in opt.managed()] == [param_id("weight"), param_id("bias")]


def test_names_that_cleaning_would_make_one_stay_as_they_are():
    model = Own()
    opt = FairCastAdamW(model.named_parameters(), lr=1e-3)
    names = ["weight", "module.weight", "bias", "head.weight"]
    assert [e.identity.name for e in opt.managed()] == names
    assert [e.identity.param_id for e in opt.managed()] == [param_id(n) for n in names]
    opt = FairCastAdamW([("weight", model.weight)], lr=1e-3)
    opt.add_param_group({"params": [("module.weight", model.module.weight)]})
    assert [e.identity.name for e in opt.managed()] == ["weight", "module.weight"]
    with pytest.raises(ValueError, match="'module.weight' names two parameters"):
        opt.add_param_group({"params": [("module.weight", nn.Parameter(torch.ones(2)))]})


def test_bind_refuses_two_parameters_of_one_name():
    class Wrapped(DistributedDataParallel):
        """A wrapper with a parameter of its own that is called as one inside."""

        def __init__(self, module):
            nn.Module.__init__(self)
            self.module = module
            self.weight = nn.Parameter(torch.ones(2))

    model = Wrapped(nn.Linear(2, 2))
    opt = FairCastAdamW(model.module.parameters(), lr=1e-3)
    with pytest.raises(ValueError, match="'weight' would be the name of two parameters"):
        opt.bind(model)
    assert not opt.weights.was_bound and [e.identity.name for e in opt.managed()] == [
        "param.0",
        "param.1",
    ]
    # A parameter that the model does not have keeps the name that it was given.
    net, critic = nn.Linear(2, 2), nn.Parameter(torch.ones(2))
    opt = FairCastAdamW([("a", net.weight), ("b", net.bias), ("weight", critic)], lr=1e-3)
    with pytest.raises(ValueError, match="'weight' would be the name of two"):
        opt.bind(net)


# ---- Muon's sorter


def test_muon_groups_see_heads_and_names_through_wrappers():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = checkpoint_wrapper(nn.Linear(4, 4))
            self.lm_head = checkpoint_wrapper(nn.Linear(4, 4, bias=False))

    muon, adamw = muon_param_groups(compiled(Net()))
    assert [n for n, _ in muon["params"]] == ["module.weight"]
    assert [n for n, _ in adamw["params"]] == ["module.bias", "lm_head.weight"]


@pytest.mark.parametrize("original", [True, False])
def test_muon_groups_refuse_flattened_parameters_by_name(group, original):
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    flat = FullyShardedDataParallel(net, use_orig_params=original, device_id=torch.device("cpu"))
    name = "0.weight, 0.bias" if original else "_flat_param"
    with pytest.raises(TypeError, match=f"{name}.* flattened by FullyShardedDataParallel"):
        muon_param_groups(flat)


def test_muon_refuses_a_flattened_parameter_whatever_shape_it_shows(group):
    net = FullyShardedDataParallel(
        nn.Linear(4, 4, bias=False), use_orig_params=True, device_id=torch.device("cpu")
    )
    with pytest.raises(TypeError, match="weight' is flattened by FullySharded.*fully_shard"):
        FairCastMuon(net.named_parameters(), lr=1e-3)


# ---- No names


@pytest.fixture
def log(caplog, monkeypatch):
    monkeypatch.setattr(unnamed, "_said_shared", False)
    gc.collect()  # optimizers of other tests
    caplog.set_level(logging.WARNING, logger="fc_optim")
    return caplog


def test_serving_under_numbers_is_said_once(log):
    model = tiny()
    opt = FairCastAdamW(model.parameters(), lr=1e-3)
    train(model, opt, 2)
    assert log.messages == []
    for _ in range(2):
        assert [n for n, _ in opt.served_params()][0] == "param.0"
        opt.served_digest()
    (said,) = log.messages
    assert "'param.0' to 'param.5'" in said and "bind(model)" in said


def test_nothing_is_said_of_names_that_are_there(log):
    model = tiny()
    for opt in (
        FairCastAdamW(model.named_parameters(), lr=1e-3),
        FairCastAdamW(model.parameters(), lr=1e-3).bind(model),
    ):
        list(opt.served_params())
        opt.served_digest()
    assert log.messages == []


def test_one_unnamed_optimizer_per_parameter_is_told_that_they_share_random_bits(log):
    model = tiny()
    ours = {p: FairCastAdamW([p], lr=1e-3) for p in model.parameters()}
    hooks = [
        p.register_post_accumulate_grad_hook(lambda _, opt=opt: opt.step())
        for p, opt in ours.items()
    ]
    for _ in range(2):
        model(torch.ones(2, 6)).sum().backward()
    for hook in hooks:  # it holds its optimizer, which holds the parameter
        hook.remove()
    (said,) = log.messages
    assert "'param.0'" in said and "[(name, parameter)]" in said


@pytest.mark.parametrize(
    "make",
    [
        lambda n, p: FairCastAdamW([(n, p)], lr=1e-3),
        lambda n, p: FairCastAdamW([p], lr=1e-3, seed=p.numel()),
        lambda n, p: FairCastAdamW([p, nn.Parameter(torch.ones(2))], lr=1e-3),
    ],
    ids=["named", "own seed", "several parameters"],
)
def test_other_optimizers_are_not_told(log, make):
    ours = [make(n, p) for n, p in nn.Linear(3, 2).named_parameters()]
    for opt in ours:
        opt.publish()
    assert log.messages == []


def test_optimizers_that_are_gone_share_nothing(log):
    for p in tiny().parameters():
        FairCastAdamW([p], lr=1e-3).publish()
        gc.collect()
    assert log.messages == []


def test_a_registry_counts_its_numbers_over_all_groups():
    registry = Registry()
    p, q = (nn.Parameter(torch.ones(2)) for _ in range(2))
    for param in (p, q):
        registry.admit({"params": [param], "served_dtype": "bfloat16"})
    groups = [{"params": [p]}, {"params": [q]}]
    assert registry.names(groups) == ["param.0", "param.1"]
