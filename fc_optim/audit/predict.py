"""What round-to-nearest would discard of one optimizer step, element by element.

An update is discarded if the copy of the moved master equals the copy of the master:
nearest(M + d) == nearest(M). The steps to cross are the least k with nearest(M + k d) !=
nearest(M), if k equal steps follow each other: the fastest that a weight can get through.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fc_optim.audit.formats import BF16, E4M3, FP16, Format
from fc_optim.audit.layers import kind_of, layer_of
from fc_optim.audit.stored import BadCheckpoint, Stored

FORMATS = ("bf16", "fp16", "fp8-tensor", "fp8-block")
FP8_BLOCK = 128  # edge of the square blocks that share a scale
LAG_STEPS = (1, 2, 5, 10, 20, 30, 50, 70, 100, 150, 200, 300, 500, 700, 1000)

_PER_OCTAVE = 32
_OCTAVES = 64
_LOWEST = -40  # log2 of the smallest update over half-ulp that the histogram tells apart
_SAMPLE = 2**18  # elements, over all tensors, that the lag is followed on

Update = Callable[[Tensor, int, int], Tensor]  # (masters, start, stop) -> the signed step


@dataclass
class Tally:
    """Counts of one tensor, or of several added up. `dead` is |d| < u / 2 (the dead zone).

    `steps` and `ratio` are histograms of log2(steps to cross) and of log2(|d| / half-ulp), 32
    bins per octave; their medians are within 2 %. `discarded` includes the `still` elements,
    which have no update at all; `nonfinite` ones are counted nowhere else.
    """

    elements: int = 0
    discarded: int = 0
    dead: int = 0
    still: int = 0
    nonfinite: int = 0
    steps: Tensor = field(default_factory=lambda: torch.zeros(_PER_OCTAVE * _OCTAVES + 1))
    ratio: Tensor = field(default_factory=lambda: torch.zeros(_PER_OCTAVE * _OCTAVES))
    along: Tensor = field(default_factory=lambda: torch.zeros(len(LAG_STEPS), dtype=torch.float64))
    length: float = 0.0

    def __iadd__(self, other: "Tally") -> "Tally":
        for name in vars(self):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        return self

    @property
    def share(self) -> float:
        return self.discarded / self.elements if self.elements else math.nan

    @property
    def dead_share(self) -> float:
        return self.dead / self.elements if self.elements else math.nan

    @property
    def median_steps(self) -> float:
        """Inf if most elements have no update, NaN without elements."""
        at = _median_bin(self.steps)
        if at is None:
            return math.nan
        never = at == len(self.steps) - 1
        return math.inf if never else float(round(2 ** ((at + 0.5) / _PER_OCTAVE)))

    @property
    def median_ratio(self) -> float:
        """Of |d| / half-ulp over the elements that have an update."""
        at = _median_bin(self.ratio)
        return math.nan if at is None else 2 ** ((at + 0.5) / _PER_OCTAVE + _LOWEST)

    def lag(self) -> list[tuple[int, float]]:
        """(k, steps that the copy is behind after k equal steps), from the sample.

        k (1 - captured), captured = <S_k - S_0, M_k - M_0> / |M_k - M_0|^2, averaged over half an
        octave of k. Meaningful where masters start on the grid.
        """
        if not self.length:
            return []
        got = (self.along / self.length).tolist()
        return [(k, max(0.0, k * (1 - c))) for k, c in zip(LAG_STEPS, got, strict=True)]

    def unmoved(self) -> list[tuple[int, float]]:
        """(k, share of the weights whose copy has not changed after k equal steps), to 4096."""
        moved = self.steps.double().cumsum(0) / max(self.elements, 1)
        ks = sorted({round(2 ** (j / 4)) for j in range(49)})
        return [(k, 1 - float(moved[int(math.log2(k) * _PER_OCTAVE + 1e-9)])) for k in ks]

    def histogram(self) -> list[tuple[int, int]]:
        """(log2 of the lower edge, elements) of |d| / half-ulp, per octave, without empty ends."""
        octaves = self.ratio.view(-1, _PER_OCTAVE).sum(1)
        used = octaves.nonzero().flatten().tolist()
        ends = range(used[0], used[-1] + 1) if used else ()
        return [(_LOWEST + i, int(octaves[i])) for i in ends]


def _median_bin(histogram: Tensor) -> int | None:
    counts = histogram.double().cumsum(0)
    if not counts[-1]:
        return None
    return int(torch.searchsorted(counts, counts[-1] / 2))


@dataclass(frozen=True)
class Row:
    """One parameter: its tallies by format. FP8 formats only where engines use them."""

    name: str
    kind: str
    layer: int | None
    shape: tuple[int, ...]
    tallies: dict[str, Tally]


def predict(name: str, masters: Stored, update: Update, formats: Iterable[str], stride: int) -> Row:
    """Tally one parameter, piece by piece.

    Args:
        masters: fp32 masters, or the weights that a run starts from.
        update: the signed step of elements [start, stop) whose masters are given (float64).
        formats: of `FORMATS`.
        stride: every how many elements the lag is followed.
    """
    if not masters.dtype.is_floating_point:
        raise BadCheckpoint(f"{name!r} is {masters.dtype}: quantized weights have no half-ulp.")
    kind = kind_of(name, len(masters.shape))
    wanted = [f for f in formats if not f.startswith("fp8") or _in_fp8(kind, masters.shape)]
    scales = _fp8_scales(masters) if any(f.startswith("fp8") for f in wanted) else None
    tallies = {f: Tally() for f in wanted}
    for start, stop in masters.pieces():
        values = masters.read(start, stop).double()
        steps = update(values, start, stop)
        finite = values.isfinite() & steps.isfinite()
        for f, tally in tallies.items():
            scale = _scale(f, scales, masters.shape, start, stop)
            tally += _tally(_FORMAT[f], values / scale, steps / scale, finite, stride)
    return Row(name, kind, layer_of(name), masters.shape, tallies)


_FORMAT: dict[str, Format] = dict(zip(FORMATS, (BF16, FP16, E4M3, E4M3), strict=True))


def lag_stride(elements: int) -> int:
    """For `predict`: over all tensors of a model together, one sample of bounded size."""
    return max(1, elements // _SAMPLE)


def _tally(fmt: Format, x: Tensor, step: Tensor, finite: Tensor, stride: int) -> Tally:
    bad = int((~finite).sum())
    if bad:
        x, step = x[finite], step[finite]
    tally = Tally(elements=x.numel(), nonfinite=bad)
    if not x.numel():
        return tally
    k = fmt.steps_to_cross(x, step)
    tally.discarded = int((k > 1).sum())
    never = len(tally.steps) - 1
    bins = torch.where(k.isinf(), never, (k.log2() * _PER_OCTAVE + 1e-9).clamp(max=never - 1))
    tally.steps = torch.bincount(bins.long(), minlength=never + 1).double()
    moving = step != 0
    tally.still = x.numel() - int(moving.sum())
    ratio = (step.abs() / (fmt.ulp(x) / 2))[moving].log2() - _LOWEST
    tally.dead = tally.still + int((ratio < -_LOWEST).sum())
    bins = (ratio * _PER_OCTAVE).clamp(0, len(tally.ratio) - 1)
    tally.ratio = torch.bincount(bins.long(), minlength=len(tally.ratio)).double()
    x, step = x[::stride], step[::stride]
    tally.length = float(step @ step)
    for i, taken in enumerate(LAG_STEPS):
        walk = torch.tensor(_around(taken), dtype=torch.float64)
        served = fmt.nearest(x + walk[:, None] * step) - fmt.nearest(x)
        tally.along[i] = (served @ step / walk).mean()
    return tally


def _around(k: int) -> list[float]:
    """k, or several values within half an octave of it: a coherent walk at one speed crosses
    whole binades at once, which no training run does."""
    return [1.0] if k == 1 else [k * 2 ** (j / 16) for j in range(-7, 8, 2)]


def _in_fp8(kind: str, shape: tuple[int, ...]) -> bool:
    """Engines quantize the matrices of linear layers; the rest stays bf16."""
    return len(shape) == 2 and kind in ("attention", "mlp", "other")


def _fp8_scales(masters: Stored) -> Tensor:
    """Largest magnitude of each 128 x 128 block over the format's. `[blocks, blocks]`, float64."""
    rows, columns = masters.shape
    shape = (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
    largest = torch.zeros(shape[0] * shape[1], dtype=torch.float64)
    for start, stop in masters.pieces():
        values = masters.read(start, stop).double().abs().nan_to_num(0, 0, 0)
        largest.scatter_reduce_(0, _block(masters.shape, start, stop), values, "amax")
    return largest.view(shape) / E4M3.largest


def _block(shape: tuple[int, ...], start: int, stop: int) -> Tensor:
    columns = shape[1]
    index = torch.arange(start, stop)
    row, column = index // columns, index % columns
    return (row // FP8_BLOCK) * -(-columns // FP8_BLOCK) + column // FP8_BLOCK


def _scale(
    fmt: str, scales: Tensor | None, shape: tuple[int, ...], start: int, stop: int
) -> Tensor | float:
    """The scale stays as it was: the step does not move the block's largest element."""
    if scales is None or not fmt.startswith("fp8"):
        return 1.0
    if fmt == "fp8-tensor":
        return float(scales.max()) or 1.0
    found = scales.flatten()[_block(shape, start, stop)]
    return torch.where(found > 0, found, 1.0)
