"""DeepSpeed: FairCastOptimizer as the client optimizer of an engine, ZeRO stages 0 to 3.

DeepSpeed steps fp32 flat partitions and copies them to the module's bf16 weights by rounding to
nearest. Our step leaves a partition on the bf16 grid, with the masters in the optimizer's state: so
that copy is exact, and nothing of DeepSpeed is patched.
"""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fc_optim.naming import clean_name
from fc_optim.optimizer import FairCastOptimizer
from fc_optim.registry import FlatBuffer
from fc_optim.shards import FlatPiece


def register(ds_config: dict[str, Any]) -> dict[str, Any]:
    """A copy of a DeepSpeed config with the flags that a client optimizer needs.

    Raises ValueError for settings under which masters cannot be served: fp16, an optimizer in the
    config, bf16 masters, NVMe and SuperOffload.
    """
    config = copy.deepcopy(ds_config)
    zero = config.get("zero_optimization", {})
    bf16 = config.get("bf16", {})
    offload = zero.get("offload_optimizer") or {}
    fp16 = config.get("fp16", {})
    problems = {
        "fp16.enabled: fp16 weights are not served; use bf16": fp16.get("enabled"),
        "optimizer: DeepSpeed would build its own; pass FairCastOptimizer to initialize() instead":
            "optimizer" in config,
        "bf16.enabled: must be true": not bf16.get("enabled"),
        "bf16.bf16_master_weights_and_grads: masters must be fp32":
            bf16.get("bf16_master_weights_and_grads"),
        "zero_optimization.offload_optimizer.device: 'nvme' is not supported; use 'cpu'":
            offload.get("device") == "nvme",
        "zero_optimization.offload_optimizer.super_offload: it steps without the optimizer":
            offload.get("super_offload"),
        "zero_optimization.zenflow: it steps without the optimizer": zero.get("zenflow"),
    }  # fmt: skip
    for problem, found in problems.items():
        if found:
            raise ValueError(f"ds_config: {problem}.")
    config["zero_allow_untested_optimizer"] = True
    config["zero_force_ds_cpu_optimizer"] = False
    return config


def attach(engine: Any) -> FairCastOptimizer:
    """Tell an engine's client optimizer which parameters its flat partitions hold; returns it.

    Call it once, after `deepspeed.initialize(model=..., optimizer=FairCastOptimizer(...),
    config=register(config))` and before the first step. `served_params()` then gives the weights
    of `engine.module`.

    Raises TypeError if the engine does not step a FairCastOptimizer, ValueError for a group with
    `served_dtype=None` (DeepSpeed keeps all weights in bf16), RuntimeError if the engine's weights
    are not those that its partitions were made from.
    """
    zero = engine.optimizer
    opt = getattr(zero, "optimizer", zero)
    if not isinstance(opt, FairCastOptimizer):
        raise TypeError(
            f"engine: it steps {type(opt).__name__}, not a FairCastOptimizer. Pass one to "
            "deepspeed.initialize(optimizer=...), with a config from register(); accelerate "
            "replaces it under offloading unless zero_force_ds_cpu_optimizer is false."
        )
    if any(group["served_dtype"] is None for group in opt.param_groups):
        raise ValueError("served_dtype: None is not possible: DeepSpeed keeps all weights in bf16.")
    buffers, groups = _buffers(engine, zero)
    for buffer in buffers:
        if buffer.tensor.dtype != torch.float32:
            raise TypeError(f"engine: its partitions are {buffer.tensor.dtype}; masters are fp32.")
    opt.state.clear()  # stage 0 has made a dummy step, with decay
    opt.step_buffers(engine.module, buffers, groups)
    _copy_from_module(buffers)
    _find_frozen(engine, opt, groups)
    opt.publish()
    return opt


