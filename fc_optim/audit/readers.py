"""Open a checkpoint of weights, whatever wrote it: safetensors, `torch.save`, DCP, HF folders."""

import json
import math
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from fc_optim.audit.stored import (
    BadCheckpoint,
    Stored,
    from_boxes,
    in_file,
    load_pickle,
    read_bytes,
)
from fc_optim.params.names import clean_name

_SAFETENSORS = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "BOOL": torch.bool, "C64": torch.complex64,
}  # fmt: skip
_WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_MOST_HEADER = 100_000_000  # bytes, the limit of the safetensors format


def open_checkpoint(path: Path, *, trust_pickle: bool = False) -> dict[str, Stored]:
    """The tensors of a checkpoint by name; nothing but headers is read.

    Args:
        path: a `.safetensors`, `.bin`, `.pt`, `.pth` or `.ckpt` file, an index file, a Hugging
            Face folder (sharded or not), or a folder of `torch.distributed.checkpoint`.
        trust_pickle: let `torch.load` unpickle arbitrary objects, which can run code.

    Raises BadCheckpoint with the reason. Names are cleaned of what wrappers add.
    """
    path = Path(path)
    if not path.exists():
        raise BadCheckpoint(f"{path}: no such file or folder.")
    tensors = {clean_name(n): t for n, t in _open(path, trust_pickle)}
    if not tensors:
        raise BadCheckpoint(f"{path}: holds no tensors.")
    return tensors


def _open(path: Path, trust: bool) -> Iterator[tuple[str, Stored]]:
    if path.is_dir():
        yield from _open_folder(path, trust)
    elif path.name.endswith(".index.json"):
        yield from _open_index(path, trust)
    elif path.suffix == ".safetensors":
        yield from _open_safetensors(path)
    elif path.suffix in _PICKLES:
        yield from named_tensors(_unwrap(load_pickle(path, trust=trust)))
    else:
        known = ", ".join((".safetensors", *_PICKLES))
        raise BadCheckpoint(f"{path}: not a known kind of file ({known}) or folder.")


def _open_folder(path: Path, trust: bool) -> Iterator[tuple[str, Stored]]:
    if (path / ".metadata").exists():
        tensors, _ = open_dcp(path)
        yield from tensors.items()
        return
    for name in _WEIGHT_FILES:
        for file in (path / f"{name}.index.json", path / name):
            if file.exists():
                yield from _open(file, trust)
                return
    files = sorted(path.glob("*.safetensors")) or sorted(path.glob("pytorch_model*.bin"))
    if not files:
        raise BadCheckpoint(
            f"{path}: holds no *.safetensors, pytorch_model*.bin, index or .metadata file."
        )
    shards = [f for f in files if "-of-" in f.name]
    if shards:
        _check_complete(path, shards)
    for file in files:
        yield from _open(file, trust)


def _check_complete(folder: Path, shards: list[Path]) -> None:
    """Without an index, the names of the files say how many there are."""
    for prefix in {f.name.rpartition("-of-")[0].rpartition("-")[0] for f in shards}:
        mine = [f for f in shards if f.name.startswith(f"{prefix}-")]
        count = mine[0].stem.rpartition("-of-")[2]
        if not count.isdecimal() or len(mine) != int(count):
            raise BadCheckpoint(f"{folder}: {len(mine)} of {count} shards {prefix}-* are there.")


def _open_index(path: Path, trust: bool) -> Iterator[tuple[str, Stored]]:
    try:
        weight_map = json.loads(path.read_bytes())["weight_map"]
        files: dict[str, set[str]] = {}
        for name, file in weight_map.items():
            files.setdefault(file, set()).add(name)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadCheckpoint(f"{path}: not an index with a 'weight_map' ({error}).") from None
    for file, names in sorted(files.items()):
        shard = inside(path.parent, file)
        if not shard.exists():
            raise BadCheckpoint(f"{path}: the shard {file!r} that it names is missing.")
        found = dict(_open(shard, trust))
        absent = sorted(names - found.keys())
        if absent:
            raise BadCheckpoint(f"{shard}: lacks {', '.join(absent[:4])}, which the index names.")
        yield from ((n, found[n]) for n in sorted(names))


def inside(folder: Path, name: Any) -> Path:
    """`folder / name`, refused if the name leads out of the folder.

    Links are followed: Hugging Face's cache is made of links to files elsewhere.
    """
    if not isinstance(name, str) or "\0" in name or ":" in name or "\\" in name:
        raise BadCheckpoint(f"{folder}: the index names {name!r}, which is not a file name.")
    part = Path(name)
    if part.is_absolute() or ".." in part.parts:
        raise BadCheckpoint(f"{folder}: the index names {name!r}, a file outside the folder.")
    return folder / part


