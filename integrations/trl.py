"""TRL: serve right before its own sync to vLLM, and prove after it what vLLM holds."""

import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fc_optim.integrations.needs import needs
from fc_optim.integrations.transformers import FairCastCallback, trained_by
from fc_optim.kernels.reference import cast
from fc_optim.optimizer import FairCastOptimizer
from fc_optim.params.registry import check_dtype
from fc_optim.serving.stream import publish_items
from fc_optim.sync.manifests import Manifest, entry
from fc_optim.sync.sync import Engine, Sync, WatchingEngine

with needs("accelerate", "1.15"):
    from accelerate.utils import broadcast_object_list, is_peft_model
with needs("transformers", "5.19"):
    from transformers import (
        Trainer,
        TrainerCallback,
        TrainerControl,
        TrainerState,
        TrainingArguments,
    )

logger = logging.getLogger(__name__)

_TESTED = "1.16.0"
_TIMEOUT_S = 600.0  # for the checksums of a server
_MERGED = (
    "TRL merges the adapter into the base weights before it sends them, and W + s*BA is rounded to "
    "nearest: no engine holds what the optimizer serves."
)


def register(trainer: Trainer, *, verify: bool = True) -> FairCastOptimizer:
    """Let a TRL trainer serve: call it before `trainer.train()`.

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
    (AsyncGRPO). It raises if the method is not there; should a later TRL keep it and yet sync by
    another, nothing is redrawn or proved. Callbacks go to the front of
    `trainer.callback_handler.callbacks`, since AsyncGRPO sends its first weights in one.

    Args:
        trainer: with a FairCastOptimizer, or with the means to create one, which is done here.
        verify: after each sync compare all managed weights that vLLM holds with those served, bit
            for bit, and raise SyncError if they differ. Costs a digest of the weights on both
            sides, twice per sync, as something else could have written in between; with a server,
            a sha256 and, where they are sharded, one more gather. Needs a vLLM in one piece, not
            quantised, without adapters. `WeightTransfer` always verifies.

    Returns the optimizer, bound to the model. Raises TypeError for another optimizer, ValueError
    for fp16 or a merged adapter that is to be verified, NotImplementedError under DeepSpeed and
    FSDP1 or if the engine cannot be asked, RuntimeError if this TRL has no such methods.
    """
    _refuse(trainer)
    optimizer = _optimizer_of(trainer)
    for managed in optimizer.managed():
        check_dtype(managed.param, managed.identity.name)
    model: Any = trainer.model
    if not trainer.is_fsdp_enabled:  # else its parameters are still to be sharded
        optimizer.bind(model)
    _wrap(trainer, optimizer, verify)
    callbacks = trainer.callback_handler.callbacks
    figures = [c for c in callbacks if isinstance(c, FairCastCallback)]
    rest = [c for c in callbacks if not isinstance(c, (FairCastCallback, _Begin))]
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
        self.registered = False
        self._sent: Manifest | None = None

    def expect(self, sent: Manifest) -> None:
        """Learn what the engine is to hold after the sync that comes; `register` calls it."""
        self._sent = sent

    def init_weight_transfer(self) -> None:
        """Called by TRL when training begins."""
        if not self.registered:
            raise RuntimeError(
                "weight_transfer: it does not know the optimizer; call "
                "fc_optim.integrations.trl.register(trainer) before train()."
            )

    def send_weights(self, iterator: Iterator[tuple[str, Tensor]]) -> None:
        """Send what TRL gathers; a managed fp32 parameter goes as the bf16 values that it holds."""
        assert self._sent is not None and self._sent.version is not None
        managed = self._sent.parameters
        weights: Iterator[tuple[str, Tensor]] = (
            (name, cast(t, torch.bfloat16) if name in managed else t) for name, t in iterator
        )
        if isinstance(self.engine, WatchingEngine):
            weights = self.engine.watch(weights, self._sent)
        self.engine.load(weights, self._sent.version)
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
        return trained_by(trainer.optimizer)
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
        if trained_by(self.trainer.optimizer) is not self.optimizer:
            raise RuntimeError(
                "trainer.optimizer: it is another one than when register() was called, and would "
                "not be served; call register(trainer) again, right before train()."
            )
        self.optimizer.bind(self.trainer.model_wrapped)  # DDP's wrapper: replicas are compared
        self.optimizer.publish()


# ---- Its sync


