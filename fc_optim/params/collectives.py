"""What ranks say to each other: whole parameters, sums of digests, and that they agree.

Nothing here is called by `step()`, except for Muon's whole matrices.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from fc_optim.kernels.batch import Segment
from fc_optim.kernels.reference import copy_cast_
from fc_optim.params.layouts import Group, Piece

_ALIGN = 16  # bytes: where a parameter of a bucket starts


def copy_from_shard(whole: Tensor, part: Tensor, segments: Iterable[Segment]) -> None:
    """Copy a rank's flat buffer to its places in a flat unsharded parameter, in its dtype."""
    for s in segments:
        rows = whole.as_strided(
            (s.rows, s.inner), (s.row_stride, 1), whole.storage_offset() + s.base
        )
        copy_cast_(rows, part[s.offset : s.offset + s.numel].view(s.rows, s.inner))


def copy_to_shard(whole: Tensor, segments: Sequence[Segment], out: Tensor) -> None:
    """The inverse of `copy_from_shard`: fill a rank's flat buffer from an unsharded parameter."""
    for s in segments:
        rows = whole.as_strided(
            (s.rows, s.inner), (s.row_stride, 1), whole.storage_offset() + s.base
        )
        out[s.offset : s.offset + s.numel].view(s.rows, s.inner).copy_(rows)


def gather(
    parts: Sequence[tuple[Tensor, Piece, torch.dtype]], groups: Sequence[Group]
) -> list[Tensor]:
    """Whole parameters from every rank's parts, in one buffer and one collective per group.

    Every rank puts its elements to their places in a buffer of zeros; the sum of the buffers as
    integers is the whole, bit for bit, however the parameters are cut. Peak memory is the buffer.

    Args:
        parts: this rank's flat buffer of each parameter, its piece, the dtype of the result.
        groups: see `Layout`. All their ranks call this with the same parameters in order.

    Returns tensors of the pieces' shapes that own the buffer between them.
    """
    sizes = [piece.shape.numel() * dtype.itemsize for _, piece, dtype in parts]
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + -(-size // _ALIGN) * _ALIGN)
    device = comm_device(groups, parts[0][0].device)
    buffer = torch.zeros(starts[-1] // 4, dtype=torch.int32, device=device)
    raw = buffer.view(torch.uint8)
    found = []
    for (part, piece, dtype), start, size in zip(parts, starts, sizes, strict=False):
        whole = raw[start : start + size].view(dtype)
        copy_from_shard(whole, part, piece.segments)
        found.append(whole.view(piece.shape))
    sum_(buffer, groups)
    return found


def sum_(tensor: Tensor, groups: Sequence[Group]) -> None:
    """In place: the sum over the ranks of all groups."""
    for group in groups:
        torch.distributed.all_reduce(tensor, group=group)


def anywhere(flag: bool, groups: Sequence[Group]) -> bool:
    """Whether the flag is set on any rank of the groups."""
    if not groups:
        return flag
    count = torch.tensor([int(flag)], device=comm_device(groups, torch.device("cpu")))
    for group in groups:
        torch.distributed.all_reduce(count, torch.distributed.ReduceOp.MAX, group=group)
    return bool(count.item())


def check_agreement(options: Mapping[str, object], groups: Sequence[Group]) -> None:
    """Raise RuntimeError on every rank if replicas or shards were built with other options."""
    hashes = [
        int.from_bytes(hashlib.blake2b(repr(v).encode(), digest_size=8).digest(), "little") >> 1
        for v in options.values()
    ]
    differ = differing(dict(zip(options, hashes, strict=True)), groups)
    if differ:
        mine = ", ".join(f"{k}={options[k]!r:.60}" for k in differ)
        raise RuntimeError(
            f"the ranks of this job disagree about {', '.join(differ)} (here: {mine}): their "
            "copies would be rounded apart. Build the optimizer with the same arguments on every "
            "rank."
        )


def differing(numbers: Mapping[str, int], groups: Sequence[Group]) -> list[str]:
    """Which int64 numbers, under the same keys everywhere, are not the same on all ranks.

    Every rank of the groups learns it, so that all of them raise and none waits for the others.
    """
    numbers_both_ways = [[*numbers.values()], [~n for n in numbers.values()]]
    both = torch.tensor(numbers_both_ways, dtype=torch.int64, device="cpu")
    for group in groups:
        both = both.to(comm_device([group], both.device))
        torch.distributed.all_reduce(both, torch.distributed.ReduceOp.MAX, group=group)
    return [k for k, high, low in zip(numbers, *both.tolist(), strict=True) if high != ~low]


def comm_device(groups: Sequence[Group], device: torch.device) -> torch.device:
    """`device` if the groups' backends reach it, else a device that they do."""
    for group in groups:
        config = torch.distributed.get_backend_config(group)  # such as "cpu:gloo,cuda:nccl"
        reached = [part.partition(":")[0] for part in config.split(",")]
        if device.type not in reached:
            return torch.device(reached[0])
    return device
