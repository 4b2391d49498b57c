"""Where this rank's part of a parameter sits in the unsharded one.

A `Layout` says it as data, which the kernels take: DTensors of any mesh and placements, FSDP1's
flat parameters and the views into them, and any flat partition (ZeRO, Megatron). The random bits
are keyed by the place in the unsharded parameter, so the cut does not show in them.
"""

import functools
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from fc_optim.kernels.batch import Segment

_PLAIN = (Tensor, nn.Parameter)
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


# ---- Tensors and their local parts


def is_dtensor(tensor: Tensor) -> bool:
    """Whether it is a `torch.distributed.tensor.DTensor` (which this does not import)."""
    if type(tensor) in _PLAIN:  # several times per parameter and step
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor: no gradient, sharing its memory and version counter."""
    if is_dtensor(tensor):
        with torch.no_grad():
            part = tensor.to_local()  # type: ignore[attr-defined]
        return part.wait() if hasattr(part, "wait") else part
    if "deepspeed" in sys.modules:
        held = getattr(tensor, "ds_tensor", tensor)  # ZeRO-3 leaves the parameter itself empty
        return held.detach()
    return tensor.detach() if tensor.requires_grad else tensor


def like(param: Tensor, part: Tensor) -> Tensor:
    """`part`, contiguous, as this rank's part of a tensor sharded as `param`. Shares its memory."""
    if not is_dtensor(param):
        return part
    return type_of_dtensor().from_local(
        part,
        param.device_mesh,  # type: ignore[attr-defined]
        param.placements,  # type: ignore[attr-defined]
        run_check=False,
        shape=param.shape,
        stride=torch.empty(param.shape, device="meta").stride(),  # of a contiguous whole
    )


def type_of_dtensor() -> Any:
    return sys.modules["torch.distributed.tensor"].DTensor


def placements(tensor: Tensor) -> tuple[Any, ...] | None:
    """The placements of a DTensor, None of a plain tensor."""
    return tuple(tensor.placements) if is_dtensor(tensor) else None  # type: ignore[attr-defined]


def local_grad(param: Tensor) -> Tensor:
    """This rank's part of the gradient, cut as the parameter is."""
    grad = param.grad
    assert grad is not None
    if is_dtensor(grad) and grad.placements != param.placements:  # type: ignore[attr-defined]
        grad = grad.redistribute(placements=param.placements)  # type: ignore[attr-defined]
    return local(grad)


# ---- Layouts


def layout_of(param: Tensor, known: Mapping[Tensor, Layout], name: str) -> Layout:
    """The layout of a parameter: what `known` says, or what the tensor itself shows.

    Raises TypeError for a view into FSDP1's flat parameter that is not known, and for a DTensor
    whose values are partial sums.
    """
    if param in known:
        return known[param]
    if is_dtensor(param):
        mesh, placements = param.device_mesh, param.placements  # type: ignore[attr-defined]
        if any(p.is_partial() for p in placements):
            raise TypeError(f"parameter {name!r} is {placements}: partial sums cannot be served.")
        piece = _dtensor_piece(mesh, tuple(placements), param.shape)
        by_dim = [(p.is_replicate(), mesh.get_group(i)) for i, p in enumerate(placements)]
        groups = tuple(group for copies, group in by_dim if not copies)
        return Layout((piece,), groups, tuple(group for copies, group in by_dim if copies))
    if hasattr(param, "_is_flat_param"):  # the groups are known once the model is bound
        return Layout(tuple(_flat_pieces(param)))
    if hasattr(param, "_fsdp_flattened"):
        raise TypeError(
            f"parameter {name!r} is a view into a flat parameter of FSDP1, which does not say "
            "where it sits: call bind(model) with the FullyShardedDataParallel model first."
        )
    return Layout((Piece.whole(param.shape),))


@functools.lru_cache(maxsize=100_000)
def _dtensor_piece(mesh: Any, placements: tuple[Any, ...], shape: torch.Size) -> Piece:
    owned = [_owned(mesh, placements, d, n) for d, n in enumerate(shape)]
    return Piece(shape, tuple(_boxes(owned, shape)))


def _owned(mesh: Any, placements: tuple[Any, ...], dim: int, size: int) -> Tensor:
    """Which indices of a dimension this rank owns, in local order: int64 on the host.

    torch itself cuts `arange`, so uneven, empty and strided shards are as torch has them.
    """
    from torch.distributed.tensor import Replicate, Shard

    def moved(placement: Any) -> Any:
        if getattr(placement, "dim", None) != dim:  # dimensions are never negative in a DTensor
            return Replicate()
        if hasattr(placement, "split_factor"):  # _StridedShard: FSDP over tensor parallelism
            return type(placement)(0, split_factor=placement.split_factor)
        return Shard(0)

    return _owned_of_one(mesh, tuple(map(moved, placements)), size)


