"""How a served copy was rounded: a statistical test of the copy S against its fp32 masters M.

With f the place of M between its two neighbours in the copy's format (0 at the one nearer zero, 1
at the other) and "up" the event that S is the outer one: round-to-nearest gives up = [f > 1/2],
truncation never up, stochastic rounding P(up | f) = f.

Error rates, for elements that round independently:

- round-to-nearest and truncation must fit every element off the grid (ties excepted), so a true one
  is never missed; stochastic rounding passes for one with probability below e**-20 = 2e-9.
- stochastic rounding is tested by chi-square over 64 bins of f at the level 1e-6: it is missed that
  often, and what deviates from it by more than a few standard errors in some bin does not pass.
- the masters of a neighbouring step, of which a share e rounds otherwise, pass for the right ones
  with probability (1 - e)**n.
- fresh and held dither are told apart by the words that changed since the previous copy: within
  10 % (and 5 sigma) of what redrawing changes, sum 2 f (1 - f), or less than half of it.

Needs: 1,000 elements off the grid; for fresh and held a previous copy too. Masters on the grid
round the same way under every rule and tell nothing.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fc_optim.audit.formats import BF16, FP16, Format

LEAST_ELEMENTS = 1000  # off the grid, finite
_BINS = 64
_NEAR = 1 / 8  # ulp: masters this near to the grid are counted as near
_NEAR_SHARE = 0.9  # spread evenly it would be 2 * _NEAR
_INFORMATION = 20.0  # nats between round-to-nearest and stochastic
_Z = 4.75  # normal quantile at 1e-6

RULES = {
    "rtn": "round-to-nearest",
    "truncation": "truncation (toward zero)",
    "stochastic": "stochastic rounding",
    "stochastic_fresh": "stochastic rounding, new bits every time",
    "stochastic_held": "stochastic rounding, held bits",
    "fp16": "fp16, round-to-nearest",
    "fp16_bf16": "fp16, then bf16, both round-to-nearest",
    "fp8": "fp8 e4m3, round-to-nearest",
    "fp8_other": "fp8 e4m3, not round-to-nearest",
    "exact": "not rounded: the copy equals the masters",
    "wrong_master": "not a rounding of these masters",
    "cannot_tell": "cannot tell",
}


@dataclass(frozen=True)
class Verdict:
    """`rule` is a key of `RULES`; `regridded` says that the masters lie near the grid, as they do
    when they are rebuilt from the copy every step, and in a run's first step from bf16 weights,
    which looks the same; `detail` is the evidence in words."""

    rule: str
    regridded: bool
    elements: int
    detail: str

    def __str__(self) -> str:
        near = "; masters re-gridded or at a run's first step" if self.regridded else ""
        return RULES[self.rule] + near


@dataclass
class _Fit:
    """Counts of one format over finite elements. Tensors have one entry per bin of f."""

    off: int = 0  # off the grid
    outside: int = 0  # S is neither neighbour
    rtn_misses: int = 0
    ups: int = 0
    near: int = 0
    information: float = 0.0
    changed: int = 0
    redrawn: float = 0.0  # expected changes of a redraw
    redrawn_variance: float = 0.0
    up: Tensor = field(default_factory=lambda: torch.zeros(_BINS, dtype=torch.float64))
    mean: Tensor = field(default_factory=lambda: torch.zeros(_BINS, dtype=torch.float64))
    variance: Tensor = field(default_factory=lambda: torch.zeros(_BINS, dtype=torch.float64))

    def __iadd__(self, other: "_Fit") -> "_Fit":
        for name in vars(self):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        return self

    def add(self, fmt: Format, s: Tensor, m: Tensor, previous: Tensor | None) -> None:
        low = fmt.toward_zero(m)
        ulp = fmt.ulp(low)
        f = (m - low).abs() / ulp
        high = low + torch.copysign(ulp, m)
        self.near += int((torch.minimum(f, 1 - f) < _NEAR).sum())
        off = f > 0
        s_off, f, low, high = s[off], f[off], low[off], high[off]
        up = s_off == high
        inside = up | (s_off == low)
        self.off += f.numel()
        self.outside += int((~inside).sum())
        wrong = inside & (up != (f > 0.5)) & (f != 0.5)
        self.rtn_misses += int(wrong.sum())
        self.ups += int(up.sum())
        self.information -= float(torch.maximum(f, 1 - f).log().sum())
        bins = (f * _BINS).long().clamp(max=_BINS - 1)
        spread = f * (1 - f)
        for total, values in ((self.up, up.double()), (self.mean, f), (self.variance, spread)):
            total += torch.bincount(bins, values, minlength=_BINS)
        if previous is not None:
            self.changed += int((s_off != previous[off]).sum())
            p = 2 * spread
            self.redrawn += float(p.sum())
            self.redrawn_variance += float((p * (1 - p)).sum())

    def is_stochastic(self) -> bool:
        used = self.variance >= 5
        degrees = int(used.sum())
        if self.outside or not degrees:
            return False
        z2 = (self.up[used] - self.mean[used]) ** 2 / self.variance[used]
        limit = degrees * (1 - 2 / (9 * degrees) + _Z * math.sqrt(2 / (9 * degrees))) ** 3
        return float(z2.sum()) < limit  # Wilson and Hilferty's quantile of chi-square


@dataclass
class Evidence:
    """Accumulates pieces of one tensor or of many; `verdict()` at any time."""

    elements: int = 0
    nonfinite: int = 0
    exact: int = 0
    fits: int = 0  # in pieces that bf16 to nearest explains: not looked at in fp16
    double_misses: int = 0  # of fp16, then bf16, in the other pieces
    one_step: int = 0  # |M - previous copy| <= 3 lr
    with_previous: bool = False
    lr: float | None = None
    bf16: _Fit = field(default_factory=_Fit)
    fp16: _Fit = field(default_factory=_Fit)
    fp8: list[tuple[int, int]] = field(default_factory=list)  # (elements, nearest) of samples

    def add(self, served: Tensor, masters: Tensor, previous: Tensor | None = None) -> None:
        """A piece: values of the copy, of the masters and of the previous copy, any float dtype.

        Only finite elements count.
        """
        s, m = served.double().flatten(), masters.double().flatten()
        p = None if previous is None else previous.double().flatten()
        fine = s.isfinite() & m.isfinite()
        fine = fine if p is None else fine & p.isfinite()
        if not fine.all():
            self.nonfinite += int((~fine).sum())
            s, m = s[fine], m[fine]
            p = None if p is None else p[fine]
        self.elements += s.numel()
        self.exact += int((s == m).sum())
        here = _Fit()
        here.add(BF16, s, m, p)
        self.bf16 += here
        if here.outside or here.rtn_misses:
            self.fp16.add(FP16, s, m, None)
            self.double_misses += int((s != BF16.nearest(FP16.nearest(m))).sum())
        else:
            self.fits += s.numel()
        if p is not None:
            self.with_previous = True
            if self.lr is not None:
                self.one_step += int(((m - p).abs() <= 3 * self.lr).sum())

    def __iadd__(self, other: "Evidence") -> "Evidence":
        """Pool another tensor's evidence, seen at the same lr."""
        for name in vars(self).keys() - {"lr", "with_previous"}:
            value = getattr(self, name)
            value += getattr(other, name)
            setattr(self, name, value)
        self.with_previous |= other.with_previous
        return self

    def sample_fp8(self, served: Tensor, masters: Tensor) -> None:
        """Look at whole rows of a matrix (or a vector) for a copy of 3 bits of significand."""
        found = fp8_fit(served, masters)
        if found is not None:
            self.fp8.append(found)

    def verdict(self) -> Verdict:
        b = self.bf16
        if self.elements < LEAST_ELEMENTS:
            return self._say(
                "cannot_tell", f"{self.elements} finite elements; {LEAST_ELEMENTS} are needed"
            )
        if b.off < LEAST_ELEMENTS:
            return self._on_the_grid()
        if self.exact == self.elements:
            return self._say("exact", "every element is equal: nothing was rounded yet")
        if not b.outside and b.information < _INFORMATION:
            return self._say("cannot_tell", "masters too near the grid: too few could round up")
        if not b.outside and not b.rtn_misses:
            return self._say("rtn", f"{b.off} elements off the grid, no miss")
        if not b.outside and not b.ups:
            return self._say("truncation", f"{b.off} elements off the grid, none moved away")
        if b.is_stochastic():
            return self._stochastic()
        return self._other_format() or self._wrong()

    def _say(self, rule: str, detail: str) -> Verdict:
        return Verdict(rule, self._regridded(rule), self.elements, detail)

    def _regridded(self, rule: str) -> bool:
        if not rule.startswith(("rtn", "truncation", "stochastic")):
            return False
        near = self.bf16.near >= _NEAR_SHARE * self.elements
        far_from_previous = (
            self.with_previous and self.lr is not None and self.one_step < 0.99 * self.elements
        )
        return near and not far_from_previous

    def _on_the_grid(self) -> Verdict:
        share = self.exact / self.elements
        if share < 0.5:
            return self._say(
                "wrong_master",
                f"the masters are bf16 values and {1 - share:.1%} of them differ from the copy",
            )
        text = (
            f"{self.elements - self.bf16.off} of {self.elements} masters lie on the bf16 grid "
            "(re-gridded, or not trained yet): every rounding leaves them alone"
        )
        return self._say("cannot_tell", text)

    def _stochastic(self) -> Verdict:
        b = self.bf16
        fit = f"P(up | f) = f over {b.off} elements"
        if not self.with_previous:
            return self._say("stochastic", fit + "; fresh or held needs the previous copy")
        if b.redrawn < 100:
            return self._say("stochastic", fit + "; too near the grid to tell fresh from held")
        ratio = b.changed / b.redrawn
        seen = f"{fit}; {b.changed} words changed, a redraw changes {b.redrawn:.0f}"
        slack = 0.1 * b.redrawn + 5 * math.sqrt(b.redrawn_variance)
        if abs(b.changed - b.redrawn) <= slack:
            return self._say("stochastic_fresh", seen)
        if ratio < 0.5:
            return self._say("stochastic_held", seen + " (or no step or sync lies between)")
        return self._say("stochastic", seen + ": neither fresh nor held, too far apart")

    def _other_format(self) -> Verdict | None:
        h = self.fp16
        if not self.fits and h.off >= LEAST_ELEMENTS and not h.outside and not h.rtn_misses:
            return self._say("fp16", f"{h.off} elements off the fp16 grid, no miss")
        if not self.fits and not self.double_misses:
            return self._say("fp16_bf16", "no miss against fp16 and then bf16")
        sampled = sum(n for n, _ in self.fp8)
        if sampled >= LEAST_ELEMENTS:
            hits = sum(hit for _, hit in self.fp8)
            text = f"{hits} of {sampled} sampled elements are the nearest fp8 value"
            return self._say("fp8" if hits >= 0.9 * sampled else "fp8_other", text)
        return None

    def _wrong(self) -> Verdict:
        """Not a rule that fits; say what comes near, since a step's mismatch is a common cause."""
        b = self.bf16
        outside = b.outside / b.off
        misses = (b.rtn_misses + b.outside) / b.off
        counted = b.variance >= 5
        gap = (b.up - b.mean)[counted].abs().sum() / max(b.off, 1)
        if misses < 0.1:
            text = f"nearest but for {misses:.2%} of the elements: masters of another step"
        elif outside < 0.1 and gap < 0.05:
            text = f"stochastic but for {outside:.2%} of the elements: masters of another step"
        else:
            text = f"{outside:.1%} of the copy is neither neighbour of its master"
        return self._say("wrong_master", text)


