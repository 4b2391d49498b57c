"""FairCastOptimizer: params -> step() -> kernel -> shadow (= the parameter) -> served_params()."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fc_optim import checkpoint, construct
from fc_optim.copying import Copying
from fc_optim.kernels.backends import backend_for
from fc_optim.membership import Membership
from fc_optim.metrics.precision import Reporting
from fc_optim.metrics.step import Telemetry
from fc_optim.params import layouts as shards
from fc_optim.params.buffers import Buffers
from fc_optim.params.collectives import anywhere
from fc_optim.params.registry import Managed, Registry, check_dtype
from fc_optim.serving import evaluation
from fc_optim.serving.stream import Serving
from fc_optim.update import foreign
from fc_optim.update.plan import (
    Context,
    complete_state,
    new_master,
    state_work,
    update_work,
)
from fc_optim.update.unfused import BaseStep, base_attribute

_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.Muon)


class FairCastOptimizer(Membership, Serving, Reporting, Copying):
    """Keeps fp32 masters and leaves in every parameter their stochastically rounded bf16 image.

    Three ways to make one::

        opt = FairCastOptimizer(torch.optim.AdamW(model.named_parameters(), lr=1e-6))
        opt = FairCastOptimizer(torch.optim.AdamW, model.named_parameters(), lr=1e-6)
        Opt = FairCastOptimizer(torch.optim.AdamW)  # a class: swap torch.optim.AdamW for it

    After `publish()` and after every `step()` each managed parameter *is* the served copy: it lies
    on the bf16 grid and is the rounded image of the fp32 master in the optimizer's state. Managed
    are the trainable parameters (bfloat16, or float32 which then holds bf16 values) of all groups
    without `served_dtype=None`. `torch.optim.Adam`, `AdamW` and `Muon` run fused, and a group's
    `algorithm` ("adam", "adamw" or "muon") mixes them; any other torch optimizer runs its own step
    on the masters, and so do its own methods: `opt.train()` of a schedule-free base publishes what
    it made of them. Its settings are attributes of this object too.

    Source: Gao and Gao, "Fair Cast"; arithmetic as in `torch.optim`.

    Args:
        base: a torch optimizer class, or an instance, whose groups and state are taken over.
        params: as for the base; needed with a class, refused with an instance.
        seed: 64-bit key of the random bits.
        dither: "fresh" (new bits every step), "sync" (new bits at each `publish(redraw=True)`) or
            "held" (one threshold per element for the run: weight deltas stay sparse).
        masters: how masters are stored; "fp32".
        backend: "auto" (numba on a CPU, triton elsewhere), "reference", "cpu" or "triton".
        fp32_grads: accumulate fp32 gradients on bf16 parameters (`Tensor.grad_dtype`). Not under
            DDP or FSDP.
        metrics: True lets the kernels count, on a fixed sixteenth of the elements, what each step
            does; "all" on all of them. `metrics()` has the figures.
        **base_kwargs: the base's own arguments, which it validates itself.
    """

    buffers: Buffers | None  # what a framework steps in place of parameters
    early_state: dict[str, Any] | None  # loaded before it was known what the state is of

    def __new__(cls, base: Any = None, params: Any = None, *args: Any, **kwargs: Any) -> Any:
        if cls._base_cls is None and isinstance(base, type) and params is None:
            return construct.drop_in(FairCastOptimizer, base, **kwargs)
        return super().__new__(cls)

    if TYPE_CHECKING:  # FairCastOptimizer(cls) is a class, which a checker cannot be told otherwise

        def __call__(self, params: Any, *args: Any, **kwargs: Any) -> "FairCastOptimizer": ...

    def __init__(
        self,
        base: type[Optimizer] | Optimizer,
        params: Iterable[Any] | None = None,
        *args: Any,
        seed: int = 0,
        dither: str = "fresh",
        masters: str = "fp32",
        backend: str = "auto",
        fp32_grads: bool = False,
        metrics: bool | str = False,
        **base_kwargs: Any,
    ):
        construct.check_options(seed, dither, masters, backend, fp32_grads, metrics)
        inner = construct.base_instance(base, params, args, base_kwargs)
        self._seed, self._dither = seed, dither
        self.masters, self.backend, self.fp32_grads = masters, backend, fp32_grads
        self.fused = type(inner) in _FUSED
        self._epoch = self._served_version = 0
        self._agreed = False
        self.was_bound = False
        self.registry = Registry()
        self._telemetry = Telemetry(metrics)
        self._reset_transient(inner)
        self._base = inner  # what it has and this object does not is reached through it from now on
        # As unpickling does: hooks, profiling, and the base's own groups and state.
        Optimizer.__setstate__(
            self,
            {"defaults": inner.defaults, "state": inner.state, "param_groups": inner.param_groups},
        )
        for key in [k for k in vars(inner) if k.endswith("_hooks")]:
            vars(self)[key].update(vars(inner)[key])
        for group in self.param_groups:
            self._admit(group)
        construct.take_over(inner)

    # -- step ----------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update masters and moments, and write the shadow into the parameters.

        Weights that something else wrote since the last step become the masters first, with one
        warning. Returns the closure's loss, if there is one; a closure must not write weights.
        """
        self._check_free("step()")
        if self.registry.is_trial(self.param_groups):
            return None
        entries = self.registry.in_turn(self.param_groups, self.state)
        if not all("master" in e.state for e in entries):
            self._make_masters()
            entries = self.registry.in_turn(self.param_groups, self.state)
        loss = None
        if closure is not None and self.fused:
            with torch.enable_grad():
                loss = closure()
        scale = getattr(self, "grad_scale", None)
        if self.buffers is not None:
            self._take_written(self.buffers.written(entries))
        self._foreign.adopt(self.context(), entries)
        self._before_update(entries)
        try:
            if self.fused:
                self._step_fused(entries, scale)
            elif not self._skipped():
                with self._telemetry.unfused(self.context(), entries, closure is not None):
                    loss = self._base_step.run(
                        self.param_groups, self.state, entries, self.context(), closure, scale
                    )
        finally:  # an exception may have come after some of the weights were written
            self.wrote(entries)
            self._served_version += self.registry.begins(entries)
        self._telemetry.end(entries)
        self._base._opt_called = True  # type: ignore[attr-defined]  # schedulers look for it
        return loss

    def _step_fused(self, entries: list[Managed], scale: Tensor | None) -> None:
        found_inf = getattr(self, "found_inf", None)
        works = update_work(self.context(), entries, scale, found_inf)
        for work in self._telemetry.fused(works):
            work.step()
        excluded = [g for g in self.param_groups if g["served_dtype"] is None and g["params"]]
        if excluded and not self._skipped():
            self._base_step.run(excluded, self.state, [], self.context(), grad_scale=scale)

    if not TYPE_CHECKING:  # a checker would take any name

        def __getattr__(self, name: str) -> Any:
            """What the base has and this class has not: settings, methods to run on the masters."""
            return base_attribute(self, name)

    @torch.no_grad()
    def call_base(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Run a method of the base on the masters: schedule-free's `train()`, SAM's `first_step()`.

        `opt.train()` is short for it. If the shadow is another one afterwards it is published as a
        new version, with new bits under dither "fresh". Collective where parameters are sharded.
        Raises RuntimeError if weights were changed outside the optimizer.
        """
        self._check_free(f"{name}()")
        self.publish()
        entries = self.managed()
        try:
            return self._base_step.call(
                name, args, kwargs, self.param_groups, self.state, entries, self.context()
            )
        finally:
            changed = bool(self._foreign.compare(self.context(), entries))
            if anywhere(changed, self.registry.groups()):
                for e in entries:
                    e.state["dither_step"] += 1
                self._served_version += 1
                self._round(entries)
                self._spread()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """As torch: with fused=True, GradScaler hands over `grad_scale` and `found_inf`.

        Else it unscales gradients and skips steps itself, which others then see.
        """
        # FSDP1's scaler learns of other ranks' overflows only where it unscales itself.
        flat = any(e.slot.layout.groups and not shards.is_dtensor(e.param)
                   for e in self._with_master())  # fmt: skip
        return bool(self.defaults.get("fused")) and not flat

    def _skipped(self) -> bool:
        """Whether GradScaler found an overflow (a host read: unfused optimizers only)."""
        found_inf = getattr(self, "found_inf", None)
        return found_inf is not None and bool(found_inf.item())

    # -- publish and serve ---------------------------------------------------------------------

    @torch.no_grad()
    def publish(self, redraw: bool = False) -> None:
        """Make masters where there are none and put the parameters on the bf16 grid. Idempotent.

        With `redraw`, round again from the masters with a new dither epoch when dither is "sync"
        (other dithers: nothing). Call it so right before serving. Raises RuntimeError if weights
        were changed outside the optimizer.
        """
        self._check_free("publish()")
        self._make_masters()
        if not self._agreed:
            self.agree()
            self._agreed = True
        groups = self.registry.groups()
        written: list[str] = []
        if self.buffers is not None:
            written = [*self.buffers.compare(self.managed()), *self.buffers.apart()]
        self._foreign.refuse(self.context(), self.managed(), "publish()", groups, written)
        if redraw and self.dither == "sync":
            self._epoch += 1
            self._served_version += 1
            self._round(self.managed())
            self._spread()

    def masters_in_model(self) -> contextlib.AbstractContextManager[None]:
        """A context in which the model's forward runs on the fp32 masters.

        The parameters' own storage comes back untouched at exit. A bf16 model is fp32 inside
        (bind it, so that frozen weights follow). Raises RuntimeError where the forward would
        round the masters (autocast, FSDP, DeepSpeed); `fc_optim.fp32_copy` works there.
        """
        return evaluation.masters_in_model(self)

    # -- foreign writes ------------------------------------------------------------------------

    def check(self) -> dict[str, int]:
        """Compare every parameter with its shadow: {name: elements that differ}, {} when sound."""
        self._check_free("check()")
        found = self._foreign.compare(self.context(), self._with_master())
        return found | (self.buffers.compare(self._with_master()) if self.buffers else {})

    @torch.no_grad()
    def adopt_weights(self) -> None:
        """Make what the parameters hold now the masters (moments stay), and publish them."""
        self._check_free("adopt_weights()")
        self._make_masters()
        if self.buffers is not None:
            self._take_written(self.managed())
        self._foreign.adopt(self.context(), self.managed(), everything=True, warn=False)
        self._round(self.managed())
        self._spread()
        self._telemetry.restart()

    @torch.no_grad()
    def restore_weights(self) -> None:
        """Write the shadow of the masters into the parameters, whatever they hold now."""
        self._check_free("restore_weights()")
        self._make_masters()
        self._round(self._with_master())
        self._spread()

    def _take_written(self, entries: list[Managed]) -> None:
        """Buffers <- the model's weights, unless somebody wrote into the buffer itself."""
        if entries and self.buffers is not None:
            written = self._foreign.compare(self.context(), entries)
            self.buffers.take([e for e in entries if e.slot.name not in written])

    def _spread(self) -> None:
        """After a write that a framework does not know of: the buffers to the model's weights."""
        if self.buffers is not None:
            self.buffers.spread()

    # -- masters and their shadow --------------------------------------------------------------

    def context(self) -> Context:
        """What the kernels' batches share."""
        return Context(
            seed=self.seed,
            epoch={"fresh": None, "sync": self._epoch, "held": 0}[self.dither],
            fused=self.fused,
            backend_for=functools.partial(backend_for, self.backend),
            caches=self._caches,
        )

    @torch.inference_mode(False)  # a rollout's mode; its tensors could not be trained on
    def _make_masters(self) -> None:
        """Masters and state for every managed parameter that has none; their shadow too."""
        new = [e for e in self.managed() if "master" not in e.state]
        if not new:
            return
        self.registry.refuse_orphans(self.param_groups, self.state)
        for e in new:
            check_dtype(e.param, e.slot.name)
            if e.param.is_meta:
                raise RuntimeError(
                    f"parameter {e.slot.name!r} is on the meta device: materialise the model "
                    "(to_empty(), then load or initialise its weights) before the first step."
                )
        self.registry.refuse_shared(self.managed())
        self.registry.lay_out(new)
        self.registry.numbered.say_shared(self.registry.names(self.param_groups), self.seed)
        for e in new:
            e.state = self.state.setdefault(e.param, {})
            e.state["master"] = new_master(e.param)
            if not e.slot.flat:
                e.state["param_id"] = checkpoint.id_tensor(e.slot.param_id)
            complete_state(e, self.fused, new=True)
        for group in self.param_groups:
            self._want_fp32_grads(group)
        self._round(new)

    @torch.no_grad()
    def _round(self, entries: list[Managed]) -> None:
        for work in state_work(self.context(), entries):
            work.round()
        self.wrote(entries)

    def wrote(self, entries: list[Managed]) -> None:
        """The parameters hold their shadow now."""
        foreign.record(entries)
        # Walking the model is for FSDP alone; DeepSpeed's buffers are none of its parameters.
        if self.buffers is None and any(e.slot.layout.groups for e in entries):
            shards.reshard(self.model)

    # -- state ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As in torch, with fp32 masters beside the moments. Never creates state.

        Raises RuntimeError if weights were changed outside the optimizer: model and masters would
        be saved apart.
        """
        self._check_free("state_dict()")
        entries = self._with_master()
        written = self.buffers.compare(entries) if self.buffers else ()
        self._foreign.refuse(self.context(), entries, "state_dict()", written=written)
        for group in self.param_groups:
            self._stamp(group)
        return super().state_dict()

    def _stamp(self, group: dict[str, Any]) -> None:
        """Write what a resume needs into a group: always there, since DCP loads known keys only."""
        group.update(
            seed=self.seed,
            dither=self.dither,
            epoch=self._epoch,
            served_version=self._served_version,
            rounding_scheme=checkpoint.ROUNDING_SCHEME,
        )

    @torch.inference_mode(False)
    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict()` or a plain torch optimizer saved.

        fp32 state is never cast. Masters of the state win: the parameters are rewritten from them
        at once. Without masters in it, moments are loaded and masters come from the parameters at
        the next publish. Group dicts are updated in place; tensors are copied. Raises ValueError,
        and changes nothing, if the state does not fit. Under DeepSpeed before `attach()`, the
        state is kept, not copied, and loaded there.
        """
        state_dict = dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = pre_hook(self, state_dict) or state_dict
        self._check_free("load_state_dict()")
        if self.registry.unknown(self.param_groups):
            self.early_state = state_dict
        else:
            checkpoint.load_state(self, state_dict)
        self._telemetry.restart()
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def load_options(self, seed: int, dither: str, epoch: int, served_version: int) -> None:
        """Continue a saved run: its seed, dither and counters win over the constructor's."""
        for key, mine, theirs in (("seed", self.seed, seed), ("dither", self.dither, dither)):
            if mine != theirs:
                checkpoint.logger.warning(
                    "load_state_dict: %s=%r of the state replaces %r. To keep yours, set it in "
                    "every group of the state dict before loading.", key, theirs, mine,
                )  # fmt: skip
        self._seed, self._dither, self._epoch = int(seed), dither, int(epoch)
        self._agreed = False
        # Monotonic: going back to an older state in this process is a new version for an engine.
        older = int(served_version) < self._served_version
        self._served_version = self._served_version + 1 if older else int(served_version)

    def to_torch_state_dict(self) -> dict[str, Any]:
        """The way out: the state dict of the base optimizer alone (moments in fp32)."""
        return checkpoint.to_torch_state_dict(self)

    def _reset_transient(self, base: Optimizer) -> None:
        self._base_step = BaseStep(base)
        self._foreign = foreign.ForeignWrites()
        self._caches: dict[Any, dict[Any, Any]] = {}
        self.buffers = self.early_state = None
        self.model = None
        self._busy: str | None = None
        self._agreed = self._reported = False

    @contextlib.contextmanager
    def guarded(self, what: str) -> Iterator[None]:
        """While inside, everything that reads or writes the shadow refuses."""
        self._check_free(what)
        self._busy = what
        try:
            yield
        finally:
            self._busy = None

    def _check_free(self, what: str) -> None:
        if self._busy:
            raise RuntimeError(f"{what} inside {self._busy}: leave that context first.")


def unwrap(optimizer: Any) -> Any:
    """Ours inside the wrappers of accelerate or DeepSpeed, else the innermost that there is."""
    while not isinstance(optimizer, FairCastOptimizer) and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


if TYPE_CHECKING:  # what the three classes are to a type checker

    class FairCastAdam(FairCastOptimizer):
        def __init__(self, params: Any, *args: Any, **kwargs: Any) -> None: ...

    class FairCastAdamW(FairCastAdam): ...

    class FairCastMuon(FairCastAdam): ...

else:
    FairCastAdam = FairCastOptimizer(torch.optim.Adam)
    FairCastAdamW = FairCastOptimizer(torch.optim.AdamW)
    FairCastMuon = FairCastOptimizer(torch.optim.Muon)
