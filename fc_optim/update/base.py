"""The base, once it is wrapped: it runs for the FairCastOptimizer alone, which has what it has.

Its own methods are run on the masters (see `update.unfused`); its settings are read and set there.
"""

import contextlib
import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

if TYPE_CHECKING:
    from fc_optim.optimizer import FairCastOptimizer

TAKEN_OVER = ("step", "load_state_dict")
_STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def taken_over(*args: Any, **kwargs: Any) -> Any:
    """What the methods of the base become."""
    raise RuntimeError(
        "this optimizer was wrapped by FairCastOptimizer, which owns its groups and state: call "
        "step() or load_state_dict() of the FairCastOptimizer, and the base's own methods there "
        "too."
    )


# A scheduler that was attached to the base checks for its mark.
taken_over._wrapped_by_lr_sched = True  # type: ignore[attr-defined]


def take_over(base: Optimizer) -> None:
    """From now on the FairCastOptimizer alone runs its methods, and those of one inside it."""
    for opt in (base, *inner_optimizers(base)):
        own = [n for n in dir(type(opt)) if own_method(type(opt), n)]
        vars(opt).update(dict.fromkeys((*TAKEN_OVER, *own), taken_over))


@contextlib.contextmanager
def released(base: Optimizer) -> Iterator[None]:
    """While inside, the base has its methods, but not the hooks of its step: ours are the same."""
    held = []
    for opt in (base, *inner_optimizers(base)):
        hidden = {k: v for k, v in vars(opt).items() if v is taken_over}
        if opt is base:
            hidden |= {k: vars(opt)[k] for k in _STEP_HOOKS if k in vars(opt)}
        held.append((opt, hidden))
        for key in hidden:
            del vars(opt)[key]
    vars(base).update({k: OrderedDict() for k in _STEP_HOOKS})
    try:
        yield
    finally:
        for opt, hidden in held:
            vars(opt).update(hidden)


def inner_optimizers(base: Optimizer) -> list[Optimizer]:
    """The optimizers that an optimizer such as SAM keeps in its attributes."""
    found: list[Optimizer] = []
    values = list(vars(base).values())
    for value in values:
        if isinstance(value, Optimizer) and value is not base and value not in found:
            found.append(value)
            values += vars(value).values()
        elif type(value) in (list, tuple):
            values += value
        elif type(value) is dict:
            values += value.values()
    return found


def own_attributes(opt: Optimizer) -> dict[str, Any]:
    """An optimizer's attributes but hooks and the methods that were taken over."""
    return {
        k: v
        for k, v in vars(opt).items()
        if k not in TAKEN_OVER and v is not taken_over and not k.endswith("_hooks")
    }


def own_method(cls: type[Optimizer], name: str) -> Callable[..., Any] | None:
    """The public method of this name that an optimizer's class has and torch's has not."""
    if name.startswith("_") or hasattr(Optimizer, name):
        return None
    found = inspect.getattr_static(cls, name, None)
    return found if isinstance(found, FunctionType) else None


# ---- What the base has and a FairCastOptimizer does not


def base_attribute(opt: "FairCastOptimizer", name: str) -> Any:
    """An attribute of the base: a method that runs on the masters, or one of its settings.

    Raises AttributeError if it has none, or one that could not be run on the masters.
    """
    opt = vars(opt).get("_optimizer", opt)  # Lightning's wrappers take on this class
    base = vars(opt).get("_base")
    if base is None or name.startswith("_"):
        raise AttributeError(f"{type(opt).__name__!r} object has no attribute {name!r}")
    method = own_method(type(base), name)
    if method is None:
        return _setting(opt, base, name)

    @functools.wraps(method)
    def on_masters(*args: Any, **kwargs: Any) -> Any:
        return opt.call_base(name, *args, **kwargs)

    return on_masters


def _setting(opt: "FairCastOptimizer", base: Optimizer, name: str) -> Any:
    if name in vars(base):
        return getattr(base, name)
    found = inspect.getattr_static(type(base), name, None)
    if found is None:
        raise AttributeError(
            f"{type(opt).__name__!r} object has no attribute {name!r}, and its base, "
            f"{type(base).__name__}, has none either"
        )
    if callable(found) and not isinstance(found, type | staticmethod | classmethod):
        raise AttributeError(
            f"{type(base).__name__}.{name} is no plain method, so it cannot be run on the masters"
        )
    return getattr(base, name)  # a property, a static or class method, a constant


def set_attribute(opt: "FairCastOptimizer", name: str, value: Any) -> None:
    """To set what is the base's alone is to set it there."""
    if _is_setting(opt, name):
        setattr(opt._base, name, value)
    else:
        object.__setattr__(opt, name, value)


def _is_setting(opt: Optimizer, name: str) -> bool:
    base = vars(opt).get("_base")
    if base is None or name.startswith("_") or name in vars(opt) or hasattr(type(opt), name):
        return False
    found = inspect.getattr_static(type(base), name, None)
    return isinstance(found, property) or vars(base).get(name, taken_over) is not taken_over
