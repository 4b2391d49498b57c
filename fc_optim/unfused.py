"""Any torch optimizer without a fused kernel: its own step, run on the fp32 masters."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fc_optim.batches import Context, Managed, check_dtype, state_work
from fc_optim.kernels.reference import canonical_bits
from fc_optim.naming import STATE_KEYS

_NOT_CLONED = ("param_groups", "state", "step")


class UnfusedStep:
    """A twin of the user's optimizer whose parameters are the masters.

    Parameters that are not managed (excluded or frozen) are stepped in place, as torch would.
    The twin's state is the outer optimizer's own, less the keys that this package adds.
    """

    def __init__(self, base: Optimizer, masters: dict[Tensor, Tensor]):
        self._masters = masters
        self.twin = object.__new__(type(base))
        for key, value in vars(base).items():
            if key not in _NOT_CLONED and not key.endswith("_hooks"):
                self.twin.__dict__[key] = _replaced(value, masters)
        self.twin.__setstate__({"state": defaultdict(dict), "param_groups": []})

    def serves(self, masters: dict[Tensor, Tensor]) -> bool:
        """Whether the twin was built for exactly these tensors."""
        mine = self._masters
        return mine.keys() == masters.keys() and all(mine[p] is m for p, m in masters.items())

    def run(
        self,
        groups: Sequence[dict[str, Any]],
        state: dict[Tensor, dict[str, Any]],
        closure: Callable[[], Any] | None,
    ) -> Any:
        """One step over `groups`; reads and writes their entries and `state`, never the shadow."""
        twin = self.twin
        twin.param_groups = [
            {**g, "params": [self._masters.get(p, p) for p in g["params"]]} for g in groups
        ]
        twin.state = defaultdict(dict)
        params = [p for g in groups for p in g["params"]]
        for p in params:
            own = {k: v for k, v in state.get(p, {}).items() if k not in STATE_KEYS}
            if own:
                twin.state[self._masters.get(p, p)] = own
        try:
            return twin.step() if closure is None else twin.step(closure)
        finally:
            for p in params:
                own = twin.state.get(self._masters.get(p, p))
                if own:
                    state[p].update(own)
            for group, ran in zip(groups, twin.param_groups, strict=True):
                group.update({k: v for k, v in ran.items() if k != "params"})


def _replaced(value: Any, masters: dict[Tensor, Tensor]) -> Any:
    """`value` with every parameter in its lists, tuples and dicts replaced by its master."""
    if isinstance(value, Tensor):
        return masters.get(value, value)
    if isinstance(value, dict):
        items = ((_replaced(k, masters), _replaced(v, masters)) for k, v in value.items())
        return type(value)(items) if type(value) is dict else value
    if type(value) in (list, tuple):
        return type(value)(_replaced(v, masters) for v in value)
    return value


def grads_to_masters(entries: Iterable[Managed], grad_scale: Tensor | None) -> None:
    """master.grad <- fp32 gradient, unscaled; None where the parameter has none."""
    for e in entries:
        grad = e.param.grad
        if grad is None:
            e.state["master"].grad = None
            continue
        check_dtype(e.param, e.slot.name)
        grad = grad.detach().float().contiguous()
        if grad_scale is not None:
            grad = grad / grad_scale.to(grad.device)
        e.state["master"].grad = grad


def publish(context: Context, entries: Iterable[Managed]) -> None:
    """containers <- stochastic rounding of the masters, made canonical first."""
    entries = list(entries)
    for e in entries:
        bits = e.state["master"].view(torch.int32)
        bits.copy_(canonical_bits(bits))
    for work in state_work(context, entries):
        work.backend.round_(work.batch)
        work.write_back()
