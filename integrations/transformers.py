"""Hugging Face transformers: log what the optimizer serves, from inside the Trainer."""

import math
from dataclasses import asdict
from typing import Any

from torch import Tensor

from fc_optim.integrations.needs import needs
from fc_optim.metrics.formulas import Movement, MovementTracker
from fc_optim.optimizer import FairCastOptimizer, unwrap
from fc_optim.params.sources import to_local

with needs("transformers", "5.19"):
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

FIGURES = ("changed_ratio", "captured", "lag_steps", "export_rms_ulp")


class FairCastCallback(TrainerCallback):
    """Adds the optimizer's figures to the Trainer's logs: `Trainer(..., callbacks=[...])`.

    Keys: `served_version`, and of the last step `changed_ratio`, `captured`, `lag_steps` and
    `export_rms_ulp`, as `fc_optim.metrics` defines them; W0 is what was served at the start of this
    `train()`. There it also binds the model and publishes, so that the first forward runs on served
    weights.

    The figures are over a fixed sample of coordinates (with sharded parameters, of this process's
    shards), so a step costs the same for any model: about 14 ms for 100,000 coordinates on a CPU
    core, and `sample * (4 * history + 10)` bytes. Nothing is communicated.

    The Trainer calls its own reporters (W&B, TensorBoard) before callbacks that it is given. For
    them to see the figures, put this first: `trainer.callback_handler.callbacks.insert(0, ...)`.

    Args:
        sample: most coordinates to follow.
        history: steps that `lag_steps` can look back.
        seed: of the sample.
    """

    def __init__(self, *, sample: int = 100_000, history: int = 100, seed: int = 0):
        self._options = {"sample": sample, "history": history, "seed": seed}
        self._tracker: MovementTracker | None = None
        self._last: Movement | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Bind the model, publish, and note the weights that captured and lag start from."""
        optimizer = trained_by(kwargs["optimizer"])
        optimizer.bind(kwargs["model"])
        optimizer.publish()
        _, served = _weights(optimizer)
        self._last = None
        self._tracker = MovementTracker(served, **self._options) if served else None

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Record one optimizer step."""
        if self._tracker is not None:
            self._last = self._tracker.record(*_weights(trained_by(kwargs["optimizer"])))

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Add the figures to the training logs, and to `state.log_history`."""
        logs: dict[str, Any] = kwargs["logs"]
        if self._last is None or "loss" not in logs:  # evaluation, or the summary at the end
            return
        figures = asdict(self._last)
        found = {k: figures[k] for k in FIGURES if math.isfinite(figures[k])}
        found["served_version"] = trained_by(kwargs["optimizer"]).served_version
        logs.update(found)
        state.log_history[-1].update(found)


def trained_by(optimizer: Any) -> FairCastOptimizer:
    """Ours, inside accelerate's wrapper. Raises TypeError if it is another one."""
    inner = unwrap(optimizer)
    if not isinstance(inner, FairCastOptimizer):
        raise TypeError(
            f"optimizer: {type(inner).__name__} is not a FairCastOptimizer; pass one to "
            "the Trainer, by optimizers= or optimizer_cls_and_kwargs=."
        )
    return inner


def _weights(optimizer: FairCastOptimizer) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """This process's part of the masters and of the parameters, by name. Views: nothing is copied.

    A parameter of fp32 holds bf16 values, as it is served.
    """
    entries = [e for e in optimizer.managed() if e.local.numel()]
    masters = {e.identity.name: to_local(e.state["master"]) for e in entries}
    return masters, {e.identity.name: e.local for e in entries}
