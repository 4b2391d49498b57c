"""Sparse updates: the bf16 words that changed since the engine was last known to hold them."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fc_optim.params.words import WORDS
from fc_optim.serving.stream import NamedTensors


class Patch(NamedTuple):
    """New words of one parameter; the format of vLLM's `sparse_nccl` and its like.

    indices: flat row-major indices into the whole parameter, ascending; int32 (int64 if it has more
        than 2**31 - 1 elements). values: the words there, of the parameter's dtype.
    """

    name: str
    shape: tuple[int, ...]
    indices: Tensor
    values: Tensor


class Baseline:
    """A copy of what an engine holds, from which the next update is told.

    Costs the served weights' own memory, on their device. `patches` overwrites it as it goes, so it
    is of use only if the engine took all of them: after a failure make a new one.
    """

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}

    def record(self, weights: NamedTensors) -> NamedTensors:
        """Pass whole weights through, keeping a copy."""
        for name, tensor in weights:
            self._held[name] = tensor.clone(memory_format=torch.contiguous_format)
            yield name, tensor

    def patches(self, weights: NamedTensors) -> Iterator[Patch]:
        """What changed, a patch for each parameter that did. Compares bits, NaNs included."""
        for name, tensor in weights:
            new, old = tensor.detach().reshape(-1), self._held[name].view(-1)
            word = WORDS[new.element_size()]
            indices = (new.view(word) != old.view(word)).nonzero().view(-1)
            if not indices.numel():
                continue
            values = new[indices]
            old[indices] = values
            small = new.numel() < 2**31
            yield Patch(name, tuple(tensor.shape), indices.int() if small else indices, values)


def apply_patch(tensor: Tensor, patch: Patch) -> None:
    """The receiver's side: write a patch into its own contiguous tensor.

    Raises ValueError, before anything is written, if the patch does not fit.
    """
    if tuple(tensor.shape) != patch.shape or tensor.dtype != patch.values.dtype:
        raise ValueError(
            f"patch: {patch.name!r} is for {patch.values.dtype} {patch.shape}, the tensor is "
            f"{tensor.dtype} {tuple(tensor.shape)}."
        )
    if not tensor.is_contiguous():
        raise ValueError(f"tensor: {patch.name!r} is not contiguous, which flat indices need.")
    tensor.view(-1)[patch.indices.long()] = patch.values
