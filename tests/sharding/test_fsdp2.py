"""FSDP2 and its relatives: what the forward sees, what is communicated, how they are built."""

import copy
import time
import warnings
import weakref
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import strategies
import torch
import torch.distributed as dist
from ranks import spawn, start
from strategies import Model, clean, differences, gradients, optimizer, run, sharded
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fc_optim
from fc_optim import FairCastOptimizer, muon_param_groups

FP32, BF16 = torch.float32, torch.bfloat16


def mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),))


def built(dtype=FP32, **options):
    model = sharded(Model().to(dtype), mesh(), dtype)
    return model, optimizer(model.named_parameters(), **options).bind(model)


def served(opt):
    return dict(opt.served_params(managed_only=True, copy=True))


# ---- The workers: each runs on every rank


def the_forward_sees_what_is_served(rank):
    for dtype in (FP32, BF16):
        model, opt = built(dtype)
        seen: dict[str, torch.Tensor] = {}

        def look(module, args, seen=seen):
            prefix = args[1]
            seen.update({prefix + n: p.detach().clone() for n, p in module.named_parameters()})

        model.second.register_forward_pre_hook(look)
        model.first.register_forward_pre_hook(look)
        opt.publish()
        for i in range(3):
            seen.clear()
            loss = model(gradients(i))
            expected = served(opt)
            assert {clean(n) for n in seen} == expected.keys()
            for name, value in seen.items():  # what was gathered: bf16, whole
                assert value.dtype == BF16 and torch.equal(value, expected[clean(name)])
            loss.backward()
            opt.step()
            opt.zero_grad()


def a_forward_without_backward_leaves_no_stale_weights(rank):
    """FSDP2 keeps the root's whole parameters after it, and would use them in the next forward."""
    model, opt = built()
    ones = {n: torch.ones_like(g) for n, g in gradients(0).items()}
    saved = {}

    def load() -> None:
        opt.load_state_dict(saved)

    for write in (opt.publish, opt.step, opt.step, load):
        for e in opt.managed():
            e.param.grad = torch.ones_like(e.param)
        with torch.no_grad():
            model(ones)
            write()
            total = model(ones)
        saved = saved or copy.deepcopy(opt.state_dict())
        torch.testing.assert_close(total, sum(t.float().sum() for t in served(opt).values()))


def step_communicates_nothing(rank):
    for strategy in (strategies.fsdp2, strategies.tensor_parallel, strategies.fsdp1_flat):
        model, opt = strategy({}, FP32)
        for e in opt.managed():
            if e.local.numel() or isinstance(e.param, DTensor):
                e.param.grad = torch.ones_like(e.param)
        with CommDebugMode() as mode:
            opt.step()
        assert mode.get_total_counts() == 0, strategy.__name__
        with CommDebugMode() as mode:  # the count can count
            list(opt.served_params(managed_only=True))
        assert mode.get_total_counts() > 0


def other_seeds_are_refused_on_every_rank(rank):
    for change in ({"seed": 11 + rank}, {"dither": ["fresh", "held"][rank]}):
        options = {"seed": 11, **change}
        model = sharded(Model(), mesh(), FP32)
        opt = FairCastOptimizer(torch.optim.AdamW, model.named_parameters(), **options)
        with pytest.raises(RuntimeError, match=f"disagree about {next(iter(change))}"):
            opt.publish()
        replica = DistributedDataParallel(nn.Linear(3, 3))
        opt = FairCastOptimizer(torch.optim.AdamW, replica.named_parameters(), **options)
        with pytest.raises(RuntimeError, match=f"disagree about {next(iter(change))}"):
            opt.bind(replica).publish()
    names = [(f"{'ab'[rank]}.{n}", p) for n, p in Model().named_parameters()]
    replica = DistributedDataParallel(nn.ParameterList([p for _, p in names if p.requires_grad]))
    opt = FairCastOptimizer(torch.optim.AdamW, [(n, p) for n, p in names if p.requires_grad])
    with pytest.raises(RuntimeError, match="disagree about parameter names"):
        opt.bind(replica).publish()


def a_foreign_write_on_one_rank_is_refused_on_all(rank):
    model, opt = built()
    run(model, opt, range(2))
    weight = model.second.get_parameter("last.weight")
    if rank == 0:
        with torch.no_grad():
            weight.to_local().add_(1)
    for action in (opt.publish, opt.served_digest, lambda: list(opt.served_params())):
        with pytest.raises(RuntimeError, match="second.last.weight" if rank == 0 else "other rank"):
            action()
    if rank == 0:
        with pytest.warns(UserWarning, match=r"adopted as masters: second\.last\.weight\."):
            run(model, opt, range(2, 3))
    else:
        run(model, opt, range(2, 3))
    assert opt.check() == {}
    list(opt.served_params())


