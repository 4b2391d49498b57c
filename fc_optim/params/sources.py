"""How frameworks show parameters: this rank's part of one, how it is cut, under which names.

A `ParameterSource` reads a framework's own attributes, and lives in `fc_optim.integrations`. It is
loaded once its framework is, so the core knows none of them.
"""

import functools
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from fc_optim.params.layouts import Group, Layout, Piece

_PLAIN = (Tensor, nn.Parameter)
_SOURCES = {  # framework -> the module with its SOURCE
    "torch.distributed.fsdp": "fc_optim.integrations.fsdp",
    "torch.distributed.tensor": "fc_optim.integrations.dtensor",
    "deepspeed": "fc_optim.integrations.deepspeed_params",
}


class ParameterSource:
    """What plain tensors show, each whole on this rank; a framework's overrides what differs."""

    def owns(self, tensor: Tensor) -> bool:
        """Whether the framework made this tensor."""
        return True

    # -- a tensor ------------------------------------------------------------------------------

    def to_local(self, tensor: Tensor) -> Tensor:
        """This rank's part: no gradient, sharing memory and version counter."""
        return tensor.detach() if tensor.requires_grad else tensor

    def from_local(self, param: Tensor, part: Tensor) -> Tensor:
        """`part`, contiguous, as this rank's part of a tensor cut as `param`. Shares its memory."""
        return part

    def address(self, tensor: Tensor) -> object:
        """Where this rank's part is: what tells that its tensor or its memory was exchanged."""
        return tensor.data_ptr()

    def versions(self, param: Tensor) -> tuple[int, ...]:
        """The version counters of a parameter and of this rank's part."""
        return (param._version,)

    def local_grad(self, param: Tensor) -> Tensor:
        """This rank's part of the gradient, cut as the parameter is."""
        return cast(Tensor, param.grad)

    def placements(self, tensor: Tensor) -> object:
        """How a tensor says it is cut, to compare with another's; None: it says nothing."""
        return None

    def mesh(self, tensor: Tensor) -> object:
        """The ranks over which a tensor says it is cut, to compare with another's."""
        return None

    def shape(self, param: Tensor, name: str) -> torch.Size:
        """The shape of the unsharded parameter. Raises TypeError if it does not say."""
        return param.shape

    def layout(self, param: Tensor, name: str) -> Layout:
        """Where this rank's part sits. Raises TypeError if the parameter alone does not say."""
        return Layout((Piece.whole(param.shape),))

    def pieces(self, name: str, param: Tensor, aliases: bool = False) -> list[tuple[str, int]]:
        """The unsharded parameters in the one of this name: (name, number of the piece).

        With `aliases`, names of parameters that are tied to them as well.
        """
        return [(name, 0)]

    def is_flat(self, param: Tensor) -> bool:
        """Whether it is a flat buffer of several parameters."""
        return False

    def check(self, param: Tensor, name: str) -> None:
        """Raise TypeError if the parameter cannot be served from this rank."""

    # -- a model -------------------------------------------------------------------------------

    def layouts(self, model: nn.Module) -> dict[Tensor, Layout]:
        """The layouts of a model's parameters that do not say them themselves."""
        return {}

    def reshard(self, model: nn.Module) -> None:
        """Drop whole parameters that the framework still keeps of older weights."""

    def replicas(self, model: nn.Module) -> list[Group]:
        """The process groups over which a model's modules hold copies of parameters."""
        return []

    def rounds_forward(self, model: nn.Module | None, params: Sequence[Tensor]) -> str | None:
        """Why a forward of the model would not run on fp32 values put into the parameters."""
        return None

    def forward_dtype(self, module: nn.Module) -> torch.dtype | None:
        """The dtype to which a module casts its parameters for the forward."""
        return None


class _Plain(ParameterSource):
    """What is no framework's; DistributedDataParallel, which torch always has."""

    def replicas(self, model: nn.Module) -> list[Group]:
        wrapper = nn.parallel.DistributedDataParallel
        return [m.process_group for m in model.modules() if isinstance(m, wrapper)]

    def rounds_forward(self, model: nn.Module | None, params: Sequence[Tensor]) -> str | None:
        native = any(p.dtype == torch.bfloat16 for p in params)
        if native and model is not None and self.replicas(model):
            return "DistributedDataParallel would lose its hooks with the parameters' dtype"
        return None

    def forward_dtype(self, module: nn.Module) -> torch.dtype | None:
        if isinstance(module, nn.parallel.DistributedDataParallel):
            return getattr(module.mixed_precision, "param_dtype", None)
        return None


PLAIN = _Plain()


def active() -> tuple[ParameterSource, ...]:
    """The sources of the frameworks that are loaded; the plain one last."""
    return _load(tuple(name for name in _SOURCES if name in sys.modules))


@functools.cache
def _load(frameworks: tuple[str, ...]) -> tuple[ParameterSource, ...]:
    modules = [importlib.import_module(_SOURCES[name]) for name in frameworks]
    return (*(m.SOURCE for m in modules), PLAIN)


def source_of(tensor: Tensor) -> ParameterSource:
    """The source that knows a tensor."""
    return next(s for s in active() if s.owns(tensor))


def to_local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor: no gradient, sharing its memory and version counter."""
    return source_of(tensor).to_local(tensor)


def address_reader(owners: Sequence[ParameterSource]) -> Callable[[Sequence[Tensor]], list[object]]:
    """A function that says where this rank's parts of tensors of these sources are.

    Made once, since every step asks it.
    """
    if all(source is PLAIN for source in owners):
        return lambda tensors: list(map(Tensor.data_ptr, tensors))
    ask = [source.address for source in owners]
    return lambda tensors: [address(t) for address, t in zip(ask, tensors, strict=True)]


def is_sharded(tensor: Tensor) -> bool:
    """Whether the tensor says itself that it is part of a larger one (a DTensor)."""
    return type(tensor) not in _PLAIN and source_of(tensor).placements(tensor) is not None


def layout_of(param: Tensor, known: dict[Tensor, Layout], name: str) -> Layout:
    """The layout of a parameter: what `known` says, or what the parameter itself shows.

    Raises TypeError for one that does not show it, and for partial sums.
    """
    return known[param] if param in known else source_of(param).layout(param, name)


def layouts_in(model: nn.Module) -> dict[Tensor, Layout]:
    """The layouts of a model's parameters that do not say them themselves."""
    return {p: layout for s in active() for p, layout in s.layouts(model).items()}


def reshard(model: nn.Module | None) -> None:
    """Drop whole parameters that frameworks still keep: they are of the weights before."""
    if model is not None:
        for s in active():
            s.reshard(model)


def replicas_in(model: nn.Module) -> list[Group]:
    """The process groups over which a model's modules hold copies of parameters."""
    return [group for s in active() for group in s.replicas(model)]
