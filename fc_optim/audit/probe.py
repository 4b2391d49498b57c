"""What an export would hide, measured on real weights without any training.

The hidden log-ratio is log p(y; M) - log p(y; S) with masters M and served weights S, both
evaluated in fp32 by the same kernels, so that only the weights differ. Figures as in
`fc_optim.metrics`.
"""

import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fc_optim.audit.hidden import HiddenRatio as HiddenRatio
from fc_optim.audit.hidden import evaluating, token_log_probs
from fc_optim.audit.hidden import hidden_ratio as hidden_ratio
from fc_optim.audit.text import TEXT
from fc_optim.metrics.formulas import effective_sample_size, log_ratio
from fc_optim.params.names import clean_name, param_id
from fc_optim.serving.rounding import stochastic_round

SEQUENCE = 64  # tokens
SEQUENCES = 16  # at most: one backward pass
SEEDS = 3  # stochastic copies per distance


@dataclass(frozen=True)
class ProbeResult:
    """What `probe` found; `rows` as described there, the rest says under which conditions."""

    rows: list[dict[str, Any]]
    model: str
    parameters: int
    tokens: int
    sequences: int
    lr: float
    device: str
    hardware: str
    torch: str
    seconds: float
    cpu_seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [
            f"{self.model}: {self.parameters:,} parameters, {self.tokens} tokens in "
            f"{self.sequences} sequences, lr {self.lr:g}, {self.seconds:.0f} s "
            f"({self.cpu_seconds:.0f} s of CPU) on {self.hardware}",
            f"{'copy':>16} {'steps':>6} {'mean|.|':>9} {'mean':>9} {'p99':>9} {'k3':>9} "
            f"{'max|sum|':>9} {'ESS':>7}   (n {self.sequences}, floor {1 / self.sequences:.3f})",
        ]
        for r in self.rows:
            seed = "" if r["seed"] is None else f" seed {r['seed']}"
            largest = max(map(abs, r["sequence_sums"]))
            lines.append(
                f"{r['copy'] + seed:>16} {r['steps'] or '-':>6} {r['mean_abs']:9.2e} "
                f"{r['mean']:9.1e} {r['p99']:9.2e} {r['k3']:9.2e} {largest:9.2e} "
                f"{r['sequence_ess']:7.4f}"
            )
        return "\n".join(lines)


def probe(
    model: str | Path | nn.Module,
    *,
    text: str | Tensor | None = None,
    lr: float = 1e-6,
    steps: Sequence[int] = (10, 50, 150),
    seed: int = 0,
    device: str = "cpu",
) -> ProbeResult:
    """The hidden log-ratio that k coherent steps at `lr` would leave behind each kind of cast.

    Takes one real gradient of the text's loss in fp32, and moves the masters from the bf16 weights
    W0 to W0 - k lr sign(gradient): k steps of Adam while the gradient keeps its sign. Compared are
    masters and copies on the same text, for each k:

    - "rtn": round-to-nearest;
    - "sr": stochastic rounding, with three seeds;

    and once "ceiling", the noise of stochastic rounding at its largest: masters spread evenly
    between grid points (W0 with random low 16 bits), which no number of steps exceeds.

    `rows` has a dict per k, copy and seed: steps, copy, seed; mean, mean_abs, p99, k3 of the
    log-ratio per token, in nats; sequence_sums, one per sequence; sequence_ess, the effective
    sample size of their exponentials as a share of n (floor 1/n). The text is given, not sampled
    from the model, so the ESS is that of these ratios, not of a rollout.

    Args:
        model: folder or name for transformers' `from_pretrained`, or a causal language model whose
            forward takes `input_ids` and returns `.logits`. A model object is evaluated in
            place: its parameters and buffers are fp32 copies meanwhile, its own are put back
            untouched, also after an exception. Masters start from its weights rounded to bf16.
        text: a text, of which the first 1,024 tokens are used in sequences of 64, or token ids
            [sequences, tokens] (int64). Needed as ids with a model object that has no tokenizer
            by its `name_or_path`. By default a built-in text of about 800 tokens.
        lr: of Adam. steps: the distances k. seed: of the stochastic copies, which use seed,
            seed + 1, seed + 2. device: where a model that is loaded here is put.

    Memory: the weights as loaded, an fp32 copy (4 bytes per parameter), the gradient's signs (1),
    the activations of one backward pass over the text. Copies are made one parameter at a time.

    Raises ValueError or TypeError for steps, lr or text that cannot be used.
    """
    if not 0 < lr < 1 or not steps or min(steps) < 1:
        raise ValueError(f"lr, steps: {lr}, {tuple(steps)}; need 0 < lr < 1 and steps >= 1.")
    began, cpu = time.perf_counter(), time.process_time()
    net, name = _load(model, device)
    ids = token_ids(model, text).to(next(net.parameters()).device)
    rows: list[dict[str, Any]] = []
    with evaluating(net), in_fp32(net) as start:
        signs = gradient_signs(net, ids)
        masters = Masters(net, start, signs, lr)
        for k in steps:
            log_p = masters.evaluate(identity, ids, k)
            for copy, s, cast in [("rtn", None, nearest), *_stochastic(seed, k)]:
                rows.append(_row(log_p, masters.evaluate(cast, ids, k), k, copy, s))
        log_p = masters.evaluate(identity, ids, None)
        _, s, cast = next(_stochastic(seed, 0))
        rows.append(_row(log_p, masters.evaluate(cast, ids, None), None, "ceiling", s))
    return ProbeResult(
        rows=rows, model=name, parameters=sum(p.numel() for p in net.parameters()),
        tokens=ids.shape[0] * (ids.shape[1] - 1), sequences=ids.shape[0], lr=lr,
        device=str(ids.device), hardware=hardware(ids.device), torch=torch.__version__,
        seconds=time.perf_counter() - began, cpu_seconds=time.process_time() - cpu,
    )  # fmt: skip


