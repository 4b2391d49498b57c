"""How a FairCastOptimizer comes to be: options, the base instance, drop-in classes, copies."""

import copy
import inspect
from typing import Any

import torch
from torch.optim import Optimizer

from fc_optim.kernels.backends import BACKENDS
from fc_optim.metrics.step import MODES
from fc_optim.update.algorithms import ALGORITHMS, own_algorithm
from fc_optim.update.unfused import own_attributes, take_over, taken_over
from fc_optim.weights import DITHERS

OPTIONS = ("seed", "dither", "masters", "backend", "fp32_grads", "metrics")
_classes: dict[Any, type] = {}


def check_options(
    seed: int, dither: str, masters: str, backend: str, fp32_grads: bool, metrics: bool | str
) -> None:
    """Raise ValueError or TypeError for an option that this version does not know."""
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**64:
        raise ValueError(f"seed: {seed!r} is not an integer in [0, 2**64).")
    if dither not in DITHERS:
        raise ValueError(f"dither: {dither!r} is none of {', '.join(map(repr, DITHERS))}.")
    if masters != "fp32":
        raise ValueError(f"masters: {masters!r} is not supported; use 'fp32'.")
    if backend not in BACKENDS:
        raise ValueError(f"backend: {backend!r} is none of {', '.join(map(repr, BACKENDS))}.")
    if metrics not in MODES:
        raise ValueError(
            f"metrics: {metrics!r} is none of False, True (counts a sixteenth) and 'all'."
        )
    if fp32_grads and not hasattr(torch.Tensor, "grad_dtype"):
        raise ValueError(f"fp32_grads: torch {torch.__version__} has no Tensor.grad_dtype.")


