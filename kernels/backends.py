"""Which backend serves a device. Backends are imported only when they are used."""

import functools
import importlib
import importlib.util
import warnings
from collections.abc import Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from fc_optim.kernels.batch import Batch

BACKENDS = ("auto", "reference", "cpu", "triton")
_MODULES = {"reference": "reference", "cpu": "cpu", "triton": "gpu"}


class Backend(Protocol):
    """The kernels; see `fc_optim.kernels.reference` for what each does."""

    def round_(self, batch: Batch) -> None: ...
    def canonical_(self, batch: Batch) -> None: ...
    def adam_(self, batch: Batch) -> None: ...
    def muon_momentum_(self, batch: Batch) -> None: ...
    def muon_update_(self, batch: Batch) -> None: ...
    def flag_foreign(self, batch: Batch) -> Tensor: ...
    def adopt_(self, batch: Batch, flags: Tensor) -> Tensor: ...
    def sample(
        self, tensors: Sequence[Tensor], positions: Sequence[Tensor], cache: dict[Any, Any]
    ) -> Tensor: ...


@functools.cache
def select_backend(choice: str, device_type: str) -> Backend:
    """The backend for tensors on `device_type`; `choice` is one of `BACKENDS`.

    Raises ValueError for an unknown choice or one that cannot serve the device, ImportError when
    its library is not installed. "auto" falls back to the reference with one warning.
    """
    if choice not in BACKENDS:
        raise ValueError(f"backend: {choice!r} is none of {', '.join(map(repr, BACKENDS))}.")
    if choice == "cpu" and device_type != "cpu":
        raise ValueError(f"backend: 'cpu' cannot serve {device_type} parameters; use 'auto'.")
    wanted = choice
    if choice == "auto":
        wanted = "cpu" if device_type == "cpu" else "triton"
    library = {"cpu": "numba", "triton": "triton"}.get(wanted)
    if library and importlib.util.find_spec(library) is None:
        remedy = "pip install 'fc_optim[cpu]'" if wanted == "cpu" else "pip install triton"
        if choice != "auto":
            raise ImportError(f"backend: {choice!r} needs {library}: {remedy}")
        warnings.warn(
            f"{library} is not installed: fc_optim runs its torch reference on {device_type}, many "
            f"times slower. {remedy}",
            stacklevel=2,
        )
        wanted = "reference"
    module = importlib.import_module(f"fc_optim.kernels.{_MODULES[wanted]}")
    return cast(Backend, module)


def backend_for(choice: str, device: torch.device) -> Backend:
    return select_backend(choice, device.type)
