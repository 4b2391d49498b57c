"""Names and identities of parameters: what keys the random bits, and what an engine is told."""

import hashlib
from collections.abc import Iterable

_WRAPPERS = ("_fsdp_wrapped_module.", "_orig_mod.", "_checkpoint_wrapped_module.")


def clean_name(name: str) -> str:
    """A parameter's name as the plain model has it, without the prefixes that wrappers add.

    For names of which nothing else is known: those given with parameters, those in files. It keys
    random bits, so it must never change. The names of a model's parameters come from
    `modules.named_parameters`, which sees the wrappers.
    """
    name = without_wrappers(name)
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def without_wrappers(name: str) -> str:
    """A name without the attributes of wrappers that no model has; `module` may be its own."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def listed(names: Iterable[str]) -> str:
    """The first of many names, for a message."""
    names = list(names)
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def param_id(name: str) -> int:
    """The 32-bit identity of a parameter in the Philox counter, from its cleaned name."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little")


# What this package adds to torch's per-parameter state and parameter groups.
STATE_KEYS = ("master", "param_id", "dither_step")
GROUP_KEYS = (
    "algorithm",
    "dither",
    "epoch",
    "rounding_scheme",
    "seed",
    "served_dtype",
    "served_version",
)
