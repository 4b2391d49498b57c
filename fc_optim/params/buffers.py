"""Flat buffers that a framework steps in place of the parameters, and its own copy of them.

DeepSpeed trains on bf16 weights that it copies from fp32 buffers after each step. What the
optimizer leaves in a buffer is right by construction; here is what finds a copy that somebody else
wrote, and takes it over.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fc_optim.params.collectives import differing
from fc_optim.params.layouts import FlatPiece, Group
from fc_optim.params.registry import Managed
from fc_optim.params.words import WORDS, differing_words, mix

_SAMPLE = 1024  # positions of a buffer that a step compares
_CHUNK = 1 << 20  # elements: 8 MB of int64 temporaries


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
    whole: gives the model's weights that every rank holds whole now, whoever steps them, by name.
    """

    all: Sequence[FlatBuffer]
    groups: Sequence[Group]
    replicas: Sequence[Group]
    spread: Callable[[], None]
    whole: Callable[[], Iterable[tuple[str, Tensor]]]

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
        """{name: elements of the model's weight that differ from the buffer}, all compared.

        Of what this rank steps; `apart` finds the rest.
        """
        found: dict[str, int] = {}
        whole = dict(self.whole())
        for buffer in self._of(entries):
            copy, flat = _as_forwarded(buffer, whole), buffer.tensor.detach().view(-1)
            if not _differ(copy[: _end(buffer)], flat[: _end(buffer)]):
                continue
            for _, piece in buffer.pieces:
                run = slice(piece.offset, piece.offset + piece.length)
                count = int(_differ(copy[run], flat[run]))
                if count:
                    found[piece.name] = count
        return found

    def apart(self) -> list[str]:
        """Names of weights that ranks hold whole, but not with the same bits. Collective.

        Finds what somebody wrote on a rank that does not step it.
        """
        held = dict(self.whole())
        if not held:
            return []
        sums = torch.stack([_checksum(w) for w in held.values()]).tolist()
        return differing(dict(zip(held, sums, strict=True)), [*self.groups, *self.replicas])

    def take(self, entries: Sequence[Managed]) -> None:
        """Buffers <- the model's weights."""
        whole = dict(self.whole())
        for buffer, e in zip(self._of(entries), entries, strict=True):
            end = _end(buffer)
            e.local.view(-1)[:end].copy_(_as_forwarded(buffer, whole)[:end])
            e.identity.seen = None  # compare all of it

    def _of(self, entries: Sequence[Managed]) -> list[FlatBuffer]:
        by_tensor = {buffer.tensor: buffer for buffer in self.all}
        return [by_tensor[e.param] for e in entries]


def _end(buffer: FlatBuffer) -> int:
    """Where the last parameter ends: padding follows."""
    return max((p.offset + p.length for _, p in buffer.pieces), default=0)


def _as_forwarded(buffer: FlatBuffer, whole: Mapping[str, Tensor]) -> Tensor:
    """The model's elements in the buffer's order, as a forward reads them now: 1-D.

    ZeRO-3 keeps some weights whole beside the partitions that it gathers them from.
    """
    copy = buffer.copy().detach().view(-1)
    memory = copy.untyped_storage().data_ptr()
    held = [(piece, whole[piece.name]) for _, piece in buffer.pieces if piece.name in whole]
    beside = [(p, w) for p, w in held if p.length and w.untyped_storage().data_ptr() != memory]
    if beside:
        copy = copy.clone()
    for piece, weight in beside:
        run = weight.detach().reshape(-1)[piece.start : piece.start + piece.length]
        copy[piece.offset : piece.offset + piece.length].copy_(run)
    return copy


def _checksum(weight: Tensor) -> Tensor:
    """A sum over the bits of a weight, each with a factor of its place: 0-d int64.

    A fraction of the work of a digest, since every `publish()` does it.
    """
    words = weight.detach().contiguous().view(-1).view(WORDS[weight.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for part in words.split(_CHUNK):
        total = total * 31 + (part.to(torch.int64) * _factors(words.device)[: len(part)]).sum()
    return total


@functools.lru_cache(maxsize=1)
def _factors(device: torch.device) -> Tensor:
    """Odd, so that no single change is lost modulo 2**64."""
    return mix(torch.arange(_CHUNK, device=device)) | 1


def _differ(copy: Tensor, flat: Tensor) -> Tensor:
    """How many elements differ in their bits: 0-d int64 on the device of `flat`."""
    return differing_words(copy.detach().to(flat.dtype), flat)
