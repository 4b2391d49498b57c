"""Two consecutive served checkpoints, and the masters that the second was made from."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from fc_optim.audit.classify import Evidence
from fc_optim.audit.layers import kind_of, layer_of
from fc_optim.audit.predict import FP8_BLOCK, Tally, lag_stride, predict
from fc_optim.audit.readers import open_checkpoint
from fc_optim.audit.states import open_state
from fc_optim.audit.stored import PIECE, BadCheckpoint, Stored
from fc_optim.audit.updates import first_adamw_step
from fc_optim.metrics.formulas import bf16_ulp

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass
class Export:
    """Sums over elements of S (second copy), M (its masters) and W0 (first copy)."""

    evidence: Evidence
    along: float = 0.0  # <S - W0, M - W0>
    length: float = 0.0  # |M - W0|^2
    square: float = 0.0  # of (S - M) / u(M)
    elements: int = 0

    @property
    def captured(self) -> float:
        return self.along / self.length if self.length else math.nan

    @property
    def rms_ulp(self) -> float:
        return math.sqrt(self.square / self.elements) if self.elements else math.nan

    def pool(self, other: "Export") -> None:
        for name in vars(self):
            value = getattr(self, name)
            value += getattr(other, name)
            setattr(self, name, value)

    def add(self, served: Tensor, masters: Tensor, previous: Tensor) -> None:
        self.evidence.add(served, masters, previous)
        s, m, w = served.double(), masters.double(), previous.double()
        fine = s.isfinite() & m.isfinite() & w.isfinite()
        s, m, w = s[fine], m[fine], w[fine]
        self.along += float((s - w) @ (m - w))
        self.length += float((m - w) @ (m - w))
        self.square += float((((s - m) / bf16_ulp(m)) ** 2).sum())
        self.elements += s.numel()


@dataclass
class Change:
    """One parameter in both checkpoints.

    `changed` words differ; `ones` entries are exactly 1.0 in both; `off_grid` entries of an fp32
    file are not bf16 values; `nonfinite` entries of either are NaN or Inf. `tally` is the dead
    zone at the lr, of the second checkpoint.
    """

    name: str
    kind: str
    layer: int | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    tally: Tally
    elements: int = 0
    changed: int = 0
    ones: int = 0
    off_grid: int = 0
    nonfinite: int = 0
    export: Export | None = None


@dataclass
class Comparison:
    """What `compare` found. `exports` pools the evidence by kind, and of all as "all"."""

    changes: list[Change] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)  # name: dtype
    exports: dict[str, Export] = field(default_factory=dict)


def pair_up(
    first: dict[str, Stored], second: dict[str, Stored], *, common: bool = False
) -> list[str]:
    """The names in both, in order; refuses different names and shapes."""
    odd = sorted(first.keys() ^ second.keys())
    names = [n for n in first if n in second]
    if odd and (not common or not names):
        raise BadCheckpoint(
            f"the checkpoints do not have the same tensors; {len(odd)} are in one only: "
            f"{', '.join(odd[:6])}{', ...' if len(odd) > 6 else ''}. Compare what both have with "
            "--common."
        )
    for n in names:
        if first[n].shape != second[n].shape:
            raise BadCheckpoint(f"{n!r} has shapes {first[n].shape} and {second[n].shape}.")
    return names


def compare(
    first: dict[str, Stored],
    second: dict[str, Stored],
    masters: dict[str, Stored] | None,
    lr: float,
    *,
    common: bool = False,
) -> Iterator[Comparison]:
    """Compare tensor by tensor; yields the growing result after each, for a progress bar.

    Args:
        first, second: consecutive served checkpoints.
        masters: fp32 masters of the second, for any of its tensors.
        lr: for the dead zone: one step of it up or down, as Adam's first is.
        common: leave out the tensors that only one has.

    Raises BadCheckpoint where the files do not fit each other.
    """
    names = pair_up(first, second, common=common)
    result = Comparison()
    stride = lag_stride(sum(second[n].numel for n in names))
    if masters is not None and not masters.keys() & set(names):
        some = ", ".join(sorted(masters)[:4])
        raise BadCheckpoint(f"no master has the name of a served tensor; the masters are {some}.")
    seen: set[tuple[str, int]] = set()
    for name in names:
        a, b = first[name], second[name]
        if _is_scale(name, second):
            continue
        if not (a.dtype.is_floating_point and b.dtype.is_floating_point):
            result.skipped[name] = str((b if a.dtype.is_floating_point else a).dtype)
        elif b.place is None or b.place not in seen:
            if b.place and b.numel:
                seen.add(b.place)
            change = _change(name, a, b, lr, stride)
            master = (masters or {}).get(name)
            if master is not None:
                _export(change, name, first, second, master, lr, result.exports)
            result.changes.append(change)
        yield result
    if not result.changes:
        kinds = ", ".join(sorted(set(result.skipped.values())))
        raise BadCheckpoint(
            f"every tensor is {kinds}: quantized integers have no half-ulp to compare. Give the "
            "bf16, fp16 or fp8 weights that the engine dequantizes to."
        )


def open_masters(
    path: Path, names: Mapping[str, Stored], *, trust_pickle: bool
) -> dict[str, Stored]:
    """fp32 masters from a checkpoint of weights or from a training state that has them."""
    try:
        found = open_checkpoint(path, trust_pickle=trust_pickle)
        if found.keys() & names.keys():
            return found
        some = ", ".join(sorted(found)[:4])
        reason = f"{path}: no master has the name of a served tensor; it holds {some}, ..."
    except BadCheckpoint as error:
        reason = str(error)
    try:
        slots = open_state(path, trust_pickle=trust_pickle)
    except BadCheckpoint:
        raise BadCheckpoint(reason) from None
    return {s.name: s.masters for s in slots}


def _change(name: str, a: Stored, b: Stored, lr: float, stride: int) -> Change:
    kind = kind_of(name, len(b.shape))
    if b.dtype in _FP8:
        tally = Tally()
    else:
        update = first_adamw_step(name, lr, weight_decay=0.0)
        tally = predict(name, b, update, ["bf16"], stride).tallies["bf16"]
    change = Change(name, kind, layer_of(name), b.shape, b.dtype, tally, b.numel)
    for start, stop in b.pieces():
        old, new = a.read(start, stop), b.read(start, stop)
        change.changed += int(
            (_words(old, a.dtype == b.dtype) != _words(new, a.dtype == b.dtype)).sum()
        )
        old, new = old.float(), new.float()
        change.ones += int(((old == 1) & (new == 1)).sum())
        change.nonfinite += int((~(old.isfinite() & new.isfinite())).sum())
        if b.dtype in (torch.float32, torch.float64):
            change.off_grid += int((new != new.bfloat16().float()).sum())
    return change


def _words(x: Tensor, same: bool) -> Tensor:
    """What an engine holds: the stored words, or bf16 ones of what is wider or differs."""
    if not same or x.dtype.itemsize > 2:
        x = x.bfloat16()
    return x.view(torch.int16 if x.dtype.itemsize == 2 else torch.uint8)


def _export(
    change: Change,
    name: str,
    first: dict[str, Stored],
    second: dict[str, Stored],
    master: Stored,
    lr: float,
    pools: dict[str, Export],
) -> None:
    if master.shape != change.shape:
        raise BadCheckpoint(
            f"{name!r} has shape {change.shape} served, {master.shape} among the masters."
        )
    if not master.dtype.is_floating_point:
        raise BadCheckpoint(f"the master of {name!r} is {master.dtype}.")
    served, previous = dequantized(name, second), dequantized(name, first)
    if served is None or previous is None:
        return
    export = change.export = Export(Evidence(lr=lr))
    for start, stop in served.pieces():
        export.add(*(t.read(start, stop) for t in (served, master, previous)))
    width = change.shape[-1] if len(change.shape) > 1 else max(served.numel, 1)
    rows = min(FP8_BLOCK, PIECE // max(width, 1), served.numel // max(width, 1))
    if rows:
        export.evidence.sample_fp8(
            *(t.read(0, rows * width).view(rows, width) for t in (served, master))
        )
    for pool in (change.kind, "all"):
        pools.setdefault(pool, Export(Evidence(lr=lr))).pool(export)


def _is_scale(name: str, tensors: dict[str, Stored]) -> bool:
    base = tensors.get(name.removesuffix("_inv").removesuffix("_scale"))
    return base is not None and "_scale" in name and base.dtype in _FP8


def dequantized(name: str, tensors: dict[str, Stored]) -> Stored | None:
    """An fp8 tensor times its `_scale` or `_scale_inv`; other dtypes as they are.

    One scale for the tensor, or one per 128 x 128 block. None if there is no scale.
    """
    raw = tensors[name]
    if raw.dtype not in _FP8:
        return raw
    scale = tensors.get(f"{name}_scale_inv") or tensors.get(f"{name}_scale")
    if scale is None:
        return None
    factors = scale.load().float()
    blocks = tuple(-(-n // FP8_BLOCK) for n in raw.shape)
    if factors.numel() != 1 and tuple(factors.shape) != blocks:
        return None

    def read(start: int, stop: int) -> Tensor:
        values = raw.read(start, stop).float()
        if factors.numel() == 1:
            return values * factors.flatten()
        index = torch.arange(start, stop)
        row, column = index // raw.shape[1], index % raw.shape[1]
        return values * factors[row // FP8_BLOCK, column // FP8_BLOCK]

    return Stored(raw.shape, torch.float32, read)
