"""Which parameters an optimizer manages: groups that join, names, and that all ranks agree."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import Self

from fc_optim import checkpoint, construct
from fc_optim.params import layouts as shards
from fc_optim.params.buffers import Buffers
from fc_optim.params.collectives import refuse_disagreement
from fc_optim.params.registry import Managed, Registry


class Membership(Optimizer):
    """The part of `FairCastOptimizer` that knows its parameters."""

    model: nn.Module | None
    was_bound: bool
    registry: Registry
    buffers: Buffers | None  # what a framework steps in place of parameters
    fused: bool
    fp32_grads: bool
    _base: Optimizer
    _seed: int
    _dither: str
    _epoch: int
    _agreed: bool

    def _stamp(self, group: dict[str, Any]) -> None:
        raise NotImplementedError

    @property
    def seed(self) -> int:
        """The 64-bit key of the random bits. Fixed: the shadow in the parameters depends on it."""
        return self._seed

    @property
    def dither(self) -> str:
        """The dither: "fresh", "sync" or "held". Fixed, as the seed is."""
        return self._dither

    def bind(self, model: nn.Module) -> Self:
        """Take names and order of `served_params()` from `model`. Random bits do not change.

        Under DistributedDataParallel it is collective: replicas that were built differently are
        refused, as `agree` does it.

        Raises ValueError if the optimizer trains none of the model's parameters. Returns self.
        """
        shards.reshard(model)  # FSDP2 shows other parameters while they are whole
        self.registry.bind(self.param_groups, model)
        self.was_bound = True
        self.model = model
        self._agreed = False  # the model knows of more ranks
        self.agree(shards.ddp_groups(model))
        return self

    def declare_flat(
        self, param: Tensor, pieces: Sequence[shards.FlatPiece], groups: Sequence[Any] = ()
    ) -> None:
        """Say which parameters a flat buffer holds, before its first step.

        Random bits and names are then those of the parameters, as if nothing had been flattened.

        Args:
            param: a flat parameter of this optimizer, 1-D, as ZeRO and Megatron make them.
            pieces: one per parameter that it is made of, in the same order on every rank of the
                groups; `length` is 0 where this rank has none of it.
            groups: process groups whose buffers together hold the whole parameters.

        Raises ValueError for an unknown parameter, a piece out of bounds, a name that comes twice.
        """
        self.registry.declare_flat(self.param_groups, param, pieces, groups)

    def step_buffers(self, model: nn.Module, buffers: Buffers) -> None:
        """Say which flat buffers a framework put in place of the parameters of `model`.

        For integrations, before the first step. Names and random bits stay those of the
        parameters. Raises ValueError if the optimizer was not built with a parameter,
        RuntimeError if it has masters of other tensors.
        """
        for b in buffers.all:
            layout = shards.flat_layout([p for _, p in b.pieces], buffers.groups, buffers.replicas)
            self.registry.replace(b.tensor, b.group, b.pieces, layout)
        self.registry.refuse_orphans(self.param_groups, self.state)
        self.buffers = buffers
        self.model, self.was_bound, self._agreed = model, True, False

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch. Masters of the new parameters are made at the next publish or step."""
        self._base.param_groups = self.param_groups  # somebody may have replaced the list
        self._agreed = False
        construct.read_once([param_group])
        with construct.released(self._base):
            self._base.add_param_group(param_group)  # to the shared list, after its checks
        try:
            self._admit(self.param_groups[-1])
        except Exception:
            self.param_groups.pop()
            raise

    def managed(self) -> list[Managed]:
        """The parameters under management, in group order."""
        return self.registry.managed(self.param_groups, self.state)

    def name_of(self, param: Tensor) -> str:
        """The label of a parameter of this optimizer."""
        return self.registry.name_of(self.param_groups, param)

    def agree(self, groups: Sequence[Any] | None = None) -> None:
        """Compare with other ranks what the shadow depends on. Collective; makes no masters.

        The first `publish()` does it, over all groups that shard or replicate the parameters as
        far as they are known. Raises RuntimeError on every rank if they disagree.
        """
        if groups is None:
            groups = self.registry.groups()
        ids = [e.slot.ids for e in self.managed()]
        options = {"seed": self.seed, "dither": self.dither, "epoch": self._epoch}
        options |= {"rounding_scheme": checkpoint.ROUNDING_SCHEME, "parameter names": ids}
        refuse_disagreement(options, groups)

    def _admit(self, group: dict[str, Any]) -> None:
        """Check a new group, complete its keys, and give its parameters their identities."""
        construct.refuse_text(group, self._base.defaults)
        group["served_dtype"] = construct.served_dtype(group.get("served_dtype", torch.bfloat16))
        construct.set_algorithm(group, type(self._base), self.fused)
        self._stamp(group)
        if group.get("differentiable"):
            raise ValueError("differentiable: True is not supported; masters are no graph nodes.")
        self.registry.admit(group)
        self._want_fp32_grads(group)

    def _want_fp32_grads(self, group: dict[str, Any]) -> None:
        if self.fp32_grads and group["served_dtype"] is not None:
            for p in group["params"]:
                if p.dtype == torch.bfloat16 and p.requires_grad and p.grad is None:
                    p.grad_dtype = torch.float32

    def _with_master(self) -> list[Managed]:
        return [e for e in self.managed() if "master" in e.state]
