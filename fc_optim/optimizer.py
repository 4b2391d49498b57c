"""FairCastOptimizer: params -> step() -> kernel -> shadow (= the parameter) -> served_params()."""

import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import Self

from fc_optim import checkpoint, construct
from fc_optim._eager import eager
from fc_optim.metrics.precision import Report, report
from fc_optim.metrics.step import StepMetrics, Telemetry
from fc_optim.params.layouts import FlatPiece
from fc_optim.params.registry import Managed
from fc_optim.serving import evaluation, stream
from fc_optim.serving.digests import Digest, sharded_digest
from fc_optim.serving.stream import NamedTensors
from fc_optim.update.base import base_attribute, released, set_attribute, take_over
from fc_optim.update.plan import Plan
from fc_optim.update.unfused import BaseStep
from fc_optim.weights import ServedWeights

_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.Muon)
logger = logging.getLogger("fc_optim")


class FairCastOptimizer(Optimizer):
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

    _base_cls: ClassVar[type[Optimizer] | None] = None
    _made_with: ClassVar[tuple[type[Optimizer], dict[str, Any]] | None] = None
    weights: ServedWeights
    _base: Optimizer

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
        self.masters = masters
        self.fused = type(inner) in _FUSED
        # As unpickling does: hooks, profiling, and the base's own groups and state.
        Optimizer.__setstate__(
            self,
            {"defaults": inner.defaults, "state": inner.state, "param_groups": inner.param_groups},
        )
        for key in [k for k in vars(inner) if k.endswith("_hooks")]:
            vars(self)[key].update(vars(inner)[key])
        self.weights = ServedWeights(
            self, seed=seed, dither=dither, backend=backend, fused=self.fused, fp32_grads=fp32_grads
        )
        self._telemetry = Telemetry(metrics)
        self._attach(inner)
        self._base = inner  # from now on, what it has and this object has not is reached through it
        for group in self.param_groups:
            self._admit(group)
        take_over(inner)

    def _attach(self, base: Optimizer) -> None:
        """What is made anew after unpickling."""
        self._base_step = BaseStep(base)
        self._reported = False

    # -- step ----------------------------------------------------------------------------------

    @eager
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update masters and moments, and write the shadow into the parameters.

        Weights that something else wrote since the last step become the masters first, with one
        warning. Returns the closure's loss, if there is one; a closure must not write weights.
        """
        weights = self.weights
        weights.check_free("step()")
        if weights.registry.is_trial(self.param_groups):
            return None
        plan, loss = weights.plan(everyone=closure is not None), None
        if closure is not None and self.fused:
            with torch.enable_grad():
                loss = closure()
            plan = weights.plan()
        entries = weights.registry.in_turn(self.param_groups, plan.entries)
        weights.adopt_foreign(plan, entries)
        self._log_report()
        self._telemetry.begin(plan.context, entries)
        moving = [e for e in entries if closure is not None or e.param.grad is not None]
        try:
            if self.fused:
                self._step_fused(plan, entries)
            elif not self._skipped():
                loss = self._step_unfused(plan, entries, moving, closure)
        finally:  # an exception may have come after some of the weights were written
            weights.wrote(moving)
            weights.version += weights.registry.begins(entries)
        self._telemetry.end(entries)
        self._base._opt_called = True  # type: ignore[attr-defined]  # schedulers look for it
        return loss

    def _step_fused(self, plan: Plan, entries: list[Managed]) -> None:
        scale, found_inf = map(vars(self).get, ("grad_scale", "found_inf"))
        calls = plan.updates(entries)
        for call in calls:
            call.take_scaler(scale, found_inf)
        for call in self._telemetry.fused(calls):
            call.step()
        excluded = [g for g in self.param_groups if g["served_dtype"] is None and g["params"]]
        if excluded and not self._skipped():
            self._base_step.run(excluded, self.state, [], plan.context, grad_scale=scale)

    def _step_unfused(
        self, plan: Plan, entries: list[Managed], moving: list[Managed], closure: Any
    ) -> Any:
        scale = vars(self).get("grad_scale")
        with self._telemetry.unfused(plan.context, moving):
            return self._base_step.run(
                self.param_groups, self.state, entries, plan.context, closure, scale
            )

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """As torch: with fused=True, GradScaler hands over `grad_scale` and `found_inf`.

        Else it unscales gradients and skips steps itself, which others then see.
        """
        # FSDP1's scaler learns of other ranks' overflows only where it unscales itself.
        flat = any(
            e.layout.groups and e.source.placements(e.param) is None
            for e in self.weights.with_master()
        )
        return bool(self.defaults.get("fused")) and not flat

    def _skipped(self) -> bool:
        """Whether GradScaler found an overflow (a host read: unfused optimizers only)."""
        found_inf = vars(self).get("found_inf")
        return found_inf is not None and bool(found_inf.item())

    # -- publish and serve ---------------------------------------------------------------------

    @eager
    def publish(self, redraw: bool = False) -> None:
        """Make masters where there are none and put the parameters on the bf16 grid. Idempotent.

        With `redraw`, round again from the masters with a new dither epoch when dither is "sync"
        (other dithers: nothing). Call it so right before serving. Raises RuntimeError if weights
        were changed outside the optimizer.
        """
        self.weights.publish(redraw)

    @eager
    def served_params(
        self,
        full: bool = True,
        managed_only: bool = False,
        tied: str = "once",
        copy: bool = False,
        bucket_bytes: int | None = None,
    ) -> NamedTensors:
        """Iterate over (name, tensor) as the rollout engine is to hold them.

        With a bound model: every parameter in model order, managed ones in bf16, frozen and
        excluded ones as they are. Without: the parameters of the groups. Names are cleaned of
        wrapper prefixes.

        Args:
            full: whole parameters, gathered one at a time: every rank iterates to the end. False:
                this rank's shards (flat runs of a flat parameter).
            managed_only: leave out frozen and excluded parameters.
            tied: "once" gives a tied parameter under its first name, "all" under each.
            copy: give tensors of their own memory.
            bucket_bytes: gather as many sharded parameters at once as fit in this.

        With dither "sync", call `publish(redraw=True)` right before. The tensors are read-only and
        valid until the next `step()`, unless `copy`. The iterator raises RuntimeError when it is
        resumed after a step. Draws no random numbers. It keeps no reference to what it gave, so
        beside the shards there is one whole parameter, or bucket, for each that the reader holds.
        """
        items = stream.publish_items(self.weights, "served", managed_only, tied)
        return stream.stream(items, (self.weights,), full, copy, bucket_bytes)

    @eager
    def master_params(
        self,
        full: bool = True,
        managed_only: bool = False,
        tied: str = "once",
        copy: bool = False,
        bucket_bytes: int | None = None,
    ) -> NamedTensors:
        """As `served_params`, with the fp32 masters in place of their shadows."""
        items = stream.publish_items(self.weights, "master", managed_only, tied)
        return stream.stream(items, (self.weights,), full, copy, bucket_bytes)

    @eager
    def served_digest(self) -> Digest:
        """The digest of `served_params()`; `fc_optim.digest` is the receiver's side.

        Computed shard by shard: every rank calls it, nothing is gathered.
        """
        return sharded_digest(stream.publish_items(self.weights, "served"))

    @property
    def served_version(self) -> int:
        """Counts the versions of the served weights: +1 per `step()` and per redraw. Saved."""
        return self.weights.version

    def masters_in_model(self) -> contextlib.AbstractContextManager[None]:
        """A context in which the model's forward runs on the fp32 masters.

        The parameters' own storage comes back untouched at exit. A bf16 model is fp32 inside
        (bind it, so that frozen weights follow). Raises RuntimeError where the forward would
        round the masters (autocast, FSDP, DeepSpeed); `fc_optim.fp32_copy` works there.
        """
        return evaluation.masters_in_model(self.weights)

    # -- foreign writes ------------------------------------------------------------------------

    @eager
    def check(self) -> dict[str, int]:
        """Compare every parameter with its shadow: {name: elements that differ}, {} when sound."""
        return self.weights.check()

    @eager
    def adopt_weights(self) -> None:
        """Make what the parameters hold now the masters (moments stay), and publish them.

        Also the way to begin new masters after `state` was cleared.
        """
        self.weights.adopt()
        self._telemetry.restart()

    @eager
    def restore_weights(self) -> None:
        """Write the shadow of the masters into the parameters, whatever they hold now."""
        self.weights.restore()

    def edit_masters(self) -> contextlib.AbstractContextManager[dict[str, Tensor]]:
        """A context that gives the fp32 masters by name, to be changed in place; then publishes.

        For clipped weights, neurons that begin anew, averages of models: written into parameters,
        such values would be rounded first. The tensors are the state's own, sharded as the
        parameters are. Moments stay; the weights are a new version afterwards, also if the code
        inside raises. Raises RuntimeError if weights were changed outside the optimizer.
        """
        return self.weights.edit_masters()

    def reset_moments(self) -> None:
        """Let the moments and step counts begin anew: when the policy jumps.

        Masters, identities and the dither stay. For another base than torch's three, all of its
        own state is dropped.
        """
        self.weights.reset_moments()

    # -- parameters ----------------------------------------------------------------------------

    @property
    def seed(self) -> int:
        """The 64-bit key of the random bits. Fixed: the shadow in the parameters depends on it."""
        return self.weights.seed

    @property
    def dither(self) -> str:
        """The dither: "fresh", "sync" or "held". Fixed, as the seed is."""
        return self.weights.dither

    @property
    def model(self) -> nn.Module | None:
        """The model that names were taken from by `bind`."""
        return self.weights.model

    def managed(self) -> list[Managed]:
        """The parameters under management, in group order."""
        return self.weights.entries()

    @eager
    def bind(self, model: nn.Module) -> Self:
        """Take names and order of `served_params()` from `model`. Random bits do not change.

        Under DistributedDataParallel it is collective: replicas that were built differently are
        refused, as `check_replicas` does it.

        Raises ValueError if the optimizer trains none of the model's parameters. Returns self.
        """
        self.weights.bind(model)
        return self

    def check_replicas(self, groups: Sequence[Any] | None = None) -> None:
        """Compare with other ranks what the shadow depends on. Collective; makes no masters.

        The first `publish()` does it, over all groups that shard or replicate the parameters as
        far as they are known. Raises RuntimeError on every rank if they disagree.
        """
        self.weights.check_replicas(groups)

    agree = check_replicas  # its name in 0.1

    def declare_flat(
        self, param: Tensor, pieces: Sequence[FlatPiece], groups: Sequence[Any] = ()
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
        self.weights.declare_flat(param, pieces, groups)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch. Masters of the new parameters are made at the next publish or step."""
        self._base.param_groups = self.param_groups  # somebody may have replaced the list
        construct.read_once([param_group])
        with released(self._base):
            self._base.add_param_group(param_group)  # to the shared list, after its checks
        try:
            self._admit(self.param_groups[-1])
        except Exception:
            self.param_groups.pop()
            raise

    def _admit(self, group: dict[str, Any]) -> None:
        construct.complete_group(group, self._base, self.fused)
        self.weights.stamp(group)
        self.weights.admit(group)

    # -- figures -------------------------------------------------------------------------------

    def metrics(self) -> StepMetrics:
        """What the last `step()` did, with `metrics=True` or "all"; nothing waits until it is read.

        Call it before the next step, or before weights are written, if that step is of interest.
        Before the first step, and after `load_state_dict()` or `adopt_weights()`, nothing was
        counted: n is 0, ratios are NaN. Raises RuntimeError if the optimizer does not count.
        """
        return self._telemetry.figures(self.weights.entries(), self.weights.version)

    def report(self) -> Report:
        """Which dtypes the masters, the forward, the gradients and the served copy have, by group.

        `print()` shows a table; the logger "fc_optim" has it in one line (INFO) at the first step.
        FSDP's and DDP's mixed precision are known once the model is bound.
        """
        return report(self.weights)

    def _log_report(self) -> None:
        if not self._reported and logger.isEnabledFor(logging.INFO):
            logger.info(self.report().line())
        self._reported = True

    # -- state ---------------------------------------------------------------------------------

    @eager
    def state_dict(self) -> dict[str, Any]:
        """As in torch, with fp32 masters beside the moments. Never creates state.

        Raises RuntimeError if weights were changed outside the optimizer: model and masters would
        be saved apart.
        """
        self.weights.check_free("state_dict()")
        self.weights.check_unwritten("state_dict()")
        for group in self.param_groups:
            self.weights.stamp(group)
        return checkpoint.add_names(
            self.weights, checkpoint.plain_epochs(self.weights, super().state_dict())
        )

    @eager
    @torch.inference_mode(False)
    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict()` or a plain torch optimizer saved: all of it, or nothing.

        Whose state an entry is: parameters are matched by name where both sides have names (given
        at construction, of a bound model, or the keys of `torch.distributed.checkpoint`; prefixes
        of wrappers do not count), else by identity (`param_id`), else by position, as torch does.
        So parameters and groups may come in another order. Parameters that only one side has, a
        parameter that moved to another group, and names that contradict identities are refused.

        What is loaded: fp32 state is never cast. Masters of the state win: the parameters are
        rewritten from them at once. The identities, seed, dither and epoch of the state win too.
        Group dicts are updated in place; tensors are copied. A state of before the first publish
        and one of plain torch have no masters: they come from the parameters at the next publish.
        Where this optimizer has masters already they are given up only for
        `fc_optim.without_masters(state_dict)`.

        What is refused, with names: a master, moment, step or entry that is missing beside others;
        masters or moments that were cast; tensors of another shape, of freed memory or none; keys
        that became strings; groups that lack hyper-parameters or hold another type.

        Raises ValueError if the state does not fit. Whatever is raised, masters, moments, groups
        and weights are to the bit what they were; until the load is done, new state lies beside
        the old (as in torch), and a copy of the weights. Under DeepSpeed before `attach()`, the
        state is kept, not copied, and loaded there.
        """
        state_dict = dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = pre_hook(self, state_dict) or state_dict
        self.weights.check_free("load_state_dict()")
        if self.weights.registry.unknown(self.param_groups):
            self.weights.early_state = state_dict
        else:
            checkpoint.load_state(self.weights, state_dict)
        self._telemetry.restart()
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    @eager
    def to_torch_state_dict(self) -> dict[str, Any]:
        """The way out: the state dict of the base optimizer alone (moments in fp32)."""
        return checkpoint.to_torch_state_dict(self.state_dict(), self.fused)

    # -- what only the base has ----------------------------------------------------------------

    def call_base(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Run a method of the base on the masters: schedule-free's `train()`, SAM's `first_step()`.

        `opt.train()` is short for it. If the shadow is another one afterwards it is published as a
        new version, with new bits under dither "fresh". Collective where parameters are sharded.
        Raises RuntimeError if weights were changed outside the optimizer.
        """
        return self.weights.call_base(self._base_step, name, args, kwargs)

    if not TYPE_CHECKING:  # a checker would take any name
        __getattr__, __setattr__ = base_attribute, set_attribute

    # -- pickling and deepcopy -----------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        return construct.packed(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        construct.unpack_into(self, state)

    def __reduce__(self) -> tuple[Any, ...]:
        return construct.reduced(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """As unpickling, but bound to the copy of the model."""
        return construct.deepcopy(self, memo)


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
