"""Stochastic rounding on its own, for a stack that cannot change its optimizer."""

import operator
from typing import Any

import torch
from torch import Tensor

from fc_optim.kernels.backends import backend_for
from fc_optim.kernels.batch import Batch, Segment


@torch.no_grad()
def stochastic_round(
    x: Tensor, *, seed: int, param_id: int, t: int, offset: int = 0, out: Tensor | None = None
) -> Tensor:
    """Round fp32 values to bf16, each up or down with the probability that makes it unbiased.

    P(away from zero) is exactly the discarded 16 bits / 65536. A value on the bf16 grid never
    moves; NaN stays NaN (0x7FC0, whatever its sign), Inf stays Inf, and a finite value never
    becomes Inf.
    Random bits are Philox4x32-10 of (seed, flat index, param_id, t): the result depends on nothing
    else, and `x` may be any contiguous piece of a parameter.

    Args:
        x: float32, any shape and strides. Not written.
        seed: 64-bit key.
        param_id: 32-bit identity of the parameter (`fc_optim.param_id(name)`).
        t: dither epoch, 32 bits: a step count, or a constant for one threshold per element.
        offset: flat index of the first element of `x` in its unsharded parameter.
        out: bfloat16, or float32 to get the same values on the bf16 grid; contiguous, of x's
            shape, owned by the caller. By default a new bfloat16 tensor.

    Raises TypeError or ValueError for a wrong type, dtype, shape or range.
    Source: design of Fair Cast (Gao and Gao); Philox from Salmon et al. 2011.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"x: expected a float32 tensor, got a {type(x).__name__}.")
    if x.dtype != torch.float32:
        raise TypeError(f"x: expected float32, got {x.dtype}; call x.float() first.")
    seed, t, offset = _integer("seed", seed), _integer("t", t), _integer("offset", offset)
    if isinstance(param_id, str):
        raise TypeError(f"param_id: {param_id!r} is a name; pass fc_optim.param_id({param_id!r}).")
    param_id = _integer("param_id", param_id)
    for name, value, bits in (("seed", seed, 64), ("param_id", param_id, 32), ("t", t, 32)):
        if not 0 <= value < 2**bits:
            raise ValueError(f"{name}: {value} is not in [0, 2**{bits}).")
    if not 0 <= offset < 2**63 - x.numel():
        raise ValueError(f"offset: {offset} is not a flat index.")
    if out is None:
        out = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
    if out.dtype not in (torch.bfloat16, torch.float32):
        raise TypeError(f"out: expected bfloat16 or float32, got {out.dtype}.")
    if out.shape != x.shape or out.device != x.device or not out.is_contiguous():
        raise ValueError(
            f"out: needs x's shape {tuple(x.shape)} and device {x.device}, contiguous; got "
            f"{tuple(out.shape)} on {out.device}, strides {out.stride()}."
        )
    if x.numel():
        n = x.numel()
        batch = Batch(
            containers=[out],
            masters=[x.detach().contiguous()],
            segments=[(Segment(param_id, base=offset, rows=1, inner=n, row_stride=n),)],
            epochs=[],
            seed=seed,
            epoch=t,
        )
        backend_for("auto", x.device).round_(batch)
    return out


def _integer(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: {value!r} is no integer; pass int(...) of it.") from None