def _wrap(trainer: Any, optimizer: FairCastOptimizer, verify: bool) -> None:
    """Put the redraw before, and the proof after, the method by which this trainer syncs."""
    transfer: Any = getattr(trainer, "weight_transfer", None)
    ours = False
    if hasattr(trainer, "weight_transfer"):
        # TRL keeps it on the main process alone.
        (ours,) = broadcast_object_list([isinstance(transfer, WeightTransfer)])
        if getattr(trainer, "_lora_sync", False):
            # Adapters are sent as they are; vLLM keeps them stacked.
            _around(trainer, "_sync_weight_lora", optimizer)
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
    if not (verify or ours):
        _around(owner, method, optimizer)
    elif ours and transfer is None:
        _around(owner, method, optimizer, Sync(optimizer, None))
    elif ours:
        _around(owner, method, optimizer, Sync(optimizer, transfer.engine), transfer.expect)
        transfer.registered = True
    elif _has_server(trainer):
        server = _Server(trainer, optimizer)
        sync = Sync(optimizer, server if trainer.accelerator.is_main_process else None)
        _around(owner, method, optimizer, sync, server.expect)
    else:
        engine, expect = _colocated(owner, optimizer)
        # An engine that sleeps between syncs has dropped its weights, which is no foreign write.
        sync = Sync(optimizer, engine, recheck=not owner.enable_sleep_mode)
        _around(owner, method, optimizer, sync, expect)


def _around(
    owner: Any,
    method: str,
    optimizer: FairCastOptimizer,
    sync: Sync | None = None,
    before: Callable[[Manifest], None] = lambda sent: None,
) -> None:
    """Wrap one method of one object: redraw, `before`, the method, the proof of `sync`."""
    original = _method(owner, method)

    @functools.wraps(original)
    def synced(*args: Any, **kwargs: Any) -> Any:
        if sync is None:
            optimizer.publish(redraw=True)
            return original(*args, **kwargs)
        results: list[Any] = []

        def send(sent: Manifest) -> None:
            before(sent)
            results.append(original(*args, **kwargs))

        sync.send = send
        sync()
        return results[0]

    synced._fc_optim = True  # type: ignore[attr-defined]
    vars(owner)[method] = synced


def _method(owner: Any, method: str) -> Callable[..., Any]:
    """The method itself, without what an earlier `register` put around it."""
    found: Any = getattr(owner, method, None)
    if not callable(found):
        import trl

        raise RuntimeError(
            f"trainer: trl {trl.__version__} has no {method}() to wrap; tested is {_TESTED}. "
            "Call optimizer.publish(redraw=True) before each sync yourself."
        )
    original: Callable[..., Any] = found.__wrapped__ if hasattr(found, "_fc_optim") else found
    return original


# ---- What vLLM holds


def _colocated(
    generation: Any, optimizer: FairCastOptimizer
) -> tuple[Engine, Callable[[Manifest], None]]:
    """The vLLM in this process, which TRL itself loads, and a function that tells it the names."""
    if generation.tensor_parallel_size > 1:
        raise NotImplementedError(
            f"verify: vllm_tensor_parallel_size={generation.tensor_parallel_size}: no process "
            "holds whole weights to compare; pass verify=False."
        )
    from fc_optim.integrations.vllm import OfflineEngine

    engine = OfflineEngine(generation.llm)

    def expect(sent: Manifest) -> None:
        items = publish_items(optimizer.weights, "served")  # frozen ones fuse with others
        every = {i.name: entry(i.dtype, i.piece.shape, None) for i in items}
        engine.watch(iter(()), Manifest(sent.version, every))

    return engine, expect


def _has_server(trainer: Any) -> bool:
    """Whether TRL sends to a server by NCCL."""
    if not hasattr(trainer, "weight_transfer"):
        return bool(trainer.vllm_generation.mode == "server")
    transfer = trainer.weight_transfer
    if transfer is None or type(transfer).__module__.startswith("trl."):
        return True
    raise NotImplementedError(
        f"verify: what {type(transfer).__name__} sends to cannot be asked. Send by "
        "fc_optim.integrations.trl.WeightTransfer(engine), or pass verify=False."
    )


class _Server:
    """A server to which TRL sends: an Engine that is asked, by the main process, for checksums."""

    def __init__(self, trainer: Any, optimizer: FairCastOptimizer):
        self._optimizer, self._main = optimizer, trainer.accelerator.is_main_process
        if not self._main:
            return
        from fc_optim.integrations import vllm, vllm_layout

        if hasattr(trainer, "weight_transfer"):
            url = trainer.vllm_client.server_url
        else:
            url = trainer.vllm_generation.vllm_client.base_url
        self._routes, self._format = vllm.Routes(url, _TIMEOUT_S), vllm_layout
        self._ledger = vllm_layout.Ledger()

    def expect(self, sent: Manifest) -> None:
        """Hash the weights that TRL is about to send. Every process gathers them."""
        weights = self._optimizer.served_params(managed_only=True)
        if self._main:
            layout = self._format.Layout(frozenset(self._checksums()))
            weights = self._ledger.record(layout, weights, sent)
        for _ in weights:
            pass

    def load(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Never called."""
        raise NotImplementedError("TRL sends the weights.")

    def held(self) -> Manifest:
        """What the checksums of its weights say."""
        checksums = self._checksums()
        if self._ledger.holds(checksums) == "new":
            self._ledger.loaded()
        return Manifest(None, self._ledger.translate(checksums))

    def _checksums(self) -> dict[str, set[str]]:
        answer = self._routes.post("weight_checker", {"action": "checksum"})
        return self._format.read_checksums(answer["checksums"])
