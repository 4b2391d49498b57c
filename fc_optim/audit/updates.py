"""Models of an optimizer's next step: what a new run's first step is like, and what the moments of
a saved state say."""

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fc_optim.audit.predict import Update
from fc_optim.audit.stored import BadCheckpoint
from fc_optim.params.names import param_id
from fc_optim.update.muon import DEFAULTS, lr_ratio, orthogonalise

if TYPE_CHECKING:
    from fc_optim.audit.states import Slot


def first_adamw_step(name: str, lr: float, weight_decay: float) -> Update:
    """Adam's first step: |d| = lr for every element that has a gradient, whatever its size.

    m_hat / (sqrt(v_hat) + eps) is the sign of the gradient at step 1; later steps are mostly
    smaller (0.2 lr for gradients that are all noise). Signs are drawn, decay is added.
    """
    generator = torch.Generator().manual_seed(param_id(name))

    def update(masters: Tensor, start: int, stop: int) -> Tensor:
        sign = torch.randint(0, 2, masters.shape, generator=generator).double() * 2 - 1
        return lr * sign - lr * weight_decay * masters

    return update


def first_muon_step(
    name: str, shape: tuple[int, ...], lr: float, weight_decay: float, adjust_lr_fn: str | None
) -> Update:
    """An orthogonalised matrix: normal elements of rms 0.9 / sqrt(max(rows, columns)), times the
    rate that `torch.optim.Muon` makes of `lr`. 0.9, because torch's five Newton-Schulz iterations
    leave singular values around 1 and not at it (0.86 to 0.95 for random matrices of 128 to 2048).
    """
    rows, columns = shape
    rms = 0.9 * lr * lr_ratio(adjust_lr_fn, torch.Size(shape)) / math.sqrt(max(rows, columns))
    generator = torch.Generator().manual_seed(param_id(name))

    def update(masters: Tensor, start: int, stop: int) -> Tensor:
        noise = torch.randn(masters.shape, generator=generator, dtype=torch.float64)
        return rms * noise - lr * weight_decay * masters

    return update


def next_step(slot: "Slot", lr: float | None = None) -> Update:
    """The last step's update once more, from the moments of a saved state.

    Adam and AdamW: lr m_hat / (sqrt(v_hat) + eps), with decoupled decay; Muon: its orthogonalised
    momentum; SGD: its momentum. The next gradient is not known, and moves Adam's m by a tenth.

    Args:
        slot: a parameter of the state, with the hyper-parameters of its group.
        lr: in place of the group's.

    Raises BadCheckpoint if the state is of another optimizer, or its lr is 0.
    """
    group = slot.group
    rate = group.get("lr") if lr is None else lr
    if not isinstance(rate, float | int) or not rate > 0:
        raise BadCheckpoint(
            f"{slot.name!r}: the state's lr is {rate!r} (a finished schedule?): give one with --lr."
        )
    decay = float(group.get("weight_decay") or 0.0)
    if "exp_avg" in slot.state and "exp_avg_sq" in slot.state:
        decoupled = group.get("decoupled_weight_decay", group.get("algorithm") != "adam")
        return _adam(slot, float(rate), decay if decoupled else 0.0)
    if "momentum_buffer" in slot.state:
        if group.get("algorithm") == "muon" or "ns_steps" in group:
            return _muon(slot, float(rate), decay)
        momentum = slot.state["momentum_buffer"]
        return lambda masters, start, stop: -rate * momentum.read(start, stop).double()
    raise BadCheckpoint(
        f"{slot.name!r}: its state is {sorted(slot.state)}: only Adam, AdamW, Muon and SGD with "
        "momentum are known."
    )


def _adam(slot: "Slot", lr: float, decay: float) -> Update:
    beta1, beta2 = slot.group["betas"]
    eps, t = float(slot.group.get("eps", 1e-8)), max(slot.step, 1.0)
    first = slot.state["exp_avg"]
    second = slot.state.get("max_exp_avg_sq", slot.state["exp_avg_sq"])

    def update(masters: Tensor, start: int, stop: int) -> Tensor:
        m = first.read(start, stop).double() / (1 - beta1**t)
        v = second.read(start, stop).double() / (1 - beta2**t)
        return -lr * m / (v.sqrt() + eps) - lr * decay * masters

    return update


def _muon(slot: "Slot", lr: float, decay: float) -> Update:
    """Whole matrices, since an orthogonalised one has no parts."""
    momentum = slot.state["momentum_buffer"]
    options = {**DEFAULTS, **slot.group}
    rate = lr * lr_ratio(options["adjust_lr_fn"], torch.Size(momentum.shape))
    whole = orthogonalise(momentum.load().bfloat16(), options).flatten()

    def update(masters: Tensor, start: int, stop: int) -> Tensor:
        return -rate * whole[start:stop].double() - lr * decay * masters

    return update
