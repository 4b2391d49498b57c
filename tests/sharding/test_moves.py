"""Models whose weights are moved, cast or swapped under the optimizer, as `nn.Module` does it."""

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import strategies
import torch
import torch.distributed as dist
from models import backward, tiny
from strategies import STEPS, Model, differences, gradients, optimizer, result, run, sharded
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.multiprocessing.reductions import StorageWeakRef

from fc_optim import FairCastAdamW, FairCastOptimizer, without_masters
from fc_optim.kernels.batch import WHOLE, sample_positions

FP32, BF16 = torch.float32, torch.bfloat16


def emptied(model: nn.Module, opt: FairCastOptimizer) -> None:
    model.to_empty(device="cpu")
    for e in opt.managed():
        e.local.fill_(torch.nan)  # its memory may be the old one
    opt.restore_weights()


Move = Callable[[Any, FairCastOptimizer], Any]
MOVES: dict[str, Move] = {
    "cpu": lambda model, opt: model.cpu(),
    "cast": lambda model, opt: model.to(BF16),
    "cast and back": lambda model, opt: model.to(BF16).to(FP32),
    "channels_last": lambda model, opt: model.to(memory_format=torch.channels_last),
    "share_memory": lambda model, opt: model.share_memory(),
    "emptied": emptied,
}


