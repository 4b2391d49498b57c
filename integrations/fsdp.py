"""FullyShardedDataParallel (FSDP1) and fully_shard (FSDP2): what both keep beside the parameters.

FSDP1 has no public way to say where a shard sits; it is read from its own records
(`FlatParameter._shard_param_infos`). FSDP2's parameters are DTensors, which say it themselves.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from fc_optim.params.layouts import Layout, Piece
from fc_optim.params.names import without_wrappers
from fc_optim.params.sources import ParameterSource

_FLAT = "_flat_param"  # FSDP1's name for a flat parameter, in place of its originals' names


class _FSDP(ParameterSource):
    def owns(self, tensor: Any) -> bool:
        return hasattr(tensor, "_is_flat_param") or hasattr(tensor, "_fsdp_flattened")

    def is_flat(self, param: Any) -> bool:
        return hasattr(param, "_is_flat_param")

    def shape(self, param: Any, name: str) -> torch.Size:
        raise TypeError(
            f"parameter {name!r} is flattened by FullyShardedDataParallel, which hides its shape: "
            "Muon, which needs whole matrices, needs fully_shard (FSDP2); other shapes are to be "
            "taken from the model before it is wrapped."
        )

    def layout(self, param: Any, name: str) -> Layout:
        if self.is_flat(param):  # the groups are known once the model is bound
            return Layout(tuple(_flat_pieces(param)))
        raise TypeError(
            f"parameter {name!r} is a view into a flat parameter of FSDP1, which does not say "
            "where it sits: call bind(model) with the FullyShardedDataParallel model first."
        )

    def pieces(self, name: str, param: Any, aliases: bool = False) -> list[tuple[str, int]]:
        if not self.is_flat(param):
            return [(name, 0)]
        prefix = name.removesuffix(_FLAT) if name.endswith(_FLAT) else name + "."
        found = [(fqn, i) for i, fqn in enumerate(param._fqns)]
        for tied in param._shared_param_infos if aliases else ():
            first = f"{tied.prim_module_name}.{tied.prim_param_name}".removeprefix(".")
            alias = f"{tied.module_name}.{tied.param_name}".removeprefix(".")
            found.append((alias, param._fqns.index(first)))
        return [(prefix + without_wrappers(fqn), i) for fqn, i in found]

    def rounds_forward(self, model: nn.Module | None, params: Sequence[Tensor]) -> str | None:
        wrapped = (FullyShardedDataParallel, FSDPModule)
        under = model is not None and any(isinstance(m, wrapped) for m in model.modules())
        return "the model is under FSDP" if under else None

    def forward_dtype(self, module: nn.Module) -> torch.dtype | None:
        policy: Any = None
        if isinstance(module, FSDPModule):
            policy = module._get_fsdp_state()._mp_policy  # type: ignore[operator, union-attr]
        elif isinstance(module, FullyShardedDataParallel):
            policy = module.mixed_precision
        return getattr(policy, "param_dtype", None)

    def layouts(self, model: nn.Module) -> dict[Tensor, Layout]:
        found: dict[Tensor, Layout] = {}
        for unit in FullyShardedDataParallel.fsdp_modules(model):
            handle = unit._handle
            if handle is None:
                continue
            flat = handle.flat_param
            groups = (handle.process_group,) if handle.uses_sharded_strategy else ()
            between = getattr(unit, "_inter_node_pg", None)  # HYBRID_SHARD
            copies = (between,) if groups and between is not None else ()
            if not groups:
                copies = (handle.process_group,)
            pieces = tuple(_flat_pieces(flat))
            found[flat] = Layout(pieces, groups, copies)
            for param, piece in zip(flat._params or (), pieces, strict=bool(flat._params)):
                at_zero = tuple(replace(s, offset=0) for s in piece.segments)
                found[param] = Layout((Piece(piece.shape, at_zero),), groups, copies)
        return found

    def reshard(self, model: nn.Module) -> None:
        """FSDP keeps whole parameters after a forward without a backward, and would use them again.

        FSDP1 has no public way to drop them; this does what it does at the end of a backward.
        """
        for m in model.modules():
            if isinstance(m, FSDPModule):
                m.reshard()
        for unit in FullyShardedDataParallel.fsdp_modules(model):
            handle = unit._handle
            if handle is None or not handle.uses_sharded_strategy:
                continue
            begun = hasattr(handle.flat_param, "_full_param_padded")  # there was a forward
            if begun and handle._training_state.name == "IDLE" and not handle.needs_unshard():
                handle.reshard(True)
                handle.post_reshard()
                handle._prefetched = False


def _flat_pieces(flat_param: Any) -> Iterator[Piece]:
    """The pieces of a flat parameter, one per original parameter."""
    for shape, info in zip(flat_param._shapes, flat_param._shard_param_infos, strict=True):
        if info.in_shard:
            start, length = info.intra_param_start_idx, info.numel_in_shard
            yield Piece.run(shape, start, length, info.offset_in_shard)
        else:
            yield Piece(shape, ())


SOURCE = _FSDP()