def base_instance(
    base: Any, params: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Optimizer:
    """The torch optimizer to take over: `base` itself, or one built from it."""
    if isinstance(base, type) and issubclass(base, Optimizer):
        if hasattr(base, "served_params"):
            raise TypeError(f"base: {base.__name__} is a FairCastOptimizer already.")
        return base(params, *args, **kwargs)
    if not isinstance(base, Optimizer):
        raise TypeError(
            f"base: {base!r} is neither a torch.optim.Optimizer class nor an instance of one."
        )
    if hasattr(base, "served_params"):
        raise TypeError("base: it is a FairCastOptimizer already.")
    if vars(base).get("step") is taken_over:
        raise ValueError("base: this instance was wrapped already; use that FairCastOptimizer.")
    if params is not None or args or kwargs:
        extra = ", ".join(["params"] * (params is not None) + sorted(kwargs)) or "arguments"
        raise TypeError(f"{extra}: not taken with an optimizer instance, which has its own.")
    return base


def complete_group(group: dict[str, Any], base: type[Optimizer], fused: bool) -> None:
    """Check a new parameter group and add the keys that it needs.

    Raises ValueError for a `served_dtype`, `algorithm` or hyper-parameter that cannot be.
    """
    group["served_dtype"] = served_dtype(group.get("served_dtype", torch.bfloat16))
    if group.get("differentiable"):
        raise ValueError("differentiable: True is not supported; masters are no graph nodes.")
    own = own_algorithm(base, group, fused)
    algorithm = group.setdefault("algorithm", own)
    allowed = tuple(ALGORITHMS) if fused else (own,)
    if algorithm not in allowed:
        raise ValueError(f"algorithm: {algorithm!r} is none of {allowed} for {base.__name__}.")
    if not fused:
        return
    if group["served_dtype"] is None and algorithm != own:
        raise ValueError(
            f"algorithm: {algorithm!r} in a group with served_dtype=None, which {base.__name__} "
            "itself steps; leave it out there."
        )
    ALGORITHMS[algorithm].complete_group(group)
    ALGORITHMS[algorithm].check_group(group)


def served_dtype(value: Any) -> str | None:
    """The group key `served_dtype`, as a plain value: "bfloat16", or None for an excluded group."""
    if value is None:
        return None
    if value in (torch.bfloat16, "bfloat16"):
        return "bfloat16"
    raise ValueError(f"served_dtype: {value!r} is neither torch.bfloat16 nor None (not rounded).")


def drop_in(parent: type[Optimizer], base: type[Optimizer], **defaults: Any) -> type[Optimizer]:
    """The class that takes the base's place; one per base and defaults, so that it pickles."""
    if not issubclass(base, Optimizer) or issubclass(base, parent):
        raise TypeError(f"base: {base!r} is not a torch.optim.Optimizer class to wrap.")
    key = (parent, base, tuple(sorted(defaults.items())))
    try:
        known = _classes.get(key)
    except TypeError as error:
        raise TypeError(f"defaults of a drop-in class must be hashable: {defaults!r}") from error
    if known is None:
        check_options(**{**_option_defaults(parent), **_only_options(defaults)})
        known = _classes[key] = _make(parent, base, defaults)
    return known


def _make(
    parent: type[Optimizer], base: type[Optimizer], defaults: dict[str, Any]
) -> type[Optimizer]:
    def __init__(self: Any, params: Any, *args: Any, **kwargs: Any) -> None:
        # Positional arguments are the base's, and win over this class's defaults.
        given = list(inspect.signature(base).parameters)[1 : 1 + len(args)]
        own = {k: v for k, v in defaults.items() if k not in given}
        parent.__init__(self, base, params, *args, **{**own, **kwargs})  # type: ignore[misc, arg-type]

    name = f"FairCast{base.__name__}"
    doc = f"`torch.optim`-style {base.__name__} whose parameters are the served bf16 copy."
    attributes = {
        "__init__": __init__,
        "__doc__": f"{doc} See `FairCastOptimizer`.",
        "__module__": "fc_optim",
        "__qualname__": name,
        "__signature__": _signature(parent, base, defaults),
        "_base_cls": base,
        "_made_with": (base, dict(defaults)),
    }
    return type(name, (parent,), attributes)


def _only_options(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in kwargs.items() if k in OPTIONS}


def _option_defaults(parent: type[Optimizer]) -> dict[str, Any]:
    parameters = inspect.signature(parent.__init__).parameters
    return {k: parameters[k].default for k in OPTIONS}


def _signature(
    parent: type[Optimizer], base: type[Optimizer], defaults: dict[str, Any]
) -> inspect.Signature:
    mine = inspect.signature(parent.__init__).parameters
    theirs = inspect.signature(base).parameters
    merged = [p for p in theirs.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    merged += [mine[k] for k in OPTIONS if k not in theirs]
    merged = [p.replace(default=defaults.get(p.name, p.default)) for p in merged]
    return inspect.Signature(merged)


# ---- Pickling and deepcopy

# Made anew, or somebody else's (a scheduler's `step`, GradScaler's tensors).
_TRANSIENT = ("_base_step", "_reported", "step", "grad_scale", "found_inf")


def packed(opt: Any) -> dict[str, Any]:
    """An optimizer's attributes as they travel.

    The inner one as its class and attributes: torch's own pickling keeps groups and state only,
    which breaks LBFGS.
    """
    state = {k: v for k, v in vars(opt).items() if k not in _TRANSIENT and "_hooks" not in k}
    return {**state, "_base": (type(opt._base), own_attributes(opt._base))}


def unpack_into(opt: Any, state: dict[str, Any]) -> None:
    """The inverse of `packed`; also takes a state whose base is still an optimizer, as torch's."""
    state = dict(state)
    if isinstance(state.get("_base"), tuple):
        state["_base"] = _unpacked_base(*state["_base"])
    Optimizer.__setstate__(opt, state)
    if "weights" in state:
        opt.weights.attach(opt)
        opt._attach(opt._base)
        for group in opt.param_groups:
            opt.weights.want_fp32_grads(group)


def _unpacked_base(cls: type[Optimizer], attributes: dict[str, Any]) -> Optimizer:
    base = object.__new__(cls)
    base.__dict__.update(attributes)
    Optimizer.__setstate__(base, {})  # its hooks; AdamW's own would look for `step` in all state
    take_over(base)
    return base


def reduced(opt: Any) -> tuple[Any, ...]:
    """How an optimizer pickles. A class made by `drop_in` has no importable name in general: it
    travels as what it was made with."""
    cls = type(opt)
    made = vars(cls).get("_made_with")
    return (_new, (cls if made is None else cls.__base__, made), packed(opt))


def deepcopy(opt: Any, memo: dict[int, Any]) -> Any:
    """As unpickling, but bound to the copy of the model."""
    make, args, state = reduced(opt)
    memo[id(opt)] = twin = make(*args)
    unpack_into(twin, copy.deepcopy(state, memo))
    twin.weights.model = copy.deepcopy(opt.weights.model, memo)
    return twin


def _new(parent: type, made: tuple[type[Optimizer], dict[str, Any]] | None) -> Any:
    """An uninitialised instance of `parent`, or of the drop-in class made from it."""
    cls: Any = parent if made is None else drop_in(parent, made[0], **made[1])
    return cls.__new__(cls)