def fp8_fit(served: Tensor, masters: Tensor) -> tuple[int, int] | None:
    """(elements looked at, how many are nearest) if the copy has 3 bits of significand.

    Whatever the scale: one per tensor, per 128 x 128 block, or per 128 elements of a row. A scale
    only shifts the grid, so the largest value of a tile is one of the 8 of its binade and gives 8
    scales to try; bf16 after dequantization is allowed for. None if no scale fits 99 %.
    """
    s = served.double().reshape(-1, served.shape[-1]) if served.ndim else served.double().view(1, 1)
    m = masters.double().reshape(s.shape)
    for height, width in ((s.shape[0], s.shape[1]), (128, 128), (1, 128)):
        pairs = zip(_tiles(s, height, width), _tiles(m, height, width), strict=True)
        found = [_tile(a, b) for a, b in pairs]
        looked, fits, hits = (sum(counts) for counts in zip(*found, strict=True))
        if looked >= LEAST_ELEMENTS and fits >= 0.99 * looked:
            return looked, hits
    return None


def _tiles(x: Tensor, height: int, width: int) -> list[Tensor]:
    """The first 64 tiles, row by row."""
    rows = x[: 64 * height].split(height)
    return [t.flatten() for r in rows for t in r.split(width, 1)][:64]


def _tile(s: Tensor, m: Tensor) -> tuple[int, int, int]:
    """(normal elements, on the grid of the best scale, nearest to their master on it)."""
    largest = float(s.abs().max()) if s.numel() else 0.0
    keep = s.isfinite() & m.isfinite() & (s.abs() > largest * 2.0**-12) & (s != 0)
    s, m = s[keep], m[keep]
    best = (0, 0, 0)
    if not s.numel() or not math.isfinite(largest):
        return best
    for eighths in range(8, 16):
        scale = largest / eighths
        for _ in range(2):  # the largest value was rounded too: fit the scale to all of them
            grid = _three_bits(s / scale)
            scale *= float((s / scale / grid).median())
        grid = _three_bits(s / scale)
        on = (grid - s / scale).abs() <= 1.25 * 2.0**-8 * grid.abs()
        nearest = _three_bits(m / scale) == grid
        found = (s.numel(), int(on.sum()), int((nearest & on).sum()))
        best = max(best, found, key=lambda b: b[1])
    return best


def _three_bits(x: Tensor) -> Tensor:
    exponent = torch.frexp(x)[1]
    ulp = torch.ldexp(torch.ones_like(x), exponent - 4)
    return torch.round(x / ulp) * ulp
