"""Parameters that ZeRO-3 partitioned: what it leaves of them is empty, the rest in attributes."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fc_optim.params.layouts import FlatPiece, Layout, flat_layout
from fc_optim.params.sources import ParameterSource


class _Partitioned(ParameterSource):
    def owns(self, tensor: Any) -> bool:
        return hasattr(tensor, "ds_tensor")

    def to_local(self, tensor: Any) -> Tensor:
        return tensor.ds_tensor.detach()

    def address(self, tensor: Any) -> int:
        return tensor.ds_tensor.data_ptr()

    def shape(self, param: Any, name: str) -> torch.Size:
        return torch.Size(param.ds_shape)

    def layout(self, param: Any, name: str) -> Layout:
        piece = FlatPiece(name, param.ds_shape, *partition(param), 0)
        return flat_layout([piece], [param.ds_process_group])

    def rounds_forward(self, model: Any, params: Sequence[Tensor]) -> str | None:
        of_engine = any(hasattr(p, "ds_id") or hasattr(p, "_ds_tensor") for p in params)
        return "the model is under DeepSpeed" if of_engine else None


def partition(p: Any) -> tuple[int, int]:
    """Which elements of a parameter this rank's ZeRO-3 partition has: (start, length)."""
    size = p.ds_tensor.numel()
    start = min(torch.distributed.get_rank(p.ds_process_group) * size, p.ds_numel)
    return start, min(size, p.ds_numel - start)


SOURCE = _Partitioned()
