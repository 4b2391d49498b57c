"""How a FairCastOptimizer comes to be: options, the base instance, drop-in classes, copies."""

import copy
import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from fc_optim.kernels.backends import BACKENDS
from fc_optim.metrics.step import MODES
from fc_optim.update.algorithms import ALGORITHMS, own_algorithm
from fc_optim.update.base import inner_optimizers, own_attributes, take_over, taken_over
from fc_optim.weights import DITHERS

OPTIONS = ("seed", "dither", "masters", "backend", "fp32_grads", "metrics")
_classes: dict[Any, type] = {}
logger = logging.getLogger("fc_optim")


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
        _check_arguments(base, args, kwargs)
        params = read_once(params)
        made = base(params, *args, **kwargs)
        _check_base(made)
        return made
    if not isinstance(base, Optimizer):
        raise TypeError(
            f"base: {base!r} is neither a torch.optim.Optimizer class nor an instance of one."
        )
    if hasattr(base, "served_params"):
        raise TypeError("base: it is a FairCastOptimizer already.")
    if vars(base).get("step") is taken_over:
        raise ValueError("base: this instance was wrapped already; use that FairCastOptimizer.")
    _check_base(base)
    if params is not None or args or kwargs:
        extra = ", ".join(["params"] * (params is not None) + sorted(kwargs)) or "arguments"
        raise TypeError(f"{extra}: not taken with an optimizer instance, which has its own.")
    return base


def _check_arguments(base: type[Optimizer], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise TypeError for arguments of which the base's own errors would not say what is wrong."""
    known = inspect.signature(base).parameters
    defaults = {name: p.default for name, p in known.items()}
    check_numbers({**dict(zip(list(known)[1:], args, strict=False)), **kwargs}, defaults)
    for key in ("served_dtype", "algorithm"):
        if key in kwargs and key not in known:
            raise TypeError(
                f"{key}: a key of parameter groups, not an argument: pass "
                f"[{{'params': ..., {key!r}: {kwargs[key]!r}}}, ...]."
            )


def read_once(params: Any) -> Any:
    """Parameters, or groups of them, with lists in place of iterators.

    Raises ValueError for an iterator that gives nothing: it was read before.
    """
    if isinstance(params, Iterator):
        params = _list("params", params)
    for i, group in enumerate(params if isinstance(params, list | tuple) else ()):
        if isinstance(group, dict) and isinstance(group.get("params"), Iterator):
            group["params"] = _list(f"params of group {i}", group["params"])
    return params


def _list(what: str, iterator: Iterator[Any]) -> list[Any]:
    found = list(iterator)
    if not found:
        raise ValueError(
            f"{what}: the {type(iterator).__name__} gives no parameters. One can be read only "
            "once: pass model.parameters() anew, or a list."
        )
    return found


def check_numbers(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Raise TypeError for text in place of a number: torch does not look into groups."""
    for key, value in values.items():
        usual = defaults.get(key)
        numbers = [type(x) in (int, float) for x in _each(usual)]  # a bool is none
        numeric = key == "lr" or (numbers and all(numbers))
        if numeric and any(isinstance(x, str) for x in _each(value)):
            raise TypeError(
                f"{key}: {value!r} is text, not a number. Pass float(...) of it; in YAML, write "
                "1.0e-6, since 1e-6 is text there."
            )


def _each(value: Any) -> Sequence[Any]:
    return value if isinstance(value, tuple | list) else [value]


def _check_base(base: Optimizer) -> None:
    """Raise TypeError for an optimizer whose state is not all its own.

    Wrappers such as Lookahead keep the state of an inner optimizer beside theirs: it would run on
    the parameters in place of the masters, and not be saved.
    """
    name = type(base).__name__
    apart = [o for o in inner_optimizers(base) if o.state is not base.state]
    if apart:
        inner = type(apart[0]).__name__
        raise TypeError(
            f"base: {name} steps an {inner} inside, which keeps a state of its own that would "
            f"neither be run on the masters nor saved. Wrap the inner one alone, "
            f"FairCastOptimizer({inner}, ...), or use an optimizer that does both itself."
        )
    if type(base).state_dict is Optimizer.state_dict:
        return
    saved = type(base).state_dict(base).keys()
    if not {"state", "param_groups"} <= saved:
        raise TypeError(
            f"base: the state_dict() of {name} has {sorted(map(str, saved))} in place of 'state' "
            "and 'param_groups', so its state could not be saved with the masters."
        )
    if len(saved) > 2:
        logger.warning(
            "base: %s saves %s beside its state and groups. That is not saved with the masters: "
            "it begins anew after a resume.",
            name, ", ".join(sorted(map(str, saved - {"state", "param_groups"}))),
        )  # fmt: skip


# ---- Parameter groups


def complete_group(group: dict[str, Any], base: Optimizer, fused: bool) -> None:
    """Check a new parameter group and add the keys that it needs.

    Raises ValueError for a `served_dtype`, `algorithm` or hyper-parameter that cannot be, TypeError
    for text in place of a number.
    """
    check_numbers(group, base.defaults)
    group["served_dtype"] = served_dtype(group.get("served_dtype", torch.bfloat16))
    if group.get("differentiable"):
        raise ValueError("differentiable: True is not supported; masters are no graph nodes.")
    name = type(base).__name__
    own = own_algorithm(type(base), group, fused)
    algorithm = group.setdefault("algorithm", own)
    allowed = tuple(ALGORITHMS) if fused else (own,)
    if algorithm not in allowed:
        raise ValueError(f"algorithm: {algorithm!r} is none of {allowed} for {name}.")
    if not fused:
        return
    if group["served_dtype"] is None and algorithm != own:
        raise ValueError(
            f"algorithm: {algorithm!r} in a group with served_dtype=None, which {name} "
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
    raise ValueError(
        f"served_dtype: {value!r} is not supported. It is torch.bfloat16, stochastically rounded, "
        "or None: not rounded, stepped as torch does and served as it is."
    )


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
    return {**state, "_base": _pack(opt._base)}


class Packed(NamedTuple):
    """An optimizer to pickle: all its attributes but hooks and the methods that were taken over."""

    cls: type[Optimizer]
    attributes: dict[str, Any]


def _pack(base: Optimizer) -> Packed:
    attributes = {
        k: _pack(v) if isinstance(v, Optimizer) else v
        for k, v in own_attributes(base).items()
        if not isinstance(v, Iterator)  # what the base was given, and has read
    }
    return Packed(type(base), attributes)


def unpack_into(opt: Any, state: dict[str, Any]) -> None:
    """The inverse of `packed`; also takes a state whose base is still an optimizer, as torch's."""
    state = dict(state)
    if isinstance(state.get("_base"), tuple):
        state["_base"] = _unpack(*state["_base"])
    Optimizer.__setstate__(opt, state)
    if "weights" in state:
        opt.weights.attach(opt)
        opt._attach(opt._base)
        for group in opt.param_groups:
            opt.weights.want_fp32_grads(group)


def _unpack(cls: type[Optimizer], attributes: dict[str, Any]) -> Optimizer:
    base = object.__new__(cls)
    made = {k: _unpack(*v) if isinstance(v, Packed) else v for k, v in attributes.items()}
    base.__dict__.update(made)
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
