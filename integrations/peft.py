"""PEFT: LoRA adapters merged into bf16 weights without losing them to the cast.

Adapters are ordinary managed parameters. An engine that serves them beside the base model gets
them from `served_params()`. One that wants them merged needs W + s B A in bf16, and that sum is the
worst dead zone of all: what LoRA adds in a hundred steps is mostly under half an ulp of W, and
round-to-nearest, as in PEFT's own `merge_adapter()`, drops it.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from fc_optim.integrations.needs import needs
from fc_optim.kernels.reference import nearest_bf16
from fc_optim.optimizer import FairCastOptimizer
from fc_optim.params.modules import named_modules
from fc_optim.params.names import param_id
from fc_optim.serving.rounding import stochastic_round

with needs("peft", "0.21"):
    from peft import PeftModel
    from peft.tuners import lora
    from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper


def merge_lora(
    model: PeftModel, optimizer: FairCastOptimizer, *, rounding: str = "stochastic"
) -> Iterator[tuple[str, Tensor]]:
    """Iterate over the base model's weights with the active adapters merged in.

    Merged weights are new bf16 tensors; all others are as in `optimizer.served_params()`. Names are
    the base model's own, as engines know them. The model is not touched. Where parameters are
    sharded every rank iterates to the end. To send it and prove that it came::

        sync = Sync(optimizer, engine, source=lambda: merge_lora(model, optimizer))

    The sum is taken in fp32, from the served adapters that the training forward uses, and rounded
    once. Stochastically it is unbiased: over elements, what is served of s B A is all of it. The
    random bits depend on the optimizer's seed, the weight's name and, as its `dither` says, on the
    served version, the redraws, or nothing ("held": few words change from sync to sync).

    Args:
        model: a PEFT model, to which the optimizer is bound.
        optimizer: trains the adapters. With dither "sync", call `publish(redraw=True)` before.
        rounding: "stochastic", or "nearest" to compare.

    Raises TypeError for a model that is not PEFT's, NotImplementedError for adapters other than
    plain LoRA on Linear, Embedding and Conv1D layers (DoRA, LoRA biases, convolutions),
    RuntimeError for adapters that are merged already or a base weight that is tied.

    Source: Hu et al. 2021 (LoRA), equation 3.
    """
    if rounding not in ("stochastic", "nearest"):
        raise ValueError(f"rounding: {rounding!r} is neither 'stochastic' nor 'nearest'.")
    if not isinstance(model, PeftModel):
        raise TypeError(f"model: {type(model).__name__} is not a PeftModel.")
    bound = optimizer.model
    if bound is None or not any(m is model for m in bound.modules()):
        raise RuntimeError("optimizer: it is not bound to this model; call optimizer.bind(model).")
    layers = {
        name: _checked(name, module)
        for name, module in named_modules(model)
        if isinstance(module, lora.LoraLayer | AuxiliaryTrainingWrapper)
    }
    _refuse_tied(model)
    return _stream(layers, optimizer, rounding)


def _stream(
    layers: Mapping[str, nn.Module], optimizer: FairCastOptimizer, rounding: str
) -> Iterator[tuple[str, Tensor]]:
    """Whole parameters in model order; those of a layer, which are neighbours, become one."""
    layer, parts = "", dict[str, Tensor]()
    for name, tensor in optimizer.served_params():
        if parts and not name.startswith(f"{layer}."):
            yield from _merge(layer, layers[layer], parts, optimizer, rounding)
            parts = {}
        found = _layer_of(name, layers)
        if found is None:
            yield _base_name(name), tensor
        else:
            layer = found
            parts[name.removeprefix(f"{layer}.")] = tensor
    if parts:
        yield from _merge(layer, layers[layer], parts, optimizer, rounding)


def _merge(
    name: str,
    layer: Any,
    parts: dict[str, Tensor],
    optimizer: FairCastOptimizer,
    rounding: str,
) -> Iterator[tuple[str, Tensor]]:
    """The parameters of one wrapped layer, as the base model has them."""
    base = _base_name(name)
    if isinstance(layer, ModulesToSaveWrapper):  # a trained copy stands for the original
        kind = f"modules_to_save.{layer.active_adapters[0]}." if layer.active_adapters else ""
        kind = kind or "original_module."
        yield from (
            (f"{base}.{k.removeprefix(kind)}", t) for k, t in parts.items() if k.startswith(kind)
        )
        return
    for key, tensor in parts.items():
        if key == "base_layer.weight":
            tensor = _sum(layer, parts)
            if rounding == "nearest":
                tensor = nearest_bf16(tensor)
            else:
                t = optimizer.weights.context().epoch
                t = optimizer.served_version if t is None else t
                tensor = stochastic_round(
                    tensor, seed=optimizer.seed, param_id=param_id(f"{base}.weight"), t=t % 2**32
                )
        if key.startswith("base_layer."):
            yield f"{base}.{key.removeprefix('base_layer.')}", tensor


def _sum(layer: Any, parts: Mapping[str, Tensor]) -> Tensor:
    """W + s B A in fp32, over the active adapters."""
    total = parts["base_layer.weight"].float()
    for adapter in layer.active_adapters:
        if isinstance(layer, lora.Embedding) and adapter in layer.lora_embedding_A:
            b, a = (parts[f"lora_embedding_{x}.{adapter}"] for x in "BA")
        elif adapter in layer.lora_A:
            b, a = (parts[f"lora_{x}.{adapter}.weight"] for x in "BA")
        else:
            continue
        delta = (b.float() @ a.float()) * layer.scaling[adapter]
        transposed = isinstance(layer, lora.Embedding) or layer.fan_in_fan_out
        total = total + (delta.T if transposed else delta)
    return total


def _checked(name: str, module: Any) -> nn.Module:
    """The module. Raises for one whose merged weight is not W + s B A."""
    if isinstance(module, ModulesToSaveWrapper):
        return module
    if type(module) not in (lora.Linear, lora.Embedding):
        raise NotImplementedError(
            f"model: {name} is a {type(module).__module__}.{type(module).__name__}; only plain "
            "LoRA on Linear, Conv1D and Embedding layers is merged."
        )
    if module.merged or module.disable_adapters:
        raise RuntimeError(
            f"model: the adapters of {name} are {'merged' if module.merged else 'disabled'}; call "
            f"{'unmerge_adapter()' if module.merged else 'enable_adapter_layers()'} first."
        )
    for adapter in module.active_adapters:
        if adapter in module.lora_variant or module.lora_bias.get(adapter):
            raise NotImplementedError(
                f"model: adapter {adapter!r} of {name} is DoRA or another variant, or has a bias; "
                "only plain LoRA is merged."
            )
    return module


def _refuse_tied(model: nn.Module) -> None:
    """Raise where a base weight belongs to another layer too, which merging would change."""
    names: dict[Tensor, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(p, []).append(name)
    for shared in names.values():
        if len(shared) > 1 and any(".base_layer." in name for name in shared):
            raise RuntimeError(
                f"model: {' and '.join(shared)} are tied: an adapter on one of them would be "
                "merged into the other. Leave them out of target_modules, or untie them."
            )


def _layer_of(name: str, layers: Mapping[str, nn.Module]) -> str | None:
    """The wrapped layer that a parameter belongs to."""
    head = name
    while head:
        head = head.rpartition(".")[0]
        if head in layers:
            return head
    return None


def _base_name(name: str) -> str:
    return name.removeprefix("base_model.model.")
