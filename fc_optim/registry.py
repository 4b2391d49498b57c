"""Which parameters are managed, and under which identity and name."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fc_optim.naming import clean_name, param_id

CONTAINER_DTYPES = (torch.bfloat16, torch.float32)

Groups = Sequence[dict[str, Any]]


@dataclass(slots=True)
class Slot:
    """A place in a parameter group: its identity and its label, whichever tensor is there now.

    Frameworks swap parameters after the optimizer was built; the identity stays with the place.
    `seen` is the parameter's fingerprint after the optimizer last wrote it (see `foreign`).
    """

    param_id: int
    name: str
    seen: tuple[Any, ...] | None = None
    bound: bool = False  # the label is that of the bound model


@dataclass(slots=True)
class Managed:
    """A parameter that is served through stochastic rounding, with everything it needs."""

    param: Tensor
    state: dict[str, Any]
    group: dict[str, Any]
    slot: Slot


class Registry:
    """The slots of an optimizer, parallel to its parameter groups."""

    def __init__(self) -> None:
        self._slots: list[list[Slot]] = []

    def admit(self, group: dict[str, Any]) -> None:
        """Give the parameters of a new last group their identities.

        Raises ValueError for a name that is taken or a parameter that comes twice, TypeError for
        a trainable parameter that cannot be a container.
        """
        params, named = group["params"], group.get("param_names")
        if len(set(params)) != len(params):
            raise ValueError("params: a parameter comes twice in one group; pass tied ones once.")
        first = sum(map(len, self._slots))
        plain = (f"param.{first + i}" for i in range(len(params)))
        names = [clean_name(n) for n in named or plain]
        taken = {slot.name for slots in self._slots for slot in slots}
        for name, p in zip(names, params, strict=True):
            if name in taken:
                raise ValueError(
                    f"param_names: {name!r} names two parameters. Random bits are keyed by name, "
                    "so names must differ: prefix them ('critic.' + name), or pass plain "
                    "parameters."
                )
            taken.add(name)
            if group["served_dtype"] is not None and p.requires_grad:
                check_dtype(p, name)
        self._slots.append([Slot(param_id(name), name) for name in names])

    def places(self, groups: Groups) -> Iterator[tuple[dict[str, Any], Tensor, Slot]]:
        """Every (group, parameter, slot), in group order."""
        if [len(g["params"]) for g in groups] != [len(slots) for slots in self._slots]:
            raise RuntimeError(
                f"param_groups now have {[len(g['params']) for g in groups]} parameters, they had "
                f"{[len(slots) for slots in self._slots]}: parameters can be exchanged in place, "
                "not added or removed; use add_param_group(), or build a new optimizer."
            )
        for group, slots in zip(groups, self._slots, strict=True):
            for p, slot in zip(group["params"], slots, strict=True):
                yield group, p, slot

    def managed(self, groups: Groups, state: Mapping[Tensor, Any]) -> list[Managed]:
        """The parameters under management. Never adds to `state`: torch and DCP look for keys."""
        entries = []
        for group, p, slot in self.places(groups):
            own = state.get(p, {})
            if group["served_dtype"] is not None and (p.requires_grad or "master" in own):
                entries.append(Managed(p, own, group, slot))
        return entries

    def refuse_orphans(self, groups: Groups, state: Mapping[Tensor, Any]) -> None:
        """Raise RuntimeError if masters belong to parameters that are in no group any more."""
        held = {p for g in groups for p in g["params"]}
        lost = sum("master" in own for p, own in state.items() if p not in held)
        if lost:
            raise RuntimeError(
                f"{lost} parameters that have masters were replaced in param_groups, so their "
                "masters would be lost. Replace parameters before the first publish() or step(), "
                "or save state_dict() first and load it after."
            )

    def refuse_shared(self, entries: Sequence[Managed]) -> None:
        """Raise ValueError if two parameters share memory: each would undo the other's step."""
        owner: dict[int, str] = {}
        for e in entries:
            address = e.param.data_ptr()
            if (
                address
                and e.param.numel()
                and owner.setdefault(address, e.slot.name) != e.slot.name
            ):
                raise ValueError(
                    f"params: {owner[address]!r} and {e.slot.name!r} share their memory; tie them "
                    "by using one Parameter for both, and pass it once."
                )

    def name_of(self, groups: Groups, param: Tensor) -> str:
        return next(slot.name for _, p, slot in self.places(groups) if p is param)

    def bind(self, groups: Groups, model: nn.Module) -> None:
        """Take labels from `model`; identities stay. Raises ValueError if it shares nothing."""
        names: dict[Tensor, str] = {}
        for name, p in model.named_parameters(remove_duplicate=False):
            names.setdefault(p, clean_name(name))
        places = [(p, slot) for _, p, slot in self.places(groups)]
        if not any(p in names for p, _ in places):
            raise ValueError(
                "model: the optimizer trains none of its parameters; bind the model whose "
                "parameters the optimizer was built from."
            )
        for tensor, slot in places:
            slot.name, slot.bound = names.get(tensor, slot.name), tensor in names

    def __getstate__(self) -> list[list[tuple[int, str]]]:
        return [[(s.param_id, s.name) for s in slots] for slots in self._slots]

    def __setstate__(self, state: list[list[tuple[int, str]]]) -> None:
        self._slots = [[Slot(*pair) for pair in slots] for slots in state]


def check_dtype(param: Tensor, name: str) -> None:
    """Raise TypeError unless the parameter can be a container."""
    if param.dtype not in CONTAINER_DTYPES:
        raise TypeError(
            f"parameter {name!r} is {param.dtype}: a served parameter is bfloat16, or float32 on "
            "the bf16 grid. Convert the model (model.bfloat16() or .float()), or put the parameter "
            "in a group with served_dtype=None."
        )
    if hasattr(param, "to_local") or hasattr(param, "_is_flat_param"):
        raise TypeError(
            f"parameter {name!r} is a shard ({type(param).__name__}): sharded training is not "
            "supported yet; train on one process or under DDP."
        )
    if param.layout != torch.strided:
        raise TypeError(f"parameter {name!r} is {param.layout}: only dense parameters are served.")
    if any(stride == 0 and n > 1 for stride, n in zip(param.stride(), param.shape, strict=True)):
        raise TypeError(f"parameter {name!r} is expanded (a stride is 0): make it contiguous().")
    if param.is_inference():
        raise TypeError(
            f"parameter {name!r} was made in inference mode and cannot be trained: build the model "
            "outside of it."
        )
