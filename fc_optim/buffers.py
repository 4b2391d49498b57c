"""Flat buffers that a framework steps in place of the parameters, and its own copy of them.

DeepSpeed trains on bf16 weights that it copies from fp32 buffers after each step. What the
optimizer leaves in a buffer is right by construction; here is what finds a copy that somebody else
wrote, and takes it over.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fc_optim.foreign import differing_words
from fc_optim.registry import Managed
from fc_optim.shards import FlatPiece, Group

_SAMPLE = 1024  # positions of a buffer that a step compares


@dataclass(frozen=True, slots=True)
class FlatBuffer:
    """A flat buffer that a framework steps in place of parameters of a group.

    group: the parameter group that it is stepped in.
    tensor: fp32, 1-D (or of the parameter's shape, if it holds one whole).
    pieces: each parameter that the optimizer was built with, and what the buffer holds of it.
    copy: gives the model's own bf16 elements, in the buffer's order.
    """

    group: dict[str, Any]
    tensor: Tensor
    pieces: Sequence[tuple[Tensor, FlatPiece]]
    copy: Callable[[], Tensor]


@dataclass(frozen=True, slots=True)
class Buffers:
    """All the buffers of an optimizer.

    groups: process groups that hold the rest of the buffers.
    replicas: process groups whose ranks hold the same buffers.
    spread: copies the buffers to the model's weights, on every rank (collective).
    """

    all: Sequence[FlatBuffer]
    groups: Sequence[Group]
    replicas: Sequence[Group]
    spread: Callable[[], None]

    def written(self, entries: Sequence[Managed]) -> list[Managed]:
        """The entries whose copy differs from the buffer at sampled positions; one host read."""
        own = self._of(entries)
        counts = []
        for buffer in own:
            every = max(1, buffer.tensor.numel() // _SAMPLE)
            used = slice(0, _end(buffer), every)
            counts.append(_differ(buffer.copy().view(-1)[used], buffer.tensor.view(-1)[used]))
        found = torch.stack(counts).tolist() if counts else []
        return [e for e, count in zip(entries, found, strict=True) if count]

    def compare(self, entries: Sequence[Managed]) -> dict[str, int]:
        """{name: elements of the model's weight that differ from the buffer}, all compared."""
        found: dict[str, int] = {}
        for buffer in self._of(entries):
            copy, flat = buffer.copy().view(-1), buffer.tensor.detach().view(-1)
            if not _differ(copy[: _end(buffer)], flat[: _end(buffer)]):
                continue
            for _, piece in buffer.pieces:
                run = slice(piece.offset, piece.offset + piece.length)
                count = int(_differ(copy[run], flat[run]))
                if count:
                    found[piece.name] = count
        return found

    def take(self, entries: Sequence[Managed]) -> None:
        """Buffers <- the model's weights."""
        for buffer, e in zip(self._of(entries), entries, strict=True):
            end = _end(buffer)
            e.local.view(-1)[:end].copy_(buffer.copy().view(-1)[:end])
            e.slot.seen = None  # compare all of it

    def _of(self, entries: Sequence[Managed]) -> list[FlatBuffer]:
        by_tensor = {buffer.tensor: buffer for buffer in self.all}
        return [by_tensor[e.param] for e in entries]


def _end(buffer: FlatBuffer) -> int:
    """Where the last parameter ends: padding follows."""
    return max((p.offset + p.length for _, p in buffer.pieces), default=0)


def _differ(copy: Tensor, flat: Tensor) -> Tensor:
    """How many elements differ in their bits: 0-d int64 on the host."""
    return differing_words(copy.detach().to(flat.dtype), flat).cpu()
