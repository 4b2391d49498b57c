"""Random batches for the kernel tests, and bit equality between two of them."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor

from fc_optim.kernels.batch import AdamHyper, Batch, MuonHyper, Segment

WRITTEN = ["containers", "masters", "epochs", "steps", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs"]
WRITTEN += ["momentum_buffers", "updates"]
SPECIALS = [  # fp32 patterns
    0x00000000, 0x80000000,  # zeros
    0x00000001, 0x80000001, 0x007FFFFF, 0x00800000, 0x0000FFFF, 0x80018000,  # around subnormals
    0x3F800000, 0xBF80FFFF, 0x3F808000, 0x5F3504F3,  # ordinary
    0x7F7E8000, 0x7F7EFFFF, 0xFF7EFFFF, 0x7F7F0000, 0xFF7F0000,  # up to the largest finite bf16
    0x7F7F0001, 0xFF7F8000, 0x7F7FFFFF,  # finite, beyond bf16
    0x7F800000, 0xFF800000,  # infinities
    0x7FC00000, 0xFFC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0xFFBFFFFF,  # NaNs
]  # fmt: skip


VALUES: dict[str, tuple[Any, Any]] = {  # of keyword arguments of make_batch
    "container": (torch.bfloat16, torch.float32),
    "grad": (torch.bfloat16, torch.float32),
    "amsgrad": (False, True),
    "decoupled": (True, False),
    "maximize": (False, True),
    "epoch": (None, 7),
    "weight_decay": (0.1, 0.0),
    "grad_scale": (None, 1024.0),
    "beta1": (0.9, 0.25),  # both branches of lerp
    "tensor_lr": (False, True),
}


def _pairwise() -> list[dict[str, Any]]:
    """Six option sets in which every pair of options takes all four pairs of values.

    Kleitman and Spencer 1973: row 0 takes the first values; option k takes its second value in
    the k-th 3-subset of the other five rows. Two such subsets meet, and neither holds the other.
    """
    rows = [{name: pair[0] for name, pair in VALUES.items()} for _ in range(6)]
    for (name, pair), subset in zip(VALUES.items(), combinations(range(1, 6), 3), strict=True):
        for row in subset:
            rows[row][name] = pair[1]
    return rows


OPTIONS = _pairwise()
# For what takes long, in an interpreter: two sets with every value, half of all pairs. The
# others of `OPTIONS` are for `-m long`.
FEW = [{name: pair[k] for name, pair in VALUES.items()} for k in (0, 1)]
FEW_OR_LONG = [*FEW, *(pytest.param(o, marks=pytest.mark.long) for o in OPTIONS[1:])]


def option_id(options: dict[str, Any]) -> str:
    return ",".join(str(v).removeprefix("torch.") for v in options.values())


def make_batch(
    sizes: Sequence[int],
    *,
    container: torch.dtype = torch.bfloat16,
    grad: torch.dtype = torch.float32,
    amsgrad: bool = False,
    decoupled: bool = True,
    maximize: bool = False,
    epoch: int | None = None,
    segments: Sequence[Sequence[Segment]] | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0x0123456789ABCDEF,
    generator_seed: int = 0,
    lr: float = 1e-3,
    tensor_lr: bool = False,
    beta1: float = 0.9,
    beta2: float = 0.99,
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    grad_scale: float | None = None,
    found_inf: float | None = None,
    step: int = 0,
    taken: int = 0,
) -> Batch:
    """A batch of flat tensors of these sizes: random masters, gradients and non-zero moments.

    Tensors have taken `taken` steps or a few more, of which torch's counts say `step` or so.
    Without `segments` each tensor is a whole parameter. Tensors share two hyper-parameter groups.
    """
    generator = torch.Generator().manual_seed(generator_seed)

    def normal(n: int, scale: float) -> Tensor:
        return (torch.randn(n, generator=generator) * scale).to(device)

    def scalar(x: float | None) -> Tensor | None:
        return None if x is None else torch.tensor([x], dtype=torch.float32, device=device)

    if segments is None:
        segments = [[Segment.whole(0x9E3779B9 * (i + 1) % 2**32, n)] for i, n in enumerate(sizes)]
    rate = torch.tensor(lr, device=device) if tensor_lr else lr
    hyper = AdamHyper(rate, beta1, beta2, eps, weight_decay, decoupled, maximize)
    hypers = [hyper, replace(hyper, weight_decay=weight_decay / 3)]
    masters = [normal(n, 0.02) for n in sizes]
    return Batch(
        containers=[x.bfloat16().to(container) for x in masters],
        masters=masters,
        segments=list(segments),
        epochs=[torch.tensor(taken + i % 4, device=device) for i in range(len(sizes))],
        steps=[torch.tensor(float(step + i % 3), device=device) for i in range(len(sizes))],
        seed=seed,
        epoch=epoch,
        grads=[normal(n, grad_scale or 1.0).to(grad) for n in sizes],
        exp_avgs=[normal(n, 0.1) for n in sizes],
        exp_avg_sqs=[normal(n, 0.1).square() for n in sizes],
        max_exp_avg_sqs=[normal(n, 0.1).square() for n in sizes] if amsgrad else [],
        hypers=[hypers[i % 2] for i in range(len(sizes))],
        grad_scale=scalar(grad_scale),
        found_inf=scalar(found_inf),
    )


MUON_OPTIONS: list[dict[str, Any]] = [  # keyword arguments of make_muon_batch
    {},
    {"grad": torch.bfloat16, "momentum": 0.25, "tensor_lr": True},
    {"container": torch.float32, "momentum": 0.5, "grad_scale": 1024.0, "epoch": 7},
    {"container": torch.float32, "grad": torch.bfloat16, "nesterov": False, "weight_decay": 0.0},
]


def make_muon_batch(
    sizes: Sequence[int],
    *,
    momentum: float = 0.95,
    nesterov: bool = True,
    lr: float = 1e-3,
    tensor_lr: bool = False,
    weight_decay: float = 0.1,
    device: torch.device | str = "cpu",
    **options: Any,
) -> Batch:
    """As `make_batch`, for Muon: every kind of its tensors is there, and random."""
    batch = make_batch(sizes, device=device, **options)
    rate = torch.tensor(lr, device=device) if tensor_lr else lr
    hyper = MuonHyper(rate, momentum, nesterov, weight_decay, lr_ratio=0.7)
    hypers = [hyper, replace(hyper, weight_decay=weight_decay / 3, lr_ratio=1.3)]
    return replace(
        batch,
        steps=[],
        exp_avgs=[],
        exp_avg_sqs=[],
        max_exp_avg_sqs=[],
        hypers=[],
        momentum_buffers=batch.exp_avgs,
        updates=[x.bfloat16() for x in batch.exp_avg_sqs],
        muon_hypers=[hypers[i % 2] for i in range(len(sizes))],
    )


def refresh_grads(batches: Sequence[Batch], generator_seed: int) -> None:
    """Give all batches (copies of one another) the same new gradients, in place."""
    generator = torch.Generator().manual_seed(generator_seed)
    for grads in zip(*(b.grads for b in batches), strict=True):
        new = torch.randn(grads[0].shape, generator=generator).to(grads[0].dtype)
        for g in grads:
            g.copy_(new)


def sow_specials(batch: Batch, *, generator_seed: int = 0) -> Batch:
    """Overwrite a quarter of the masters, moments and gradients with special patterns, in place."""
    generator = torch.Generator().manual_seed(generator_seed)
    patterns = torch.tensor(SPECIALS, dtype=torch.int64).to(torch.int32).view(torch.float32)
    lists = [batch.masters, batch.grads, batch.exp_avgs, batch.exp_avg_sqs, batch.max_exp_avg_sqs]
    lists += [batch.momentum_buffers, batch.updates]
    for x in [x for tensors in lists for x in tensors]:
        drawn = patterns[torch.randint(len(patterns), x.shape, generator=generator)]
        hit = torch.rand(x.shape, generator=generator) < 0.25
        x.copy_(torch.where(hit.to(x.device), drawn.to(x.device).to(x.dtype), x))
    for v in batch.exp_avg_sqs + batch.max_exp_avg_sqs:
        v.copy_(torch.where(v < 0, -v, v))  # NaN and -0 stay; a negative one has no meaning
    return batch


def clone_batch(batch: Batch, device: torch.device | str | None = None) -> Batch:
    """A deep copy of all tensors, with an empty cache."""

    def copy(x: Any) -> Any:
        if isinstance(x, Tensor):
            return x.clone() if device is None else x.to(device, copy=True)
        return x

    names = [*WRITTEN, "grads"]
    lists: dict[str, Any] = {k: [copy(x) for x in getattr(batch, k)] for k in names}
    copies = {id(h): replace(h, lr=copy(h.lr)) for h in batch.hypers}
    muon_copies = {id(h): replace(h, lr=copy(h.lr)) for h in batch.muon_hypers}
    return replace(
        batch,
        **lists,
        hypers=[copies[id(h)] for h in batch.hypers],
        muon_hypers=[muon_copies[id(h)] for h in batch.muon_hypers],
        grad_scale=copy(batch.grad_scale),
        found_inf=copy(batch.found_inf),
        cache={},
        shared={},
    )


def bits_of(x: Tensor) -> Tensor:
    """The bit patterns, on the CPU."""
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return x.detach().cpu().contiguous().view(integer)


def assert_same_bits(a: Batch, b: Batch) -> None:
    """Equal bits in all that kernels write, NaNs included."""
    for name in WRITTEN:
        for i, (x, y) in enumerate(zip(getattr(a, name), getattr(b, name), strict=True)):
            assert x.dtype == y.dtype and x.shape == y.shape
            p, q = bits_of(x).flatten(), bits_of(y).flatten()
            at = (p != q).nonzero().flatten().tolist()
            detail = [(k, hex(int(p[k])), hex(int(q[k]))) for k in at[:4]]
            assert not at, f"{name}[{i}] of {x.numel()}: {len(at)} differ, first {detail}"
