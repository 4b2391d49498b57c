"""TRL: serve right before its own sync to vLLM, and prove after it what vLLM holds."""

import functools
import logging
from collections.abc import Iterator
from typing import Any

from accelerate.utils import is_peft_model
from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from fc_optim.integrations.transformers import FairCastCallback, unwrap
from fc_optim.manifests import Manifest
from fc_optim.optimizer import FairCastOptimizer
from fc_optim.registry import check_dtype
from fc_optim.serving import list_items
from fc_optim.sync import Engine, Sync, WatchingEngine

logger = logging.getLogger(__name__)

_TESTED = "1.16.0"
_MERGED = (
    "TRL merges the adapter into the base weights before it sends them, and vLLM rounds W + s*BA to "
    "nearest: no engine holds what the optimizer serves."
)


def register(trainer: Trainer, *, verify: bool = True) -> FairCastOptimizer:
    """Let a TRL trainer serve: call it once, before `trainer.train()`.

    ::

        trainer = GRPOTrainer(model, reward, args=args, train_dataset=rows, optimizers=(opt, None))
        register(trainer)
        trainer.train()

    A trainer that loads the model itself, from a path, gets the optimizer after it was made::

        trainer.optimizer_cls_and_kwargs = (FairCastAdamW, {"lr": 1e-6, "dither": "sync"})

    Training is right without this function where the weights are bf16 values from the start and
    dither is not "sync". It adds: names, and weights on the bf16 grid before the first forward; new
    dither right before each sync (dither "sync"; a trainer that generates with transformers has no
    sync, so there it is like "held"); the log of `FairCastCallback`; and proof after each sync.

    What is wrapped, on this trainer's objects only: `trainer.vllm_generation.sync_weights` (GRPO,
    RLOO and others, colocated or server) or `trainer._sync_weight_merged` and `_sync_weight_lora`
    (AsyncGRPO). It does nothing if a later TRL syncs by another way, but raises if the method is not
    there. Callbacks go to the front of `trainer.callback_handler.callbacks`, since AsyncGRPO sends
    its first weights in one.

    Args:
        trainer: with a FairCastOptimizer, or with the means to create one, which is done here.
        verify: after each sync compare all managed weights that vLLM holds with those served, bit
            for bit, and raise SyncError if they differ. Costs a digest of the weights on both
            sides, twice per sync, as something else could have written in between. For a colocated
            vLLM in one piece, and for AsyncGRPO with `WeightTransfer`.

    Returns the optimizer, bound to the model. Raises TypeError for another optimizer, ValueError for
    fp16 or a merged adapter that is to be verified, NotImplementedError under DeepSpeed and FSDP1
    or if the engine cannot be verified, RuntimeError if this TRL has no such methods.
    """
    _refuse(trainer)
    optimizer = _optimizer_of(trainer)
    for entry in optimizer.managed():
        check_dtype(entry.param, entry.slot.name)
    if not trainer.is_fsdp_enabled:  # else its parameters are still to be sharded
        optimizer.bind(trainer.model)
    _wrap(trainer, optimizer, verify)
    callbacks = trainer.callback_handler.callbacks
    figures = [c for c in callbacks if isinstance(c, FairCastCallback)]
    rest = [c for c in callbacks if c not in figures]
    callbacks[:] = [_Begin(trainer, optimizer), *(figures or [FairCastCallback()]), *rest]
    return optimizer


class WeightTransfer:
    """AsyncGRPO's `weight_transfer=`: the served weights to any engine of `fc_optim.sync`.

    ::

        transfer = WeightTransfer(ServerEngine(url))
        trainer = AsyncGRPOTrainer(path, reward, args=args, ..., weight_transfer=transfer)
        register(trainer)

    In place of TRL's own, which sends by NCCL. The engine pauses and resumes in its `load`.
    `register` redraws before each sync and verifies after it.
    """

    def __init__(self, engine: Engine):
        self.engine = engine
        self.sent: Manifest | None = None  # what the engine is to hold: set before each sync
        self.registered = False

    def init_weight_transfer(self) -> None:
        """Called by TRL when training begins."""
        if not self.registered:
            raise RuntimeError(
                "weight_transfer: it does not know the optimizer; call "
                "fc_optim.integrations.trl.register(trainer) before train()."
            )

    def send_weights(self, iterator: Iterator[tuple[str, Tensor]]) -> None:
        """Send what TRL gathers; a managed fp32 parameter goes as the bf16 values that it holds."""
        assert self.sent is not None and self.sent.version is not None
        managed = self.sent.parameters
        weights = ((name, t.bfloat16() if name in managed else t) for name, t in iterator)
        if isinstance(self.engine, WatchingEngine):
            weights = self.engine.watch(weights, self.sent)
        self.engine.load(weights, self.sent.version)
        for _ in iterator:  # other processes gather to the end
            pass

    def pause(self) -> None:
        """Left to the engine."""

    resume = destroy = pause


# ---- Which trainers


def _refuse(trainer: Trainer) -> None:
    """Raise where a FairCastOptimizer would not be stepped, or its weights not be served."""
    if trainer.is_deepspeed_enabled:
        raise NotImplementedError(
            "trainer: under DeepSpeed the Trainer hands the optimizer to an engine that steps flat "
            "buffers instead. Train under DDP or FSDP2, or call deepspeed.initialize() yourself "
            "(fc_optim.integrations.deepspeed)."
        )
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if trainer.is_fsdp_enabled and getattr(plugin, "fsdp_version", 1) == 1:
        raise NotImplementedError(
            "trainer: under FSDP1 the Trainer creates the optimizer only while it trains, and TRL "
            "refuses optimizers=. Use FSDP2 (fsdp_version: 2)."
        )
    if trainer.args.fp16:
        raise ValueError(
            "trainer.args.fp16: True casts the weights to fp16 in the forward, which loses bits of "
            "small bf16 values: the trainer would not run on what is served. Use bf16=True."
        )


