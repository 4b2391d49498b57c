"""Where this rank's part of a parameter sits in the unsharded one, as data that kernels take.

The random bits are keyed by the place in the unsharded parameter, so the cut does not show in
them. What a framework's own tensors say of their layout is read by its `ParameterSource`.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor

from fc_optim.kernels.batch import Segment

Group = Any  # torch.distributed.ProcessGroup, which a build without distributed does not have


@dataclass(frozen=True, slots=True)
class Piece:
    """What a local buffer holds of one unsharded parameter of shape `shape`.

    The segments carry no identity yet (`param_id` is 0).
    """

    shape: torch.Size
    segments: tuple[Segment, ...]

    @classmethod
    def whole(cls, shape: torch.Size) -> "Piece":
        """All of a parameter, row-major."""
        numel = shape.numel()
        return cls(shape, (Segment.whole(0, numel),) if numel else ())

    @classmethod
    def run(cls, shape: torch.Size, start: int, length: int, offset: int) -> "Piece":
        """Elements `start` to `start + length` of a parameter, at `offset` of the buffer."""
        if start < 0 or length < 0 or offset < 0 or start + length > shape.numel():
            raise ValueError(
                f"start, length, offset: {start}, {length}, {offset} is no run of a parameter of "
                f"{shape.numel()} elements."
            )
        segment = Segment(0, base=start, rows=1, inner=length, row_stride=length, offset=offset)
        return cls(shape, (segment,) if length else ())


@dataclass(frozen=True, slots=True)
class FlatPiece:
    """A run of a named parameter in a flat buffer that a framework made (ZeRO, Megatron).

    name, shape: of the unsharded parameter, as in the model.
    start, length: which of its elements, row-major.
    offset: where they begin in this rank's buffer.
    """

    name: str
    shape: Sequence[int]
    start: int
    length: int
    offset: int


@dataclass(frozen=True, slots=True)
class Layout:
    """A parameter's local buffer: the pieces in it, and the ranks that hold the rest.

    pieces: one per unsharded parameter: several in a flat parameter.
    groups: process groups; the local buffers of all ranks of all groups make the whole.
    replicas: process groups whose ranks hold the same elements.
    """

    pieces: tuple[Piece, ...]
    groups: tuple[Group, ...] = ()
    replicas: tuple[Group, ...] = ()

    def segments(self, ids: Sequence[int]) -> tuple[Segment, ...]:
        """The segments of all pieces, keyed by their parameters' identities."""
        return tuple(
            replace(s, param_id=i)
            for i, piece in zip(ids, self.pieces, strict=True)
            for s in piece.segments
        )


# ---- Building layouts


def flat_layout(
    pieces: Iterable[FlatPiece], groups: Iterable[Group], replicas: Iterable[Group] = ()
) -> Layout:
    """The layout of a flat buffer, from what its framework says of it."""
    return Layout(
        tuple(Piece.run(torch.Size(p.shape), p.start, p.length, p.offset) for p in pieces),
        tuple(groups),
        tuple(replicas),
    )


def boxes(owned: Sequence[Tensor], shape: torch.Size) -> Iterator[Segment]:
    """The segments of a local buffer that holds the product of `owned` index sets."""
    if not all(len(index) for index in owned):
        return
    d = len(shape) - 1
    while d >= 0 and len(owned[d]) == shape[d]:
        d -= 1
    if d < 0:
        yield Segment.whole(0, shape.numel())
        return
    # Dimensions after `d` are whole: runs of `d` are contiguous here and there.
    inner = prod(shape[d + 1 :])
    rows = _flat_index(owned[:d], shape, prod(shape[d:]))
    runs = list(_runs(owned[d], step=1))
    offset = 0
    if len(runs) == 1:
        ((first, length, _),) = runs
        for base, count, stride in _runs(rows):
            base += first * inner
            yield Segment(0, base, count, length * inner, max(stride, length * inner), offset)
            offset += count * length * inner
        return
    for row in rows.tolist():
        for first, length, _ in runs:
            size = length * inner
            yield Segment(0, row + first * inner, 1, size, size, offset)
            offset += size


def _flat_index(owned: Sequence[Tensor], shape: torch.Size, size: int) -> Tensor:
    """Row-major flat index of the product of index sets of the leading dimensions."""
    flat = torch.zeros(1, dtype=torch.int64, device="cpu")
    for index, n in zip(owned, shape, strict=False):
        flat = (flat[:, None] * n + index).flatten()
    return flat * size


def _runs(index: Tensor, step: int | None = None) -> Iterator[tuple[int, int, int]]:
    """(first, count, stride) of the arithmetic runs of an index vector, greedily from the left."""
    values = index.tolist()
    first, stride = 0, step
    for i, (a, b) in enumerate(pairwise(values), 1):
        if stride is None:
            stride = b - a
        elif b - a != stride:
            yield values[first], i - first, stride
            first, stride = i, step
    if values:
        yield values[first], len(values) - first, stride or 1


def groups_of(layouts: Iterable[Layout]) -> list[Group]:
    """The distinct groups of some layouts, in order: of the rest, and of replicas."""
    found: dict[int, Group] = {}
    for layout in layouts:
        for group in (*layout.groups, *layout.replicas):
            found.setdefault(id(group), group)
    return list(found.values())
