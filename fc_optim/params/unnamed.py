"""What is said, once, of parameters that were given no names: how they are served and rounded."""

import logging
from collections.abc import Sequence
from weakref import WeakKeyDictionary

logger = logging.getLogger("fc_optim")


class Numbered:
    """Whether the parameters of an optimizer are known by their numbers alone."""

    def __init__(self) -> None:
        self.any = False  # some were given no name
        self._said = False

    def say_served(self, names: Sequence[str]) -> None:
        """Log that these parameters of an unbound optimizer are served under their numbers."""
        if self.any and not self._said:
            self._said = True
            logger.warning(
                "served_params: the optimizer was given no names and no model, so it serves %s: "
                "call bind(model) for the names that an engine knows.", _range(names),
            )  # fmt: skip

    def say_shared(self, names: Sequence[str], seed: int) -> None:
        """Log that optimizers of one unnamed parameter each use the same random bits.

        That is how an optimizer that steps inside of the backward is made: one per parameter.
        """
        global _said_shared
        if not self.any or len(names) != 1:
            return
        _alone[self] = seed
        if not _said_shared and list(_alone.values()).count(seed) > 1:
            _said_shared = True
            logger.warning(
                "params: several optimizers have one unnamed parameter each. All are %r, so their "
                "elements are rounded with the same random bits: pass each its name, "
                "[(name, parameter)].", names[0],
            )  # fmt: skip


def _range(names: Sequence[str]) -> str:
    return repr(names[0]) if len(names) == 1 else f"{names[0]!r} to {names[-1]!r}"


# Of optimizers that have masters: their seeds.
_alone: WeakKeyDictionary[Numbered, int] = WeakKeyDictionary()
_said_shared = False
