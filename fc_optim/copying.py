"""How an optimizer travels: pickling and deepcopy, of drop-in classes too."""

import copy
from typing import Any, ClassVar

from torch import nn
from torch.optim import Optimizer

from fc_optim import construct

# Rebuilt after unpickling, or somebody else's (a scheduler's `step`, GradScaler's tensors).
_TRANSIENT = (
    *("_foreign", "_caches", "_base_step", "model", "_busy", "_agreed", "_reported"),
    *("buffers", "early_state"),
    *("step", "grad_scale", "found_inf"),
)


# What methods set after construction.
_OWN = (
    *("_seed", "_dither", "_epoch", "_served_version"),
    *("model", "was_bound", "_agreed", "_busy"),
)


class Copying(Optimizer):
    """The part of `FairCastOptimizer` that packs it and builds it again.

    A class made by `construct.drop_in` has no importable name in general: it travels as what it
    was made with (`_made_with`).
    """

    _base_cls: ClassVar[type[Optimizer] | None] = None
    _made_with: ClassVar[tuple[type[Optimizer], dict[str, Any]] | None] = None
    _base: Optimizer
    model: nn.Module | None

    def __setattr__(self, name: str, value: Any) -> None:
        """Lightning's wrappers take on this class, but hold the optimizer that has the state."""
        wrapped = vars(self).get("_optimizer")
        if wrapped is not None and name in _OWN:
            setattr(wrapped, name, value)
        elif construct.is_setting(self, name):
            setattr(self._base, name, value)
        else:
            super().__setattr__(name, value)

    def _reset_transient(self, base: Optimizer) -> None:
        raise NotImplementedError

    def _want_fp32_grads(self, group: dict[str, Any]) -> None:
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        state = {k: v for k, v in vars(self).items() if k not in _TRANSIENT and "_hooks" not in k}
        return {**state, "_base": construct.pack(self._base)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        if isinstance(state.get("_base"), tuple):
            state["_base"] = construct.unpack(*state["_base"])
            self._reset_transient(state["_base"])
        Optimizer.__setstate__(self, state)
        for group in self.param_groups:
            self._want_fp32_grads(group)

    def __reduce__(self) -> tuple[Any, ...]:
        cls = type(self)
        made = vars(cls).get("_made_with")
        return (_new, (cls if made is None else cls.__base__, made), self.__getstate__())

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """As unpickling, but bound to the copy of the model."""
        make, args, state = self.__reduce__()
        memo[id(self)] = twin = make(*args)
        twin.__setstate__(copy.deepcopy(state, memo))
        twin.model = copy.deepcopy(self.model, memo)
        return twin


def _new(parent: type, made: tuple[type[Optimizer], dict[str, Any]] | None) -> Any:
    """An uninitialised instance of `parent`, or of the drop-in class made from it."""
    cls: Any = parent if made is None else construct.drop_in(parent, made[0], **made[1])
    return cls.__new__(cls)
