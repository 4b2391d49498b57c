"""DeepSpeed: FairCastOptimizer as the client optimizer of an engine, ZeRO stages 0 to 3.

DeepSpeed steps fp32 flat partitions and copies them to the module's bf16 weights by rounding to
nearest. Our step leaves a partition on the bf16 grid, with the masters in the optimizer's state: so
that copy is exact. Nothing of DeepSpeed is patched; an engine's `save_checkpoint` is wrapped, so
that ranks refuse foreign writes together. Where the partitions lie is read from attributes of
DeepSpeed's optimizers (0.19).
"""

import contextlib
import copy
import functools
import logging
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fc_optim import checkpoint
from fc_optim.integrations.deepspeed_params import partition
from fc_optim.optimizer import FairCastOptimizer
from fc_optim.params.buffers import Buffers, FlatBuffer
from fc_optim.params.layouts import FlatPiece
from fc_optim.params.modules import named_parameters
from fc_optim.update.state import EPOCH, MASTER

MASTERS_MARK = "masters_in_fp32"  # group key of a checkpoint whose fp32 weights are the masters
logger = logging.getLogger("fc_optim")


def register(ds_config: dict[str, Any]) -> dict[str, Any]:
    """A copy of a DeepSpeed config with the flags that a client optimizer needs.

    Raises ValueError for settings under which masters cannot be served: fp16, an optimizer in the
    config, bf16 masters, NVMe, quantised weights, SuperOffload, ZenFlow, AutoEP, elastic
    checkpoints.
    """
    config = copy.deepcopy(ds_config)
    if "optimizer" in config:
        raise ValueError(
            "ds_config: optimizer: DeepSpeed would build its own; pass FairCastOptimizer to "
            "initialize() or prepare() instead."
        )
    _refuse_settings(config)
    config["zero_allow_untested_optimizer"] = True
    config["zero_force_ds_cpu_optimizer"] = False
    return config


def _refuse_settings(config: dict[str, Any]) -> None:
    """Raise ValueError for what cannot work; "auto" is looked at again by `attach`."""
    zero = config.get("zero_optimization", {})
    bf16 = config.get("bf16", {})
    offload = zero.get("offload_optimizer") or {}
    problems = {
        "fp16.enabled: fp16 weights are not served; use bf16":
            config.get("fp16", {}).get("enabled") not in (None, False, "auto"),
        "bf16.enabled: must be true": not bf16.get("enabled"),
        "bf16.bf16_master_weights_and_grads: masters must be fp32":
            bf16.get("bf16_master_weights_and_grads"),
        "bf16.bf16_optimizer_states: moments must be fp32": bf16.get("bf16_optimizer_states"),
        "zero_optimization.offload_optimizer.device: 'nvme' is not supported; use 'cpu'":
            offload.get("device") == "nvme",
        "zero_optimization.offload_param.device: 'nvme' is not supported; use 'cpu'":
            (zero.get("offload_param") or {}).get("device") == "nvme",
        "zero_optimization.offload_optimizer.super_offload: it steps without the optimizer":
            offload.get("super_offload"),
        "zero_optimization.offload_optimizer.ratio: below 1 not all is stepped by it":
            offload.get("ratio", 1.0) != 1.0,
        "zero_optimization.zenflow: it steps without the optimizer": zero.get("zenflow"),
        "zero_optimization.zero_quantized_weights: the forward would not run on served weights":
            zero.get("zero_quantized_weights"),
        "zero_optimization.elastic_checkpoint: it drops the masters; use universal checkpoints":
            zero.get("elastic_checkpoint"),
        "expert_parallel.enabled: AutoEP replaces the parameters that the optimizer was built with":
            config.get("expert_parallel", {}).get("enabled"),
    }  # fmt: skip
    for problem, found in problems.items():
        if found:
            raise ValueError(f"ds_config: {problem}.")