def _buffers(engine: Any, zero: Any) -> tuple[list[FlatBuffer], list[Any]]:
    """What the engine's optimizer steps: fp32 buffers, and where they sit in the parameters."""
    names = {p: clean_name(n) for n, p in engine.module.named_parameters()}
    param_groups = zero.optimizer.param_groups
    if hasattr(zero, "fp32_partitioned_groups_flat"):  # stage 3: a buffer per sub-group
        buffers = [
            FlatBuffer(param_groups[zero.sub_group_to_group_id[k]], tensor, list(pieces))
            for k, tensor in enumerate(zero.fp32_partitioned_groups_flat)
            for pieces in [_stage3(zero.fp16_groups[k], names)]
        ]
        return buffers, [zero.dp_process_group]
    if hasattr(zero, "single_partition_of_fp32_groups"):  # stages 1 and 2
        parts = zero.single_partition_of_fp32_groups
        whole, params = zero.bit16_groups_flat, zero.bit16_groups
    elif hasattr(zero, "fp32_groups_flat_partition"):  # stage 1 with fp32 gradient accumulation
        parts = zero.fp32_groups_flat_partition
        whole, params = zero.bf16_groups_flat, zero.bf16_groups
    elif hasattr(zero, "fp32_groups"):  # stage 0: an fp32 copy per parameter
        buffers = [
            FlatBuffer(group, own, [(p, FlatPiece(names[p], p.shape, 0, p.numel(), 0))])
            for group, owns, ps in zip(
                param_groups, zero.fp32_groups, zero.fp16_groups, strict=True
            )
            for own, p in zip(owns, ps, strict=True)
        ]
        return buffers, []
    else:
        raise TypeError(f"engine: {type(zero).__name__} is not supported; use bf16 with ZeRO 0-3.")
    groups = zero.real_dp_process_group
    if any(group is not groups[0] for group in groups):
        raise TypeError("engine: expert-parallel groups are not supported.")
    rank = torch.distributed.get_rank(groups[0])
    buffers = [
        FlatBuffer(group, part, list(_cut(flat, part.numel(), rank, ps, names)))
        for group, part, flat, ps in zip(param_groups, parts, whole, params, strict=True)
    ]
    return buffers, [groups[0]]


def _cut(
    flat: Tensor, size: int, rank: int, params: list[Tensor], names: dict[Tensor, str]
) -> Iterator[tuple[Tensor, FlatPiece]]:
    """The pieces of a rank's part of a flat bf16 buffer, whose views the parameters are.

    By address: `round_robin_gradients` reorders parameters, and padding lies between them.
    """
    for p in params:
        begin = (p.data_ptr() - flat.data_ptr()) // flat.element_size() - rank * size
        start = min(max(0, -begin), p.numel())
        length = max(0, min(p.numel() - start, size - max(begin, 0)))
        yield p, FlatPiece(names[p], p.shape, start, length, max(begin, 0) if length else 0)


def _stage3(params: list[Any], names: dict[Tensor, str]) -> Iterator[tuple[Tensor, FlatPiece]]:
    """The pieces of a sub-group: every parameter's partition, one behind the other."""
    offset = 0
    for p in params:
        start, length = _partition(p)
        yield p, FlatPiece(names[p], p.ds_shape, start, length, offset if length else 0)
        offset += p.ds_tensor.numel()


def _partition(p: Any) -> tuple[int, int]:
    """Which elements of a parameter this rank's ZeRO-3 partition has: (start, length)."""
    size = p.ds_tensor.numel()
    start = min(torch.distributed.get_rank(p.ds_process_group) * size, p.ds_numel)
    return start, min(size, p.ds_numel - start)


@torch.no_grad()
def _copy_from_module(buffers: list[FlatBuffer]) -> None:
    """Buffers <- the module's own weights: a dummy step or a late load may lie between them."""
    for buffer in buffers:
        flat = buffer.tensor.view(-1)
        for p, piece in buffer.pieces:
            if piece.length:
                held = getattr(p, "ds_tensor", None)
                source = p.detach().reshape(-1)[piece.start :] if held is None else held
                flat[piece.offset : piece.offset + piece.length].copy_(source[: piece.length])


def _find_frozen(engine: Any, opt: FairCastOptimizer, groups: list[Any]) -> None:
    """Where the frozen parameters of stage 3 sit: they are partitioned as well."""
    from fc_optim.shards import flat_layout

    for name, p in engine.module.named_parameters():
        if hasattr(p, "ds_tensor") and p not in opt.registry.inside:
            piece = FlatPiece(name, p.ds_shape, *_partition(p), 0)
            opt.registry.known[p] = flat_layout([piece], groups)
