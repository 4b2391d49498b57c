"""The hidden log-ratio of a running job: its masters against the weights that it serves."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fc_optim.metrics.formulas import LogRatio, effective_sample_size, log_ratio
from fc_optim.serving.evaluation import fp32_copy

if TYPE_CHECKING:
    from fc_optim.optimizer import FairCastOptimizer

logger = logging.getLogger("fc_optim")

AT_ONCE = 4  # sequences in flight: logits take AT_ONCE x tokens x vocabulary x 4 bytes


@dataclass(frozen=True)
class HiddenRatio:
    """log p(y; M) - log p(y; S) on a sample, and what it took.

    ratio: its summary per token, in nats, and its sums per sequence. token_ess and sequence_ess:
    effective sample size of the unclipped weights as a share of n; floors are 1/tokens and
    1/sequences. bytes: of the one fp32 copy in memory at a time.
    """

    ratio: LogRatio
    token_ess: float
    sequence_ess: float
    tokens: int
    sequences: int
    served_version: int
    bytes: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"hidden log-ratio at version {self.served_version}: mean |.| "
            f"{self.ratio.mean_abs:.2e}, mean {self.ratio.mean:.1e}, p99 {self.ratio.p99:.2e} per "
            f"token ({self.tokens}); sequence ESS {self.sequence_ess:.4f} of n {self.sequences} "
            f"(floor {1 / self.sequences:.3f}); {self.seconds:.1f} s"
        )


def hidden_ratio(
    model: nn.Module,
    optimizer: "FairCastOptimizer",
    batch: Mapping[str, Tensor],
    *,
    into: nn.Module | None = None,
    say: Callable[[str], Any] = logger.info,
) -> HiddenRatio:
    """How far the served policy is from the masters' on `batch`, in fp32 on both sides.

    Makes a gathered fp32 copy of the model (`fc_optim.fp32_copy`) with the masters, then one with
    the served weights, never both, and evaluates the batch with each. Beforehand `say` is told the
    cost: the bytes of a copy, and the seconds that one sequence's forward of the live model
    suggests. Every rank must call it where the weights are sharded.

    Args:
        model: a causal language model that `optimizer` trains. Only its train/eval mode changes,
            and is put back.
        batch: keyword arguments of the forward: `input_ids` [n, t] int64, and if the rows are
            padded `attention_mask`. `labels` [n, t], not given to the forward, picks the tokens
            that count (not -100), as in transformers; without it the attention mask does.
        into: for a sharded model, the same model without the sharding, which is overwritten.
        say: gets one line of text; by default it goes to the "fc_optim" logger at level INFO.

    Raises KeyError without input_ids; what `fp32_copy` and `fc_optim.metrics.log_ratio` raise.
    """
    n, t = batch["input_ids"].shape
    size = sum(4 * p.numel() for p in model.parameters())
    say(
        f"hidden_ratio: 2 fp32 copies of {size / 1e6:,.0f} MB, one after the other, {n} sequences "
        f"of {t} tokens each; about {_estimate(model, batch) * 2 * n:.1f} s of forwards."
    )
    began = time.perf_counter()
    log_p = {
        which: _of_copy(model, optimizer, which, batch, into) for which in ("master", "served")
    }
    mask = _mask(batch).to(log_p["master"].device)
    ratio = log_ratio(log_p["master"], log_p["served"], mask)
    return HiddenRatio(
        ratio=ratio,
        token_ess=effective_sample_size((log_p["master"] - log_p["served"])[mask]),
        sequence_ess=effective_sample_size(ratio.sequence_sums),
        tokens=int(mask.sum()),
        sequences=n,
        served_version=optimizer.served_version,
        bytes=size,
        seconds=time.perf_counter() - began,
    )


def token_log_probs(net: nn.Module, batch: Mapping[str, Tensor], at_once: int = AT_ONCE) -> Tensor:
    """Log-probability of each token but the first, [n, t - 1] float32, `at_once` rows at a time."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    n = len(inputs["input_ids"])
    parts = []
    for i in range(0, n, at_once):
        rows = {
            name: v[i : i + at_once] if isinstance(v, Tensor) and len(v) == n else v
            for name, v in inputs.items()
        }
        logits = net(**rows).logits[:, :-1].float()
        picked = logits.gather(-1, rows["input_ids"][:, 1:, None]).squeeze(-1)
        parts.append(picked - logits.logsumexp(-1))
    return torch.cat(parts)


@contextmanager
def evaluating(net: nn.Module) -> Iterator[None]:
    """Eval mode, and each module's own mode again afterwards."""
    modes = [(m, m.training) for m in net.modules()]
    try:
        net.eval()
        yield
    finally:
        for module, training in modes:
            module.training = training


@torch.no_grad()
def _of_copy(
    model: nn.Module,
    optimizer: "FairCastOptimizer",
    which: str,
    batch: Mapping[str, Tensor],
    into: nn.Module | None,
) -> Tensor:
    return token_log_probs(fp32_copy(model, optimizer, which=which, into=into), batch)


@torch.no_grad()
def _estimate(model: nn.Module, batch: Mapping[str, Tensor]) -> float:
    """Seconds of one sequence's forward."""
    n = len(batch["input_ids"])
    one = {name: v[:1] if isinstance(v, Tensor) and len(v) == n else v for name, v in batch.items()}
    with evaluating(model):
        began = time.perf_counter()
        float(token_log_probs(model, one).sum())  # the read waits for the device
        return time.perf_counter() - began


def _mask(batch: Mapping[str, Tensor]) -> Tensor:
    """The tokens that count, [n, t - 1]: those that have a prediction and are asked for."""
    if "labels" in batch:
        return batch["labels"][:, 1:] != -100
    ones = torch.ones_like(batch["input_ids"])
    return batch.get("attention_mask", ones)[:, 1:].bool()
