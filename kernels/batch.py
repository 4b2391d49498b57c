"""What every kernel is given: the tensors of one launch, and where each sits in its parameter.

A kernel never sees a parameter, an optimizer or a process group. It sees a `Batch`: lists of
contiguous tensors of one dtype set on one device, and for each tensor the `Segment`s that say
which elements of the unsharded parameter it holds. The random bits are keyed by the latter, so
the result does not depend on how a parameter is cut (design: "Rounding contract").
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

SAMPLES = 1024  # elements per segment that `flag_foreign` compares
WHOLE = 4 * SAMPLES  # of a segment of up to so many it compares all: no dearer than the samples
SAMPLE_MIX = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: a Weyl sequence, no period against columns

# What a step did to a master M and its container S (new against old), in columns of `counts`:
# bits(S) differ; |M - M_old| < ulp(M_old) / 2; |M| is the largest finite bf16; M is Inf or NaN.
COUNTS = ("changed", "dead", "saturated", "nonfinite")
CHUNK_BITS = 10  # 1024 elements of a parameter are counted, or not, as one: a Triton program's
STRATUM_BITS = 4  # of 16 chunks in a row one is counted
RUN = 128  # elements that `scattered_positions` takes in a row


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of a local buffer and its place in the unsharded parameter.

    Local element `offset + r * inner + c` is element `base + r * row_stride + c` (row-major flat
    index) of the parameter that `param_id` names, for `0 <= r < rows` and `0 <= c < inner`.
    """

    param_id: int
    base: int
    rows: int
    inner: int
    row_stride: int
    offset: int = 0

    @classmethod
    def whole(cls, param_id: int, numel: int) -> "Segment":
        """The segment of an unsharded parameter of `numel` elements."""
        return cls(param_id, base=0, rows=1, inner=numel, row_stride=numel)

    @property
    def numel(self) -> int:
        return self.rows * self.inner

    def split(self, size: int) -> Iterator["Segment"]:
        """Cut into segments of at most `size` elements (bounds the reference's temporaries)."""
        step_rows, step_inner = max(1, size // max(1, self.inner)), min(self.inner, size)
        for r in range(0, self.rows, step_rows):
            for c in range(0, self.inner, max(1, step_inner)):
                yield Segment(
                    self.param_id,
                    base=self.base + r * self.row_stride + c,
                    rows=min(step_rows, self.rows - r),
                    inner=min(step_inner, self.inner - c),
                    row_stride=self.row_stride,
                    offset=self.offset + r * self.inner + c,
                )


@dataclass(frozen=True, slots=True)
class AdamHyper:
    """Hyper-parameters of one parameter group, named as in `torch.optim.Adam`.

    `decoupled` is AdamW's weight decay. `lr` and the betas may be 0-d tensors; the Triton backend
    never reads those on the host.
    """

    lr: float | Tensor
    beta1: float | Tensor
    beta2: float | Tensor
    eps: float
    weight_decay: float
    decoupled: bool
    maximize: bool


@dataclass(frozen=True, slots=True)
class MuonHyper:
    """Hyper-parameters of one matrix, named as in `torch.optim.Muon`.

    `lr_ratio` is what `adjust_lr_fn` makes of the matrix's shape. `lr` may be a 0-d tensor; the
    Triton backend never reads it on the host.
    """

    lr: float | Tensor
    momentum: float
    nesterov: bool
    weight_decay: float
    lr_ratio: float


def hyper_key(hyper: AdamHyper | MuonHyper) -> tuple[Any, ...]:
    """Its values, to compare: a tensor's value may not be read, it equals only itself."""
    values = (getattr(hyper, name) for name in hyper.__slots__)
    return tuple(id(x) if isinstance(x, Tensor) else x for x in values)


def distinct_hypers(hypers: Sequence[AdamHyper | MuonHyper]) -> tuple[list[int], list[Any]]:
    """Each one's place in the list of distinct ones, and the list. Tensors equal only themselves.

    (As a dictionary's key a hyper with a tensor would compare the tensor's values.)
    """
    places: dict[tuple[Any, ...], int] = {}
    distinct: list[Any] = []
    known: dict[int, int] = {}  # by identity: most tensors share a group's
    index = []
    for h in hypers:
        if id(h) in known:
            index.append(known[id(h)])
            continue
        key = hyper_key(h)
        if key not in places:
            places[key] = len(distinct)
            distinct.append(h)
        known[id(h)] = places[key]
        index.append(places[key])
    return index, distinct


@dataclass
class Batch:
    """Tensors of one dtype set on one device, at least one: what one launch updates.

    All lists are parallel. Tensors are contiguous and owned by the caller; kernels write
    `containers`, `masters`, the moments, `epochs` and `steps` in place.

    A batch is built once and kept over many steps: what backends derive from a list they keep in
    `cache`, and they trust it for as long as the field holds the same list object. Between steps
    the caller may replace `grads` (whose addresses are read at every launch), `grad_scale`,
    `found_inf`, `counts`, `epoch`, and `hypers` or `muon_hypers` where one of them changed, always
    by a new list. When anything else changes, such as the address of another tensor or a segment,
    the caller builds a new batch with a cache of its own.

    containers: bf16, or fp32 on the bf16 grid. Written, and read only by the foreign-write kernels.
    masters: fp32, finite values at most the largest finite bf16.
    epochs: 0-d int64 on the tensors' device: how many steps each has taken, which `adam_` and
        `muon_update_` count; their low 32 bits are the dither epoch t when `epoch` is None. Never
        torch's `step`, which users reset and which stops at 2**24. May be empty where they are
        neither counted nor read: with `epoch`, for kernels that do not step.
    epoch: dither epoch shared by all tensors (dither "sync" and "held"), or None for "fresh".
    grads: bf16 or fp32. With them come Adam's moments (`max_exp_avg_sqs` is empty without amsgrad)
        or Muon's fp32 momentum buffers, and one entry of `hypers` or `muon_hypers` per tensor.
    steps: 0-d fp32, Adam only: torch's step count, which its bias correction reads.
    updates: bf16, Muon only: Newton-Schulz's input as `muon_momentum_` leaves it, and its output
        as `muon_update_` takes it.
    grad_scale, found_inf: 0-d or one-element fp32 tensors as torch's GradScaler sets them.
    counts: int64 `[segments of all tensors, len(COUNTS)]`, to which `adam_` and `muon_update_` add
        what they did to the elements that `is_counted`, or to all with `count_all`; None: nothing.
    cache, shared: for the backend's own use between launches: on this batch; and of the same
        optimizer on the same device.
    """

    containers: list[Tensor]
    masters: list[Tensor]
    segments: Sequence[Sequence[Segment]]
    epochs: list[Tensor]
    seed: int
    epoch: int | None
    grads: list[Tensor] = field(default_factory=list)
    steps: list[Tensor] = field(default_factory=list)
    exp_avgs: list[Tensor] = field(default_factory=list)
    exp_avg_sqs: list[Tensor] = field(default_factory=list)
    max_exp_avg_sqs: list[Tensor] = field(default_factory=list)
    hypers: list[AdamHyper] = field(default_factory=list)
    momentum_buffers: list[Tensor] = field(default_factory=list)
    updates: list[Tensor] = field(default_factory=list)
    muon_hypers: list[MuonHyper] = field(default_factory=list)
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None
    counts: Tensor | None = None
    count_all: bool = False
    cache: dict[Any, Any] = field(default_factory=dict)
    shared: dict[Any, Any] = field(default_factory=dict)


def power(x: float, n: int) -> float:
    """x**n for n >= 0 by repeated squaring: only IEEE products, so every backend agrees on it."""
    result = 1.0
    while n:
        if n & 1:
            result *= x
        x *= x
        n >>= 1
    return result


@dataclass(frozen=True, slots=True)
class AdamScalars:
    """What an Adam step needs of its hyper-parameters and step count, in float64.

    Each is rounded once to fp32 before it meets a tensor. `m += lerp * (g - x)` starts from
    `x = exp_avg`, or from `x = g` when `from_grad`: the two branches of `torch.lerp`.
    """

    grad_factor: float  # sign of maximize / grad_scale
    decay: float  # 1 - lr * weight_decay (AdamW), else 1
    l2: float  # weight_decay (Adam), else 0
    lerp: float
    from_grad: float  # 1.0 or 0.0
    beta2: float
    one_minus_beta2: float
    neg_step_size: float
    bias_correction2_sqrt: float
    eps: float


def adam_scalars(hyper: AdamHyper, step: int, grad_scale: float = 1.0) -> AdamScalars:
    """The scalars of step number `step` (1 for the first), as `torch.optim.adam` computes them."""
    lr, beta1, beta2 = float(hyper.lr), float(hyper.beta1), float(hyper.beta2)
    weight = 1 - beta1
    from_grad = weight >= 0.5
    return AdamScalars(
        grad_factor=(-1.0 if hyper.maximize else 1.0) / grad_scale,
        decay=1 - lr * hyper.weight_decay if hyper.decoupled else 1.0,
        l2=0.0 if hyper.decoupled else float(hyper.weight_decay),
        lerp=weight - 1.0 if from_grad else weight,
        from_grad=float(from_grad),
        beta2=beta2,
        one_minus_beta2=1 - beta2,
        neg_step_size=-(lr / (1 - power(beta1, step))),
        bias_correction2_sqrt=math.sqrt(1 - power(beta2, step)),  # rounds correctly, `pow` need not
        eps=float(hyper.eps),
    )


@dataclass(frozen=True, slots=True)
class MuonScalars:
    """What a Muon step needs of its hyper-parameters, in float64; rounded once to fp32.

    Both averages are `torch.lerp`, in either of its branches: `buffer = x + lerp * (g - buffer)`
    from `x = buffer`, or from `x = g` when `from_grad`; and Nesterov's update is
    `x + blend * (buffer - g)` from `x = g`, or from `x = buffer` when `from_buffer`.
    """

    grad_factor: float  # 1 / grad_scale
    lerp: float
    from_grad: float  # 1.0 or 0.0
    blend: float
    from_buffer: float  # 1.0 or 0.0
    decay: float  # 1 - lr * weight_decay
    neg_lr: float  # -lr * lr_ratio


def muon_scalars(hyper: MuonHyper, grad_scale: float = 1.0) -> MuonScalars:
    """The scalars of a step, as `torch.optim.Muon` computes them. Without Nesterov, blend is 0."""
    lr, momentum = float(hyper.lr), float(hyper.momentum)
    weight = 1 - momentum
    from_grad, from_buffer = weight >= 0.5, momentum >= 0.5 or not hyper.nesterov
    blend = momentum - 1.0 if from_buffer else momentum
    return MuonScalars(
        grad_factor=1.0 / grad_scale,
        lerp=weight - 1.0 if from_grad else weight,
        from_grad=float(from_grad),
        blend=blend if hyper.nesterov else 0.0,
        from_buffer=float(from_buffer),
        decay=1 - lr * hyper.weight_decay,
        neg_lr=-(lr * hyper.lr_ratio),
    )


def sample_positions(numel: int) -> Tensor:
    """The positions (int64, local to a segment) that `flag_foreign` compares: one per stratum."""
    count = numel if numel <= WHOLE else SAMPLES
    k = torch.arange(count, device="cpu")
    low, high = k * numel // max(count, 1), (k + 1) * numel // max(count, 1)
    mixed = (k * (SAMPLE_MIX - 2**64) >> 20) & (2**44 - 1)
    return low + mixed % (high - low)


def is_counted(e: Tensor) -> Tensor:
    """Whether the elements with flat indices `e` (int64) are in the sixteenth that is counted.

    Of each 16 chunks one, at a place that a Weyl sequence gives; of the first 16 the first. It is
    the parameter's index that decides, so the figures do not depend on how it is cut.
    """
    chunk = e >> CHUNK_BITS
    return chunk & 15 == _counted_chunk(chunk >> STRATUM_BITS)


def _counted_chunk(stratum: Tensor) -> Tensor:
    return stratum * (SAMPLE_MIX - 2**64) >> 64 - STRATUM_BITS & 15


def count_size(segment: Segment) -> int:
    """How many elements of a segment `is_counted` takes."""

    def before(e: Tensor) -> Tensor:
        stratum = e >> CHUNK_BITS + STRATUM_BITS
        inside = e - (stratum << CHUNK_BITS + STRATUM_BITS)
        first = _counted_chunk(stratum) << CHUNK_BITS
        return (stratum << CHUNK_BITS) + (inside - first).clamp(0, 1 << CHUNK_BITS)

    starts = segment.base + torch.arange(segment.rows, device="cpu") * segment.row_stride
    return int((before(starts + segment.inner) - before(starts)).sum())


def scattered_positions(segment: Segment, every: int) -> Tensor:
    """Positions (int64, local to the segment) of one element in `every`, in runs of RUN.

    As `is_counted` they are fixed in the unsharded parameter. A run is a few lines of memory.
    """
    last = segment.base + max(segment.rows - 1, 0) * segment.row_stride + segment.inner - 1
    stratum = torch.arange(segment.base // (RUN * every), last // (RUN * every) + 1, device="cpu")
    mixed = (stratum + 1) * (SAMPLE_MIX - 2**64) + (segment.param_id << 20)
    run = stratum * every + (mixed >> 20 & 2**44 - 1) % every
    at = (run[:, None] * RUN + torch.arange(RUN, device="cpu")).flatten() - segment.base
    row_stride = max(segment.row_stride if segment.rows > 1 else segment.inner, 1)
    row, column = at // row_stride, at % row_stride
    inside = (at >= 0) & (row < segment.rows) & (column < segment.inner)
    return (row * segment.inner + column)[inside]
