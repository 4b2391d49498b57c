"""How vLLM names and fuses what a checkpoint has apart, and the checksums that it reports.

vLLM keeps q, k and v of a layer in one parameter, and gate and up in another. Both sides of a
transfer use this file; it needs no vLLM.
"""

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from fc_optim.sync.manifests import Entry, Manifest, entry

T = TypeVar("T")

# What vLLM's dense decoders (Llama, Qwen, Mistral, Gemma, ...) fuse: `packed_modules_mapping`.
PACKED: Mapping[str, Sequence[str]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
VOCABULARY = 64  # vLLM pads vocabularies to multiples of it, with zeros
_EMPTY = hashlib.sha256().hexdigest()


@dataclass(frozen=True)
class Layout:
    """The parameters of a running model, and which names of a checkpoint make up each of them.

    runtime: the names that the engine computes with. packed: fused module -> its parts in order.
    """

    runtime: Collection[str]
    packed: Mapping[str, Sequence[str]] = field(default_factory=lambda: PACKED)

    def place(self, name: str) -> tuple[str, list[str]]:
        """The runtime parameter that `name` is in, and all checkpoint names in it, in order.

        Raises ValueError if there is none.
        """
        if name in self.runtime:
            return name, [name]
        head, _, leaf = name.rpartition(".")
        prefix, _, module = head.rpartition(".")
        dot = "." if prefix else ""
        for fused, parts in self.packed.items():
            runtime = f"{prefix}{dot}{fused}.{leaf}"
            if module in parts and runtime in self.runtime:
                return runtime, [f"{prefix}{dot}{part}.{leaf}" for part in parts]
        raise ValueError(
            f"weights: the engine has no parameter for {name!r}. Dense, unquantised decoders with "
            "one tensor per matrix are supported; experts, MLA and quantised layers are not."
        )

    def whole_groups(
        self, items: Iterable[tuple[str, T]], keep: Callable[[T], T]
    ) -> Iterator[list[tuple[str, T]]]:
        """Bring together what is fused: each list is one whole runtime parameter, in order.

        `keep` is applied to what has to wait for others. Raises ValueError at the end, naming what
        was missing, if a fused parameter stayed incomplete: no part of it was given out.
        """
        waiting: dict[str, dict[str, T]] = {}
        for name, item in items:
            runtime, parts = self.place(name)
            here = waiting.setdefault(runtime, {})
            here[name] = item
            if len(here) == len(parts):
                yield [(part, here[part]) for part in parts]
                del waiting[runtime]
            else:
                here[name] = keep(item)
        for here in waiting.values():
            self.check_whole(here)

    def check_whole(self, names: Collection[str]) -> None:
        """Raise ValueError if `names` have a part of a fused parameter without the others."""
        for name in names:
            runtime, parts = self.place(name)
            missing = [part for part in parts if part not in names]
            if missing:
                raise ValueError(
                    f"weights: {name!r} comes without {', '.join(missing)}, which vLLM keeps in "
                    f"the same parameter, {runtime}: a part would damage the rest. Serve all of "
                    "the model: build the optimizer from its parameters and bind(model)."
                )

    def check_covered(self, names: Iterable[str]) -> None:
        """Raise ValueError if the engine has parameters beside those of `names`."""
        left = set(self.runtime) - {self.place(name)[0] for name in names}
        if left:
            raise ValueError(
                f"weights: nothing is sent for {', '.join(sorted(left)[:3])}, which the engine "
                "would keep as it was started. Serve all of the model: bind(model)."
            )


def check_shapes(
    layout: Layout, sent: Mapping[str, Sequence[int]], have: Mapping[str, Sequence[int]]
) -> None:
    """Raise ValueError if tensors do not make up the runtime parameters that they are parts of.

    sent: shapes by checkpoint names. have: shapes by runtime names.
    """
    for name in sent:
        runtime, parts = layout.place(name)
        shapes = [tuple(sent[part]) for part in parts]
        rows, want = sum(s[0] for s in shapes), tuple(have[runtime])
        fits = want[0] in (rows, _padded(rows) if _is_vocabulary(runtime) else rows)
        if not fits or any(s[1:] != want[1:] for s in shapes):
            text = ", ".join(f"{p} {s}" for p, s in zip(parts, shapes, strict=True))
            raise ValueError(f"weights: {text} do not fit the engine's {runtime} {want}.")


def emptied(name: str) -> str:
    """The text of the error for a parameter that a CPU kernel has repacked."""
    return (
        f"engine: {name} is empty: vLLM has repacked it for a CPU kernel (oneDNN, AMX, zentorch), "
        "where it can neither be updated in place nor read. Call fc_optim.integrations.vllm."
        "keep_plain_weights() before the LLM is made; for a server set FC_OPTIM_VLLM_PLAIN=1 in "
        "its environment."
    )


def _padded(rows: int) -> int:
    return -(-rows // VOCABULARY) * VOCABULARY


def _is_vocabulary(runtime: str) -> bool:
    return "embed" in runtime or "lm_head" in runtime


# ---- vLLM's checksums: sha256 over the bytes of a whole runtime parameter


class Ledger:
    """What the checksums of two versions mean: sha256 -> entries by checkpoint names.

    They are the newest, and the last before it of which `loaded()` was called.

    They cannot be told from digests, so each weight is hashed on its way to the engine. A fused
    parameter of which a part is old and a part new has none of the known checksums.
    """

    def __init__(self) -> None:
        self._now: dict[str, dict[str, dict[str, Entry]]] = {}
        self._before: dict[str, dict[str, dict[str, Entry]]] = {}
        self._casts: dict[str, dict[str, dict[str, Entry]]] = {}  # of the newest
        self._loaded = False

    def record(
        self, layout: Layout, weights: Iterable[tuple[str, Tensor]], sent: Manifest
    ) -> Iterator[tuple[str, Tensor]]:
        """Pass the weights of a new version through, fused ones together."""
        if self._loaded:
            self._before, self._loaded = self._now, False
        self._now, self._casts = {}, {}
        for group in layout.whole_groups(weights, _clone):
            runtime, parts = layout.place(group[0][0])
            meaning = {part: sent.parameters[part] for part in parts}
            tensors = [t.detach().cpu() for _, t in group]
            self._now[runtime] = dict.fromkeys(_checksums(runtime, tensors), meaning)
            if tensors[0].ndim == 1:  # small, and enough to tell the dtype of an engine
                self._casts[runtime] = _casts(runtime, tensors, meaning)
            yield from group

    def loaded(self) -> None:
        """The engine took the newest version."""
        self._loaded = True

    def translate(self, checksums: Mapping[str, Collection[str]]) -> dict[str, Entry]:
        """Entries by checkpoint names; without a digest where a checksum is not known.

        checksums: runtime name -> those of its replicas. Of several, one that is not of the newest
        version counts.
        """
        found: dict[str, Entry] = {}
        for runtime, known in self._now.items():
            replicas = checksums.get(runtime, ())
            newest = next(iter(known.values()))
            unknown = {part: e._replace(digest=None) for part, e in newest.items()}
            others = self._before.get(runtime, {}) | self._casts.get(runtime, {})
            read = [known.get(c) or others.get(c) or unknown for c in replicas]
            found |= next((r for r in read if r != newest), newest if read else {})
        return found

    def holds(self, checksums: Mapping[str, Collection[str]]) -> str | None:
        """Which version all replicas have: "new", "old", or None for neither or a mixture."""
        for version, known in (("new", self._now), ("old", self._before)):
            if known and all(c in known[r] for r in known for c in checksums.get(r, [""])):
                return version
        return None


def read_checksums(answer: Mapping[str, str]) -> dict[str, set[str]]:
    """What `weight_checker` answers, by runtime names: a checksum for each that is different.

    Raises NotImplementedError for an engine that is split by tensor parallelism, or that has
    repacked its weights.
    """
    found: dict[str, set[str]] = {}
    for key, checksum in answer.items():
        *ranks, name = key.split(":", 4)
        if "tp0" not in ranks:
            raise NotImplementedError(
                f"engine: {key}: what an engine holds that is split by tensor parallelism cannot "
                "be told yet. Start it with --tensor-parallel-size 1; replicas are supported."
            )
        if checksum == _EMPTY:
            raise NotImplementedError(emptied(name))
        found.setdefault(name, set()).add(checksum)
    return found


def _checksums(runtime: str, tensors: Sequence[Tensor]) -> list[str]:
    """Of the tensors one after another; of a vocabulary, also with its padding."""
    sha = hashlib.sha256()
    for t in tensors:
        sha.update(t.contiguous().view(-1).view(torch.uint8).numpy().data)
    found = [sha.hexdigest()]
    rows = tensors[0].shape[0] if tensors[0].ndim else 0
    if _is_vocabulary(runtime) and _padded(rows) != rows:
        sha.update(bytes((_padded(rows) - rows) * tensors[0][0].nbytes))
        found.append(sha.hexdigest())
    return found


def _casts(
    runtime: str, tensors: Sequence[Tensor], meaning: Mapping[str, Entry]
) -> dict[str, dict[str, Entry]]:
    """What the checksums mean of an engine that computes in another dtype."""
    found: dict[str, dict[str, Entry]] = {}
    for dtype in {torch.float16, torch.bfloat16, torch.float32} - {tensors[0].dtype}:
        cast = {part: entry(dtype, e.shape, None) for part, e in meaning.items()}
        found |= dict.fromkeys(_checksums(runtime, [t.to(dtype) for t in tensors]), cast)
    return found


def _clone(t: Tensor) -> Tensor:
    return t.detach().clone()
