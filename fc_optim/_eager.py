"""What `torch.compile` is to leave alone."""

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., object])


def eager(function: F) -> F:
    """A function that a compiled caller runs as it is, with a graph break.

    Kernels are compiled already, and read addresses that a trace does not have. As
    `torch.compiler.disable`, which would import the compiler now: 2 s that most never need.
    """

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> object:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        return disabled()(*args, **kwargs)

    @functools.cache
    def disabled() -> Callable[..., object]:
        import torch._dynamo

        return torch._dynamo.disable(function)

    wrapper._torchdynamo_disable = True  # type: ignore[attr-defined]  # do not look inside
    return cast(F, wrapper)
