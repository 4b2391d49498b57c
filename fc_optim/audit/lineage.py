"""Which tensors hold a model's parameters: known by storage, followed through data movement."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves


def plain_tensors(tree: Any) -> list[Tensor]:
    """The strided tensors in a pytree, in order; of DTensors and other wrappers the inner ones."""
    found: list[Tensor] = []
    for leaf in tree_leaves(tree):
        if not isinstance(leaf, Tensor):
            continue
        if is_traceable_wrapper_subclass(leaf):
            names, _ = leaf.__tensor_flatten__()
            found += plain_tensors([getattr(leaf, name) for name in names])
        elif leaf.layout == torch.strided and leaf.device.type != "meta":
            found.append(leaf)
    return found


class Origin(NamedTuple):
    """Bytes [start, stop) of a storage hold values of the parameters `names`.

    `values` are the wide values that a tensor of this `layout` (shape, strides, offset) stands for,
    element by element, where those are not the tensor's own: after integer arithmetic on the bits.
    They count while their version is `version`. `fixed` marks the parameters themselves.
    """

    start: int
    stop: int
    names: tuple[str, ...]
    dtype: torch.dtype
    values: Tensor | None = None
    version: int = 0
    layout: tuple[Any, ...] = ()
    fixed: bool = False


class Lineage:
    """Storage -> the origins of its bytes. Holds storages weakly, so it keeps no weights alive,
    except `values` of temporaries, which go with the storage that stands for them."""

    def __init__(self, named: Iterable[tuple[str, Tensor]]):
        # A weak reference keeps the storage's address from being used again.
        self._known: dict[int, tuple[StorageWeakRef, list[Origin]]] = {}
        self._limit = 64  # storages, above which dead ones are looked for
        for name, p in named:
            for t in plain_tensors(p):
                self._put(t, Origin(*_bytes_of(t), (name,), t.dtype, fixed=True))

    def names(self, t: Tensor) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for o in self.origins(t) for name in o.names))

    def origins(self, t: Tensor) -> list[Origin]:
        entry = self._known.get(t.untyped_storage()._cdata)
        if entry is None or not t.numel():
            return []
        start, stop = _bytes_of(t)
        return [o for o in entry[1] if o.start < stop and start < o.stop]

    def values(self, t: Tensor) -> Tensor | None:
        """The floating-point values of the parameters that t's elements stand for, in t's shape."""
        origins = self.origins(t)
        if len(origins) != 1:
            return t if t.is_floating_point() else None
        (o,) = origins
        if o.values is not None and o.layout == _layout(t) and o.values._version == o.version:
            return o.values
        if t.is_floating_point():
            return _whole_words(t, o.dtype) if t.itemsize < o.dtype.itemsize else t
        return t.view(o.dtype) if t.itemsize == o.dtype.itemsize else None

    def moved(self, dest: Tensor, sources: list[Tensor], values: Tensor | None = None) -> None:
        """`dest` now holds the values of `sources`; see `Origin` for `values`."""
        start, stop = _bytes_of(dest)
        dtype = dest.dtype if values is None else values.dtype
        if len(sources) > 1 and dest.is_contiguous() and _tiles(dest, sources):
            for s in sources:  # a bucket: remember which part is whose
                stop = start + s.numel() * dest.itemsize
                if names := self.names(s):
                    self._put(dest, Origin(start, stop, names, dtype))
                start = stop
            return
        names = tuple(dict.fromkeys(name for s in sources for name in self.names(s)))
        version = 0 if values is None else values._version
        self._put(dest, Origin(start, stop, names, dtype, values, version, _layout(dest)))

    def forget(self, dest: Tensor) -> None:
        """`dest` was overwritten with something else. Parameters stay parameters."""
        entry = self._known.get(dest.untyped_storage()._cdata)
        if entry is not None:
            start, stop = _bytes_of(dest)
            entry[1][:] = [o for o in entry[1] if o.fixed or o.start < start or stop < o.stop]

    def _put(self, t: Tensor, origin: Origin) -> None:
        held = origin.values is not None and not any(o.fixed for o in self.origins(origin.values))
        if held or len(self._known) > self._limit:
            self._known = {k: e for k, e in self._known.items() if not e[0].expired()}
            self._limit = max(64, 2 * len(self._known))
        storage = t.untyped_storage()
        _, origins = self._known.setdefault(storage._cdata, (StorageWeakRef(storage), []))
        origins[:] = [
            o for o in origins if o.fixed or o.start < origin.start or origin.stop < o.stop
        ]
        if not any(o.fixed and o.start <= origin.start and origin.stop <= o.stop for o in origins):
            origins.append(origin)


def _bytes_of(t: Tensor) -> tuple[int, int]:
    start = int(t.storage_offset()) * t.itemsize
    last = sum((n - 1) * int(stride) for n, stride in zip(t.shape, t.stride(), strict=True))
    return start, start + (last + 1) * t.itemsize if t.numel() else start


def _layout(t: Tensor) -> tuple[Any, ...]:
    return t.shape, t.stride(), t.storage_offset()


def _tiles(dest: Tensor, sources: list[Tensor]) -> bool:
    """`dest` is its sources one after the other, as cat and stack make along dimension 0."""
    if sum(s.numel() for s in sources) != dest.numel():
        return False
    rest = dest.shape[1:]
    return all(s.shape[1:] == rest or s.shape == rest for s in sources)


def _whole_words(t: Tensor, dtype: torch.dtype) -> Tensor:
    """The wide values whose upper halves `t` picks out, as x.view(bfloat16)[..., 1::2] does."""
    even = all(stride % 2 == 0 for n, stride in zip(t.shape, t.stride(), strict=True) if n > 1)
    if t.itemsize * 2 != dtype.itemsize or not even or t.storage_offset() % 2 == 0:
        return t
    words = torch.empty(0, dtype=dtype, device=t.device).set_(t.untyped_storage())
    return words.as_strided(t.shape, [s // 2 for s in t.stride()], t.storage_offset() // 2)