@functools.lru_cache(maxsize=10_000)
def _owned_of_one(mesh: Any, placements: tuple[Any, ...], size: int) -> Tensor:
    from torch.distributed.tensor import distribute_tensor

    if all(p.is_replicate() for p in placements):
        return torch.arange(size, device="cpu")
    index = torch.arange(size, device=mesh.device_type)
    cut = distribute_tensor(index, mesh, placements, src_data_rank=None)  # communicates nothing
    return local(cut).cpu()


def _boxes(owned: Sequence[Tensor], shape: torch.Size) -> Iterator[Segment]:
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


# ---- Flat buffers


def flat_layout(
    pieces: Iterable[FlatPiece], groups: Iterable[Group], replicas: Iterable[Group] = ()
) -> Layout:
    """The layout of a flat buffer, from what its framework says of it."""
    return Layout(
        tuple(Piece.run(torch.Size(p.shape), p.start, p.length, p.offset) for p in pieces),
        tuple(groups),
        tuple(replicas),
    )


def _flat_pieces(flat_param: Any) -> Iterator[Piece]:
    """The pieces of a flat parameter, one per original parameter."""
    for shape, info in zip(flat_param._shapes, flat_param._shard_param_infos, strict=True):
        if info.in_shard:
            start, length = info.intra_param_start_idx, info.numel_in_shard
            yield Piece.run(shape, start, length, info.offset_in_shard)
        else:
            yield Piece(shape, ())


def fsdp1_layouts(model: nn.Module) -> dict[Tensor, Layout]:
    """The layouts of all parameters, original or flat, of a FullyShardedDataParallel model.

    Read from FSDP1's own records of each shard (`FlatParameter._shard_param_infos`); {} for other
    models.
    """
    module = sys.modules.get("torch.distributed.fsdp")
    if module is None:
        return {}
    found: dict[Tensor, Layout] = {}
    for unit in module.FullyShardedDataParallel.fsdp_modules(model):
        handle = unit._handle
        if handle is None:
            continue
        flat = handle.flat_param
        groups = (handle.process_group,) if handle.uses_sharded_strategy else ()
        between = getattr(unit, "_inter_node_pg", None)  # HYBRID_SHARD
        replicas = (between,) if groups and between is not None else ()
        if not groups:
            replicas = (handle.process_group,)
        pieces = tuple(_flat_pieces(flat))
        found[flat] = Layout(pieces, groups, replicas)
        for param, piece in zip(flat._params or (), pieces, strict=bool(flat._params)):
            at_zero = tuple(replace(s, offset=0) for s in piece.segments)
            found[param] = Layout((Piece(piece.shape, at_zero),), groups, replicas)
    return found


def reshard(model: nn.Module | None) -> None:
    """Drop whole parameters that FSDP still keeps: they are of the weights before this write.

    It keeps some after a forward without a backward, and would use them again. FSDP1 has no public
    way to drop them; this does what it does itself at the end of a backward.
    """
    module = sys.modules.get("torch.distributed.fsdp")
    if model is None or module is None:
        return
    for m in model.modules():
        if isinstance(m, module.FSDPModule):
            m.reshard()
    for unit in module.FullyShardedDataParallel.fsdp_modules(model):
        handle = unit._handle
        if handle is None or not handle.uses_sharded_strategy:
            continue
        begun = hasattr(handle.flat_param, "_full_param_padded")  # there was a forward
        if begun and handle._training_state.name == "IDLE" and not handle.needs_unshard():
            handle.reshard(True)
            handle.post_reshard()
            handle._prefetched = False


def ddp_groups(model: nn.Module) -> list[Group]:
    """The process groups over which DistributedDataParallel modules hold replicas."""
    return [
        m.process_group
        for m in model.modules()
        if isinstance(m, nn.parallel.DistributedDataParallel)
    ]


def groups_of(layouts: Iterable[Layout]) -> list[Group]:
    """The distinct groups of some layouts, in order: of the rest, and of replicas."""
    found: dict[int, Group] = {}
    for layout in layouts:
        for group in (*layout.groups, *layout.replicas):
            found.setdefault(id(group), group)
    return list(found.values())
