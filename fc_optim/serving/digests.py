"""A fingerprint of served weights that both sides of a sync can compute, shard by shard."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from fc_optim.kernels.batch import Segment
from fc_optim.params.collectives import comm_device, sum_
from fc_optim.params.layouts import Group
from fc_optim.params.words import WORDS, mix

if TYPE_CHECKING:
    from fc_optim.serving.stream import Item

_CHUNK = 1 << 18  # elements: a few MB of int64 temporaries
_MASK64 = 2**64 - 1


class Digest(NamedTuple):
    """A fingerprint of named weights: equal bits give equal digests (not a cryptographic hash).

    Sums of 64-bit mixes over elements, modulo 2**64, so that it can be computed shard by shard.
    """

    total: int
    parameters: dict[str, int]

    @classmethod
    def of(cls, parameters: dict[str, int]) -> "Digest":
        """The digest of parameters of which each one's own is known."""
        parameters = {name: value & _MASK64 for name, value in parameters.items()}
        return cls(sum(parameters.values()) & _MASK64, parameters)


def digest(named_tensors: Iterable[tuple[str, Tensor]]) -> Digest:
    """The digest of named tensors: the receiver's side of `FairCastOptimizer.served_digest()`.

    Each element contributes a mix of (name and dtype, row-major flat index, bit pattern).

    Raises ValueError if a name comes twice, TypeError for what is no pair of a name and a tensor.
    """
    parameters: dict[str, int] = {}
    for name, tensor in named_pairs(named_tensors):
        if name in parameters:
            raise ValueError(f"named_tensors: {name!r} comes twice.")
        tensor = tensor.detach().contiguous().view(-1)
        whole = Segment.whole(0, tensor.numel())
        parameters[name] = int(_sum(name, tensor, [whole] if tensor.numel() else []))
    return Digest.of(parameters)


def named_pairs(named_tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The same pairs, checked one by one: a dict, or a tensor, could be unpacked into nonsense."""
    remedy = "pass pairs, such as model.named_parameters() or weights.items()."
    if isinstance(named_tensors, Mapping | nn.Module | Tensor):
        raise TypeError(f"named_tensors: it is of type {type(named_tensors).__name__}; {remedy}")
    for pair in named_tensors:
        named = isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[0], str)
        if not named:
            raise TypeError(f"named_tensors: {str(pair)[:80]!r} is no (name, tensor); {remedy}")
        name, tensor = pair
        if not isinstance(tensor, Tensor):
            raise TypeError(f"named_tensors: {name!r} is of type {type(tensor).__name__}; {remedy}")
        yield name, tensor


def sharded_digest(
    items: Sequence["Item"], change: Callable[[Tensor], Tensor] | None = None
) -> Digest:
    """The digest of what is served: every rank sums its elements, then the ranks their sums.

    With `change`, an elementwise function: of what a receiver would hold that did this to it.
    """
    sums = []
    for i in items:
        part, segments = _own_elements(i)
        sums.append(_sum(i.name, part if change is None else change(part), segments))
    by_groups: dict[tuple[Group, ...], list[int]] = {}
    for k, item in enumerate(items):
        by_groups.setdefault(item.groups, []).append(k)
    parameters = dict.fromkeys((i.name for i in items), 0)
    for groups, members in by_groups.items():
        device = comm_device(groups, sums[members[0]].device)
        total = torch.stack([sums[k].to(device) for k in members])
        sum_(total, groups)
        for k, value in zip(members, total.tolist(), strict=True):
            parameters[items[k].name] = value
    return Digest.of(parameters)


def _own_elements(item: "Item") -> tuple[Tensor, list[Segment]]:
    """This rank's elements as served, flat, and their segments."""
    segments = item.piece.segments
    part = item.local().contiguous().view(-1)
    first = segments[0].offset if segments else 0  # of a flat parameter, `local` has only the piece
    shifted = [
        Segment(0, s.base, s.rows, s.inner, s.row_stride, s.offset - first) for s in segments
    ]
    return part, shifted


def _sum(name: str, flat: Tensor, segments: Iterable[Segment]) -> Tensor:
    """The wrapping int64 sum over elements of a flat buffer: 0-d."""
    key = f"{name}:{str(flat.dtype).removeprefix('torch.')}".encode()
    seed = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little", signed=True)
    size = flat.element_size()
    words = flat.view(WORDS[size]) if size in WORDS else torch.view_as_real(flat).view(-1)
    words = words.view(torch.int64) if words.is_floating_point() else words
    per = words.numel() // max(flat.numel(), 1)  # words of an element: 2 for complex128
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for s in (part for segment in segments for part in segment.split(_CHUNK)):
        part = words[s.offset * per : (s.offset + s.numel) * per].to(torch.int64)
        if size < 8:
            part &= (1 << 8 * size) - 1
        total += mix(mix(_index(s, per, part.device) + seed) ^ part).sum()
    return total


def _index(s: Segment, per: int, device: torch.device) -> Tensor:
    """Flat indices of a segment's words in the unsharded parameter: int64, `[numel * per]`."""
    rows = torch.arange(s.rows, device=device) * (s.row_stride * per) + s.base * per
    return (rows[:, None] + torch.arange(s.inner * per, device=device)).view(-1)
