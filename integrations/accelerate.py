"""Hugging Face accelerate: check what `prepare()` made and bind the model that trains."""

from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType

from fc_optim.optimizer import FairCastOptimizer


def register(accelerator: Accelerator, optimizer: Any) -> FairCastOptimizer:
    """The FairCastOptimizer behind a prepared optimizer, bound to the prepared model.

    Call it after `accelerator.prepare(model, optimizer)`; read `served_params()` from the result,
    since accelerate's wrapper passes no attributes through.

    Raises TypeError if `optimizer` is not a (prepared) FairCastOptimizer, ValueError if no prepared
    model holds its parameters, NotImplementedError under FSDP and DeepSpeed.
    """
    kind: DistributedType = accelerator.distributed_type
    if kind.value != "NO" and not kind.value.startswith("MULTI_"):  # MULTI_*: DDP
        raise NotImplementedError(
            f"accelerator: distributed_type {kind.value} shards parameters, which fc_optim does "
            f"not support yet; train on one process or under DDP."
        )
    inner = getattr(optimizer, "optimizer", optimizer)
    if not isinstance(inner, FairCastOptimizer):
        raise TypeError(f"optimizer: {type(inner).__name__} is not a FairCastOptimizer.")
    held = {p for group in inner.param_groups for p in group["params"]}
    for model in accelerator._models:
        if any(p in held for p in model.parameters()):
            return inner.bind(model)
    raise ValueError(
        "accelerator: none of its prepared models holds the optimizer's parameters; prepare the "
        "model that the optimizer was built from."
    )
