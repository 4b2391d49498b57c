"""What a rollout engine receives of the optimizer's movement, in figures. One definition each.

M_t are the fp32 masters after step t, S_t the served bf16 weights, W0 = S_0, and u(x) the bf16 ulp
at |x| (the distance to the next value away from zero). Weights are given as a tensor or as a
mapping of named tensors; means are over all elements together, sums are in float64.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fc_optim.kernels.reference import cast

Weights = Tensor | Mapping[str, Tensor]

_SMALLEST_ULP = 2.0**-133  # of bf16's subnormals


def bf16_ulp(x: Tensor) -> Tensor:
    """u(x): the spacing of bf16 values at |x|, away from zero. float64, shape of `x`.

    2**(floor(log2 |x|) - 7) for normal values, 2**-133 for subnormals and zero, NaN for NaN and
    Inf.
    """
    _, exponent = torch.frexp(x.double())
    ulp = torch.ldexp(torch.ones_like(x, dtype=torch.float64), exponent - 8)
    ulp = ulp.clamp(min=_SMALLEST_ULP)
    return torch.where(torch.isfinite(x), torch.where(x == 0, _SMALLEST_ULP, ulp), torch.nan)


def changed_ratio(served: Weights, previous: Weights) -> float:
    """mean[bits(S_t) != bits(S_{t-1})]: the share of bf16 words that a sync has to send."""
    changed = total = 0
    for s, p in _pairs(served, previous):
        changed += int((_bf16_words(s) != _bf16_words(p)).sum())
        total += s.numel()
    return changed / total


def dead_zone_fraction(masters: Weights, previous: Weights, rule: str = "exact") -> float:
    """mean[|M_t - M_{t-1}| < threshold]: updates that round-to-nearest hides from a grid weight.

    rule "exact": threshold u(M_{t-1}) / 2. rule "paper": |M_{t-1}| / 256, Fair Cast's estimate, a
    lower bound of it. It is a property of the update, whatever the rounding of the export.
    """
    if rule not in ("exact", "paper"):
        raise ValueError(f"rule: {rule!r} is neither 'exact' nor 'paper'.")
    dead = total = 0
    for m, p in _pairs(masters, previous):
        threshold = bf16_ulp(p) / 2 if rule == "exact" else p.double().abs() / 256
        dead += int(((m.double() - p.double()).abs() < threshold).sum())
        total += m.numel()
    return dead / total


def update_half_ulp(masters: Weights, previous: Weights) -> float:
    """median[|M_t - M_{t-1}| / (u(M_{t-1}) / 2)]: the regime a run is in.

    Well under 1, round-to-nearest hides most updates; Fair Cast's experiments are at about 0.016.
    """
    ratios = [
        ((m.double() - p.double()).abs() / (bf16_ulp(p) / 2)).flatten()
        for m, p in _pairs(masters, previous)
    ]
    return float(torch.cat([r.cpu() for r in ratios]).median())


def captured(served: Weights, masters: Weights, start: Weights) -> float:
    """<S_t - W0, M_t - W0> / |M_t - W0|^2: the share of the movement that is served.

    1 means unbiased, 0 that nothing arrived. NaN while the masters have not moved.
    """
    along, length = _projections(served, masters, start)
    return along / length if length else float("nan")


def export_rms_ulp(served: Weights, masters: Weights) -> float:
    """rms((S - M) / u(M)): the noise of the export. 0.29 for round-to-nearest, 0.41 for stochastic
    rounding of values spread evenly between grid points (sqrt(1/12), sqrt(1/6))."""
    square = total = 0.0
    for s, m in _pairs(served, masters):
        square += float((((s.double() - m.double()) / bf16_ulp(m)) ** 2).sum())
        total += s.numel()
    return (square / total) ** 0.5


@dataclass(frozen=True)
class Movement:
    """The figures of one record, over the tracker's coordinates; see the functions of these names.

    `step` counts records: optimizer steps, or syncs if there are several steps between two.
    """

    step: int
    changed_ratio: float
    dead_zone_fraction: float
    update_half_ulp: float
    captured: float
    lag_steps: float
    export_rms_ulp: float


class MovementTracker:
    """Follows masters and served weights step by step on a fixed sample of coordinates.

    Owns copies: per coordinate 4 bytes for each step of history and 10 bytes besides.

    Args:
        start: W0, the weights that both sides start from (served at step 0).
        sample: most coordinates to follow, drawn once, evenly over all elements.
        history: steps that `lag_steps` can look back; a longer lag is reported as this many.
        seed: of the sample.
    """

    def __init__(
        self, start: Weights, *, sample: int = 1_000_000, history: int = 200, seed: int = 0
    ):
        if sample < 1 or history < 1:
            raise ValueError(f"sample, history: {sample}, {history} must be at least 1.")
        tensors = dict(_named(start))
        total = sum(t.numel() for t in tensors.values())
        generator = torch.Generator().manual_seed(seed)
        keep = torch.arange(total, device="cpu")
        if total > sample:
            keep = torch.randperm(total, generator=generator, device="cpu")[:sample].sort().values
        self._at: dict[str, Tensor] = {}
        first = 0
        for name, t in tensors.items():
            inside = (keep >= first) & (keep < first + t.numel())
            self._at[name] = (keep[inside] - first).to(t.device)
            first += t.numel()
        self._start = self._take(start).float()
        self._served = self._start.bfloat16()
        self._masters: deque[tuple[int, Tensor]] = deque([(0, self._start)], maxlen=history + 1)

    def record(self, masters: Weights, served: Weights) -> Movement:
        """The figures after one more optimizer step, whose weights these are."""
        step = self._masters[-1][0] + 1
        m, s = self._take(masters).float(), self._take(served)
        previous, before = self._masters[-1][1], self._served
        self._masters.append((step, m))
        self._served = s.bfloat16()
        return Movement(
            step=step,
            changed_ratio=changed_ratio(s, before),
            dead_zone_fraction=dead_zone_fraction(m, previous),
            update_half_ulp=update_half_ulp(m, previous),
            captured=captured(s, m, self._start),
            lag_steps=lag_steps(s, list(self._masters), self._start),
            export_rms_ulp=export_rms_ulp(s, m),
        )

    def _take(self, weights: Weights) -> Tensor:
        """The sample of each tensor, in the order of `start`."""
        tensors = dict(_named(weights))
        if tensors.keys() != self._at.keys():
            odd = sorted(tensors.keys() ^ self._at.keys())[:8]
            raise ValueError(f"weights: not the names that it follows: {', '.join(odd)}.")
        parts = [tensors[name].detach().reshape(-1)[at] for name, at in self._at.items()]
        return torch.cat([p.cpu() for p in parts])


def lag_steps(served: Tensor, masters: list[tuple[int, Tensor]], start: Tensor) -> float:
    """t - s, where M_s has the same projection on M_t - W0 as S_t has; linear between steps.

    `masters` is the history of (step, M_step) up to step t. 0 when the engine has all of it, or by
    chance more; if the answer is older than the history, the history's length.
    """
    newest = masters[-1][1]
    direction = newest.double() - start.double()

    def along(weights: Tensor) -> float:
        return float((weights.double() - start.double()) @ direction)

    history = ((step, along(m)) for step, m in reversed(masters))
    return lag_of_projections(along(served), history)


def lag_of_projections(target: float, history: Iterable[tuple[int, float]]) -> float:
    """`lag_steps`, given <S_t - W0, M_t - W0> and, newest first, (s, <M_s - W0, M_t - W0>).

    Takes no more of the history than it needs.
    """
    steps = iter(history)
    last, later = next(steps)
    at = last
    if target >= later:
        return 0.0
    for step, along in steps:
        if along <= target:
            share = (target - along) / (later - along)
            return last - (step + share * (at - step))
        at, later = step, along
    return float(last - at)


@dataclass(frozen=True)
class LogRatio:
    """A summary of per-token log-ratios, in nats.

    mean, mean_abs and p99 (of the absolute value) are over tokens; k3 is the mean of
    exp(r) - 1 - r, an estimate of KL(q || p) for r = log p - log q under q; sequence_sums has one
    entry per sequence.
    """

    mean: float
    mean_abs: float
    p99: float
    k3: float
    sequence_sums: Tensor


def log_ratio(log_p: Tensor, log_q: Tensor, mask: Tensor) -> LogRatio:
    """Summary of r = log_p - log_q where `mask` is true. All `[sequences, tokens]`.

    hidden: log_p of the masters, log_q of the served weights, both with the same kernels and
    compute dtype, so that only the weights differ. visible: log_p of the trainer's forward, log_q
    of the sampler.
    """
    if not log_p.shape == log_q.shape == mask.shape or log_p.dim() != 2:
        raise ValueError(
            "log_p, log_q, mask: expected one shape [sequences, tokens], got "
            f"{tuple(log_p.shape)}, {tuple(log_q.shape)}, {tuple(mask.shape)}."
        )
    mask = mask.bool()
    if not mask.any():
        raise ValueError("mask: it selects no token.")
    r = torch.where(mask, log_p.double() - log_q.double(), 0.0)
    tokens = r[mask]
    return LogRatio(
        mean=float(tokens.mean()),
        mean_abs=float(tokens.abs().mean()),
        p99=float(tokens.abs().quantile(0.99)),
        k3=float((tokens.expm1() - tokens).mean()),
        sequence_sums=r.sum(dim=1),
    )


def effective_sample_size(log_weights: Tensor) -> float:
    """ESS / n = (sum w)^2 / (n sum w^2) of unclipped importance weights given as logarithms.

    Between 1/n (one sample has all the weight) and 1. For tokens pass token log-ratios, for
    sequences their sums. By log-sum-exp, so that large ratios do not overflow.
    """
    x = log_weights.double().flatten()
    if x.numel() == 0:
        raise ValueError("log_weights: empty.")
    log_ess = 2 * torch.logsumexp(x, 0) - torch.logsumexp(2 * x, 0)
    return float(torch.exp(log_ess)) / x.numel()


def _bf16_words(x: Tensor) -> Tensor:
    return cast(x.detach(), torch.bfloat16).contiguous().view(torch.int16)


def _named(weights: Weights) -> Iterator[tuple[str, Tensor]]:
    yield from weights.items() if isinstance(weights, Mapping) else [("", weights)]


def _pairs(a: Weights, b: Weights) -> Iterator[tuple[Tensor, Tensor]]:
    left, right = dict(_named(a)), dict(_named(b))
    if left.keys() != right.keys():
        odd = sorted(left.keys() ^ right.keys())[:8]
        raise ValueError(f"weights: the two sides do not have the same names: {', '.join(odd)}.")
    for name, x in left.items():
        if x.shape != right[name].shape:
            shapes = f"{tuple(x.shape)} and {tuple(right[name].shape)}"
            raise ValueError(f"weights: {name!r} has shapes {shapes}.")
        yield x.detach(), right[name].detach()


def _projections(served: Weights, masters: Weights, start: Weights) -> tuple[float, float]:
    along = length = 0.0
    for (s, m), (_, w) in zip(_pairs(served, masters), _pairs(masters, start), strict=True):
        moved = m.double() - w.double()
        along += float(((s.double() - w.double()) * moved).sum())
        length += float((moved * moved).sum())
    return along, length