def _optimizer_of(trainer: Trainer) -> FairCastOptimizer:
    """The trainer's own optimizer; created as `train()` would, if it is not there yet."""
    created = trainer.optimizer is None
    if created:
        trainer.create_optimizer()
    try:
        return unwrap(trainer.optimizer)
    except TypeError:
        if created:
            trainer.optimizer = None
        raise


class _Begin(TrainerCallback):
    """Checks what the Trainer made of the optimizer, and publishes before the first forward."""

    def __init__(self, trainer: Trainer, optimizer: FairCastOptimizer):
        self.trainer, self.optimizer = trainer, optimizer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if unwrap(self.trainer.optimizer) is not self.optimizer:
            raise RuntimeError(
                "trainer.optimizer: it is another one than when register() was called, and would "
                "not be served; call register(trainer) again, last before train()."
            )
        self.optimizer.bind(self.trainer.model_wrapped)  # DDP's wrapper: replicas are compared
        self.optimizer.publish()


# ---- Its sync


def _wrap(trainer: Any, optimizer: FairCastOptimizer, verify: bool) -> None:
    """Put the redraw before, and the proof after, the method by which this trainer syncs."""
    transfer = getattr(trainer, "weight_transfer", None)
    ours = isinstance(transfer, WeightTransfer)
    if hasattr(trainer, "weight_transfer"):
        if trainer._lora_sync:  # adapters are sent as they are; vLLM keeps them stacked
            _around(trainer, "_sync_weight_lora", optimizer, None)
            return
        owner, method = trainer, "_sync_weight_merged"
    elif getattr(trainer, "use_vllm", False):
        owner, method = getattr(trainer, "vllm_generation", None), "sync_weights"
    else:
        return
    if is_peft_model(trainer.accelerator.unwrap_model(trainer.model)):
        if verify or ours:
            raise ValueError(f"verify: True cannot be with a merged adapter. {_MERGED} Pass False.")
        logger.warning(_MERGED)
    sync = None
    if verify or ours:
        # An engine that sleeps between syncs has dropped its weights, which is no foreign write.
        recheck = not getattr(owner, "enable_sleep_mode", False)
        sync = Sync(optimizer, _engine_of(trainer, optimizer), recheck=recheck)
    _around(owner, method, optimizer, sync, transfer if ours else None)
    if ours:
        transfer.registered = True


def _around(
    owner: Any,
    method: str,
    optimizer: FairCastOptimizer,
    sync: Sync | None,
    transfer: WeightTransfer | None = None,
) -> None:
    """Wrap one method of one object. Without `sync` it only redraws."""
    original = getattr(owner, method, None)
    if not callable(original):
        import trl

        raise RuntimeError(
            f"trainer: {type(owner).__name__} has no {method}() in trl {trl.__version__}; tested is "
            f"trl {_TESTED}. Call optimizer.publish(redraw=True) before each sync yourself."
        )
    if method in vars(owner):
        raise RuntimeError("trainer: it was registered already.")

    @functools.wraps(original)
    def synced(*args: Any, **kwargs: Any) -> Any:
        if sync is None:
            optimizer.publish(redraw=True)
            return original(*args, **kwargs)
        results: list[Any] = []

        def send(now: Manifest) -> None:
            if transfer is not None:
                transfer.sent = now
            results.append(original(*args, **kwargs))

        sync.send = send
        sync()
        return results[0]

    vars(owner)[method] = synced


class _Colocated:
    """The vLLM in this process, which TRL itself loads: an Engine that is only asked."""

    def __init__(self, llm: Any, optimizer: FairCastOptimizer):
        from fc_optim.integrations import vllm_worker

        self.llm, self.optimizer, self.read = llm, optimizer, vllm_worker.entries

    def load(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        raise NotImplementedError("TRL sends the weights.")

    def held(self) -> Manifest:
        items = list_items(self.optimizer.model, (self.optimizer,), "served")
        rows = {i.name: i.piece.shape[0] for i in items}
        (found,) = self.llm.collective_rpc(self.read, args=(rows,))
        return Manifest(None, found)


def _engine_of(trainer: Any, optimizer: FairCastOptimizer) -> Engine | None:
    """The engine to ask what it holds; None on processes that have none."""
    if hasattr(trainer, "weight_transfer"):
        transfer = trainer.weight_transfer
        if transfer is None:
            return None
        if isinstance(transfer, WeightTransfer):
            return transfer.engine
        raise NotImplementedError(
            f"verify: what {type(transfer).__name__} sends to cannot be asked. Send by "
            "fc_optim.integrations.trl.WeightTransfer(engine), or pass verify=False."
        )
    generation = trainer.vllm_generation
    if generation.mode != "colocate" or generation.tensor_parallel_size > 1:
        raise NotImplementedError(
            f"verify: with vllm_mode={generation.mode!r} and vllm_tensor_parallel_size="
            f"{generation.tensor_parallel_size} no process has whole weights of vLLM's to compare; "
            "pass verify=False."
        )
    return _Colocated(generation.llm, optimizer)