def ways_of_building_give_the_same_bits(rank):
    expected = strategies.result(*strategies.fsdp2({}, FP32))

    def same(model, opt, changed=()):
        assert not differences(expected, strategies.result(model, opt)), changed

    # On the meta device first; weights come later.
    with torch.device("meta"):
        model = Model()
    model = sharded(model, mesh(), FP32)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for p, q in zip(model.parameters(), Model().parameters(), strict=True):
            p.copy_(distribute_tensor(q, p.device_mesh, p.placements, src_data_rank=None))
    opt = optimizer(model.named_parameters())
    same(*run(model, opt), "meta")
    # Recomputed activations, and a compiled block: wrappers add to the names.
    model = Model()
    model.second = checkpoint_wrapper(model.second)
    model.first = torch.compile(model.first, backend="aot_eager")
    model = sharded(model, mesh(), FP32)
    opt = optimizer(model.named_parameters())
    same(*run(model, opt), "wrappers")
    # Named afterwards, other groups, parameters exchanged after the optimizer was built.
    model = Model()
    params = [p for p in model.named_parameters() if p[1].requires_grad]
    opt = optimizer([{"params": params[:3]}, {"params": params[3:]}])
    model = sharded(model, mesh(), FP32)
    now = dict(model.named_parameters())
    for group in opt.param_groups:
        group["params"][:] = [now[n] for n in group["param_names"]]
    same(*run(model, opt), "exchanged")


def meta_parameters_are_refused(rank):
    with torch.device("meta"):
        model = sharded(Model(), mesh(), FP32)
    opt = optimizer(model.named_parameters())
    with pytest.raises(RuntimeError, match="'first.emb.weight' is on the meta device"):
        opt.publish()


def clipping_and_excluded_groups(rank):
    model = sharded(Model(), mesh(), FP32)
    named = [p for p in model.named_parameters() if p[1].requires_grad]
    opt = optimizer([{"params": named[1:]}, {"params": named[:1], "served_dtype": None}])
    opt.bind(model)
    model(gradients(0)).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    opt.step()
    assert norm.full_tensor() > 0.5
    everything = dict(opt.served_params())
    assert list(everything) == [clean(n) for n, _ in Model().named_parameters()]
    emb = everything["first.emb.weight"]
    assert emb.dtype == FP32 and not torch.equal(emb, emb.bfloat16().float())
    assert torch.equal(everything["frozen.weight"], Model().frozen.weight)
    assert "first.emb.weight" not in served(opt)


def other_algorithms_have_the_bits_of_the_unsharded_run(rank):
    def make(kind, model):
        if kind == "muon":
            groups = muon_param_groups(model, muon={"lr": 1e-2})
            return FairCastOptimizer(torch.optim.AdamW, groups, lr=1e-3, backend="cpu")
        options = {"momentum": 0.9} if kind == "SGD" else {}
        base = getattr(torch.optim, kind)
        return FairCastOptimizer(base, model.named_parameters(), lr=1e-2, **options)

    for kind in ("muon", "SGD", "Adagrad"):
        for dtype in (FP32, BF16):
            reference = Model().to(dtype)
            opt = make(kind, reference).bind(reference)
            for i in range(4):
                for name, g in gradients(i).items():
                    reference.get_parameter(name).grad = g.to(dtype)
                opt.step()
            model = sharded(Model().to(dtype), mesh(), dtype)
            other = make(kind, model)
            run(model, other, range(4))
            assert opt.served_digest() == other.served_digest(), (kind, dtype)


def shards_and_copies_to_evaluate(rank):
    model, opt = strategies.fsdp2({}, FP32)
    parts = dict(opt.served_params(full=False, managed_only=True))
    for name, p in model.named_parameters():
        if p.requires_grad:
            assert torch.equal(parts[clean(name)], p.to_local().bfloat16())
    with pytest.raises(RuntimeError, match="under FSDP.*fp32_copy"), opt.masters_in_model():
        pass
    with pytest.raises(RuntimeError, match="pass into="):
        fc_optim.fp32_copy(model, opt)
    for which, values in (("master", opt.master_params), ("served", opt.served_params)):
        plain = fc_optim.fp32_copy(model, opt, which, into=Model().bfloat16())
        assert plain.head.weight is plain.first.emb.weight
        for name, value in values():
            mine = plain.get_parameter(name)
            assert mine.dtype == FP32 and torch.equal(mine, value.float())
    with pytest.raises(ValueError, match="into: the trained model has no extra.weight"):
        bigger = Model()
        bigger.extra = nn.Linear(1, 1, bias=False)
        fc_optim.fp32_copy(model, opt, into=bigger)


