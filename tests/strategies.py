"""Ways to shard one model; each yields what the optimizer holds after the same gradients."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from fc_optim import FairCastOptimizer, FlatPiece

STEPS = 4


class Leaf(nn.Module):
    """Real modules whose loss is linear in their weights: the gradient is what it is given."""

    def __init__(self, **modules: nn.Module):
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)
        self.weights = [n for n, _ in self.named_parameters()]

    def forward(self, grads: dict[str, torch.Tensor], prefix: str = "") -> torch.Tensor:
        total = torch.zeros(())
        for name in self.weights:
            module, _, leaf = name.rpartition(".")
            weight = getattr(self.get_submodule(module), leaf)  # FSDP1 makes it a plain tensor
            total = total + (weight.float() * grads[prefix + name]).sum()
        return total


def clean(name: str) -> str:
    return name.replace("_fsdp_wrapped_module.", "").replace("_checkpoint_wrapped_module.", "")


class Model(nn.Module):
    """Shapes that no world size divides, a dimension of 2, a tied head, a norm, a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = Leaf(
            emb=nn.Embedding(7, 6),
            norm=nn.LayerNorm(5),
            wide=nn.Linear(12, 4),
            short=nn.Linear(9, 2),
        )
        self.second = Leaf(conv=nn.Conv2d(3, 5, (2, 3)), last=nn.Linear(11, 13, bias=False))
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.first.emb.weight  # type: ignore[assignment, union-attr]
        self.frozen = nn.Linear(3, 3, bias=False).requires_grad_(False)

    def forward(self, grads: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.first(grads, "first.") + self.second(grads, "second.")


def gradients(step: int) -> dict[str, torch.Tensor]:
    """Of few bits: sums and means over ranks are exact, in bf16 as well. Some zeros."""
    generator = torch.Generator().manual_seed(100 + step)
    return {
        name: torch.randint(-8, 9, p.shape, generator=generator) / 16
        for name, p in Model().named_parameters()
        if p.requires_grad
    }


def optimizer(params, **options) -> FairCastOptimizer:
    return FairCastOptimizer(
        torch.optim.AdamW, params, lr=1e-3, weight_decay=0.1, seed=11, backend="cpu", **options
    )


def plain(options, dtype):
    """No sharding: the reference."""
    model = Model().to(dtype)
    opt = optimizer(model.named_parameters(), **options)
    for i in range(STEPS):
        for name, g in gradients(i).items():
            model.get_parameter(name).grad = g.to(dtype)
        opt.step()
    return model, opt


def run(model, opt, steps=range(STEPS)):
    """Backward through the wrapped model: gradients arrive by the strategy's own reduction."""
    for i in steps:
        opt.zero_grad()
        model(gradients(i)).backward()
        opt.step()
    return model, opt.bind(model)


def set_dtensor_grads(model, opt, steps=range(STEPS)):
    for i in steps:
        grads = gradients(i)
        for name, p in model.named_parameters():
            if p.requires_grad:
                g = grads[clean(name)].to(p.dtype)
                p.grad = distribute_tensor(g, p.device_mesh, p.placements, src_data_rank=None)
        opt.step()
    return model, opt.bind(model)


def ddp(options, dtype, **ddp_options):
    model = Model().to(dtype)
    model.head = None  # static_graph counts uses of a parameter
    wrapped = DistributedDataParallel(
        model, gradient_as_bucket_view=True, static_graph=True, **ddp_options
    )
    opt = optimizer(wrapped.named_parameters(), **options)
    for i in range(STEPS):
        opt.zero_grad()
        wrapped(gradients(i)).backward()
        for name, g in gradients(i).items():  # DDP multiplies by 1/3, which is not exact
            torch.testing.assert_close(model.get_parameter(name).grad, g.to(dtype))
            model.get_parameter(name).grad.copy_(g)
        opt.step()
    return wrapped, opt.bind(wrapped)


def sharded(model, mesh, dtype, **kwargs):
    if dtype == torch.float32:
        kwargs["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    for part in (model.second, model):  # tied weights must be in one group
        fully_shard(part, mesh=mesh, **kwargs)
    return model


def fsdp2(options, dtype, mesh=None, **kwargs):
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    model = sharded(Model().to(dtype), mesh, dtype, **kwargs)
    opt = optimizer(model.named_parameters(), **options)
    return run(model, opt)


def fsdp2_offloaded(options, dtype):
    return fsdp2(options, dtype, offload_policy=CPUOffloadPolicy(pin_memory=False))


def fsdp2_columns(options, dtype):
    """Shard(1) where the size divides, which FSDP2 asks for."""
    world = dist.get_world_size()

    def placement(p):
        return Shard(1) if p.ndim > 1 and p.shape[1] % world == 0 else Shard(0)

    return fsdp2(options, dtype, shard_placement_fn=placement)


def hsdp(options, dtype):
    world = dist.get_world_size()
    shape = (2, world // 2) if world % 2 == 0 else (1, world)
    return fsdp2(options, dtype, mesh=init_device_mesh("cpu", shape, mesh_dim_names=("r", "s")))


def tensor_parallel(options, dtype, mesh=None):
    """Rows, columns and copies in turn; uneven ones too."""
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    model = Model().to(dtype)
    places = [Shard(0), Shard(1), Replicate()]
    distribute(model, mesh, lambda i, p: places[i % 3] if p.ndim > 1 else places[i % 2 * 2])
    opt = optimizer(model.named_parameters(), **options)
    return set_dtensor_grads(model, opt)


def distribute(model, mesh, place) -> None:
    tied = model.head.weight
    for i, (name, p) in enumerate(list(model.named_parameters())):
        module, _, leaf = name.rpartition(".")
        new = nn.Parameter(
            distribute_tensor(p.data, mesh, [place(i, p)], src_data_rank=None), p.requires_grad
        )
        setattr(model.get_submodule(module), leaf, new)
        if p is tied:
            model.head.weight = new


def fsdp2_over_tensor_parallel(options, dtype):
    """Rows cut twice (a strided shard), or rows and columns."""
    world = dist.get_world_size()
    shape = (2, world // 2) if world % 2 == 0 else (world, 1)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    model = Model().to(dtype)
    distribute(model, mesh["tp"], lambda i, p: Shard(i % 2 if p.ndim > 1 else 0))
    model = sharded(model, mesh["dp"], dtype)
    opt = optimizer(model.named_parameters(), **options)
    return set_dtensor_grads(model, opt)


def fsdp1(options, dtype, original=True, **kwargs):
    model = Model().to(dtype)
    kwargs.update(device_id=torch.device("cpu"), use_orig_params=original)
    if dtype == torch.float32:
        kwargs["mixed_precision"] = MixedPrecision(torch.bfloat16, torch.float32)
    if not original:  # a flat parameter is trainable as a whole
        kwargs["ignored_modules"] = [model.frozen]
    inner = {k: v for k, v in kwargs.items() if k != "ignored_modules"}
    model.second = FullyShardedDataParallel(model.second, **inner)
    model = FullyShardedDataParallel(model, **kwargs)
    opt = optimizer(model.named_parameters(), **options).bind(model)
    return run(model, opt)


def fsdp1_flat(options, dtype):
    return fsdp1(options, dtype, original=False)


def fsdp1_hybrid(options, dtype):
    world = dist.get_world_size()
    shape = (2, world // 2) if world == 4 else (1, world)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("r", "s"))
    return fsdp1(options, dtype, device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD)


def flat_partition(options, dtype):
    """As ZeRO cuts: one buffer of all parameters, padded, in equal parts."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = Model().to(dtype)
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    size = -(-sum(p.numel() for _, p in named) // world)

    def own(tensors):
        flat = torch.cat([t.detach().reshape(-1) for t in tensors])
        return nn.functional.pad(flat, (0, size * world - len(flat))).chunk(world)[rank]

    buffer = nn.Parameter(own([p for _, p in named]).clone())
    pieces, at = [], -size * rank
    for name, p in named:
        start = min(max(0, -at), p.numel())
        length = max(0, min(p.numel() - start, size - max(at, 0)))
        pieces.append(FlatPiece(name, p.shape, start, length, max(at, 0) if length else 0))
        at += p.numel()
    opt = optimizer([buffer], **options)
    opt.declare_flat(buffer, pieces, [dist.group.WORLD])
    for i in range(STEPS):
        grads = gradients(i)
        buffer.grad = own([grads[n] for n, _ in named]).to(dtype)
        opt.step()
    return None, opt


ALL = [
    ddp, fsdp2, fsdp2_offloaded, fsdp2_columns, hsdp, tensor_parallel, fsdp2_over_tensor_parallel,
    fsdp1, fsdp1_flat, fsdp1_hybrid, flat_partition,
]  # fmt: skip


def whole_state(model, opt) -> dict[str, torch.Tensor]:
    """Moments by name, put together by torch, not by us."""
    found: dict[str, torch.Tensor] = {}
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.state_dict_type(
            model,
            StateDictType.FULL_STATE_DICT,
            FullStateDictConfig(),
            # With offloading, FSDP1 on a CPU hands out the states themselves.
            FullOptimStateDictConfig(offload_to_cpu=False, rank0_only=False),
        ):
            state = FullyShardedDataParallel.optim_state_dict(model, opt)["state"]
    else:
        state = {e.identity.name: e.state for e in opt.managed()}
    for name, entry in state.items():
        for key in ("exp_avg", "exp_avg_sq", "step"):
            v = entry[key]
            found[f"{name}.{key}"] = v.full_tensor() if isinstance(v, DTensor) else v
    return found


def result(model, opt) -> dict[str, object]:
    """All that must not depend on the sharding."""
    served = opt.served_params(managed_only=True, copy=True)
    masters = opt.master_params(managed_only=True, copy=True, bucket_bytes=1000)
    digest = opt.served_digest().parameters
    found: dict[str, object] = {
        "served": dict(served),
        "masters": dict(masters),
        "digest": {k: v for k, v in digest.items() if k != "frozen.weight"},
        "version": opt.served_version,
    }
    if model is not None:
        found["state"] = whole_state(model, opt)
    return found


def differences(expected: dict, got: dict) -> list[str]:
    """Names of what is not bitwise equal, or not in the same order."""
    bad = []
    for part in expected.keys() & got.keys():
        a, b = expected[part], got[part]
        if not isinstance(a, dict):
            bad += [part] * (a != b)
            continue
        bad += [f"{part}: order"] * (part != "state" and list(a) != list(b))
        for name, value in a.items():
            same = name in b and (
                torch.equal(value, b[name]) if torch.is_tensor(value) else value == b[name]
            )
            bad += [] if same else [f"{part} {name}"]
    return bad
