"""Names and identities of parameters: what keys the random bits, and what an engine is told."""

import hashlib
from dataclasses import dataclass
from typing import Any

_WRAPPERS = ("_fsdp_wrapped_module.", "_orig_mod.", "_checkpoint_wrapped_module.")


def clean_name(name: str) -> str:
    """A parameter's name as the plain model has it, without the prefixes that wrappers add."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def param_id(name: str) -> int:
    """The 32-bit identity of a parameter in the Philox counter, from its cleaned name."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little")


@dataclass(slots=True)
class Slot:
    """A place in a parameter group: its identity and its label, whichever tensor is there now.

    Frameworks swap parameters after the optimizer was built; the identity stays with the place.
    `seen` is the parameter's fingerprint after the optimizer last wrote it (see `foreign`).
    """

    param_id: int
    name: str
    seen: tuple[Any, ...] | None = None


def slots_of_group(group: dict, *, first: int, taken: set[str]) -> list[Slot]:
    """Slots for a new group whose first parameter is the optimizer's `first`-th.

    Raises ValueError for a name that the optimizer has already.
    """
    count = len(group["params"])
    named = group.get("param_names")
    plain = (f"param.{first + i}" for i in range(count))
    names = [clean_name(n) for n in named or plain]
    for name in names:
        if name in taken:
            raise ValueError(
                f"param_names: {name!r} names two parameters. Random bits are keyed by name, so "
                "names must differ: prefix them (f'critic.{name}'), or pass plain parameters."
            )
        taken.add(name)
    return [Slot(param_id(name), name) for name in names]


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