def fsdp1_forwards_on_what_is_served(rank):
    """It, too, keeps whole parameters after a forward without a backward."""
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP):
        for original in (True, False):
            model = FullyShardedDataParallel(
                nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)),
                device_id=torch.device("cpu"),
                use_orig_params=original,
                sharding_strategy=strategy,
            )
            opt = optimizer(model.named_parameters(), dither="sync").bind(model)
            x = torch.ones(2, 5)
            for write in (opt.publish, lambda o=opt: o.publish(redraw=True), opt.restore_weights):
                with torch.no_grad():
                    model(x)
                    write()
                    (w, b, v, c) = (t.float() for t in served(opt).values())
                    torch.testing.assert_close(model(x), (x @ w.T + b) @ v.T + c)


def bound_after_a_forward(rank):
    model = sharded(Model(), mesh(), FP32)
    opt = optimizer(model.named_parameters())
    with torch.no_grad():
        model(gradients(0))
        opt.bind(model)
        model(gradients(0))
        fc_optim.fp32_copy(model, opt, into=Model())
    assert list(served(opt)) == [n for n, p in Model().named_parameters() if p.requires_grad]


def state_of_another_cut_is_refused(rank):
    def state_with(place):
        state = copy.deepcopy(opt.state_dict())
        for entry in state["state"].values():
            entry["master"] = place(entry["master"])
        return state

    def halved(master):  # as if saved on twice the ranks
        part = master.to_local()[: len(master.to_local()) // 2]
        shape = {"shape": master.shape, "stride": master.stride()}
        return DTensor.from_local(part, master.device_mesh, master.placements, **shape)

    weight = nn.Parameter(distribute_tensor(torch.randn(8, 4), mesh(), [Shard(0)]))
    opt = optimizer([weight])
    before = served(opt)
    for place, message in (
        (halved, "another number of ranks"),
        (lambda m: m.redistribute(placements=[Shard(1)]), "cut as"),
        (lambda m: m.full_tensor().bfloat16(), "not float32"),
    ):
        with pytest.raises(ValueError, match=message):
            opt.load_state_dict(state_with(place))
        assert torch.equal(served(opt)["param.0"], before["param.0"])
    whole = state_with(lambda m: m.full_tensor() + 1)
    opt.load_state_dict(whole)
    assert torch.equal(dict(opt.master_params())["param.0"], whole["state"][0]["master"])


def odd_tensors_step(rank):
    """Copies, transposed and channels_last DTensors; gradients that are partial sums."""
    generator = torch.Generator().manual_seed(0)  # ranks have other global seeds
    image = torch.randn(4, 3, 2, 2, generator=generator)
    image = image.contiguous(memory_format=torch.channels_last)
    for base, options in ((torch.optim.AdamW, {}), (torch.optim.SGD, {"momentum": 0.9})):
        results = []
        for place in (None, [Shard(0)], [Replicate()]):
            generator.manual_seed(1)
            tensors = [image.clone(), torch.randn(6, 4, generator=generator).T]
            if place is not None:
                tensors = [distribute_tensor(t, mesh(), place, src_data_rank=None) for t in tensors]
            params = [nn.Parameter(t) for t in tensors]
            opt = FairCastOptimizer(base, params, lr=0.1, **options)
            for _ in range(2):
                for p in params:
                    p.grad = torch.ones_like(p)
                    if place is not None:
                        half = torch.full(p.shape, 0.5)
                        p.grad = DTensor.from_local(half, mesh(), [Partial()])
                opt.step()
            opt.state_dict()
            with pytest.raises(RuntimeError, match="sharded") if place else nullcontext():
                with opt.masters_in_model():
                    pass
            results.append(opt.served_digest())
        assert results[0] == results[1] == results[2], base


def overflows_skip_every_rank(rank):
    """A scaler may hand over the number of ranks that overflowed; this one may have no row."""
    weight = nn.Parameter(distribute_tensor(torch.randn(1, 4), mesh(), [Shard(0)]))
    opt = optimizer([weight], fused=True)
    for found, steps in ((0.0, 1), (2.0, 1), (0.0, 2)):
        weight.grad = torch.ones_like(weight)
        opt.grad_scale, opt.found_inf = torch.ones(()), torch.tensor(found)
        opt.step()
        assert int(opt.state[weight]["step"]) == steps


def whole_parameters_of_fsdp1_are_refused(rank):
    model = FullyShardedDataParallel(
        nn.Linear(5, 7), device_id=torch.device("cpu"), use_orig_params=True
    )
    opt = optimizer(model.named_parameters()).bind(model)
    with FullyShardedDataParallel.summon_full_params(model):
        with pytest.raises(RuntimeError, match="leave summon_full_params"):
            opt.publish()
    list(opt.served_params())
    flat = FullyShardedDataParallel(nn.Linear(5, 7), device_id=torch.device("cpu"))
    with pytest.raises(RuntimeError, match=r"call bind\(model\)"):
        optimizer(flat.named_parameters()).served_params()


ON_TWO_RANKS = [
    the_forward_sees_what_is_served,
    a_forward_without_backward_leaves_no_stale_weights,
    step_communicates_nothing,
    other_seeds_are_refused_on_every_rank,
    a_foreign_write_on_one_rank_is_refused_on_all,
    ways_of_building_give_the_same_bits,
    meta_parameters_are_refused,
    clipping_and_excluded_groups,
    other_algorithms_have_the_bits_of_the_unsharded_run,
    shards_and_copies_to_evaluate,
    fsdp1_forwards_on_what_is_served,
    bound_after_a_forward,
    state_of_another_cut_is_refused,
    odd_tensors_step,
    overflows_skip_every_rank,
    whole_parameters_of_fsdp1_are_refused,
]


def on_a_rank(check: Callable[[int], None]) -> None:
    warnings.simplefilter("error", UserWarning)
    check(dist.get_rank())


@pytest.mark.parametrize("check", ON_TWO_RANKS, ids=lambda f: f.__name__)
def test_on_two_ranks(check, ranks):
    ranks(2).run(on_a_rank, check)


def serve_in_two_jobs(rank: int, world: int, rendezvous: str) -> None:
    """An equal mesh, other process groups."""
    for job in ("first", "second"):
        start(rank, world, f"{rendezvous}-{job}")
        served(built()[1])
        dist.destroy_process_group()


def test_a_second_job_in_the_same_processes(tmp_path):
    spawn(serve_in_two_jobs, 2, tmp_path)


# ---- Memory


class LiveBytes(TorchDispatchMode):
    """The most bytes that were alive at once in storages made while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[weakref.ref[torch.Tensor]] = []
        self.made: set[int] = set()
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves(args) if plain(t)}
        for t in filter(plain, tree_leaves(out)):
            self.tensors.append(weakref.ref(t))
            self.made |= {t.untyped_storage().data_ptr()} - given
        alive = [t.untyped_storage() for r in self.tensors if (t := r()) is not None]
        sizes = {s.data_ptr(): s.nbytes() for s in alive if s.data_ptr() in self.made}
        self.peak = max(self.peak, sum(sizes.values()))
        return out


def plain(value: object) -> bool:
    return type(value) is torch.Tensor


def peak(action) -> int:
    with LiveBytes() as live:
        action()
    return live.peak


def one_of_four_disagrees(rank: int) -> None:
    """Nobody may wait for a rank that has raised in another dimension of the mesh."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("r", "s"))
    model = sharded(Model(), grid, FP32)
    opt = FairCastOptimizer(torch.optim.AdamW, model.named_parameters(), seed=int(rank == 3))
    with pytest.raises(RuntimeError, match="disagree about seed"):
        opt.publish()
    opt = FairCastOptimizer(torch.optim.AdamW, model.named_parameters())
    opt.publish()
    if rank == 3:
        with torch.no_grad():
            model.second.get_parameter("last.weight").to_local().add_(1)
    with pytest.raises(RuntimeError, match="last.weight" if rank == 3 else "other ranks"):
        opt.publish()
    inside = DeviceMesh("cpu", [0, 1])
    weight = distribute_tensor(torch.ones(4), inside, [Shard(0)], src_data_rank=None)
    with pytest.raises(TypeError, match="not part of") if rank > 1 else nullcontext():
        list(optimizer([nn.Parameter(weight)]).served_params())


def serving_holds_one_parameter(rank: int) -> None:
    model = nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(6)])
    fully_shard(model, mesh=mesh())
    opt = optimizer(model.named_parameters()).bind(model)
    opt.publish()
    whole = 512 * 512 * 2

    def read(**options):
        for _, tensor in opt.served_params(**options):
            del tensor
            time.sleep(0.05)  # gloo's thread lets go of a buffer a moment after the collective

    assert whole <= peak(read) < 1.1 * whole
    assert 3 * whole <= peak(lambda: read(bucket_bytes=3 * whole)) < 3.1 * whole
    assert peak(lambda: read(full=False)) < 0.3 * whole
    assert peak(lambda: list(opt.served_params())) >= 6 * whole


@pytest.mark.parametrize("check", [one_of_four_disagrees, serving_holds_one_parameter])
def test_on_four_ranks(check, ranks):
    ranks(4).run(on_a_rank, check)
