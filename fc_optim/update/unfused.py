"""Any torch optimizer without a fused kernel: its own step, run on the fp32 masters."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fc_optim.construct import own_attributes
from fc_optim.params.layouts import like, local_grad
from fc_optim.params.names import STATE_KEYS
from fc_optim.params.registry import Managed
from fc_optim.update.plan import Context, check_grad, state_work


class BaseStep:
    """Runs the user's optimizer through a twin whose parameters are the masters.

    Parameters without a master (excluded or frozen) are stepped in place, as torch would. The
    twin's state is the outer optimizer's own, less the keys that this package adds.
    """

    def __init__(self, base: Optimizer):
        self._base = base
        self._masters: dict[Tensor, Tensor] = {}
        self._twin: Optimizer | None = None

    def run(
        self,
        groups: Sequence[dict[str, Any]],
        state: dict[Tensor, dict[str, Any]],
        entries: Sequence[Managed],
        context: Context,
        closure: Callable[[], Any] | None = None,
        grad_scale: Tensor | None = None,
    ) -> Any:
        """One step of `groups`, whose managed parameters are `entries`; ends with their shadow.

        A closure is evaluated on the served weights: they are published before every call.
        """
        for e in entries:
            if closure is not None or e.param.grad is not None:
                e.state["dither_step"] += 1
        self._prepare({e.param: e.state["master"] for e in entries})
        _grads_to_masters(entries, grad_scale)
        if grad_scale is not None:
            for p in (p for g in groups for p in g["params"] if p not in self._masters):
                if p.grad is not None:
                    p.grad.div_(grad_scale.to(p.grad.device))

        def on_served_weights() -> Any:
            assert closure is not None
            _publish(context, entries)
            versions = [e.param._version for e in entries]
            with torch.enable_grad():
                loss = closure()
            written = [
                e.slot.name for e, v in zip(entries, versions, strict=True) if e.param._version != v
            ]
            if written:
                raise RuntimeError(
                    f"closure: it wrote the weights {', '.join(written[:8])}, which the optimizer "
                    "would overwrite; change weights between steps."
                )
            _grads_to_masters(entries, None)
            return loss

        try:
            return self._run_twin(groups, state, None if closure is None else on_served_weights)
        finally:
            for e in entries:
                e.state["master"].grad = None
            _publish(context, entries)

    def _prepare(self, masters: dict[Tensor, Tensor]) -> None:
        """Make the twin, unless there is one for exactly these tensors."""
        known = self._masters
        if self._twin is not None and known.keys() == masters.keys():
            if all(known[p] is m for p, m in masters.items()):
                return
        self._masters = masters
        self._twin = twin = object.__new__(type(self._base))
        twin.__dict__.update(_attributes(self._base, masters))
        twin.__setstate__({"state": defaultdict(dict), "param_groups": []})

    def _run_twin(
        self,
        groups: Sequence[dict[str, Any]],
        state: dict[Tensor, dict[str, Any]],
        closure: Callable[[], Any] | None,
    ) -> Any:
        twin, masters = self._twin, self._masters
        assert twin is not None
        twin.param_groups = [
            {**g, "params": [masters.get(p, p) for p in g["params"]]} for g in groups
        ]
        twin.state = defaultdict(dict)
        params = [p for g in groups for p in g["params"]]
        for p in params:
            own = {k: v for k, v in state.get(p, {}).items() if k not in STATE_KEYS}
            if own:  # an empty entry is how torch knows to make the state
                twin.state[masters.get(p, p)] = own
        held = set(params)
        others = {k: v for k, v in state.items() if k not in held}  # what is no parameter's
        twin.state.update(others)
        try:
            return twin.step() if closure is None else twin.step(closure)
        finally:
            for p in params:
                after = twin.state.pop(masters.get(p, p), {})
                own = state.setdefault(p, {}) if after else state.get(p, {})
                for key in [k for k in own if k not in STATE_KEYS and k not in after]:
                    del own[key]
                own.update(after)
            state.update(twin.state)
            for group, ran in zip(groups, twin.param_groups, strict=True):
                group.update({k: v for k, v in ran.items() if k != "params"})
            # What the optimizer keeps on itself must outlive the twin (pickling, new masters).
            back = {m: p for p, m in masters.items()}
            self._base.__dict__.update(_attributes(twin, back))


def _attributes(opt: Optimizer, replace: dict[Tensor, Tensor]) -> dict[str, Any]:
    """An optimizer's own attributes, with tensors replaced in its lists, tuples and dicts.

    Not its groups and state, which the twin is given for each step.
    """
    return {
        key: _replaced(value, replace)
        for key, value in own_attributes(opt).items()
        if key not in ("param_groups", "state")
    }


def _replaced(value: Any, masters: dict[Tensor, Tensor]) -> Any:
    """`value` with every parameter in its lists, tuples and dicts replaced by its master."""
    if isinstance(value, Tensor):
        return masters.get(value, value)
    if type(value) is dict:
        return {_replaced(k, masters): _replaced(v, masters) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_replaced(v, masters) for v in value)
    return value


def _grads_to_masters(entries: Iterable[Managed], grad_scale: Tensor | None) -> None:
    """master.grad <- fp32 gradient, unscaled; None where the parameter has none."""
    for e in entries:
        grad = e.param.grad
        if grad is not None:
            check_grad(e)
            grad = like(e.param, local_grad(e.param).float().contiguous())
            if grad_scale is not None:
                grad = grad / grad_scale.to(grad.device)
        e.state["master"].grad = grad


def _publish(context: Context, entries: Iterable[Managed]) -> None:
    """containers <- stochastic rounding of the masters, made canonical first."""
    for work in state_work(context, entries):
        work.backend.canonical_(work.batch)
        work.round()
