"""DTensors of any mesh and placements: FSDP2, HSDP, tensor parallelism."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fc_optim.params.layouts import Layout, Piece, boxes
from fc_optim.params.sources import ParameterSource


class _DTensors(ParameterSource):
    def owns(self, tensor: Tensor) -> bool:
        return isinstance(tensor, DTensor)

    def to_local(self, tensor: Any) -> Tensor:
        part = tensor._local_tensor  # without a graph; to_local() costs as much as a small update
        return part.wait() if hasattr(part, "wait") else part

    def from_local(self, param: Any, part: Tensor) -> Tensor:
        return DTensor.from_local(
            part,
            param.device_mesh,
            param.placements,
            run_check=False,
            shape=param.shape,
            stride=torch.empty(param.shape, device="meta").stride(),  # of a contiguous whole
        )

    def address(self, tensor: Any) -> object:
        part = tensor._local_tensor
        return id(part), part.data_ptr()  # a new one (model.cpu()) has a version counter of its own

    def versions(self, param: Any) -> tuple[int, ...]:
        return (param._version, param._local_tensor._version)  # writes to either bump its own

    def local_grad(self, param: Any) -> Tensor:
        grad = param.grad
        if grad.placements != param.placements:
            grad = grad.redistribute(placements=param.placements)
        return self.to_local(grad)

    def placements(self, tensor: Any) -> tuple[Any, ...]:
        return tuple(tensor.placements)

    def mesh(self, tensor: Any) -> object:
        return tensor.device_mesh

    def layout(self, param: Any, name: str) -> Layout:
        mesh, placements = param.device_mesh, tuple(param.placements)
        if any(p.is_partial() for p in placements):
            raise TypeError(f"parameter {name!r} is {placements}: partial sums cannot be served.")
        piece = _piece(mesh, placements, param.shape)
        by_dim = [(p.is_replicate(), mesh.get_group(i)) for i, p in enumerate(placements)]
        groups = tuple(group for copies, group in by_dim if not copies)
        return Layout((piece,), groups, tuple(group for copies, group in by_dim if copies))

    def check(self, param: Any, name: str) -> None:
        if param.device_mesh.get_coordinate() is None:
            raise TypeError(
                f"parameter {name!r} is on {param.device_mesh}, which this rank is not part of: "
                "build the optimizer on the ranks of the mesh alone, from their parameters."
            )

    def rounds_forward(self, model: Any, params: Sequence[Tensor]) -> str | None:
        return "parameters are sharded" if any(map(self.owns, params)) else None


SOURCE = _DTensors()


@functools.lru_cache(maxsize=100_000)
def _piece(mesh: Any, placements: tuple[Any, ...], shape: torch.Size) -> Piece:
    owned = [_owned(mesh, placements, d, n) for d, n in enumerate(shape)]
    return Piece(shape, tuple(boxes(owned, shape)))


def _owned(mesh: Any, placements: tuple[Any, ...], dim: int, size: int) -> Tensor:
    """Which indices of a dimension this rank owns, in local order: int64 on the host.

    torch itself cuts `arange`, so uneven, empty and strided shards are as torch has them.
    """

    def moved(placement: Any) -> Any:
        if getattr(placement, "dim", None) != dim:  # dimensions are never negative in a DTensor
            return Replicate()
        if hasattr(placement, "split_factor"):  # _StridedShard: FSDP over tensor parallelism
            return type(placement)(0, split_factor=placement.split_factor)
        return Shard(0)

    return _owned_of_one(mesh, tuple(map(moved, placements)), size)


@functools.lru_cache(maxsize=10_000)
def _owned_of_one(mesh: Any, placements: tuple[Any, ...], size: int) -> Tensor:

    if all(p.is_replicate() for p in placements):
        return torch.arange(size, device="cpu")
    index = torch.arange(size, device=mesh.device_type)
    cut = distribute_tensor(index, mesh, placements, src_data_rank=None)  # communicates nothing
    return SOURCE.to_local(cut).cpu()
