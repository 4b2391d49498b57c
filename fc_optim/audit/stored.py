"""Named tensors on disk, read piece by piece: what every format of checkpoint is turned into."""

import io
import math
import pickle
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PIECE = 2**17  # elements per piece: bounds the memory of every command


class BadCheckpoint(ValueError):
    """A file that cannot be read rightly; the message says which, why, and what to do."""


@dataclass(frozen=True)
class Stored:
    """A tensor that lies in a file.

    `read(start, stop)` returns elements [start, stop) of its row-major order as a new 1-D tensor
    of `dtype`, owned by the caller. `place` is equal for two names of one tensor (tied weights).
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[int, int], Tensor]
    place: tuple[str, int] | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def pieces(self, size: int = PIECE) -> Iterator[tuple[int, int]]:
        """Bounds of consecutive pieces of at most `size` elements."""
        return ((i, min(i + size, self.numel)) for i in range(0, self.numel, size))

    def load(self) -> Tensor:
        """The whole tensor, in its shape."""
        return self.read(0, self.numel).view(self.shape)


def in_memory(tensor: Tensor) -> Stored:
    flat = tensor.detach().reshape(-1)
    return Stored(tuple(tensor.shape), tensor.dtype, lambda start, stop: flat[start:stop].clone())


def in_file(path: Path, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Stored:
    """A contiguous tensor that starts at byte `offset` of `path`.

    Read with plain reads and not through a memory map: a map of the whole file counts against a
    limit on address space, and its pages against the resident size.
    """

    def read(start: int, stop: int) -> Tensor:
        size = dtype.itemsize
        return torch.frombuffer(
            read_bytes(path, offset + start * size, (stop - start) * size), dtype=dtype
        )

    def read_some(start: int, stop: int) -> Tensor:
        return read(start, stop) if stop > start else torch.empty(0, dtype=dtype)

    return Stored(shape, dtype, read_some, (str(path), offset))


def read_bytes(path: Path, offset: int, count: int) -> bytearray:
    buffer = bytearray(count)
    with open(path, "rb") as file:
        file.seek(offset)
        got = file.readinto(buffer)
    if got != count:
        raise BadCheckpoint(
            f"{path}: truncated: {count} bytes were expected at offset {offset}, {got} are there."
        )
    return buffer


def from_boxes(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    boxes: list[tuple[tuple[int, ...], Stored]],
) -> Stored:
    """One tensor from shards: `boxes` are (offset in every dimension, the shard).

    A piece is made of whole rows of dimension 0, so that memory is bounded by the piece and a row.
    Raises BadCheckpoint if the shards do not cover the tensor exactly.
    """
    whole = math.prod(shape)
    if sum(s.numel for _, s in boxes) != whole or any(
        o + n > full for at, s in boxes for o, n, full in zip(at, s.shape, shape, strict=True)
    ):
        raise BadCheckpoint(f"shards do not cover a tensor of shape {shape} exactly.")
    if len(boxes) == 1:
        return Stored(shape, dtype, boxes[0][1].read)
    inner = math.prod(shape[1:])
    if whole == 0:
        return in_memory(torch.empty(shape, dtype=dtype))

    def read(start: int, stop: int) -> Tensor:
        first, last = start // inner, -(-stop // inner)
        rows = torch.empty(last - first, *shape[1:], dtype=dtype)
        for at, shard in boxes:
            low, high = max(first, at[0]), min(last, at[0] + shard.shape[0])
            if low < high:
                width = math.prod(shard.shape[1:])
                part = shard.read((low - at[0]) * width, (high - at[0]) * width)
                inside = tuple(
                    slice(o, o + n) for o, n in zip(at[1:], shard.shape[1:], strict=True)
                )
                rows[(slice(low - first, high - first), *inside)] = part.view(
                    high - low, *shard.shape[1:]
                )
        return rows.flatten()[start - first * inner : stop - first * inner]

    return Stored(shape, dtype, read)


def from_parts(shape: tuple[int, ...], parts: list[tuple[Stored, int, int]]) -> Stored:
    """One tensor whose row-major elements are these (flat tensor, start, stop) end to end."""
    if sum(stop - start for _, start, stop in parts) != math.prod(shape):
        raise BadCheckpoint(f"partitions do not add up to a tensor of shape {shape}.")

    def read(start: int, stop: int) -> Tensor:
        found, at = [], 0
        for flat, low, high in parts:
            a, b = max(start - at, 0), min(stop - at, high - low)
            if a < b:
                found.append(flat.read(low + a, low + b))
            at += high - low
        return torch.cat(found) if found else torch.empty(0, dtype=parts[0][0].dtype)

    return Stored(shape, parts[0][0].dtype, read)


class _Inert:
    """Stands in for a class of an allowed name: holds what was pickled and does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args = args


