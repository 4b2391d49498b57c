"""What somebody holds, told without sending it: version, dtypes, shapes and digests by name."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from fc_optim.serving.digests import Digest, digest, named_pairs, sharded_digest

if TYPE_CHECKING:
    from fc_optim.serving.stream import Item


class Entry(NamedTuple):
    """One tensor of a manifest. `digest` is None where its holder cannot tell the bits."""

    dtype: str  # as torch names it: "bfloat16"
    shape: tuple[int, ...]
    digest: int | None


@dataclass(frozen=True)
class Manifest:
    """The version that somebody holds, None if it has none, and an entry for each tensor."""

    version: int | None
    parameters: Mapping[str, Entry]

    @property
    def digest(self) -> Digest:
        """As `served_digest()`. Raises ValueError if the bits of a tensor are unknown."""
        known = {name: e.digest for name, e in self.parameters.items() if e.digest is not None}
        if len(known) != len(self.parameters):
            lost = next(name for name in self.parameters if name not in known)
            raise ValueError(f"manifest: its holder cannot tell the bits of {lost!r}.")
        return Digest.of(known)

    def to_json(self) -> str:
        """Text for another process."""
        return json.dumps({"version": self.version, "parameters": dict(self.parameters)})

    @classmethod
    def from_json(cls, text: str) -> "Manifest":
        """The inverse of `to_json`. Raises ValueError for anything else."""
        try:
            found = json.loads(text)
            rows = {n: Entry(d, tuple(s), x) for n, (d, s, x) in found["parameters"].items()}
            return cls(found["version"], rows)
        except (AttributeError, KeyError, TypeError, ValueError) as e:
            raise ValueError(f"text: {text[:80]!r} is not a manifest in JSON.") from e


def manifest(version: int | None, named_tensors: Iterable[tuple[str, Tensor]]) -> Manifest:
    """The receiver's side of a sync: what it holds, under the names that were sent.

    Args:
        version: the last one that was loaded to the end; None for weights from elsewhere.
        named_tensors: the receiver's own memory, which is only read.

    Raises ValueError if a name comes twice, TypeError for what is no pair of a name and a tensor.
    """
    named = list(named_pairs(named_tensors))
    found = digest(named).parameters
    return Manifest(version, {n: entry(t.dtype, t.shape, found[n]) for n, t in named})


def served_manifest(version: int, items: Sequence["Item"]) -> Manifest:
    """What a receiver is to hold. Computed shard by shard: collective, nothing is gathered."""
    found = sharded_digest(items).parameters
    return Manifest(version, {i.name: entry(i.dtype, i.piece.shape, found[i.name]) for i in items})


def entry(dtype: torch.dtype, shape: Iterable[int], digest: int | None) -> Entry:
    """An `Entry` from torch's own dtype and shape."""
    return Entry(str(dtype).removeprefix("torch."), tuple(shape), digest)
