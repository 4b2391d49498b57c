"""What every step runs: kernel calls, worked out once for the same parameters, state and gradients.

A `KernelCall` is one launch: the tensor lists of one dtype set on one device. A `Plan` keeps the
calls of an optimizer and tells, by comparing identities and addresses, whether they still hold.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from fc_optim.kernels.backends import Backend
from fc_optim.kernels.batch import Batch
from fc_optim.params.registry import CONTAINER_DTYPES, Managed
from fc_optim.params.sources import is_sharded, source_of, to_local
from fc_optim.update.algorithms import Algorithm, algorithm_of
from fc_optim.update.state import EPOCH, MASTER, check_state, move_state, state_keys

_SIGNATURES = 8  # sets of gradients whose calls are kept: experts that get none in some steps


@dataclass(frozen=True, slots=True)
class Context:
    """What all calls of an optimizer share. `epoch` is None where each state has its own."""

    seed: int
    epoch: int | None
    fused: bool
    backend_for: Callable[[torch.device], Backend]
    shared: dict[Any, Any] = field(default_factory=dict, compare=False)  # the backends' own


@dataclass(slots=True)
class KernelCall:
    """The tensor lists of one launch, the parameters they came from, and who runs it.

    members: all of them, in the order of every rank.
    entries: those with elements on this rank; `idle` have none (empty, or on other ranks).
    staged: kernels cannot take the containers, which are strided or not where the state is. They
        get copies, made for each run and copied back.
    """

    batch: Batch
    members: list[Managed]
    backend: Backend
    algorithm: Algorithm | None = None
    staged: bool = False
    adopted: Tensor | None = None  # on a GPU: counts that captured steps add to
    hyper_values: list[object] = field(default_factory=list)  # of the hyper-parameters in `batch`
    entries: list[Managed] = field(init=False)
    idle: list[Managed] = field(init=False)
    groups: dict[int, dict[str, Any]] = field(init=False)  # the parameter groups, by identity

    def __post_init__(self) -> None:
        self.entries = [e for e in self.members if e.local.numel()]
        self.idle = [e for e in self.members if not e.local.numel()]
        self.groups = {id(e.group): e.group for e in self.entries}

    def round(self) -> None:
        """containers <- stochastic rounding of the masters."""
        self.stage()
        self.backend.round_(self.batch)
        self._write_back()

    def canonical(self) -> None:
        """In place: masters as they are stored, after somebody else computed them."""
        self.backend.canonical_(self.batch)

    def flag_foreign(self) -> Tensor:
        """int32 `[entries]`: whether sampled elements are not their masters' shadow."""
        self.stage()
        flags = self.backend.flag_foreign(self.batch)
        self._drop()
        return flags

    def adopt(self, flags: Tensor) -> Tensor:
        """In flagged tensors, masters <- foreign elements, and their shadow; int64 counts."""
        self.stage()
        counts = self.backend.adopt_(self.batch, flags)
        self._write_back()
        return counts

    def take_scaler(self, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
        """What GradScaler says of the next step, brought to where the kernels are."""
        device = self.members[0].param.device
        self.batch.grad_scale, self.batch.found_inf = on(grad_scale, device), on(found_inf, device)

    def step(self) -> None:
        """One step of the algorithm, ending with the shadow. Takes the gradients that are there."""
        batch, algorithm = self.batch, self.algorithm
        assert algorithm is not None
        grads = [e.source.local_grad(e.param) for e in self.members]  # may communicate
        batch.grads = [
            g if g.is_contiguous() and not g.is_neg() else _dense(g) for g in grads if g.numel()
        ]
        self.stage()
        algorithm.prepare(self)
        algorithm.step(self)
        self._write_back()
        batch.grads = []  # the user's to free
        for e in self.idle:
            taken = 1 if batch.found_inf is None else batch.found_inf.reshape(()) == 0
            for key in (EPOCH, "step")[: 1 + algorithm.has_step()]:
                e.state[key] += taken

    def stage(self) -> None:
        """Give the kernels containers that they can take."""
        if self.staged:
            device = self.batch.masters[0].device
            self.batch.containers = [container_of(e.local, device) for e in self.entries]

    def _write_back(self) -> None:
        if self.staged:
            for entry, container in zip(self.entries, self.batch.containers, strict=True):
                entry.local.copy_(container)
            self._drop()

    def _drop(self) -> None:
        if self.staged:
            self.batch.containers = []


def state_calls(
    context: Context, entries: Iterable[Managed], *, scratch: bool = False
) -> list[KernelCall]:
    """Calls over masters and containers, for publishing and checking.

    With `scratch` the containers are copies, for comparing with what the model holds.
    """

    def key(e: Managed) -> tuple[Any, ...]:
        device = to_local(e.state[MASTER]).device
        return (device, e.param.dtype, not scratch and is_staged(e, device))

    calls = []
    held = [e for e in entries if e.local.numel()]
    for e in held:
        check_state(e)
    for (device, _, staged), part in _grouped(held, key):
        own = [container_of(e.local, device, copy=True) if scratch else e.local for e in part]
        batch = Batch(
            containers=[] if staged else own,
            masters=[to_local(e.state[MASTER]) for e in part],
            segments=[e.segments for e in part],
            epochs=[e.state[EPOCH].to(device) for e in part],
            seed=context.seed,
            epoch=context.epoch,
            shared=context.shared.setdefault(device, {}),
        )
        calls.append(KernelCall(batch, part, context.backend_for(device), staged=staged))
    return calls


def update_calls(context: Context, entries: Sequence[Managed]) -> list[KernelCall]:
    """Calls for fused steps of entries that have a gradient."""

    def key(e: Managed) -> tuple[Any, ...]:
        assert e.param.grad is not None
        algorithm = algorithm_of(e)
        kind = algorithm.name, algorithm.moments(e.group)
        staged = bool(e.local.numel()) and is_staged(e, e.param.device)
        return (e.param.device, e.param.dtype, e.param.grad.dtype, staged, kind)

    calls = []
    for keys, everyone in _grouped(entries, key):
        device, staged = keys[0], keys[3]
        for e in everyone:
            check_grad(e)
        move_state(everyone, device)
        algorithm = algorithm_of(everyone[0])
        part = [e for e in everyone if e.local.numel()]
        batch = Batch(
            containers=[] if staged else [e.local for e in part],
            masters=[to_local(e.state[MASTER]) for e in part],
            segments=[e.segments for e in part],
            epochs=[e.state[EPOCH] for e in part],
            steps=[e.state["step"] for e in part] if algorithm.has_step() else [],
            seed=context.seed,
            epoch=context.epoch,
            shared=context.shared.setdefault(device, {}),
        )
        for name in algorithm.moments(everyone[0].group):
            setattr(batch, f"{name}s", [to_local(e.state[name]) for e in part])
        backend = context.backend_for(device)
        calls.append(KernelCall(batch, everyone, backend, algorithm, staged))
    return calls


def _grouped(
    entries: Iterable[Managed], key: Callable[[Managed], tuple[Any, ...]]
) -> Iterator[tuple[tuple[Any, ...], list[Managed]]]:
    groups: dict[tuple[Any, ...], list[Managed]] = {}
    for e in entries:
        groups.setdefault(key(e), []).append(e)
    yield from groups.items()


# ---- The plan


class Plan:
    """The calls of one optimizer, until something that they rest on changes.

    entries: those that have a master, with complete and checked state.
    among: all that are managed.
    state: calls that round, compare or adopt all of them.
    """

    def __init__(self, context: Context, entries: list[Managed], among: list[Managed]) -> None:
        self.context, self.entries, self._among = context, entries, among
        self._keys = [itemgetter(*state_keys(e, context.fused)) for e in entries]
        self.state = state_calls(context, entries)
        self._parts: dict[tuple[int, ...], list[KernelCall]] = {}  # of `state`, for some entries
        self._updates: dict[tuple[Any, ...], list[KernelCall]] = {}
        self._seal()

    def _seal(self) -> None:
        """Note what the calls rest on."""
        held = [t for keys, e in zip(self._keys, self.entries, strict=True) for t in keys(e.state)]
        self._identities = list(map(id, held))
        plain = [t for t in held if not is_sharded(t)]
        self._plain = plain
        self._sharded = [(source_of(t), t) for t in held if is_sharded(t)]
        self._addresses = self._read_addresses()

    def _read_identities(self) -> list[int]:
        return [
            id(t) for keys, e in zip(self._keys, self.entries, strict=True) for t in keys(e.state)
        ]

    def _read_addresses(self) -> list[object]:
        return [
            *map(Tensor.data_ptr, self._plain),
            *(source.address(t) for source, t in self._sharded),
        ]

    def holds(self, context: Context, among: list[Managed]) -> bool:
        """Whether the calls are still of these entries, with the same state in the same memory."""
        try:
            return (
                among is self._among
                and context == self.context
                and self._read_identities() == self._identities
                and self._read_addresses() == self._addresses
            )
        except KeyError:  # somebody took a part of the state away
            return False

    def state_of(self, entries: list[Managed]) -> list[KernelCall]:
        """The calls that compare or adopt these entries, which may be a part of all."""
        if entries is self.entries:
            return self.state
        key = tuple(map(id, entries))
        if key not in self._parts:
            self._parts[key] = state_calls(self.context, entries)
        return self._parts[key]

    def updates(self, entries: Sequence[Managed]) -> list[KernelCall]:
        """The calls of a fused step of those of the entries that have a gradient."""
        signature = tuple(
            (id(e), grad.dtype, grad.layout) for e in entries if (grad := e.param.grad) is not None
        )
        found = self._updates.get(signature)
        if found is None:
            if len(self._updates) >= _SIGNATURES:
                self._updates.clear()
            moving = [e for e in entries if e.param.grad is not None]
            found = self._updates[signature] = update_calls(self.context, moving)
            if self._read_identities() != self._identities:  # state came back to its device
                self.state = state_calls(self.context, self.entries)
                self._updates, self._parts = {signature: found}, {}
                self._seal()
        return found


# ---- Tensors as kernels take them


def is_staged(entry: Managed, device: torch.device) -> bool:
    """Whether kernels cannot take the parameter itself."""
    return entry.local.device != device or not entry.local.is_contiguous()


def container_of(part: Tensor, device: torch.device, copy: bool = False) -> Tensor:
    """What kernels can take in its place: the part itself if they can and may, else a copy."""
    if copy:  # not an empty one: kernels do not write the padding of flat parameters
        return part.to(device, memory_format=torch.contiguous_format, copy=True)
    return part.to(device).contiguous()


def on(value: Tensor | None, device: torch.device) -> Tensor | None:
    """A scalar of GradScaler's, where the kernels are."""
    return None if value is None else value.detach().to(device, torch.float32)


def _dense(grad: Tensor) -> Tensor:
    return grad.detach().resolve_neg().contiguous()


def check_grad(entry: Managed) -> None:
    """Raise TypeError for a gradient that no kernel takes."""
    grad, name = entry.param.grad, entry.identity.name
    assert grad is not None
    if grad.layout != torch.strided:
        raise TypeError(
            f"the gradient of {name!r} is {grad.layout}: sparse gradients are not supported. "
            "Use a dense embedding (sparse=False), or put it in a group with served_dtype=None."
        )
    if grad.dtype not in CONTAINER_DTYPES:
        raise TypeError(f"the gradient of {name!r} is {grad.dtype}, not bfloat16 or float32.")
