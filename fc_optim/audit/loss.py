"""What one narrowing did to the values: how many changed, by how much, and by which rounding.

Both sides are at hand, so this compares each element with its two neighbours on the narrow grid;
no statistics are needed but for telling stochastic rounding from its look-alikes.
"""

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from fc_optim.audit.formats import Format

_CHUNK = 1 << 18  # elements in flight; about 30 MB of float64 temporaries
_LEVEL = -3.0  # log10: results less likely than this under stochastic rounding exclude it
_SIGMAS = 5.0  # drift beyond which a choice among neighbours is not unbiased


@dataclass(frozen=True)
class Loss:
    """Counts over the elements of one or more casts of the same dtypes; they add up.

    off_grid: values that the narrow format cannot hold, of which `nearest`, `toward_zero` and
    `neighbours` count those that went to the nearest, the smaller or either grid point next to
    them (ulp: their distance). altered: values on the grid that changed all the same.
    overflowed: finite values that became Inf or NaN. out_of_range: larger than the largest finite
    value; they count towards `changed` alone. drift and variance: of the signed errors, away from
    zero, against stochastic rounding, in ulp; log10_stochastic: the probability that it would have
    given exactly this result.
    """

    elements: int = 0
    changed: int = 0
    off_grid: int = 0
    nearest: int = 0
    toward_zero: int = 0
    neighbours: int = 0
    altered: int = 0
    out_of_range: int = 0
    overflowed: int = 0
    sum_ulp: float = 0.0
    max_ulp: float = 0.0
    drift: float = 0.0
    variance: float = 0.0
    log10_stochastic: float = 0.0

    def __add__(self, other: "Loss") -> "Loss":
        total: dict[str, Any] = {
            f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(Loss)
        }
        return Loss(**{**total, "max_ulp": max(self.max_ulp, other.max_ulp)})

    @property
    def mean_ulp(self) -> float:
        """Mean |error| over all elements, in ulp of the narrow format."""
        return self.sum_ulp / self.elements if self.elements else 0.0

    @property
    def rounding(self) -> str:
        """ "exact", "nearest", "truncation", "stochastic" or "other".

        Several joined by " or " where the elements are too few, or lie so, that more than one
        fits. "stochastic": each value went to one of its neighbours without bias.
        """
        if not self.changed and not self.off_grid:
            return "exact"
        if self.altered or self.neighbours < self.off_grid:
            return "other"
        unbiased = abs(self.drift) <= _SIGMAS * self.variance**0.5
        fits = {
            "nearest": self.nearest == self.off_grid,
            "truncation": self.toward_zero == self.off_grid,
            "stochastic": unbiased and self.log10_stochastic > _LEVEL,
        }
        if not fits["nearest"] and not fits["truncation"]:
            fits["stochastic"] = unbiased
        return " or ".join(name for name, fit in fits.items() if fit) or "other"


@torch.no_grad()
def measure(wide: Tensor, narrow: Tensor) -> Loss:
    """Compare `narrow` with the values it was made from. Equal shapes, floating dtypes.

    Copies a chunk at a time to float64 on `wide`'s device, and reads counts back from it. Raises
    ValueError if the shapes differ.
    """
    if wide.shape != narrow.shape:
        raise ValueError(f"narrow: shape {tuple(narrow.shape)}, wide has {tuple(wide.shape)}.")
    if wide.device != narrow.device and wide.device.type != "cpu":
        torch.accelerator.synchronize(wide.device)  # the cast may be a non-blocking copy
    w, n = wide.detach().reshape(-1), narrow.detach().reshape(-1)
    total = Loss()
    for at in range(0, w.numel(), _CHUNK):
        source, result = w[at : at + _CHUNK], n[at : at + _CHUNK].to(w.device)
        if torch.equal(result.to(source.dtype), source):
            total += Loss(elements=source.numel())
        else:
            total += _measure(source.double(), result.double(), narrow.dtype)
    return total


def _measure(s: Tensor, d: Tensor, dtype: torch.dtype) -> Loss:
    info = torch.finfo(dtype)
    bits = round(-torch.tensor(info.eps).log2().item())
    least = round(torch.tensor(info.tiny).log2().item())
    ulp = Format(str(dtype), bits, least, info.max).ulp(torch.where(s.isfinite(), s, 0))
    changed = (s != d) & ~(s.isnan() & d.isnan())
    inside = s.isfinite() & (s.abs() <= info.max)
    q, got = s.abs() / ulp, d * s.sign() / ulp  # exact: an ulp is a power of two
    low = q.floor()
    share = q - low  # of an ulp beyond the smaller neighbour: how likely the larger one is
    off = inside & (share > 0)
    down, up = off & (got == low), off & (got == low + 1)
    neighbour = down | up
    error = torch.where(inside & d.isfinite(), got - q, 0)
    chance = torch.where(up, share, 1 - share)[neighbour]
    return Loss(
        elements=s.numel(),
        changed=int(changed.sum()),
        off_grid=int(off.sum()),
        nearest=int((off & (got == q.round())).sum()),
        toward_zero=int(down.sum()),
        neighbours=int(neighbour.sum()),
        altered=int((changed & ~off & (inside | ~s.isfinite())).sum()),
        out_of_range=int((s.isfinite() & ~inside).sum()),
        overflowed=int((s.isfinite() & ~d.isfinite()).sum()),
        sum_ulp=float(error.abs().sum()),
        max_ulp=float(error.abs().max()),
        drift=float(error[off].sum()),
        variance=float((share * (1 - share))[off].sum()),
        log10_stochastic=float(chance.log10().sum()),
    )