Cast = Callable[[Tensor, str], Tensor]


def identity(master: Tensor, name: str) -> Tensor:
    return master


def nearest(master: Tensor, name: str) -> Tensor:
    return master.bfloat16()


def _stochastic(seed: int, epoch: int) -> Iterator[tuple[str, int, Cast]]:
    for s in range(seed, seed + SEEDS):

        def cast(master: Tensor, name: str, s: int = s) -> Tensor:
            return stochastic_round(master, seed=s, param_id=param_id(name), t=epoch)

        yield "sr", s, cast


class Masters:
    """W0 - k lr sign(gradient) for any k, made one parameter at a time.

    net: the model inside `in_fp32`, whose parameters `write` fills. start: its own weights, W0
    once rounded to bf16. signs: int8, for the parameters that move.
    """

    def __init__(
        self, net: nn.Module, start: dict[str, Tensor], signs: dict[str, Tensor], lr: float
    ):
        self.net, self.start, self.signs, self.lr = net, start, signs, lr

    @torch.no_grad()
    def write(self, cast: Cast, steps: int | None) -> None:
        """Put cast(master, name) of each parameter into the model; steps None: see `probe`."""
        for name, p in self.net.named_parameters():
            p.copy_(cast(self._master(name, steps), clean_name(name)))

    @torch.no_grad()
    def evaluate(self, cast: Cast, ids: Tensor, steps: int | None) -> Tensor:
        self.write(cast, steps)
        return token_log_probs(self.net, {"input_ids": ids})

    def _master(self, name: str, steps: int | None) -> Tensor:
        w = self.start[name].bfloat16().float()
        if name not in self.signs:
            return w
        if steps is not None:
            return w.sub_(self.signs[name], alpha=steps * self.lr)
        bits = w.view(torch.int32)
        draw = torch.Generator(w.device).manual_seed(param_id(name))
        low = torch.randint(2**16, w.shape, generator=draw, dtype=torch.int32, device=w.device)
        return torch.where(w.isfinite(), (bits | low).view(torch.float32), w)


