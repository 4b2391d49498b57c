"""What a model's modules and parameters are called, whatever wraps them."""

import sys
from collections.abc import Iterator

from torch import Tensor, nn

# Modules that stand for another one: where their class is, and the attributes that hold the other.
# Looked up in sys.modules: a framework that was never imported wraps nothing.
_WRAPPERS = (
    ("torch.nn.parallel", "DataParallel", ("module",)),
    ("torch.nn.parallel", "DistributedDataParallel", ("module",)),
    ("torch.optim.swa_utils", "AveragedModel", ("module",)),
    ("torch.distributed.fsdp", "FullyShardedDataParallel", ("_fsdp_wrapped_module",)),
    ("torch._dynamo.eval_frame", "OptimizedModule", ("_orig_mod",)),
    (
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "ActivationWrapper",  # of checkpoints and of offloading
        ("_checkpoint_wrapped_module",),
    ),
    ("deepspeed.runtime.engine", "DeepSpeedEngine", ("module",)),
    ("lightning.fabric.wrappers", "_FabricModule", ("_forward_module", "_original_module")),
    ("lightning_fabric.wrappers", "_FabricModule", ("_forward_module", "_original_module")),
    ("apex.parallel", "DistributedDataParallel", ("module",)),
    ("megatron.core.distributed.data_parallel_base", "_BaseDataParallel", ("module",)),
    ("megatron.core.transformer.module", "Float16Module", ("module",)),
)


def named_parameters(
    model: nn.Module, remove_duplicate: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """As `model.named_parameters()`, with the names that the model has without its wrappers.

    A wrapper is known by its class, so that a model's own attribute `module` keeps its name.
    """
    seen: set[object] = set()
    for prefix, module in named_modules(model, remove_duplicate):
        for key, p in module._parameters.items():
            name = _join(prefix, key)
            mark = p if remove_duplicate else (name, p)  # a wrapper may hold a model twice
            if p is not None and mark not in seen:
                seen.add(mark)
                yield name, p


def named_modules(
    model: nn.Module, remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Module]]:
    """As `model.named_modules()`; a wrapper and what it wraps have the same name."""
    known = [
        (getattr(sys.modules[module], name), attributes)
        for module, name, attributes in _WRAPPERS
        if hasattr(sys.modules.get(module), name)
    ]
    seen: set[nn.Module] = set()

    def walk(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
        if remove_duplicate and module in seen:
            return
        seen.add(module)
        yield name, module
        inner = {a for cls, attributes in known if isinstance(module, cls) for a in attributes}
        for key, child in module._modules.items():
            if child is not None:
                yield from walk(child, name if key in inner else _join(name, key))

    return walk(model, "")


def _join(prefix: str, key: str) -> str:
    return f"{prefix}.{key}" if prefix else key
