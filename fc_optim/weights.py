"""The weights of one optimizer: masters in its state, their shadow in the parameters.

`ServedWeights` is what everything else takes: it knows the parameters and their identities, makes
masters, rounds them, and finds what somebody else wrote. `FairCastOptimizer` is its face to torch.
"""

import contextlib
import functools
import operator
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fc_optim.kernels.backends import backend_for
from fc_optim.params import sources
from fc_optim.params.buffers import Buffers
from fc_optim.params.collectives import anywhere, check_agreement
from fc_optim.params.layouts import FlatPiece, Group, flat_layout, groups_of
from fc_optim.params.names import STATE_KEYS
from fc_optim.params.registry import Managed, Registry, check_memory
from fc_optim.update import foreign, masters
from fc_optim.update.plan import Context, Plan, state_calls
from fc_optim.update.state import EPOCH, MASTER, check_state, complete_state, state_keys
from fc_optim.update.unfused import BaseStep

ROUNDING_SCHEME = 1  # the bit contract: counter layout, lane order, add and truncate
DITHERS = ("fresh", "sync", "held")

StateDict: TypeAlias = dict[str, Any]
_view = operator.attrgetter("dtype", "shape")


class ServedWeights:
    """Masters, shadow and identities of the parameters of one optimizer.

    optimizer: whose `param_groups` and `state` these are; read anew each time, since frameworks
        exchange both.
    epoch: dither epoch of "sync": the number of redraws.
    version: of what is served: +1 per step and per redraw.
    model: that names were taken from, None if unknown or (`was_bound`) lost in pickling.
    buffers: what a framework steps in place of parameters.
    early_state: a state dict that was loaded before it was known what it is of.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        seed: int,
        dither: str,
        backend: str,
        fused: bool,
        fp32_grads: bool,
    ) -> None:
        self.seed, self.dither, self.backend = seed, dither, backend
        self.fused, self.fp32_grads = fused, fp32_grads
        self.epoch = self.version = 0
        self.was_bound = False
        self.registry = Registry()
        self.attach(optimizer)

    def attach(self, optimizer: Optimizer) -> None:
        """Belong to this optimizer; forget what does not travel with it."""
        self.optimizer = optimizer
        self.foreign = foreign.ForeignWrites()
        self.buffers: Buffers | None = None
        self.early_state: StateDict | None = None
        self.model: nn.Module | None = None
        self._shared: dict[Any, Any] = {}
        self._busy: str | None = None
        self._agreed = False
        self._entries: list[Managed] = []
        self._members: list[object] | None = None
        self._places: list[object] = []
        self._read_addresses = sources.address_reader([])
        self._plan: Plan | None = None

    def __getstate__(self) -> dict[str, Any]:
        keys = ("seed", "dither", "backend", "fused", "fp32_grads")
        return {k: vars(self)[k] for k in (*keys, "epoch", "version", "was_bound", "registry")}

    @property
    def groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @property
    def base(self) -> Optimizer:
        """The torch optimizer that was wrapped."""
        return self.optimizer._base  # type: ignore[attr-defined]

    @property
    def state(self) -> dict[Tensor, Any]:
        return self.optimizer.state

    # -- entries and plan ----------------------------------------------------------------------

    def entries(self) -> list[Managed]:
        """The parameters under management, in group order. The same list while nothing changed."""
        members = self._read_members()
        if members != self._members or self._read_places() != self._places:
            for group in self.groups:  # parameters that were swapped have forgotten it
                self.want_fp32_grads(group)
            self._plan = None  # it would keep the state that was exchanged
            self._entries = self.registry.managed(self.groups, self.state)
            self._read_addresses = sources.address_reader([e.source for e in self._entries])
            self._members, self._places = members, self._read_places()
        return self._entries

    def _read_members(self) -> list[object]:
        state, read = self.state, list[object]()
        for g in self.groups:
            read += (id(g), g["served_dtype"], g["algorithm"], g.get("amsgrad"))
        for params in self.registry.tensors(self.groups):
            read.append(len(params))
            for p in params:
                read += (id(p), p.requires_grad, id(state.get(p)))
        return [*read, self.registry.changes]

    def _read_places(self) -> list[object]:
        """What tells that a parameter's memory was exchanged, or is seen in another way."""
        params = [e.param for e in self._entries]
        return [*self._read_addresses(params), *map(_view, params), *map(Tensor.stride, params)]

    def with_master(self) -> list[Managed]:
        """Those of them that have a master."""
        return [e for e in self.entries() if MASTER in e.state]

    def context(self) -> Context:
        """What all kernel calls share."""
        return Context(
            seed=self.seed,
            epoch={"fresh": None, "sync": self.epoch, "held": 0}[self.dither],
            fused=self.fused,
            backend_for=self._backend_for,
            shared=self._shared,
        )

    @functools.cached_property
    def _backend_for(self) -> Any:
        return functools.partial(backend_for, self.backend)

    def plan(self, everyone: bool = True) -> Plan:
        """The kernel calls of all parameters; made anew when something that they rest on changed.

        Makes masters where there are none yet. Without `everyone` they wait whose weights it would
        change although they have no gradient: a graph may still wait for its backward.
        """
        context, entries = self.context(), self.entries()
        if masters.without_master(entries, everyone):
            self.make_masters(everyone)
            entries = self.entries()
        if self._plan is None or not self._plan.holds(context, entries):
            managed = self.with_master()
            for e in managed:
                check_state(e)
                complete_state(e, self.fused)
            self._plan = Plan(context, managed, among=entries)
        return self._plan

    # -- masters and their shadow --------------------------------------------------------------

    @torch.inference_mode(False)  # a rollout's mode; its tensors could not be trained on
    @torch.no_grad()
    def make_masters(self, everyone: bool = True) -> None:
        """Masters and state for every managed parameter that has none; their shadow too.

        Without `everyone`, not for those off the grid that have no gradient. Raises RuntimeError
        where there was a master, which somebody took away.
        """
        new = masters.without_master(self.entries(), everyone)
        if not new:
            return
        self.registry.check_orphans(self.groups, self.state)
        new = masters.check_new(new, everyone)
        check_memory(self.entries())
        self.registry.find_layouts(new)
        self.registry.numbered.say_shared(self.registry.names(self.groups), self.seed)
        masters.add_masters(new, self.state, self.fused)
        self.round_([e for e in new if e.identity.off_grid])
        foreign.record([e for e in new if not e.identity.off_grid], written=False)

    @torch.no_grad()
    def round_(self, entries: Sequence[Managed]) -> None:
        """Parameters <- the shadow of their masters."""
        whole = self._plan is not None and self._plan.entries is entries
        calls = self._plan.state if whole and self._plan else state_calls(self.context(), entries)
        for call in calls:
            call.round()
        self.wrote(entries)

    def wrote(self, entries: Sequence[Managed]) -> None:
        """The parameters hold their shadow now."""
        foreign.record(entries)
        # Walking the model is for FSDP alone; DeepSpeed's buffers are none of its parameters.
        if (
            self.model is not None
            and self.buffers is None
            and any(e.layout.groups for e in entries)
        ):
            sources.reshard(self.model)

    @torch.no_grad()
    def publish(self, redraw: bool = False) -> None:
        """See `FairCastOptimizer.publish`."""
        self.check_free("publish()")
        self.make_masters()
        if not self._agreed:
            self.check_replicas()
            self._agreed = True
        written: list[str] = []
        if self.buffers is not None:
            written = [*self.buffers.compare(self.entries()), *self.buffers.apart()]
        plan = self.plan()
        groups = groups_of(e.layout for e in plan.entries)
        self.foreign.check(plan.context, plan.state, "publish()", groups, written)
        if redraw and self.dither == "sync":
            self.epoch += 1
            self.version += 1
            self.round_(self.plan().entries)
            self.spread()

    @torch.no_grad()
    def call_base(self, step: BaseStep, name: str, args: Any, kwargs: Any) -> Any:
        """See `FairCastOptimizer.call_base`."""
        self.check_free(f"{name}()")
        self.publish()
        entries, context = self.entries(), self.context()
        try:
            return step.call(name, args, kwargs, self.groups, self.state, entries, context)
        finally:
            changed = bool(foreign.compare(context, entries))
            if anywhere(changed, self.registry.process_groups(self.groups)):
                for e in entries:
                    e.state[EPOCH] += 1
                self.version += 1
                self.round_(entries)
                self.spread()

    def check_unwritten(self, action: str) -> None:
        """Raise RuntimeError if a parameter with a master does not hold its shadow."""
        context, entries = self.context(), self.with_master()
        written = self.buffers.compare(entries) if self.buffers else ()
        if self._plan is not None and self._plan.holds(context, self.entries()):
            calls = self._plan.state
        else:
            calls = state_calls(context, entries)
        self.foreign.check(context, calls, action, written=written)

    # -- what users do to masters and moments --------------------------------------------------

    @contextlib.contextmanager
    def edit_masters(self) -> Iterator[dict[str, Tensor]]:
        """See `FairCastOptimizer.edit_masters`."""
        self.publish()
        entries = self.plan().entries
        with self.guarded("edit_masters()"):
            try:
                with torch.no_grad():
                    yield {e.identity.name: e.state[MASTER] for e in entries}
            finally:  # also after an exception: the weights are the masters' shadow
                for call in self.plan().state:
                    call.canonical()
                self.version += 1
                self.round_(self.plan().entries)
                self.spread()

    @torch.no_grad()
    def reset_moments(self) -> None:
        """See `FairCastOptimizer.reset_moments`."""
        self.check_free("reset_moments()")
        for e in self.with_master():
            own = set(state_keys(e, fused=True) if self.fused else e.state) - set(STATE_KEYS)
            if self.fused and own <= e.state.keys():
                for key in own:
                    e.state[key].zero_()  # in place: captured graphs hold them
            else:  # what is not there is made anew, all of it together
                for key in own & e.state.keys():
                    del e.state[key]

    # -- foreign writes ------------------------------------------------------------------------

    def check(self) -> dict[str, int]:
        """See `FairCastOptimizer.check`."""
        self.check_free("check()")
        entries = self.with_master()
        found = foreign.compare(self.context(), entries)
        return found | (self.buffers.compare(entries) if self.buffers else {})

    @torch.no_grad()
    def adopt(self) -> None:
        """See `FairCastOptimizer.adopt_weights`."""
        self.check_free("adopt_weights()")
        for _, p, identity in self.registry.places(self.groups):
            identity.has_master &= MASTER in self.state.get(p, {})  # what was taken away: anew
        self.make_masters()
        if self.buffers is not None:
            self.take_written(self.entries())
        self.foreign.adopt(self.plan().state, everything=True, warn=False)
        self.round_(self.plan().entries)
        self.spread()

    def adopt_foreign(self, plan: Plan, entries: list[Managed]) -> None:
        """What a step does first: masters <- what somebody else wrote."""
        if self.buffers is not None:
            self.take_written(self.buffers.written(entries))
        self.foreign.adopt(plan.state_of(entries))

    @torch.no_grad()
    def restore(self) -> None:
        """See `FairCastOptimizer.restore_weights`."""
        self.check_free("restore_weights()")
        self.make_masters()
        self.round_(self.with_master())
        self.spread()

    def take_written(self, entries: Sequence[Managed]) -> None:
        """Buffers <- the model's weights, unless somebody wrote into the buffer itself."""
        if entries and self.buffers is not None:
            written = foreign.compare(self.context(), entries)
            self.buffers.take([e for e in entries if e.identity.name not in written])

    def spread(self) -> None:
        """After a write that a framework does not know of: the buffers to the model's weights."""
        if self.buffers is not None:
            self.buffers.spread()

    # -- names, frameworks, other ranks --------------------------------------------------------

    def bind(self, model: nn.Module) -> None:
        """See `FairCastOptimizer.bind`."""
        sources.reshard(model)  # FSDP2 shows other parameters while they are whole
        self.registry.bind(self.groups, model)
        self.was_bound = True
        self.model = model
        self._agreed = False  # the model knows of more ranks
        self.check_replicas(sources.replicas_in(model))

    def declare_flat(
        self, param: Tensor, pieces: Sequence[FlatPiece], groups: Sequence[Group]
    ) -> None:
        """See `FairCastOptimizer.declare_flat`."""
        self.registry.declare_flat(self.groups, param, pieces, groups)

    def step_buffers(self, model: nn.Module, buffers: Buffers) -> None:
        """Say which flat buffers a framework put in place of the parameters of `model`.

        For integrations, before the first step. Names and random bits stay those of the
        parameters. Raises ValueError if the optimizer was not built with a parameter,
        RuntimeError if it has masters of other tensors.
        """
        for b in buffers.all:
            layout = flat_layout([p for _, p in b.pieces], buffers.groups, buffers.replicas)
            self.registry.replace(b.tensor, b.group, b.pieces, layout)
        self.registry.check_orphans(self.groups, self.state)
        self.buffers = buffers
        self.model, self.was_bound, self._agreed = model, True, False

    def admit(self, group: dict[str, Any]) -> None:
        """Take a new last group under management."""
        self.registry.admit(group)
        self.want_fp32_grads(group)
        self._agreed = False

    def want_fp32_grads(self, group: dict[str, Any]) -> None:
        """Let autograd accumulate in fp32 into bf16 parameters, if that was asked for."""
        if self.fp32_grads and group["served_dtype"] is not None:
            for p in group["params"]:
                wanted = p.dtype == torch.bfloat16 and p.requires_grad
                if wanted and p.grad_dtype != torch.float32:
                    grad, p.grad = p.grad, None
                    p.grad_dtype = torch.float32
                    p.grad = None if grad is None else grad.float()

    def check_replicas(self, groups: Sequence[Group] | None = None) -> None:
        """See `FairCastOptimizer.check_replicas`."""
        if groups is None:
            groups = self.registry.process_groups(self.groups)
        ids = [e.identity.ids for e in self.entries()]
        options = {"seed": self.seed, "dither": self.dither, "epoch": self.epoch}
        options |= {"rounding_scheme": ROUNDING_SCHEME, "parameter names": ids}
        check_agreement(options, groups)

    def stamp(self, group: dict[str, Any]) -> None:
        """Write what a resume needs into a group: always there, since DCP loads known keys only."""
        group.update(
            seed=self.seed,
            dither=self.dither,
            epoch=self.epoch,
            served_version=self.version,
            rounding_scheme=ROUNDING_SCHEME,
        )

    def disagree(self) -> None:
        """Compare with other ranks again before the next publish."""
        self._agreed = False

    # -- who may read and write now ------------------------------------------------------------

    @contextlib.contextmanager
    def guarded(self, what: str) -> Iterator[None]:
        """While inside, everything that reads or writes the shadow refuses."""
        self.check_free(what)
        self._busy = what
        try:
            yield
        finally:
            self._busy = None

    def check_free(self, what: str) -> None:
        if self._busy:
            raise RuntimeError(f"{what} inside {self._busy}: leave that context first.")
