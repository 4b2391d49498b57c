"""Which parameters are managed, under which identity and name, and where their shards sit."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fc_optim.kernels.batch import Segment
from fc_optim.params import sources
from fc_optim.params.layouts import FlatPiece, Group, Layout, flat_layout, groups_of
from fc_optim.params.modules import named_parameters
from fc_optim.params.names import clean_name, param_id
from fc_optim.params.sources import ParameterSource, source_of
from fc_optim.params.unnamed import Numbered

CONTAINER_DTYPES = (torch.bfloat16, torch.float32)

Groups = Sequence[dict[str, Any]]


@dataclass(slots=True)
class Identity:
    """A place in a parameter group: who is there, whichever tensor it is now.

    Frameworks exchange parameters after the optimizer was built; the identity stays with the place.

    ids, names: one per original parameter: several for a flat buffer.
    name: the label in messages.
    tensor: the one that was last seen here. Not a weak reference: torch would refuse to swap it.
    seen: the parameter's fingerprint after the optimizer last wrote it (see `update.foreign`).
    has_master: a master was made or loaded, so that its absence is a loss.
    off_grid: its values were no bf16 values when it had no master yet.
    """

    ids: tuple[int, ...]
    names: tuple[str, ...]
    name: str
    flat: bool = False  # a flat buffer: its ids follow from its names
    tensor: Tensor | None = None
    seen: tuple[Any, ...] | None = None
    bound: bool = False  # the label is that of the bound model
    has_master: bool = False
    off_grid: bool = False

    @property
    def param_id(self) -> int:
        """The id of a parameter that is not flat."""
        return self.ids[0]


@dataclass(slots=True, eq=False)
class Managed:
    """A parameter that is served through stochastic rounding, with everything it needs."""

    param: Tensor
    state: dict[str, Any]
    group: dict[str, Any]
    identity: Identity
    source: ParameterSource
    layout: Layout = field(default=Layout(()))
    segments: tuple[Segment, ...] = ()

    @property
    def local(self) -> Tensor:
        """This rank's part of the parameter: what kernels write.

        Not kept: whoever moves the weights elsewhere gets their memory.
        """
        return self.source.to_local(self.param)

    @property
    def shape(self) -> torch.Size:
        """The shape of the unsharded parameter; of a flat buffer, of its first."""
        return self.layout.pieces[0].shape

    def find_layout(self, known: dict[Tensor, Layout]) -> None:
        """Find out how the parameter is cut. Raises TypeError or RuntimeError if it cannot be."""
        name, ids = self.identity.name, self.identity.ids
        layout = sources.layout_of(self.param, known, name)
        if len(layout.pieces) != len(ids):
            raise RuntimeError(
                f"parameter {name!r}: a flat buffer does not say what it holds after pickling; "
                "call declare_flat() again."
            )
        self.layout, self.segments = layout, layout.segments(ids)


class Registry:
    """The identities of an optimizer, parallel to its parameter groups."""

    def __init__(self) -> None:
        self.identities: list[list[Identity]] = []
        self.known: dict[Tensor, Layout] = {}  # layouts that the tensors themselves do not show
        self.inside: dict[Tensor, tuple[Tensor, int]] = {}  # parameter -> flat buffer, its piece
        self._buffers: dict[Tensor, tuple[dict[str, Any], Identity]] = {}  # see `replace`
        self._plain = False  # tensors that are no Parameters are what the user passed
        self.numbered = Numbered()
        self.changes = 0  # grows with every change that the entries depend on

    # -- who is there --------------------------------------------------------------------------

    def admit(self, group: dict[str, Any]) -> None:
        """Give the parameters of a new last group their identities.

        Raises ValueError for a name that is taken or a parameter that comes twice, TypeError for
        a trainable parameter that cannot be a container.
        """
        params, named = group["params"], group.get("param_names")
        if len(set(params)) != len(params):
            raise ValueError("params: a parameter comes twice in one group; pass tied ones once.")
        first = sum(map(len, self.identities))
        plain = (f"param.{first + i}" for i in range(len(params)))
        taken = {i.name for of_group in self.identities for i in of_group}
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
        self.identities.append([_identity(n, p) for n, p in zip(names, params, strict=True)])
        self.changes += 1

    def unknown(self, groups: Groups) -> bool:
        """Whether a framework put buffers of its own into the groups and has not said of what.

        DeepSpeed's are plain tensors, in stage 3 they are there during a step only; whoever
        exchanges a parameter for another one (FSDP2) puts a Parameter there.
        """
        if self._buffers or self._plain:
            return False
        kinds = {kind for g in groups for kind in set(map(type, g["params"]))}
        return kinds != {nn.Parameter} and not all(
            p in self.known or isinstance(p, nn.Parameter) for g in groups for p in g["params"]
        )

    def is_trial(self, groups: Groups) -> bool:
        """Whether a step is only DeepSpeed trying the optimizer out, before it says what it steps.

        Its tensors are not yet known, and their gradients are zero.
        """
        if not self.unknown(groups):
            return False
        grads = [p.grad for g in groups for p in g["params"] if p.grad is not None]
        return not any(bool(grad.any()) for grad in grads)

    def tensors(self, groups: Groups) -> Sequence[Collection[Tensor]]:
        """What is stepped: the parameters of each group, or a framework's buffers for them all.

        DeepSpeed shows its buffers in the groups one by one.
        """
        return [self._buffers] if self._buffers else [group["params"] for group in groups]

    def places(self, groups: Groups) -> Iterator[tuple[dict[str, Any], Tensor, Identity]]:
        """Every (group, parameter, identity), in group order."""
        if self._buffers:
            for tensor, (group, identity) in self._buffers.items():
                yield group, tensor, identity
            return
        if self.unknown(groups):
            raise RuntimeError(
                "param_groups now hold tensors that are no Parameters: a framework put buffers in "
                "their place. Under DeepSpeed, call "
                "fc_optim.integrations.deepspeed.attach(engine) after initialize()."
            )
        sizes, mine = [len(g["params"]) for g in groups], list(map(len, self.identities))
        if sizes != mine:
            raise RuntimeError(
                f"param_groups now have {sizes} parameters, they had {mine}: parameters can be "
                "exchanged in place, not added or removed; use add_param_group(), or build a new "
                "optimizer. Under DeepSpeed, call "
                "fc_optim.integrations.deepspeed.attach(engine) after initialize()."
            )
        for group, identities in zip(groups, self.identities, strict=True):
            for p, identity in zip(group["params"], identities, strict=True):
                identity.tensor = p
                yield group, p, identity

    def managed(self, groups: Groups, state: Mapping[Tensor, Any]) -> list[Managed]:
        """The parameters under management. Never adds to `state`: torch and DCP look for keys."""
        entries = []
        for group, p, identity in self.places(groups):
            own = state.get(p, {})
            if group["served_dtype"] is not None and (p.requires_grad or "master" in own):
                e = Managed(p, own, group, identity, source_of(p))
                if own:
                    e.find_layout(self.known)
                entries.append(e)
        return entries

    def in_turn(self, groups: Groups, entries: list[Managed]) -> list[Managed]:
        """Those of the entries that are in the groups now.

        DeepSpeed steps one buffer after another.
        """
        if not self._buffers:
            return entries
        held = {p for group in groups for p in group["params"]}
        return [e for e in entries if e.param in held]

    def begins(self, entries: Sequence[Managed]) -> bool:
        """Whether the first buffer is among these: it is stepped once per step of the model."""
        return not self._buffers or next(iter(self._buffers)) in {e.param for e in entries}

    def find_layouts(self, entries: Sequence[Managed]) -> None:
        """Find how new parameters are cut. Raises TypeError or RuntimeError if one cannot be."""
        for e in entries:
            e.find_layout(self.known)
            held, expected = e.local.numel(), sum(s.numel for s in e.segments)
            if held < expected or (held > expected and not e.identity.flat):  # flat: padded
                raise RuntimeError(
                    f"parameter {e.identity.name!r} has {held} elements here, its shard has "
                    f"{expected}: leave summon_full_params() and the like first."
                )

    def process_groups(self, groups: Groups) -> list[Group]:
        """The process groups that hold the rest of any parameter, or copies of it.

        Not those of DistributedDataParallel: one of its ranks may serve alone.
        """
        layouts = []
        for group, p, identity in self.places(groups):
            if group["served_dtype"] is not None and (p.requires_grad or identity.has_master):
                layouts.append(sources.layout_of(p, self.known, identity.name))
        return groups_of(layouts)

    def names(self, groups: Groups) -> list[str]:
        """The labels of all parameters, in group order."""
        return [identity.name for _, _, identity in self.places(groups)]

    # -- checks --------------------------------------------------------------------------------

    def check_orphans(self, groups: Groups, state: Mapping[Tensor, Any]) -> None:
        """Raise RuntimeError if masters belong to parameters that are in no group any more."""
        held = {p for _, p, _ in self.places(groups)}
        lost = sum("master" in state[p] for p in state if isinstance(p, Tensor) and p not in held)
        if lost:
            raise RuntimeError(
                f"{lost} parameters that have masters were replaced in param_groups, so their "
                "masters would be lost. Replace parameters before the first publish() or step(), "
                "or save state_dict() first and load it after."
            )

    # -- what frameworks and models say --------------------------------------------------------

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
        first = {i.tensor: i for of_group in self.identities for i in of_group}
        lost = [p.name for param, p in pieces if param not in first]
        if lost:
            raise ValueError(f"the optimizer was not built with {', '.join(lost[:8])}.")
        names = tuple(p.name for _, p in pieces)
        ids = tuple(first[param].param_id for param, _ in pieces)
        label = names[0] if len(names) == 1 else f"buffer {len(self._buffers)} from {names[0]}"
        self.known[tensor] = layout
        for i, (param, _) in enumerate(pieces):
            self.inside[param] = tensor, i
        self._buffers[tensor] = group, Identity(ids, names, label, flat=True, tensor=tensor)
        self.changes += 1

    def declare_flat(
        self, groups: Groups, param: Tensor, pieces: Sequence[FlatPiece], over: Sequence[Group]
    ) -> None:
        """See `FairCastOptimizer.declare_flat`."""
        identity = next((i for _, p, i in self.places(groups) if p is param), None)
        if identity is None:
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
        self.known[param] = flat_layout(pieces, over)
        identity.ids, identity.names, identity.flat = tuple(map(param_id, names)), names, True
        self.changes += 1

    def bind(self, groups: Groups, model: nn.Module) -> None:
        """Take labels from `model`; ids stay.

        Raises ValueError if it shares nothing, or if a name would be that of two parameters.
        """
        names = {p: name for name, p in named_parameters(model)}
        places = [(p, identity) for _, p, identity in self.places(groups)]
        if not any(p in names for p, _ in places):
            raise ValueError(
                "model: the optimizer trains none of its parameters; bind the model whose "
                "parameters the optimizer was built from."
            )
        others = [(identity.name, p) for p, identity in places if p not in names]
        _check_clash([*named_parameters(model, remove_duplicate=False), *others])
        self.known.update(sources.layouts_in(model))
        for tensor, identity in places:
            identity.bound = tensor in names
            if identity.bound:
                name = identity.name = names[tensor]
                pieces = source_of(tensor).pieces(name, tensor)
                identity.names = tuple(own for own, _ in pieces)
        self.changes += 1

    def __getstate__(self) -> list[list[tuple[Any, ...]]]:
        return [
            [(i.ids, i.names, i.name, i.flat, i.has_master) for i in of_group]
            for of_group in self.identities
        ]

    def __setstate__(self, state: list[list[tuple[Any, ...]]]) -> None:
        self.__init__()  # type: ignore[misc]
        self._plain = True  # nobody knows any more
        self.identities = [
            [Identity(ids, names, n, flat, has_master=m) for ids, names, n, flat, m in of_group]
            for of_group in state
        ]


def _labels(given: Sequence[str], taken: Collection[str]) -> list[str]:
    """Cleaned names, but as they were given where cleaning would make two of them one."""
    cleaned = [clean_name(name) for name in given]
    times = Counter([*cleaned, *taken])
    return [raw if times[name] > 1 else name for raw, name in zip(given, cleaned, strict=True)]


def _check_clash(named: Iterable[tuple[str, Tensor]]) -> None:
    """Raise ValueError if two parameters have one name."""
    owner: dict[str, Tensor] = {}
    for name, p in named:
        if owner.setdefault(name, p) is not p:
            raise ValueError(
                f"model: {name!r} would be the name of two parameters, and what is served is known "
                "by its name. Rename one attribute, or bind a model that has all parameters of "
                "the optimizer."
            )


def _identity(name: str, param: Tensor) -> Identity:
    source = source_of(param)
    flat = source.is_flat(param)
    names = tuple(clean_name(n) if flat else n for n, _ in source.pieces(name, param))
    return Identity(tuple(map(param_id, names)), names, name, flat, tensor=param)


def check_memory(entries: Iterable[Managed]) -> None:
    """Raise ValueError if two parameters share memory: each would undo the other's step.

    Interleaved views (columns of one matrix) are told apart by where they begin alone.
    """
    held = [(e.local.data_ptr(), e) for e in entries if e.local.numel() and e.local.data_ptr()]
    held.sort(key=lambda found: found[0])
    end: dict[torch.device, int] = {}
    last: dict[torch.device, Managed] = {}
    for begin, e in held:
        device = e.local.device
        if begin < end.get(device, 0):
            raise ValueError(
                f"params: {last[device].identity.name!r} and {e.identity.name!r} share their "
                "memory; tie them by using one Parameter for both, and pass it once."
            )
        dense = e.local.is_contiguous()
        size = e.local.numel() if dense else 1
        end[device], last[device] = begin + size * e.local.element_size(), e


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
    source = source_of(param)
    source.check(param, name)
    part = source.to_local(param)
    if any(stride == 0 and n > 1 for stride, n in zip(part.stride(), part.shape, strict=True)):
        raise TypeError(f"parameter {name!r} is expanded (a stride is 0): make it contiguous().")
    if part.is_inference():
        raise TypeError(
            f"parameter {name!r} was made in inference mode and cannot be trained: build the model "
            "outside of it."
        )
