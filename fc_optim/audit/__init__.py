"""Audit an export: what a served copy keeps of the optimizer's movement. See `fc-audit --help`.

Names are imported when they are first used, so that this package costs nothing until then.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fc_optim.audit.casts import watch_casts as watch_casts
    from fc_optim.audit.hidden import hidden_ratio as hidden_ratio
    from fc_optim.audit.readers import open_checkpoint as open_checkpoint
    from fc_optim.audit.states import open_state as open_state
    from fc_optim.audit.stored import BadCheckpoint as BadCheckpoint

_HOME = {
    "BadCheckpoint": "stored",
    "hidden_ratio": "hidden",
    "open_checkpoint": "readers",
    "open_state": "states",
    "watch_casts": "casts",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