def attach(engine: Any) -> FairCastOptimizer:
    """Tell an engine's client optimizer which parameters its flat partitions hold; returns it.

    Call it on every rank after `deepspeed.initialize(model=..., optimizer=FairCastOptimizer(...),
    config=register(config))`, before the first step; before or after `engine.load_checkpoint()`,
    but after it for a universal checkpoint. `served_params()` then gives the weights of
    `engine.module`. Masters begin as the weights that the module holds. From then on
    `engine.save_checkpoint()` calls `publish()` first: all ranks refuse foreign writes, or none.

    Raises TypeError if the engine does not step a FairCastOptimizer, or steps partitions that
    cannot be served (experts with `ep_size` above 1), ValueError for what `register` refuses, for a
    group with `served_dtype=None` (DeepSpeed keeps all weights in bf16) and for a parameter that
    the optimizer was not built with.
    """
    zero = engine.optimizer
    opt = getattr(zero, "optimizer", zero)
    if not isinstance(opt, FairCastOptimizer):
        raise TypeError(
            f"engine: it steps {type(opt).__name__}, not a FairCastOptimizer. Pass one to "
            "deepspeed.initialize(optimizer=...), with a config from register(); accelerate "
            "replaces it under offloading unless zero_force_ds_cpu_optimizer is false."
        )
    _refuse_settings(engine._config._param_dict)
    universal = engine.load_universal_checkpoint()
    weights = opt.weights
    if weights.buffers is not None and not (universal and opt.check()):
        return opt
    if any(group["served_dtype"] is None for group in opt.param_groups):
        raise ValueError("served_dtype: None is not possible: DeepSpeed keeps all weights in bf16.")
    buffers = _buffers(engine, zero)
    for buffer in buffers.all:
        if buffer.tensor.dtype != torch.float32:
            raise TypeError(f"engine: its partitions are {buffer.tensor.dtype}; masters are fp32.")
        if buffer.group["algorithm"] == "muon" and buffers.groups:
            raise TypeError(
                "Muon: ZeRO 1 to 3 cut matrices anywhere, and a fragment must never be "
                "orthogonalised. Use ZeRO 0, fully_shard (FSDP2), or Adam for these groups."
            )
    early, weights.early_state = weights.early_state, None
    if universal and any(opt.state.values()):
        _finish_universal_load(opt)
    else:
        opt.state.clear()  # of DeepSpeed's trial step
    loaded = bool(opt.state) or early is not None
    weights.step_buffers(engine.module, buffers)
    if not loaded:
        _copy_from_module(buffers.all)
    if early is not None:
        with _all_in_groups(opt, buffers.all):
            checkpoint.load_state(weights, early)
    if loaded:
        opt.restore_weights()
    opt.publish()
    if "save_checkpoint" not in vars(engine):
        _guard_save(engine, opt)
    return opt


def _guard_save(engine: Any, opt: FairCastOptimizer) -> None:
    """Look for foreign writes on all ranks before a file is written.

    `state_dict()` refuses on the rank that sees one, and the others would wait for it.
    """
    save = engine.save_checkpoint

    @functools.wraps(save)
    def save_checkpoint(*args: Any, **kwargs: Any) -> Any:
        opt.publish()
        return save(*args, **kwargs)

    vars(engine)["save_checkpoint"] = save_checkpoint


def _finish_universal_load(opt: FairCastOptimizer) -> None:
    """What DeepSpeed leaves to do: its fp32 weights become the masters, and options are read."""
    if not all([group.pop(MASTERS_MARK, False) for group in opt.param_groups]):
        logger.warning(
            "attach: the universal checkpoint has the served weights in place of the masters. To "
            "keep the masters, run fc_optim.integrations.deepspeed_masters before ds_to_universal."
        )
    for state in opt.state.values():
        for key in (MASTER, EPOCH):  # of before the load; the epoch follows from `step`
            state.pop(key, None)
        state.update({k: v.clone() for k, v in state.items()})  # stage 3 shares one `step`
    saved = opt.param_groups[0]
    options = {k: saved[k] for k in ("seed", "dither", "epoch", "served_version")}
    checkpoint.load_options(opt.weights, **options)


@contextlib.contextmanager
def _all_in_groups(opt: FairCastOptimizer, buffers: Sequence[FlatBuffer]) -> Iterator[None]:
    """While inside, the groups hold all buffers: those of stage 3 are empty outside of a step."""
    before = [group["params"] for group in opt.param_groups]
    for group in opt.param_groups:
        group["params"] = [b.tensor for b in buffers if b.group is group]
    try:
        yield
    finally:
        for group, params in zip(opt.param_groups, before, strict=True):
            group["params"] = params


