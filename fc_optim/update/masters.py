"""How masters come to be: who gets one, what is refused, what a new one is."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fc_optim.params.names import listed
from fc_optim.params.registry import Managed, check_dtype
from fc_optim.update.algorithms import ALGORITHMS
from fc_optim.update.state import MASTER, complete_state, id_tensor, new_master, on_grid


def without_master(entries: Sequence[Managed], everyone: bool) -> list[Managed]:
    """The parameters that are to get a master now.

    Without `everyone`, not those whose weights that would change although they have no gradient.
    """
    new = [e for e in entries if MASTER not in e.state]
    return new if everyone else [e for e in new if _may_begin(e)]


def _may_begin(e: Managed) -> bool:
    return e.param.grad is not None or not e.identity.off_grid


def check_new(entries: Sequence[Managed], everyone: bool) -> list[Managed]:
    """Raise unless masters of these can be made; returns those that `without_master` still has.

    RuntimeError for a master that was there and is gone, or weights on the meta device; TypeError
    for a parameter that cannot be a container.
    """
    _check_lost(entries)
    for e in entries:
        check_dtype(e.param, e.identity.name)
        if e.param.is_meta:
            raise RuntimeError(
                f"parameter {e.identity.name!r} is on the meta device: materialise the model "
                "(to_empty(), then load or initialise its weights) before the first step."
            )
        e.identity.off_grid = not on_grid(e.local)
    return without_master(entries, everyone)


def add_masters(entries: Sequence[Managed], state: dict[Tensor, Any], fused: bool) -> None:
    """Give parameters, whose layouts are known, masters of their own values, and their state."""
    _check_whole(entries)
    for e in entries:
        e.state = state.setdefault(e.param, {})
        e.state[MASTER] = new_master(e)
        if not e.identity.flat:
            e.state["param_id"] = id_tensor(e.identity.param_id)
        complete_state(e, fused, new=True)
        e.identity.has_master = True


def _check_lost(entries: Sequence[Managed]) -> None:
    lost = [e.identity.name for e in entries if e.identity.has_master]
    if lost:
        raise RuntimeError(
            f"optimizer.state: the masters of {listed(lost)} are gone. The weights "
            "hold their rounded copies only, hundreds of steps behind: load_state_dict() a saved "
            "state, or call adopt_weights() to begin new masters from the served weights. To begin "
            "the moments anew, call reset_moments() instead of clearing the state."
        )


def _check_whole(entries: Sequence[Managed]) -> None:
    """Raise TypeError where an algorithm needs whole matrices and a flat buffer cuts them."""
    for e in entries:
        algorithm = ALGORITHMS.get(e.group["algorithm"])
        flat = e.layout.groups and e.source.placements(e.param) is None
        if flat and algorithm is not None and algorithm.whole_matrices:
            raise TypeError(
                f"parameter {e.identity.name!r} is part of a flat buffer, which cuts matrices "
                "anywhere: Muon needs whole ones. Use fully_shard (FSDP2), or Adam."
            )
