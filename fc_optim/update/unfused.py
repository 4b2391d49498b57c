"""Any torch optimizer without a fused kernel: its own step and methods, run on the fp32 masters."""

import contextlib
import functools
import inspect
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from fc_optim.params.names import STATE_KEYS
from fc_optim.params.registry import Managed
from fc_optim.params.sources import source_of, to_local
from fc_optim.update.base import inner_optimizers, own_attributes, released
from fc_optim.update.plan import Context, check_grad, state_calls
from fc_optim.update.state import EPOCH, MASTER

Groups = Sequence[dict[str, Any]]
State = dict[Any, dict[str, Any]]


class BaseStep:
    """Runs the user's optimizer with the masters in the place of their parameters.

    Parameters without a master (excluded or frozen) are stepped in place, as torch would. The
    base sees the outer optimizer's groups and state, less the keys that this package adds.
    """

    def __init__(self, base: Optimizer):
        self._base = base
        self._running: str | None = None

    def run(
        self,
        groups: Groups,
        state: State,
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
                e.state[EPOCH] += 1
        if grad_scale is not None:
            managed = {e.param for e in entries}
            for p in (p for g in groups for p in g["params"] if p not in managed):
                if p.grad is not None:
                    p.grad.div_(grad_scale.to(p.grad.device))
        given = _Gradients(entries, grad_scale)
        arguments = () if closure is None else (self._on_shadow(closure, context, given),)
        try:
            with self._masters_in("step", groups, state, entries):
                result = self._base.step(*arguments)
            given.take_back("step()", changes=False)
            return result
        finally:
            given.drop()
            _publish(context, entries)

    def call(
        self,
        name: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        groups: Groups,
        state: State,
        entries: Sequence[Managed],
        context: Context,
    ) -> Any:
        """A method of the base. Functions among the arguments run on the published weights.

        Gradients that it drops or changes are so afterwards. Whoever calls this publishes.
        """
        given = _Gradients(entries, None)

        def ready(value: Any) -> Any:
            is_closure = inspect.isroutine(value) or isinstance(value, functools.partial)
            return self._on_shadow(value, context, given) if is_closure else value

        try:
            with self._masters_in(name, groups, state, entries):
                method = getattr(self._base, name)
                result = method(*map(ready, args), **{k: ready(v) for k, v in kwargs.items()})
            given.take_back(f"{name}()")
            return result
        finally:
            given.drop()
            for call in state_calls(context, entries):
                call.canonical()

    def _on_shadow(
        self, closure: Callable[..., Any], context: Context, given: "_Gradients"
    ) -> Callable[..., Any]:
        """The closure, which sees the shadow of the masters, and whose gradients they get."""

        def on_served_weights(*args: Any, **kwargs: Any) -> Any:
            given.take_back("the optimizer")
            _publish(context, given.entries)
            versions = [e.param._version for e in given.entries]
            with torch.enable_grad():
                loss = closure(*args, **kwargs)
            written = [
                e.identity.name
                for e, v in zip(given.entries, versions, strict=True)
                if e.param._version != v
            ]
            if written:
                raise RuntimeError(
                    f"closure: it wrote the weights {', '.join(written[:8])}, which the optimizer "
                    "would overwrite; change weights between steps."
                )
            given.hand_over(None)
            return loss

        return on_served_weights

    @contextlib.contextmanager
    def _masters_in(
        self, name: str, groups: Groups, state: State, entries: Sequence[Managed]
    ) -> Iterator[None]:
        """While inside, the base holds the masters where it held their parameters."""
        if self._running:
            raise RuntimeError(f"{name}() inside {self._running}(): call it after that.")
        self._running = name
        masters = {e.param: e.state[MASTER] for e in entries}
        lent = _lend(groups, state, masters)
        optimizers = [self._base, *inner_optimizers(self._base)]
        before = [{k: vars(o)[k] for k in _SHARED if k in vars(o)} for o in optimizers]
        with released(self._base):
            for o in optimizers:
                _replace_attributes(o, masters, lent.known)
                vars(o).update({k: v for k, v in lent.shared.items() if k in vars(o)})
            for m in masters.values():
                m.requires_grad_()  # some optimizers leave out what does not
            try:
                yield
            finally:
                self._running = None
                for m in masters.values():
                    m.requires_grad_(False)
                _return(lent, groups, state, masters, vars(self._base).get("state"))
                for o, own in zip(optimizers, before, strict=True):
                    _replace_attributes(o, {m: p for p, m in masters.items()}, {})
                    vars(o).update(own)


# ---- What the base holds while it runs

_SHARED = ("param_groups", "state")


class _Lent(NamedTuple):
    """Groups and state with the masters in them, and what they stand for, by identity."""

    shared: dict[str, Any]
    known: dict[int, Any]


def _lend(groups: Groups, state: State, masters: Mapping[Tensor, Tensor]) -> _Lent:
    lent_groups = [{**g, "params": [masters.get(p, p) for p in g["params"]]} for g in groups]
    lent_state: State = defaultdict(dict)
    for p, held in state.items():
        if not isinstance(p, Tensor):  # what is no parameter's
            lent_state[p] = _replaced(held, masters, {})
            continue
        own = {k: v for k, v in held.items() if k not in STATE_KEYS}
        if own:  # an empty entry is how torch knows to make the state
            lent_state[masters.get(p, p)] = own
    known = {id(groups): lent_groups, id(state): lent_state}
    for mine, theirs in zip(groups, lent_groups, strict=True):
        known |= {id(mine): theirs, id(mine["params"]): theirs["params"]}
    return _Lent({"param_groups": lent_groups, "state": lent_state}, known)


def _return(
    lent: _Lent,
    groups: Groups,
    state: State,
    masters: Mapping[Tensor, Tensor],
    made: State | None,
) -> None:
    """What the base did to its groups and state, into the real ones."""
    after_state = lent.shared["state"] if made is None else made  # it may have made a new one
    params = {masters.get(p, p): p for p in [*state, *(p for g in groups for p in g["params"])]}
    for held, p in params.items():
        after = after_state.pop(held, {})
        if not isinstance(p, Tensor):
            continue
        own = state.setdefault(p, {}) if after else state.get(p, {})
        for key in [k for k in own if k not in STATE_KEYS and k not in after]:
            del own[key]
        own.update(after)
    state.update(_replaced(dict(after_state), {m: p for p, m in masters.items()}, {}))
    for group, ran in zip(groups, lent.shared["param_groups"], strict=True):
        group.update({k: v for k, v in ran.items() if k != "params"})


def _replace_attributes(
    opt: Optimizer, replace: Mapping[Tensor, Tensor], known: dict[int, Any]
) -> None:
    """Tensors in an optimizer's own attributes: its lists, tuples, sets, deques and dicts."""
    for key, value in own_attributes(opt).items():
        if key not in _SHARED:
            vars(opt)[key] = _replaced(value, replace, known)


def _replaced(value: Any, replace: Mapping[Tensor, Tensor], known: dict[int, Any]) -> Any:
    """`value` with tensors replaced, in new containers; the same object if there are none."""
    if isinstance(value, Tensor):
        return replace.get(value, value)
    if id(value) in known:
        return known[id(value)]
    if isinstance(value, dict):
        items = [tuple(_replaced(x, replace, known) for x in item) for item in value.items()]
        if all(a is b for new, old in zip(items, value.items(), strict=True)
               for a, b in zip(new, old, strict=True)):  # fmt: skip
            return value
        new = value.copy()
        new.clear()
        new.update(items)
        return new
    if type(value) in (list, tuple, set, deque):
        items = [_replaced(x, replace, known) for x in value]
        if all(a is b for a, b in zip(items, value, strict=True)):
            return value
        return deque(items, value.maxlen) if type(value) is deque else type(value)(items)
    return value


# ---- Gradients


class _Gradients:
    """The gradients of the parameters, lent to their masters in fp32."""

    def __init__(self, entries: Sequence[Managed], grad_scale: Tensor | None):
        self.entries = entries
        self.hand_over(grad_scale)

    def hand_over(self, grad_scale: Tensor | None) -> None:
        """master.grad <- fp32 gradient, unscaled; None where the parameter has none."""
        self._seen = []
        for e in self.entries:
            own, grad = e.param.grad, None
            if own is not None:
                check_grad(e)
                grad = e.source.from_local(
                    e.param, e.source.local_grad(e.param).float().contiguous()
                )
                if grad_scale is not None:
                    grad = grad / grad_scale.to(grad.device)
            e.state[MASTER].grad = grad
            self._seen.append((own, _version(own), grad, _version(grad)))

    def take_back(self, who: str, changes: bool = True) -> None:
        """Gradients that were dropped or, with `changes`, changed are so in the parameters too.

        Raises RuntimeError if `who` computed gradients itself, which the masters did not get.
        """
        for e, (own, own_version, lent, version) in zip(self.entries, self._seen, strict=True):
            shared = own is not None and lent is not None and _address(own) == _address(lent)
            now = e.state[MASTER].grad
            mine = e.param.grad
            same = mine is own and (shared or _version(own) == own_version)
            if mine is not None and not same:
                raise RuntimeError(
                    f"{who}: it changed the gradient of {e.identity.name!r} itself, which its "
                    "masters cannot see. Compute gradients outside of it, or in a closure."
                )
            if now is None and lent is not None:
                e.param.grad = None
            elif changes and now is not None and not (now is lent and _version(now) == version):
                if now is not lent or not shared:
                    _assign(e.param, now)

    def drop(self) -> None:
        for e in self.entries:
            e.state[MASTER].grad = None


def _version(grad: Tensor | None) -> int | None:
    return None if grad is None else to_local(grad)._version


def _address(grad: Tensor) -> int:
    return to_local(grad).data_ptr()


def _assign(param: Tensor, value: Tensor) -> None:
    """param.grad <- value, in the memory that it has (DDP's buckets) where it is cut alike."""
    own, part = param.grad, to_local(value)
    if own is not None and source_of(own).placements(own) == source_of(value).placements(value):
        to_local(own).copy_(part)
    else:
        part = part.to(param.dtype if own is None else own.dtype)
        param.grad = source_of(param).from_local(param, part)


def _publish(context: Context, entries: Iterable[Managed]) -> None:
    """containers <- stochastic rounding of the masters, made canonical first."""
    for call in state_calls(context, entries):
        call.canonical()
        call.round()
