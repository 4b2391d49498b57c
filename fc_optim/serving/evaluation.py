"""What to evaluate: the masters inside the model, or an fp32 copy of either set of weights."""

import contextlib
import copy as copy_module
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fc_optim.params import sources
from fc_optim.params.modules import named_parameters
from fc_optim.serving.stream import Item, list_items, stream
from fc_optim.update.state import MASTER
from fc_optim.weights import ServedWeights

if TYPE_CHECKING:
    from fc_optim.optimizer import FairCastOptimizer


@contextlib.contextmanager
def masters_in_model(weights: ServedWeights) -> Iterator[None]:
    """See `FairCastOptimizer.masters_in_model`."""
    weights.publish()
    entries, model = weights.entries(), weights.model
    _check_forward(weights)
    swapped: list[tuple[Tensor, Tensor]] = []
    native = any(e.param.dtype == torch.bfloat16 for e in entries)
    masters = {e.param: e.state[MASTER] for e in entries}
    others = [*model.parameters(), *model.buffers()] if model is not None else []
    with weights.guarded("masters_in_model()"):
        try:
            for t in [*masters, *(o for o in others if o not in masters)]:
                if t in masters:
                    swapped.append((t, t.data))
                    t.data = masters[t]
                elif native and t.dtype == torch.bfloat16:  # frozen weights must match in dtype
                    swapped.append((t, t.data))
                    t.data = t.data.float()
            versions = [t._version for t in masters]
            error = None
            try:
                yield
            except BaseException as e:
                error = e
            written = [
                e.identity.name
                for e, v in zip(entries, versions, strict=True)
                if e.param._version != v
            ]
        finally:
            for t, data in swapped:
                t.data = data
    if written:
        raise RuntimeError(
            f"masters_in_model(): the masters of {', '.join(written[:8])} were written inside. "
            "Call restore_weights() to serve them, or load_state_dict() to go back."
        ) from error
    if error is not None:
        raise error


def _check_forward(weights: ServedWeights) -> None:
    """Raise RuntimeError where a forward would not run on masters put into the parameters."""
    params = [e.param for e in weights.entries()]
    reason = None
    if any(torch.is_autocast_enabled(t) for t in {p.device.type for p in params}):
        reason = "autocast is active"
    elif weights.buffers is not None:
        reason = "a framework steps buffers of its own in place of the parameters"
    else:
        found = [s.rounds_forward(weights.model, params) for s in sources.active()]
        found += ["parameters are sharded"] * any(e.layout.groups for e in weights.entries())
        reason = next((r for r in found if r), None)
    if reason:
        raise RuntimeError(
            f"masters_in_model(): {reason}, so the forward would not run on fp32 masters. "
            'Use fc_optim.fp32_copy(model, optimizer, which="master") and evaluate that copy.'
        )


def fp32_copy(
    model: nn.Module,
    opt: "FairCastOptimizer",
    which: str = "master",
    into: nn.Module | None = None,
) -> nn.Module:
    """An fp32 copy of `model` with the masters (`which="master"`) or the served weights in it.

    The copy owns its memory, is in eval mode and asks for no gradients; ties are kept. Both
    copies run the same kernels in the same dtype, so a difference between them is the weights'.
    A sharded model cannot be copied: pass `into`, the same model without the sharding (on every
    rank: parameters are gathered one at a time), which is filled, and returned.

    Raises ValueError for another `which` and for an `into` that lacks a parameter, RuntimeError if
    the optimizer does not train `model`.
    """
    if which not in ("master", "served"):
        raise ValueError(f"which: {which!r} is neither 'master' nor 'served'.")
    weights = opt.weights
    weights.publish()
    sources.reshard(model)
    managed = {e.param: e for e in weights.entries()}
    if not any(p in managed for p in model.parameters()):
        raise RuntimeError("fp32_copy: the optimizer trains none of the model's parameters.")
    if into is not None:
        return _fill(into, list_items(model, (weights,), which, tied="all"), (weights,))
    if sources.layouts_in(model) or any(map(sources.is_sharded, model.parameters())):
        raise RuntimeError(
            "fp32_copy: the model is sharded and cannot be copied; pass into=, a new model of the "
            "same architecture without the sharding."
        )
    memo: dict[int, Any] = {}
    for p in model.parameters():
        value = managed[p].state[MASTER] if which == "master" and p in managed else p.detach()
        own = value.to(torch.float32 if p.is_floating_point() else p.dtype, copy=True)
        memo[id(p)] = nn.Parameter(own, requires_grad=False)
    return copy_module.deepcopy(model, memo).float().eval()


@torch.no_grad()
def _fill(into: nn.Module, items: list[Item], owners: Sequence[ServedWeights]) -> nn.Module:
    plain = into.float().eval().requires_grad_(False)
    params = dict(named_parameters(plain, remove_duplicate=False))
    missing = sorted(params.keys() - {i.name for i in items})
    if missing:
        raise ValueError(f"into: the trained model has no {', '.join(missing[:8])}.")
    for name, value in stream(items, owners):
        if name in params:
            params[name].copy_(value)
    return into
