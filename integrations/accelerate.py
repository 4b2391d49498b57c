"""Hugging Face accelerate: check what `prepare()` made and bind the model that trains."""

import functools
import sys
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fc_optim.integrations.deepspeed import attach
from fc_optim.integrations.needs import needs
from fc_optim.optimizer import FairCastOptimizer, unwrap

with needs("accelerate", "1.15"):
    from accelerate import Accelerator
    from accelerate.utils import DistributedType


def register(accelerator: Accelerator, optimizer: Any) -> FairCastOptimizer:
    """The FairCastOptimizer behind a prepared optimizer, bound to the prepared model.

    Call it on every process after `accelerator.prepare(model, optimizer)`. Train with what
    `prepare()` returned; serve from what this returns, since accelerate's wrapper passes no
    attributes through::

        model, optimizer = accelerator.prepare(model, optimizer)
        served = register(accelerator, optimizer)
        ...
        engine.load_weights(served.served_params())

    For one process, DDP, FSDP1 and FSDP2. It compares seed, dither and parameter names of all
    processes (one small all-reduce). It makes no masters, so `accelerator.load_state()` may follow,
    which it prepares to work under FSDP and in the middle of a run. After that call `publish()` if
    the weights are not bf16 values already.

    Under DeepSpeed it is `fc_optim.integrations.deepspeed.attach` for the prepared engine; make the
    plugin from a checked config, `DeepSpeedPlugin(hf_ds_config=register(config))` with `register`
    of that module, or accelerate replaces the optimizer under offloading. `load_state()` may come
    before or after; after loading a universal checkpoint call this again.

    Raises TypeError if `optimizer` is not a (prepared) FairCastOptimizer, ValueError if no prepared
    model holds its parameters, RuntimeError if the processes disagree or masters were lost when
    parameters were sharded, NotImplementedError under Megatron-LM, and under DeepSpeed what
    `attach` raises.
    """
    kind: DistributedType = accelerator.distributed_type
    if kind == DistributedType.DEEPSPEED:
        return attach(_engine(accelerator, optimizer))
    if kind.value not in ("NO", "FSDP") and not kind.value.startswith("MULTI_"):  # MULTI_*: DDP
        raise NotImplementedError(
            f"accelerator: distributed_type {kind.value} is not supported. Train on one process, "
            "or under DDP, FSDP or DeepSpeed."
        )
    inner = unwrap(optimizer)
    if not isinstance(inner, FairCastOptimizer):
        raise TypeError(f"optimizer: {type(inner).__name__} is not a FairCastOptimizer.")
    inner.weights.registry.check_orphans(inner.param_groups, inner.state)
    inner.bind(_trained_model(accelerator, inner))
    if accelerator.num_processes > 1:  # DDP's wrapper is not among accelerate's models
        inner.check_replicas([torch.distributed.group.WORLD])
    _guard_load_state(accelerator, inner)
    return inner


def _engine(accelerator: Accelerator, optimizer: Any) -> Any:
    """The prepared DeepSpeed engine that steps the optimizer, or why there is none."""
    inner = unwrap(optimizer)
    for engine in accelerator._models:
        if isinstance(inner, FairCastOptimizer) and unwrap(engine.optimizer) is inner:
            return engine
    config = accelerator.deepspeed_plugin.deepspeed_config
    offload = config.get("zero_optimization", {}).get("offload_optimizer") or {}
    if "optimizer" in config:
        raise TypeError(
            f"optimizer: {type(inner).__name__} is DeepSpeed's own, from `optimizer` in its config "
            "(a DummyOptim stands for it). Remove that key and pass a FairCastOptimizer to "
            "prepare()."
        )
    swapped = offload.get("device", "none") != "none"
    if accelerator._models and swapped and config.get("zero_force_ds_cpu_optimizer", True):
        raise TypeError(
            "optimizer: accelerate replaced it by DeepSpeed's CPU optimizer, because optimizer "
            "states are offloaded and zero_force_ds_cpu_optimizer is not false. Make the plugin "
            "with a config from fc_optim.integrations.deepspeed.register: "
            "DeepSpeedPlugin(hf_ds_config=register(config))."
        )
    if not isinstance(inner, FairCastOptimizer):
        raise TypeError(f"optimizer: {type(inner).__name__} is not a FairCastOptimizer.")
    raise ValueError(
        "accelerator: none of its prepared models is trained by the optimizer. Call "
        "prepare(model, optimizer) with both at once, then register()."
    )


def _trained_model(accelerator: Accelerator, optimizer: FairCastOptimizer) -> nn.Module:
    """The prepared model that holds the optimizer's parameters."""
    held = {p for group in optimizer.param_groups for p in group["params"]}
    for model in accelerator._models:
        _finish_fsdp1(model)
        if any(p in held for p in model.parameters()):
            return model
    raise ValueError(
        "accelerator: none of its prepared models holds the optimizer's parameters. Prepare the "
        "model that the optimizer was built from; under FSDP1 set use_orig_params, or build the "
        "optimizer from the prepared model."
    )


def _finish_fsdp1(model: nn.Module) -> None:
    """Point the original parameters into FSDP1's flat ones.

    accelerate gives a flat parameter new storage when it upcasts a bf16 model. The originals follow
    in the first forward, and what is written to them before that is lost. One unit is gathered at a
    time.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or all(p.dtype == torch.float32 for p in model.parameters()):
        return
    for unit in fsdp.FullyShardedDataParallel.fsdp_modules(model):
        with fsdp.FullyShardedDataParallel.summon_full_params(unit, recurse=False, writeback=False):
            pass


def _guard_load_state(accelerator: Accelerator, optimizer: FairCastOptimizer) -> None:
    """Let `accelerator.load_state()` fill the optimizer under FSDP.

    accelerate loads the model first and then asks for the optimizer's state, to load into its
    tensors. So they must be there (FSDP1 drops the checkpoint's state for an empty optimizer), even
    if they were lost, and the new weights are no foreign write: their masters are on the way.
    Elsewhere an optimizer without masters takes what the checkpoint has, torch's own state too.
    """
    sharded = accelerator.distributed_type == DistributedType.FSDP
    load = accelerator.load_state

    @functools.wraps(load)
    def load_state(*args: Any, **kwargs: Any) -> Any:
        if sharded and not optimizer.state:
            optimizer.adopt_weights()
        template = functools.partial(Optimizer.state_dict, optimizer)  # does not look for writes
        vars(optimizer)["state_dict"] = template
        try:
            return load(*args, **kwargs)
        finally:
            vars(optimizer).pop("state_dict", None)

    vars(accelerator)["load_state"] = load_state