def _buffers(engine: Any, zero: Any) -> Buffers:
    """What the engine's optimizer steps: fp32 buffers, and where they sit in the parameters."""
    names = {p: n for n, p in named_parameters(engine.module)}
    _refuse_split_experts(engine, names)
    param_groups = zero.optimizer.param_groups
    if hasattr(zero, "fp32_partitioned_groups_flat"):
        return _stage3_buffers(zero, names)
    if hasattr(zero, "fp32_groups"):  # stage 0: an fp32 copy per parameter
        found = [
            FlatBuffer(group, own, [(p, FlatPiece(names[p], p.shape, 0, p.numel(), 0))], p.detach)
            for group, owns, ps in zip(
                param_groups, zero.fp32_groups, zero.fp16_groups, strict=True
            )
            for own, p in zip(owns, ps, strict=True)
        ]
        held = [(piece.name, p) for b in found for p, piece in b.pieces]
        return Buffers(
            found, [], [engine.data_parallel_group], lambda: _to_copies(found), lambda: held
        )
    if hasattr(zero, "single_partition_of_fp32_groups"):  # stages 1 and 2
        parts, cuts = zero.single_partition_of_fp32_groups, zero.parallel_partitioned_bit16_groups
        whole, params = zero.bit16_groups_flat, zero.bit16_groups
    elif hasattr(zero, "fp32_groups_flat_partition"):  # stage 1 with fp32 gradient accumulation
        parts, cuts = zero.fp32_groups_flat_partition, zero.bf16_partitioned_groups
        whole, params = zero.bf16_groups_flat, zero.bf16_groups
    else:
        raise TypeError(f"engine: {type(zero).__name__} is not supported; use bf16 with ZeRO 0-3.")
    over = zero.real_dp_process_group[0]  # of experts: another group of the same ranks
    rank = torch.distributed.get_rank(over)
    found = []
    for i, (group, part, flat, ps) in enumerate(
        zip(param_groups, parts, whole, params, strict=True)
    ):
        pieces = list(_cut(flat, part.numel(), rank, ps, names))
        found.append(FlatBuffer(group, part, pieces, _at(cuts, i, rank)))
    held = [(names[p], p) for ps in params for p in ps]
    return Buffers(found, [over], [], zero.update_lp_params, lambda: held)


def _refuse_split_experts(engine: Any, names: dict[Any, str]) -> None:
    """Raise TypeError where ranks hold different experts: under one name, with the same bits."""
    everyone = _ranks(engine.seq_data_parallel_group)
    for p, name in names.items():
        if not getattr(p, "allreduce", True):
            over = engine.expert_data_parallel_group[p.group_name]
            if _ranks(over) != everyone:
                raise TypeError(
                    f"engine: {name} is an expert of {p.group_name}: ranks hold different experts "
                    "under the same name, which cannot be served. Use MoE(..., ep_size=1)."
                )


def _ranks(group: Any) -> list[int]:
    return torch.distributed.get_process_group_ranks(group)


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


def _stage3_buffers(zero: Any, names: dict[Any, str]) -> Buffers:
    """A buffer per sub-group: every parameter's partition, one behind the other."""
    found = []
    ranks = _ranks(zero.dp_process_group)
    for k, tensor in enumerate(zero.fp32_partitioned_groups_flat):
        pieces, offset = [], 0
        for p in zero.fp16_groups[k]:
            if _ranks(p.ds_process_group) != ranks:
                raise TypeError(
                    f"engine: {names[p]} is partitioned over a group of its own, which is not "
                    "supported."
                )
            start, length = partition(p)
            where = offset if length else 0
            pieces.append((p, FlatPiece(names[p], p.ds_shape, start, length, where)))
            offset += p.ds_tensor.numel()
        group = zero.optimizer.param_groups[zero.sub_group_to_group_id[k]]
        copy_of_it = _at(zero.fp16_partitioned_groups_flat, k)
        found.append(FlatBuffer(group, tensor, pieces, copy_of_it))

    def spread() -> None:
        zero.checkpoint_event_prologue()  # lets go of gathered parameters
        _to_copies(found)
        zero.checkpoint_event_epilogue()  # gathers persistent ones

    def gathered() -> list[tuple[str, Tensor]]:  # the same on all ranks: gathering is collective
        params = [p for group in zero.fp16_groups for p in group]
        return [(names[p], p) for p in params if p.shape == p.ds_shape]

    return Buffers(found, [zero.dp_process_group], [], spread, gathered)


def _at(tensors: Any, *where: int) -> Callable[[], Tensor]:
    """Looks it up each time: DeepSpeed makes new ones when it moves states to the host and back."""
    return lambda: functools.reduce(operator.getitem, where, tensors)


@torch.no_grad()
def _to_copies(buffers: Sequence[FlatBuffer]) -> None:
    for b in buffers:
        b.copy().data.copy_(b.tensor)


@torch.no_grad()
def _copy_from_module(buffers: Sequence[FlatBuffer]) -> None:
    """Buffers <- the module's own weights: a late load may lie between them."""
    for b in buffers:
        b.tensor.copy_(b.copy())


def trainer_callback(trainer: Any) -> Any:
    """A callback for a transformers Trainer that attaches its engine when training begins.

    `Trainer(args=TrainingArguments(deepspeed=register(config)), optimizer_cls_and_kwargs=(
    FairCastAdamW, {"lr": 1e-6}))`, then `trainer.add_callback(trainer_callback(trainer))`. The
    Trainer drops `optimizers=(optimizer, None)` under DeepSpeed. It loads a checkpoint before this.
    """
    from transformers import TrainerCallback

    class Attach(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            attach(trainer.model_wrapped)

    return Attach()
