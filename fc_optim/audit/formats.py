"""Number formats of a served copy: where their grid points lie and how far a master is from the
value at which round-to-nearest would change its copy.

A format is given by its significand and exponent range (IEEE 754; FP8 e4m3 as in Micikevicius et
al. 2022, "FP8 formats for deep learning", without infinities). All arithmetic is in float64, in
which halves of ulps, ties and scaled values are exact.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Format:
    """A binary floating-point format.

    Attributes:
        name: as the reports call it.
        bits: stored bits of the significand.
        least: exponent of the smallest normal value.
        largest: largest finite value; rounding saturates there.
    """

    name: str
    bits: int
    least: int
    largest: float

    def ulp(self, x: Tensor) -> Tensor:
        """Spacing of the grid at |x|, away from zero. float64."""
        biased = (x.double().view(torch.int64) >> 52) & 0x7FF  # float64's exponent plus 1023
        return ((biased.clamp(min=self.least + 1023) - self.bits) << 52).view(torch.float64)

    def nearest(self, x: Tensor) -> Tensor:
        """Round to nearest, ties to even, saturating. float64."""
        ulp = self.ulp(x)
        return (torch.round(x.double() / ulp) * ulp).clamp(-self.largest, self.largest)

    def toward_zero(self, x: Tensor) -> Tensor:
        ulp = self.ulp(x)
        return (torch.trunc(x.double() / ulp) * ulp).clamp(-self.largest, self.largest)

    def steps_to_cross(self, x: Tensor, step: Tensor) -> Tensor:
        """Least k >= 1 such that nearest(x + k step) != nearest(x), for signed steps. float64.

        Exact in real arithmetic; Inf where the step is 0. The distance to the boundary is half an
        ulp of the copy on that side: below a power of two the spacing halves.
        """
        copy = self.nearest(x)
        ulp = self.ulp(copy)
        even = (copy / ulp).long() & 1 == 0
        inward = copy * step < 0
        binade = (copy.view(torch.int64) << 12 == 0) & (copy.abs() > 2.0**self.least)
        half = torch.where(inward & binade, ulp / 4, ulp / 2)
        distance = half + torch.sign(step) * (copy - x.double())
        ratio = distance / step.double().abs()
        # A tie goes to the even neighbour: an even copy still holds exactly at its boundary.
        k = torch.where(even, torch.floor(ratio) + 1, torch.ceil(ratio)).clamp(min=1)
        return torch.where(step == 0, torch.inf, k)


BF16 = Format("bf16", 7, -126, (2 - 2**-7) * 2.0**127)
FP16 = Format("fp16", 10, -14, 65504.0)
E4M3 = Format("fp8 e4m3", 3, -6, 448.0)
FP8_BLOCK = 128  # edge of the square blocks that share a scale
