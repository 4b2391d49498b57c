"""Which parameters are managed, under which identity and name, and where their shards sit."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from fc_optim.kernels.batch import Segment
from fc_optim.params import layouts as shards
from fc_optim.params.layouts import FlatPiece, Group, Layout, is_dtensor
from fc_optim.params.modules import named_parameters
from fc_optim.params.names import clean_name, param_id, without_wrappers
from fc_optim.params.unnamed import Numbered

CONTAINER_DTYPES = (torch.bfloat16, torch.float32)
FLAT = "_flat_param"  # FSDP1's name for a flat parameter, in place of its originals' names

Groups = Sequence[dict[str, Any]]


@dataclass(slots=True)
class Slot:
    """A place in a parameter group: its identity and its label, whichever tensor is there now.

    Frameworks swap parameters after the optimizer was built; the identity stays with the place.
    `ids` and `names` have one entry per original parameter: several for a flat parameter.
    `seen` is the parameter's fingerprint after the optimizer last wrote it (see `foreign`).
    """

    ids: tuple[int, ...]
    names: tuple[str, ...]
    name: str
    seen: tuple[Any, ...] | None = None
    bound: bool = False  # the label is that of the bound model
    flat: bool = False  # a flat buffer: its identities follow from its names
    _cut: tuple[Any, ...] = (None, None, (), ())  # the tensor and ids that the rest is of

    @property
    def param_id(self) -> int:
        """The identity of a parameter that is not flat."""
        return self.ids[0]

    def forget(self) -> None:
        """Find out anew at the next `cut` how the parameter is cut."""
        self._cut = (None, None, (), ())

    def cut(self, param: Tensor, known: Mapping[Tensor, Layout]) -> None:
        """Find out how `param`, the tensor that is here now, is cut."""
        if self._cut[0] is not param or self._cut[2] != self.ids:
            layout = shards.layout_of(param, known, self.name)
            if len(layout.pieces) != len(self.ids):
                raise RuntimeError(
                    f"parameter {self.name!r}: a flat buffer does not say what it holds after "
                    "pickling; call declare_flat() again."
                )
            self._cut = param, layout, self.ids, layout.segments(self.ids)

    @property
    def layout(self) -> Layout:
        return self._cut[1]

    @property
    def segments(self) -> tuple[Segment, ...]:
        return self._cut[3]


@dataclass(slots=True)
class Managed:
    """A parameter that is served through stochastic rounding, with everything it needs."""

    param: Tensor
    local: Tensor  # this rank's part of it: what kernels write
    state: dict[str, Any]
    group: dict[str, Any]
    slot: Slot


class Registry:
    """The slots of an optimizer, parallel to its parameter groups."""

    def __init__(self) -> None:
        self._slots: list[list[Slot]] = []
        self.known: dict[Tensor, Layout] = {}  # layouts that the tensors themselves do not show
        self._replaced: dict[Tensor, tuple[dict[str, Any], Tensor, Slot]] | None = None
        self._plain = False  # tensors that are no Parameters are what the user passed
        self.inside: Any = WeakTensorKeyDictionary()  # parameter -> its flat buffer, its piece
        self.numbered = Numbered()
        self._first: Any = WeakTensorKeyDictionary()  # slots by the tensors that they began with

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
        taken = {slot.name for slots in self._slots for slot in slots}
        names = _labels(list(named or plain), taken)
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
        self.numbered.any |= bool(params) and not named
        self._plain |= not all(isinstance(p, nn.Parameter) for p in params)
        self._slots.append([_slot(name, p) for name, p in zip(names, params, strict=True)])
        self._first.update(zip(params, self._slots[-1], strict=True))

    def unknown(self, groups: Groups) -> bool:
        """Whether a framework put buffers of its own into the groups and has not said of what.

        DeepSpeed's are plain tensors, in stage 3 they are there during a step only; whoever
        exchanges a parameter for another one (FSDP2) puts a Parameter there.
        """
        if self._replaced is not None or self._plain:
            return False
        held = [p for g in groups for p in g["params"] if p not in self.known]
        return not all(isinstance(p, nn.Parameter) for p in held)

    def is_trial(self, groups: Groups) -> bool:
        """Whether a step is only DeepSpeed trying the optimizer out, before it says what it steps.

        Its tensors are not yet known, and their gradients are zero.
        """
        if not self.unknown(groups):
            return False
        grads = [p.grad for g in groups for p in g["params"] if p.grad is not None]
        return not any(bool(grad.any()) for grad in grads)

    @staticmethod
    def _sizes(groups: Groups) -> list[int]:
        return [len(g["params"]) for g in groups]

    def places(self, groups: Groups) -> Iterator[tuple[dict[str, Any], Tensor, Slot]]:
        """Every (group, parameter, slot), in group order."""
        if self._replaced is not None:
            yield from self._replaced.values()
            return
        if self.unknown(groups):
            raise RuntimeError(
                "param_groups now hold tensors that are no Parameters: a framework put buffers in "
                "their place. Under DeepSpeed, call "
                "fc_optim.integrations.deepspeed.attach(engine) after initialize()."
            )
        if self._sizes(groups) != list(map(len, self._slots)):
            raise RuntimeError(
                f"param_groups now have {self._sizes(groups)} parameters, they had "
                f"{list(map(len, self._slots))}: parameters can be exchanged in place, not added "
                "or removed; use add_param_group(), or build a new optimizer. Under DeepSpeed, "
                "call fc_optim.integrations.deepspeed.attach(engine) after initialize()."
            )
        for group, slots in zip(groups, self._slots, strict=True):
            for p, slot in zip(group["params"], slots, strict=True):
                yield group, p, slot

    def managed(self, groups: Groups, state: Mapping[Tensor, Any]) -> list[Managed]:
        """The parameters under management. Never adds to `state`: torch and DCP look for keys."""
        return self._entries(self.places(groups), state)

    def in_turn(self, groups: Groups, state: Mapping[Tensor, Any]) -> list[Managed]:
        """Those of them that are in the groups now: DeepSpeed steps one buffer after another."""
        if self._replaced is None:
            return self.managed(groups, state)
        held = [p for group in groups for p in group["params"]]
        return self._entries((self._replaced[p] for p in held), state)

    def begins(self, entries: Sequence[Managed]) -> bool:
        """Whether the first buffer is among these: it is stepped once per step of the model."""
        return self._replaced is None or next(iter(self._replaced)) in {e.param for e in entries}

    def _entries(
        self, places: Iterable[tuple[dict[str, Any], Tensor, Slot]], state: Mapping[Tensor, Any]
    ) -> list[Managed]:
        entries = []
        for group, p, slot in places:
            own = state.get(p, {})
            if group["served_dtype"] is not None and (p.requires_grad or "master" in own):
                entries.append(Managed(p, shards.local(p), own, group, slot))
                if own:
                    slot.cut(p, self.known)
        return entries

    def lay_out(self, entries: Sequence[Managed]) -> None:
        """Find how new parameters are cut. Raises TypeError or RuntimeError if one cannot be."""
        for e in entries:
            e.slot.cut(e.param, self.known)
            if e.group["algorithm"] == "muon" and e.slot.layout.groups and not is_dtensor(e.param):
                raise TypeError(
                    f"parameter {e.slot.name!r} is part of a flat buffer, which cuts matrices "
                    "anywhere: Muon needs whole ones. Use fully_shard (FSDP2), or Adam."
                )
            held, expected = e.local.numel(), sum(s.numel for s in e.slot.segments)
            if held < expected or (held > expected and not e.slot.flat):  # flat ones are padded
                raise RuntimeError(
                    f"parameter {e.slot.name!r} has {held} elements here, its shard has "
                    f"{expected}: leave summon_full_params() and the like first."
                )

    def replace(
        self,
        tensor: Tensor,
        group: dict[str, Any],
        pieces: Sequence[tuple[Tensor, FlatPiece]],
        layout: Layout,
    ) -> None:
        """A flat buffer of a framework stands for some of the parameters from now on.

        Identities are those of the parameters. Raises ValueError for one that was never here.
        """
        lost = [p.name for first, p in pieces if first not in self._first]
        if lost:
            raise ValueError(f"the optimizer was not built with {', '.join(lost[:8])}.")
        names = tuple(p.name for _, p in pieces)
        ids = tuple(self._first[first].param_id for first, _ in pieces)
        self._replaced = self._replaced or {}
        label = names[0] if len(names) == 1 else f"buffer {len(self._replaced)} from {names[0]}"
        self.known[tensor] = layout
        for i, (first, _) in enumerate(pieces):
            self.inside[first] = tensor, i
        self._replaced[tensor] = group, tensor, Slot(ids, names, label, flat=True)

    def groups(self) -> list[Group]:
        """The process groups that hold the rest of any parameter, or copies of it.

        Not those of DistributedDataParallel: one of its ranks may serve alone.
        """
        slots = [s for of_group in self._slots for s in of_group]
        if self._replaced is not None:
            slots = [slot for _, _, slot in self._replaced.values()]
        layouts = [slot.layout for slot in slots if slot.layout]
        return shards.groups_of(layouts)

    def names(self, groups: Groups) -> list[str]:
        """The labels of all parameters, in group order."""
        return [slot.name for _, _, slot in self.places(groups)]

    def refuse_orphans(self, groups: Groups, state: Mapping[Tensor, Any]) -> None:
        """Raise RuntimeError if masters belong to parameters that are in no group any more."""
        held = {p for _, p, _ in self.places(groups)}
        lost = sum("master" in state[p] for p in state if isinstance(p, Tensor) and p not in held)
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
            address = e.local.data_ptr()
            if (
                address
                and e.local.numel()
                and owner.setdefault(address, e.slot.name) != e.slot.name
            ):
                raise ValueError(
                    f"params: {owner[address]!r} and {e.slot.name!r} share their memory; tie them "
                    "by using one Parameter for both, and pass it once."
                )

    def name_of(self, groups: Groups, param: Tensor) -> str:
        return next(slot.name for _, p, slot in self.places(groups) if p is param)

    def declare_flat(
        self, groups: Groups, param: Tensor, pieces: Sequence[FlatPiece], over: Sequence[Group]
    ) -> None:
        """See `FairCastOptimizer.declare_flat`."""
        slot = next((slot for _, p, slot in self.places(groups) if p is param), None)
        if slot is None:
            raise ValueError("param: it is in none of the optimizer's groups.")
        end = max((p.offset + p.length for p in pieces), default=0)
        if end > param.numel():
            raise ValueError(
                f"pieces: they end at element {end}, the buffer has {param.numel()}: offset and "
                "length are of this rank's buffer."
            )
        names = tuple(clean_name(p.name) for p in pieces)
        if len(set(names)) != len(names):
            raise ValueError("pieces: a name comes twice; a buffer holds one run of a parameter.")
        self.known[param] = shards.flat_layout(pieces, over)
        slot.ids, slot.names, slot.flat = tuple(map(param_id, names)), names, True
        slot.forget()

    def bind(self, groups: Groups, model: nn.Module) -> None:
        """Take labels from `model`; identities stay.

        Raises ValueError if it shares nothing, or if a name would be that of two parameters.
        """
        names = {p: name for name, p in named_parameters(model)}
        places = [(p, slot) for _, p, slot in self.places(groups)]
        if not any(p in names for p, _ in places):
            raise ValueError(
                "model: the optimizer trains none of its parameters; bind the model whose "
                "parameters the optimizer was built from."
            )
        others = [(slot.name, p) for p, slot in places if p not in names]
        _refuse_clash([*named_parameters(model, remove_duplicate=False), *others])
        self.known.update(shards.fsdp1_layouts(model))
        for tensor, slot in places:
            slot.bound = tensor in names
            if slot.bound:
                slot.name = names[tensor]
                slot.names = tuple(own for own, _ in names_in(slot.name, tensor))
            slot.forget()

    def __getstate__(self) -> list[list[tuple[Any, ...]]]:
        return [[(s.ids, s.names, s.name, s.flat) for s in slots] for slots in self._slots]

    def __setstate__(self, state: list[list[tuple[Any, ...]]]) -> None:
        self.__init__()  # type: ignore[misc]
        self._plain = True  # nobody knows any more
        self._slots = [[Slot(i, names, n, flat=f) for i, names, n, f in slots] for slots in state]


def names_in(name: str, param: Any, aliases: bool = False) -> list[tuple[str, int]]:
    """The unsharded parameters that one parameter holds: (name, number of its piece).

    Several in a flat parameter of FSDP1; with `aliases`, those tied to them as well.
    """
    if not hasattr(param, "_is_flat_param"):
        return [(name, 0)]
    prefix = name.removesuffix(FLAT) if name.endswith(FLAT) else name + "."
    found = [(fqn, i) for i, fqn in enumerate(param._fqns)]
    for tied in param._shared_param_infos if aliases else ():
        first = f"{tied.prim_module_name}.{tied.prim_param_name}".removeprefix(".")
        alias = f"{tied.module_name}.{tied.param_name}".removeprefix(".")
        found.append((alias, param._fqns.index(first)))
    return [(prefix + without_wrappers(fqn), i) for fqn, i in found]


def _labels(given: Sequence[str], taken: Collection[str]) -> list[str]:
    """Cleaned names, but as they were given where cleaning would make two of them one."""
    cleaned = [clean_name(name) for name in given]
    times = Counter([*cleaned, *taken])
    return [raw if times[name] > 1 else name for raw, name in zip(given, cleaned, strict=True)]


def _refuse_clash(named: Iterable[tuple[str, Tensor]]) -> None:
    owner: dict[str, Tensor] = {}
    for name, p in named:
        if owner.setdefault(name, p) is not p:
            raise ValueError(
                f"model: {name!r} would be the name of two parameters, and what is served is known "
                "by its name. Rename one attribute, or bind a model that has all parameters of "
                "the optimizer."
            )


def _slot(name: str, param: Tensor) -> Slot:
    flat = hasattr(param, "_is_flat_param")
    names = tuple(clean_name(own) if flat else own for own, _ in names_in(name, param))
    return Slot(tuple(map(param_id, names)), names, name, flat=flat)


def check_dtype(param: Tensor, name: str) -> None:
    """Raise TypeError unless the parameter can be a container."""
    if param.dtype not in CONTAINER_DTYPES:
        raise TypeError(
            f"parameter {name!r} is {param.dtype}: a served parameter is bfloat16, or float32 on "
            "the bf16 grid. Convert the model (model.bfloat16() or .float()), or put the parameter "
            "in a group with served_dtype=None."
        )
    if param.layout != torch.strided:
        raise TypeError(f"parameter {name!r} is {param.layout}: only dense parameters are served.")
    if shards.is_dtensor(param) and param.device_mesh.get_coordinate() is None:  # type: ignore[attr-defined]
        raise TypeError(
            f"parameter {name!r} is on {param.device_mesh}, which this rank is not part of: build "  # type: ignore[attr-defined]
            "the optimizer on the ranks of the mesh alone, from their parameters."
        )
    param = shards.local(param)
    if any(stride == 0 and n > 1 for stride, n in zip(param.stride(), param.shape, strict=True)):
        raise TypeError(f"parameter {name!r} is expanded (a stride is 0): make it contiguous().")
    if param.is_inference():
        raise TypeError(
            f"parameter {name!r} was made in inference mode and cannot be trained: build the model "
            "outside of it."
        )