def _open_safetensors(path: Path) -> Iterator[tuple[str, Stored]]:
    """The format's header is JSON behind its 64-bit length; data follow without gaps."""
    size = path.stat().st_size
    length = int.from_bytes(read_bytes(path, 0, 8), "little") if size >= 8 else -1
    if not 0 <= length <= min(size - 8, _MOST_HEADER):
        raise BadCheckpoint(f"{path}: truncated or not a safetensors file ({size} bytes).")
    try:
        header = json.loads(bytes(read_bytes(path, 8, length)))
        header.pop("__metadata__", None)
        entries = [
            (name, str(e["dtype"]), tuple(map(int, e["shape"])), *map(int, e["data_offsets"]))
            for name, e in header.items()
        ]
        if not all(start >= 0 and min(shape, default=0) >= 0 for _, _, shape, start, _ in entries):
            raise ValueError("negative numbers")
    except (ValueError, KeyError, TypeError, AttributeError, UnicodeDecodeError) as error:
        raise BadCheckpoint(f"{path}: its safetensors header is damaged ({error}).") from None
    for name, code, shape, start, end in entries:
        if code not in _SAFETENSORS:
            raise BadCheckpoint(f"{path}: {name!r} has the dtype {code}, which is not supported.")
        dtype = _SAFETENSORS[code]
        if end - start != math.prod(shape) * dtype.itemsize:
            raise BadCheckpoint(f"{path}: {name!r} has {end - start} bytes for shape {shape}.")
        if 8 + length + end > size:
            raise BadCheckpoint(
                f"{path}: truncated: {name!r} ends at byte {8 + length + end}, the file at {size}."
            )
        yield name, in_file(path, 8 + length + start, shape, dtype)


def _unwrap(loaded: Any) -> Any:
    """The state dict of a file that keeps it beside other things."""
    while isinstance(loaded, dict):
        inner = [k for k in ("model", "state_dict", "module", "model_state_dict") if k in loaded]
        if not inner or not isinstance(loaded[inner[0]], dict):
            return loaded
        loaded = loaded[inner[0]]
    return loaded


def named_tensors(value: Any, prefix: str = "") -> Iterator[tuple[str, Stored]]:
    """The tensors of nested containers, named by their dotted paths."""
    if isinstance(value, Stored):
        yield prefix, value
    elif isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for k, v in items:
            yield from named_tensors(v, f"{prefix}.{k}" if prefix else str(k))


class _MetadataUnpickler(pickle.Unpickler):
    """DCP pickles its `.metadata`: accept only the plain data classes that it is made of."""

    _MODULES = {
        "torch.distributed.checkpoint.metadata": {
            "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex",
            "StorageMeta", "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
        },
        "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
        "torch": {
            "Size", "bfloat16", "bool", "float16", "float32", "float64", "float8_e4m3fn",
            "float8_e5m2", "int16", "int32", "int64", "int8", "strided", "uint8",
        },
        "torch.serialization": {"_get_layout"},
        "collections": {"OrderedDict"},
        "pathlib": {"PosixPath", "PurePosixPath", "Path"},
    }  # fmt: skip

    def find_class(self, module: str, name: str) -> Any:
        if name in self._MODULES.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is not part of DCP's metadata")


def open_dcp(folder: Path) -> tuple[dict[str, Stored], dict[str, Callable[[], Any]]]:
    """Tensors of a `torch.distributed.checkpoint`, and what loads each of its other values."""
    try:
        with open(folder / ".metadata", "rb") as file:
            metadata = _MetadataUnpickler(file).load()
        if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
            raise pickle.UnpicklingError("not a Metadata object with storage_data")
        places = {(i.fqn, i.offset): info for i, info in metadata.storage_data.items()}
    except Exception as error:  # a damaged pickle can raise anything
        raise BadCheckpoint(f"{folder}/.metadata: damaged or not DCP's ({error}).") from None
    tensors: dict[str, Stored] = {}
    values: dict[str, Callable[[], Any]] = {}
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            boxes = [
                (tuple(c.offsets), _dcp_record(folder, places, name, c.offsets))
                for c in entry.chunks
            ]
            shape, dtype = tuple(entry.size), entry.properties.dtype
            if any(
                not isinstance(s, Stored) or s.dtype != dtype or s.shape != tuple(c.sizes)
                for (_, s), c in zip(boxes, entry.chunks, strict=True)
            ):
                raise BadCheckpoint(f"{folder}: a shard of {name!r} is not what .metadata says.")
            try:
                tensors[name] = from_boxes(shape, dtype, boxes)
            except BadCheckpoint as error:
                raise BadCheckpoint(f"{folder}: {name!r}: {error}") from None
        else:
            values[name] = partial(_dcp_record, folder, places, name, None)
    return tensors, values


def _dcp_record(folder: Path, places: dict[Any, Any], name: str, offset: Any) -> Any:
    info = places.get((name, offset))
    if info is None:
        raise BadCheckpoint(f"{folder}: .metadata does not say where {name!r} lies.")
    if getattr(info, "transform_descriptors", None):
        raise BadCheckpoint(f"{folder}: {name!r} is compressed: save without extensions.")
    file = inside(folder, info.relative_path)
    if not file.exists():
        raise BadCheckpoint(f"{folder}: the file {info.relative_path!r} is missing.")
    if file.stat().st_size < info.offset + info.length:
        raise BadCheckpoint(f"{file}: truncated: it ends before {name!r} does.")
    return load_pickle(file, trust=False, offset=info.offset, length=info.length)