# What DeepSpeed puts beside the tensors of its optimizer files; none of it is needed.
DEEPSPEED_CLASSES = (
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScalerBase",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)


class _View(io.RawIOBase):
    """`length` bytes of a file from `offset` on, as a file."""

    def __init__(self, file: io.FileIO, offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, to: int, whence: int = io.SEEK_SET) -> int:
        self._at = to + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._offset + self._at)
        view = memoryview(buffer)[: max(self._length - self._at, 0)]
        got = self._file.readinto(view)
        self._at += got
        return got


def load_pickle(
    path: Path, *, trust: bool, allowed: tuple[str, ...] = (), offset: int = 0, length: int = -1
) -> Any:
    """What `torch.save` wrote, with every tensor left on disk as a `Stored`.

    Args:
        path: the file; or with `offset` and `length` one record of it.
        trust: unpickle whatever the file holds, which can run code. Otherwise `weights_only=True`.
        allowed: full names of classes to accept, each replaced by an inert stand-in.
    """
    stand_ins: list[Any] = [(type(n.rpartition(".")[2], (_Inert,), {}), n) for n in allowed]
    try:
        if length < 0:
            length = path.stat().st_size - offset
        with torch.serialization.safe_globals(stand_ins), open(path, "rb", buffering=0) as file:
            source = io.BufferedReader(_View(file, offset, length))
            where = "meta" if zipfile.is_zipfile(source) else "cpu"  # cpu: the old format
            source.seek(0)
            loaded = torch.load(source, map_location=where, weights_only=not trust)
    except pickle.UnpicklingError as error:
        why = re.search(r"GLOBAL (\S+)", str(error))
        found = f" ({why[1]})" if why else ""
        raise BadCheckpoint(
            f"{path}: not loaded, because it is damaged or holds more than tensors and plain "
            f"containers{found}. If you trust who wrote it, pass --trust-pickle."
        ) from None
    except MemoryError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        if "alloc" in str(error):
            raise
        raise BadCheckpoint(f"{path}: {_damage(error)}") from None
    return _map_tensors(loaded, lambda t: _stored(t, path, offset))


def _damage(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "no such file."
    first = str(error).partition("\n")[0][:200]
    return f"truncated or not a file of torch.save ({first})."


def _map_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {k: _map_tensors(v, change) for k, v in value.items()}
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        return [_map_tensors(v, change) for v in value]
    return value


def _stored(tensor: Tensor, path: Path, base: int) -> Stored:
    """A tensor that `torch.load` put on the meta device knows where its bytes are."""
    tensor = getattr(tensor, "_local_tensor", tensor)
    if tensor.layout != torch.strided:
        raise BadCheckpoint(f"{path}: holds a {tensor.layout} tensor, not a dense one.")
    if not tensor.is_meta:
        return in_memory(tensor)
    storage = tensor.untyped_storage()
    start = getattr(storage, "_checkpoint_offset", None)
    if start is None:
        raise BadCheckpoint(f"{path}: this torch cannot tell where its tensors lie: use >= 2.13.")
    start += base
    if path.stat().st_size < start + storage.nbytes():
        raise BadCheckpoint(f"{path}: truncated: it ends before its last tensor does.")
    offset = start + tensor.storage_offset() * tensor.dtype.itemsize
    shape = tuple(tensor.shape)
    if tensor.is_contiguous():
        return in_file(path, offset, shape, tensor.dtype)
    strides = tensor.stride()
    span = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    flat = in_file(path, offset, (span,), tensor.dtype)

    def read(low: int, high: int) -> Tensor:  # rare: a transposed view; read whole
        return flat.load().as_strided(shape, strides).reshape(-1)[low:high].clone()

    return Stored(shape, tensor.dtype, read)


@contextmanager
def explain_memory() -> Iterator[None]:
    """Turn an allocation that failed into a message."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "alloc" not in str(error).lower():
            raise
        raise BadCheckpoint(
            "out of memory: a single row of a shard, or a pickled file of the old non-zip format, "
            "does not fit. Save it again as safetensors."
        ) from None