def gradient_signs(net: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    """sign(gradient of the mean loss) per parameter that trains, as int8."""
    if not any(p.requires_grad for p in net.parameters()):
        raise ValueError("model: no parameter trains; set requires_grad on those that do.")
    signs: dict[str, Tensor] = {}
    hooks = []
    for name, p in net.named_parameters():

        def keep(p: Tensor, name: str = name) -> None:
            assert p.grad is not None
            signs[name] = p.grad.sign().to(torch.int8)
            p.grad = None  # one byte per parameter stays, not four

        if p.requires_grad:
            hooks.append(p.register_post_accumulate_grad_hook(keep))
    try:
        with torch.enable_grad():
            (-token_log_probs(net, {"input_ids": ids}, len(ids)).mean()).backward()
    finally:
        for hook in hooks:
            hook.remove()
    return signs


@contextmanager
def in_fp32(net: nn.Module) -> Iterator[dict[str, Tensor]]:
    """The model computes in fp32 on other memory; yields its own weights, which come back."""
    tensors = [*net.named_parameters(), *net.named_buffers()]
    own = [(t, t.data, t.grad) for _, t in tensors]
    try:
        for t, data, _ in own:
            if t.is_floating_point():
                t.grad = None
                t.data = data.float() if data.dtype != torch.float32 else data.clone()
        yield {name: data for (name, _), (_, data, _) in zip(tensors, own, strict=True)}
    finally:
        for t, data, grad in own:
            t.data = data
            t.grad = grad


def _row(
    masters: Tensor, served: Tensor, steps: int | None, copy: str, seed: int | None
) -> dict[str, Any]:
    ratio = log_ratio(masters, served, torch.ones_like(masters, dtype=torch.bool))
    return {
        "steps": steps,
        "copy": copy,
        "seed": seed,
        "mean": ratio.mean,
        "mean_abs": ratio.mean_abs,
        "p99": ratio.p99,
        "k3": ratio.k3,
        "sequence_sums": ratio.sequence_sums.tolist(),
        "sequence_ess": effective_sample_size(ratio.sequence_sums),
    }


def _load(model: str | Path | nn.Module, device: str) -> tuple[nn.Module, str]:
    if isinstance(model, nn.Module):
        return model, getattr(model, "name_or_path", "") or type(model).__name__
    from transformers import AutoModelForCausalLM

    name = Path(model).name if Path(model).is_dir() else str(model)
    net: Any = AutoModelForCausalLM.from_pretrained(model, dtype="auto")
    return net.to(device), name


def token_ids(model: str | Path | nn.Module, text: str | Tensor | None) -> Tensor:
    if isinstance(text, Tensor):
        if text.dim() != 2 or text.dtype != torch.int64 or text.shape[1] < 2 or not len(text):
            raise TypeError(f"text: ids must be int64 [sequences, tokens >= 2], got {text.dtype} "
                            f"{tuple(text.shape)}.")  # fmt: skip
        return text
    name = getattr(model, "name_or_path", "") if isinstance(model, nn.Module) else model
    if not name:
        raise ValueError("text: this model has no name_or_path to take a tokenizer from; "
                         "pass token ids [sequences, tokens].")  # fmt: skip
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(name)(TEXT if text is None else text)["input_ids"]
    n = min(len(ids) // SEQUENCE, SEQUENCES)
    if n < 2:
        raise ValueError(f"text: {len(ids)} tokens; need at least {2 * SEQUENCE}.")
    return torch.tensor(ids[: n * SEQUENCE]).view(n, SEQUENCE)


def hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    threads = torch.get_num_threads()
    return f"{name}, {threads} thread{'s' if threads > 1 else ''}"


STYLES = {
    "rtn": ("round-to-nearest", "#c0392b", "o"),
    "sr": ("stochastic rounding", "#1b6ca8", "s"),
}


def plot_probe(result: ProbeResult, path: str | Path) -> None:
    """Write a PNG: the log-ratio and the sequence ESS of both casts over the steps.

    Needs matplotlib (ImportError without it). Stochastic copies are drawn as the median of their
    seeds; their spread is on the first panel.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 4.7))
    figure.subplots_adjust(0.08, 0.235, 0.975, 0.79, wspace=0.24)
    for copy, (label, color, marker) in STYLES.items():
        for ax, key in ((left, "mean_abs"), (right, "sequence_ess")):
            steps, low, middle, high = _by_steps(result.rows, copy, key)
            ax.fill_between(steps, low, high, color=color, alpha=0.25, linewidth=0)
            ax.plot(steps, middle, color=color, marker=marker, markersize=5, label=label)
    (ceiling,) = (r for r in result.rows if r["copy"] == "ceiling")
    for ax, key in ((left, "mean_abs"), (right, "sequence_ess")):
        ax.axhline(ceiling[key], color="#555555", linestyle=":", linewidth=1.4,
                   label="stochastic rounding at its noisiest")  # fmt: skip
        ax.set_xlabel("coherent steps since the copy was exact")
        ax.set_xticks([k for k in dict.fromkeys(r["steps"] for r in result.rows) if k])
        ax.set_xlim(left=0)
        ax.grid(alpha=0.25)
        ax.spines[["top", "right"]].set_visible(False)
    left.set_yscale("log")
    left.set_ylabel("nats per token")
    left.set_title("Hidden log-ratio, mean |.|", loc="left", fontsize=11, fontweight="bold")
    right.set_ylim(0, 1.03)
    right.axhline(1 / result.sequences, color="#999999", linewidth=0.8)
    right.annotate(f"floor 1/n, n = {result.sequences}", (0.99, 1 / result.sequences + 0.015),
                   xycoords=("axes fraction", "data"), ha="right", fontsize=8.5)  # fmt: skip
    right.set_ylabel("share of n")
    right.set_title("Sequence ESS of its weights", loc="left", fontsize=11, fontweight="bold")
    figure.legend(
        *left.get_legend_handles_labels(), loc="upper left", ncols=3, frameon=False, fontsize=9.5,
        bbox_to_anchor=(0.005, 0.94),
    )  # fmt: skip
    figure.suptitle(
        "The policy that the optimizer holds against the one that its bf16 copy serves",
        x=0.012, ha="left", fontsize=13,
    )  # fmt: skip
    figure.text(
        0.012, 0.02,
        f"{result.model}, {result.parameters:,} parameters; masters moved k times "
        f"{result.lr:g} along the sign of one real gradient; no training.\n"
        f"Both sides in fp32, so that only the weights differ; {result.tokens} tokens in "
        f"{result.sequences} sequences. {result.hardware}, torch {result.torch}, "
        f"{result.cpu_seconds:.0f} s of CPU.",
        fontsize=8.5, va="bottom",
    )  # fmt: skip
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _by_steps(
    rows: list[dict[str, Any]], copy: str, key: str
) -> tuple[list[int], list[float], list[float], list[float]]:
    """Per distance the least, the median and the largest figure over the seeds."""
    steps = sorted({r["steps"] for r in rows if r["copy"] == copy})
    values = [sorted(r[key] for r in rows if r["copy"] == copy and r["steps"] == k) for k in steps]
    middle = [v[len(v) // 2] for v in values]
    return steps, [v[0] for v in values], middle, [v[-1] for v in values]