@pytest.fixture(params=[False, True], ids=["set .data", "swap"])
def swapped(request) -> Iterator[bool]:
    """How modules exchange a parameter's tensor."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(request.param)
    yield request.param
    torch.__future__.set_swap_module_params_on_conversion(before)


# ---- Plain models


def step(model: nn.Module, opt: FairCastOptimizer, i: int) -> None:
    for name, g in gradients(i).items():
        p = model.get_parameter(name)
        p.grad = g.to(p.dtype)
    opt.step()


@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("move", MOVES)
def test_a_moved_model_trains_on_with_the_same_bits(move, before, swapped):
    expected = result(*strategies.plain({}, FP32))
    model = Model()
    opt = optimizer(model.named_parameters()).bind(model)
    params = list(model.parameters())
    opt.publish()  # later moves of weights that are not on the grid would change them
    for i in range(STEPS):
        if i == before:
            held = dict(opt.served_params(copy=True, managed_only=True))
            MOVES[move](model, opt)
            assert all(p is q for p, q in zip(model.parameters(), params, strict=True))
            assert opt.check() == {}
            for name, value in opt.served_params(managed_only=True):
                assert torch.equal(value, held[name])
        step(model, opt, i)
    assert not differences(expected, result(model, opt))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_a_dtype_that_cannot_be_served_is_named(dtype, swapped):
    model = tiny()
    opt = FairCastAdamW(model.named_parameters())
    opt.publish()
    model.to(dtype)
    with pytest.raises(TypeError, match=rf"'0.weight' is {dtype}: a served parameter is bfloat16"):
        opt.publish()
    model.float()
    assert opt.check() == {}


def test_gradients_are_still_accumulated_in_fp32_after_a_swap(swapped):
    model = tiny(BF16)
    opt = FairCastAdamW(model.named_parameters(), fp32_grads=True)
    backward(model)
    opt.step()
    opt.zero_grad()
    model.float().to(BF16)
    backward(model)
    opt.step()  # may find gradients that torch has accumulated in bf16
    assert all(p.grad.dtype == FP32 for p in model.parameters())
    opt.zero_grad()
    backward(model)
    assert all(p.grad.dtype == FP32 for p in model.parameters())
    opt.step()
    assert opt.check() == {}


def test_a_tensor_of_another_shape_at_the_same_address_is_refused():
    p = nn.Parameter(torch.ones(8))
    opt = FairCastAdamW([("p", p)])
    opt.publish()
    p.data = p.data[:5]
    with pytest.raises(ValueError, match=r"master of 'p' has shape \(8,\), the parameter \(5,\)"):
        opt.publish()


def test_a_transposed_weight_at_the_same_address_is_seen():
    """Its elements are where they were, but they are not the same elements any more."""
    p = nn.Parameter(torch.arange(64.0).view(8, 8))
    opt = FairCastAdamW([("p", p)])
    opt.publish()
    p.data = p.data.t()
    assert opt.check() == {"p": 56}
    opt.restore_weights()
    assert torch.equal(p, torch.arange(64.0).view(8, 8))


# ---- Memory


def tensors_of(opt: FairCastOptimizer) -> dict[str, torch.Tensor]:
    found = {}
    for e in opt.managed():
        found[e.identity.name] = e.local
        for key, value in e.state.items():
            found[f"{e.identity.name}.{key}"] = getattr(value, "_local_tensor", value)
    return found


def move_away(opt: FairCastOptimizer) -> None:
    """As RL frameworks do it for a rollout: everything of the optimizer is elsewhere."""
    for e in opt.managed():
        for key, value in e.state.items():
            e.state[key] = value.clone()


def assert_let_go(opt: FairCastOptimizer, move: Callable[[], object]) -> None:
    before = {name: StorageWeakRef(t.untyped_storage()) for name, t in tensors_of(opt).items()}
    move()
    move_away(opt)
    gc.collect()
    assert not [name for name, storage in before.items() if not storage.expired()]


@torch.no_grad()
def exchange(model: nn.Module) -> None:
    for p in model.parameters():
        p.data = p.data.clone()


@pytest.mark.parametrize("metrics", [False, True])
@pytest.mark.parametrize("algorithm", ["adamw", "muon"])
def test_weights_and_state_that_are_moved_away_leave_their_memory(algorithm, metrics):
    weights = nn.ParameterList([torch.randn(8, 8), torch.randn(8, 8).t().contiguous().t()])
    group = {"params": list(weights.named_parameters()), "algorithm": algorithm}
    opt = FairCastOptimizer(torch.optim.AdamW, [group], metrics=metrics).bind(weights)

    def train() -> None:
        for p in weights:
            p.grad = torch.ones_like(p)
        opt.step()

    for use in (
        opt.publish, train, opt.check, opt.served_digest, opt.state_dict, opt.restore_weights,
        opt.adopt_weights, lambda: list(opt.served_params()), lambda: list(opt.master_params()),
        lambda: opt.load_state_dict(opt.state_dict()), train,
    ):  # fmt: skip
        use()
        assert_let_go(opt, lambda: exchange(weights))
        assert opt.check() == {}


# ---- What else exchanges state


def test_a_master_that_was_given_up_while_it_was_frozen_begins_anew():
    for give_up in ("load", "adopt"):
        model = tiny()
        opt = FairCastAdamW(model.named_parameters()).bind(model)
        opt.publish()
        frozen = model[0].weight.requires_grad_(False)
        if give_up == "load":
            opt.load_state_dict(without_masters(opt.state_dict()))
        else:
            del opt.state[frozen]
            opt.adopt_weights()
        frozen.requires_grad_()
        opt.publish()
        assert opt.check() == {} and "master" in opt.state[frozen]


# ---- FSDP2, whose modules always swap


def fsdp2(dtype: torch.dtype = FP32) -> tuple[nn.Module, FairCastOptimizer]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = sharded(Model().to(dtype), mesh, dtype)
    return model, optimizer(model.named_parameters()).bind(model)


def moved_under_fsdp2(move: str, before: int) -> None:
    expected = result(*strategies.plain({}, FP32))
    model, opt = fsdp2()
    params = list(model.parameters())
    opt.publish()
    run(model, opt, range(before))
    MOVES[move](model, opt)
    assert all(p is q for p, q in zip(model.parameters(), params, strict=True))
    assert opt.check() == {}
    run(model, opt, range(before, STEPS))
    assert not differences(expected, result(model, opt))


@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("move", ["cpu", "cast and back", "emptied"])
def test_fsdp2_trains_on_with_the_same_bits(move, before, ranks):
    ranks(2).run(moved_under_fsdp2, move, before)


def cast_before_the_first_forward() -> None:
    """Later FSDP2 itself refuses it."""
    expected = result(*strategies.plain({}, BF16))
    model, opt = fsdp2(BF16)
    model.float().to(BF16)
    assert not differences(expected, result(*run(model, opt)))


def test_fsdp2_may_be_cast_before_the_first_forward(ranks):
    ranks(2).run(cast_before_the_first_forward)


def materialised_late() -> None:
    with torch.device("meta"):
        model = Model()
    model = sharded(model, init_device_mesh("cpu", (dist.get_world_size(),)), FP32)
    opt = optimizer(model.named_parameters()).bind(model)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for p, q in zip(model.parameters(), Model().parameters(), strict=True):
            p.copy_(distribute_tensor(q, p.device_mesh, p.placements, src_data_rank=None))
    expected = result(*strategies.plain({}, FP32))
    assert not differences(expected, result(*run(model, opt)))


def test_fsdp2_may_be_materialised_after_the_optimizer_was_built(ranks):
    ranks(2).run(materialised_late)


def local(weight: Any) -> torch.Tensor:
    return weight._local_tensor


def written_after_a_move() -> None:
    """`model.cpu()` gives the shards new tensors of the old memory, which count writes anew."""
    size = 8 * WHOLE
    weight = torch.full((dist.get_world_size(), size), 0.1)  # off the grid: publish() writes it
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Linear(size, len(weight), bias=False)
    model.weight.data = weight
    fully_shard(model, mesh=mesh)
    opt = optimizer(model.named_parameters()).bind(model)
    opt.publish()
    part = local(model.weight)
    model.cpu()
    now = local(model.weight)
    assert now is not part and now.data_ptr() == part.data_ptr()
    place = next(i for i in range(size) if i not in set(sample_positions(size).tolist()))
    now[0, place] = 1
    while now._version < part._version:  # as many writes as the optimizer has seen
        torch.autograd.graph.increment_version([now])
    assert now._version == part._version
    with pytest.raises(RuntimeError, match="weight changed since the optimizer last wrote"):
        opt.publish()


def test_a_write_to_shards_that_were_moved_is_found(ranks):
    ranks(2).run(written_after_a_move)


def shards_are_let_go() -> None:
    model, opt = fsdp2()
    for use in (opt.publish, lambda: run(model, opt, range(1)), opt.check, opt.state_dict):
        use()
        opt.zero_grad()
        before = {n: StorageWeakRef(t.untyped_storage()) for n, t in tensors_of(opt).items()}
        model.to_empty(device="cpu")
        move_away(opt)
        gc.collect()
        assert not [n for n, s in before.items() if not s.expired()]
        opt.restore_weights()


def test_shards_that_are_moved_away_leave_their_memory(ranks):
    ranks(2).run(shards_are_let_go)
