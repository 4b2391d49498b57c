"""What a trainer's ratio statistics see of the gap between its masters and the served policy.

A trainer with fp32 masters M evaluates its loss under bf16 mixed precision, and its rollout engine
samples with bf16 weights: both compute with S = round-to-nearest(M). The ratio that it can measure,

    visible   log pi(y; S), by the trainer's forward  -  log pi(y; S), by the sampler,

therefore shows how the two differ in arithmetic (here: a full pass against cached decoding, both
in bf16). What the optimizer holds and what it is judged by stay apart in

    hidden    log pi(y; M)  -  log pi(y; S), both in fp32,

which nobody computes. Here the masters of a released model move k coherent steps of Adam at `--lr`
(along the sign of one real gradient, as `fc_optim.audit.probe` does), the engine gets their
nearest bf16 copy and samples responses, and the usual guards are applied to both ratios:

    PPO        share of tokens outside 1 +- 0.2, which clipping would cut (Schulman et al. 2017)
    TIS        weights truncated at 2: mean, standard deviation, share cut (Yao et al. 2025)
    IcePop     share of tokens outside [0.5, 5], which are masked (Ling team 2025)
    ESS        effective sample size of the sequences' untruncated weights, as a share of n

Needs `pip install 'fc_optim[examples]'` and a causal language model: a folder, or a name that
transformers can load. About 3 minutes of one CPU core with SmolLM2-135M-Instruct.
"""

import argparse
import csv
import importlib.metadata
import platform
import textwrap
import time
from pathlib import Path
from typing import Any

import matplotlib
import torch
from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped]
from transformers import AutoModelForCausalLM

from fc_optim.audit.hidden import evaluating, token_log_probs
from fc_optim.audit.probe import (
    Masters,
    gradient_signs,
    hardware,
    identity,
    in_fp32,
    nearest,
    token_ids,
)
from fc_optim.metrics import effective_sample_size, log_ratio

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.ticker import PercentFormatter  # noqa: E402

Row = dict[str, Any]

PPO_CLIP = 0.2
TIS_CAP = 2.0
ICEPOP = (0.5, 5.0)
PROMPT = 16  # tokens of each of the text's sequences; the response is as long as the rest


@torch.no_grad()
def sample(engine: Any, prompts: Tensor, length: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Responses at temperature 1: ids [n, prompt + length], the sampler's log-probabilities
    [n, length], and which of those tokens count (up to the end of the text)."""
    torch.manual_seed(seed)
    out = engine.generate(
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=length, do_sample=True,
        temperature=1.0, top_k=0, top_p=1.0, output_logits=True, return_dict_in_generate=True,
        pad_token_id=0,
    )  # fmt: skip
    ids = out.sequences
    answers = ids[:, prompts.shape[1] :]
    logp = torch.stack(out.logits, 1).float().log_softmax(-1)
    ends = engine.generation_config.eos_token_id
    ended = torch.isin(answers, torch.tensor([] if ends is None else ends, device=ids.device))
    before = ended.long().cumsum(1) - ended.long()
    return ids, logp.gather(-1, answers[:, :, None]).squeeze(-1), before == 0


def statistics(log_p: Tensor, log_q: Tensor, mask: Tensor) -> Row:
    """The guards' figures for the ratio of p to q. All [sequences, tokens]."""
    summary = log_ratio(log_p, log_q, mask)
    tokens = (log_p - log_q)[mask].double()
    ratio = tokens.exp()
    low, high = ICEPOP
    return {
        "mean": summary.mean,
        "mean_abs": summary.mean_abs,
        "p99": summary.p99,
        "k3": summary.k3,
        "ppo_outside": float(((ratio - 1).abs() > PPO_CLIP).double().mean()),
        "tis_mean": float(ratio.clamp(max=TIS_CAP).mean()),
        "tis_std": float(ratio.clamp(max=TIS_CAP).std()),
        "tis_cut": float((ratio > TIS_CAP).double().mean()),
        "icepop_masked": float(((ratio < low) | (ratio > high)).double().mean()),
        "token_ess": effective_sample_size(tokens),
        "sequence_ess": effective_sample_size(summary.sequence_sums),
        "largest_sequence_sum": float(summary.sequence_sums.abs().max()),
        "sequences": len(mask),
        "tokens": int(mask.sum()),
    }


def measure(masters: Masters, engine: Any, prompts: Tensor, k: int, length: int, seed: int
            ) -> list[Row]:  # fmt: skip
    """Serve the masters after k steps, sample, and compare: one row per ratio."""
    masters.write(nearest, k)
    with torch.no_grad():
        for served, p in zip(engine.parameters(), masters.net.parameters(), strict=True):
            served.copy_(p)
    ids, sampler, mask = sample(engine, prompts, length, seed)
    first = ids.shape[1] - length - 1

    @torch.no_grad()
    def responses(model: Any) -> Tensor:
        return token_log_probs(model, {"input_ids": ids})[:, first:]

    visible = statistics(responses(engine), sampler, mask)
    served_fp32 = responses(masters.net)
    masters.write(identity, k)
    hidden = statistics(responses(masters.net), served_fp32, mask)
    return [{"steps": k, "ratio": "visible", **visible}, {"steps": k, "ratio": "hidden", **hidden}]


PANELS = (
    ("mean_abs", "Mean |log-ratio| per token", "nats", False),
    ("ppo_outside", f"PPO: tokens outside 1 ± {PPO_CLIP}", "share of tokens", True),
    (
        "icepop_masked",
        "IcePop: tokens outside [{:g}, {:g}]".format(*ICEPOP),
        "share of tokens",
        True,
    ),
    ("tis_std", f"TIS: spread of the weights, cut at {TIS_CAP:g}", "standard deviation", False),
    ("sequence_ess", "ESS of the sequences' weights", "share of n", False),
    ("largest_sequence_sum", "Largest |log-ratio| of a sequence", "nats", False),
)
STYLES = {
    "visible": ("visible: what the trainer can log", "#1b6ca8", "o"),
    "hidden": ("hidden: masters against served copy", "#c0392b", "s"),
}


def plot(rows: list[Row], about: list[str], caption: str, path: Path) -> None:
    figure, axes = plt.subplots(2, 3, figsize=(13, 7.6))
    figure.subplots_adjust(0.06, 0.205, 0.985, 0.845, wspace=0.27, hspace=0.4)
    for ax, (key, title, unit, percent) in zip(axes.flat, PANELS, strict=True):
        for ratio, (label, color, marker) in STYLES.items():
            xs, ys = zip(*((r["steps"], r[key]) for r in rows if r["ratio"] == ratio), strict=True)
            ax.plot(xs, ys, color=color, marker=marker, markersize=4.5, label=label)
        ax.set_title(title, loc="left", fontsize=11, fontweight="bold")
        ax.set_ylabel(unit)
        ax.set_xlim(left=0)
        ax.set_ylim(bottom=0)
        if key == "sequence_ess":
            ax.set_ylim(0, 1.05)
            ax.axhline(1 / rows[0]["sequences"], color="#999999", linewidth=0.8)
            ax.annotate("floor 1/n", (0.99, 1 / rows[0]["sequences"] + 0.015), ha="right",
                        xycoords=("axes fraction", "data"), fontsize=8.5)  # fmt: skip
        if percent:
            ax.yaxis.set_major_formatter(PercentFormatter(1))
        ax.grid(alpha=0.25)
        ax.spines[["top", "right"]].set_visible(False)
    for ax in axes[1]:
        ax.set_xlabel("coherent steps of the masters, k")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="upper left", ncols=2,
                  bbox_to_anchor=(0.008, 0.95), frameon=False, fontsize=11)  # fmt: skip
    figure.suptitle(
        "The guards of RL post-training look at a ratio that cannot see the cast",
        x=0.012, ha="left", fontsize=14,
    )  # fmt: skip
    text = textwrap.fill(caption, 175) + "\n" + "\n".join(about[1:])
    figure.text(0.012, 0.012, text, fontsize=9, va="bottom")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "model", nargs="?", default="HuggingFaceTB/SmolLM2-135M-Instruct",
        help="folder or name (HuggingFaceTB/SmolLM2-135M-Instruct)",
    )  # fmt: skip
    parser.add_argument("--lr", type=float, default=1e-6, help="of Adam (1e-6)")
    parser.add_argument("--steps", default="0,5,10,20,50,100,150", help="the k, with commas")
    parser.add_argument("--samples", type=int, default=2, help="responses per prompt (2)")
    parser.add_argument("--length", type=int, default=48, help="tokens per response (48)")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling (0)")
    parser.add_argument("--out", type=Path, default=Path("runs/blind_spot"), help="folder")
    args = parser.parse_args()
    try:
        args.steps = [int(k) for k in args.steps.split(",")]
    except ValueError:
        parser.error("--steps: whole numbers with commas between them")
    for ok, error in (
        (min(args.steps) >= 0, "--steps must not be negative"),
        (0 < args.lr < 1, "--lr must be between 0 and 1"),
        (args.samples >= 1 and args.length >= 2, "--samples >= 1 and --length >= 2"),
    ):
        if not ok:
            parser.error(error)
    return args


def main() -> None:
    args = parse_args()
    began, cpu = time.perf_counter(), time.process_time()
    net: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    engine: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).eval()
    ids = token_ids(args.model, None)
    prompts = ids[:, :PROMPT].repeat_interleave(args.samples, 0)
    rows: list[Row] = []
    with evaluating(net), in_fp32(net) as start:
        masters = Masters(net, start, gradient_signs(net, ids), args.lr)
        for k in tqdm(args.steps, disable=None):
            rows += measure(masters, engine, prompts, k, args.length, args.seed)
    parameters = sum(p.numel() for p in net.parameters())
    flags = f"--lr {args.lr:g} --steps {','.join(map(str, args.steps))} --samples {args.samples}"
    flags += f" --length {args.length} --seed {args.seed}"
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}"
        for name in ("fc_optim", "torch", "transformers")
    )
    about = [
        f"command: python examples/blind_spot.py {Path(args.model).name} {flags}",
        f"versions: {versions}, python {platform.python_version()}",
        f"hardware: {hardware(ids.device)}, {time.perf_counter() - began:.0f} s, "
        f"{time.process_time() - cpu:.0f} s of CPU",
    ]
    args.out.mkdir(parents=True, exist_ok=True)
    with open(args.out / "blind_spot.csv", "w", newline="") as file:
        file.writelines(f"# {line}\n" for line in about)
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({n: f"{v:.6g}" if isinstance(v, float) else v for n, v in row.items()})
    caption = (
        f"{Path(args.model).name}, {parameters:,} parameters. Masters moved k times {args.lr:g} "
        "along the sign of one real gradient; the engine samples with their nearest bf16 copy "
        f"({len(prompts)} responses of up to {args.length} tokens per k). Visible: bf16 full pass "
        "against bf16 cached decoding, equal weights. Hidden: masters against that copy, both in "
        "fp32. No training, and no claim about reward."
    )
    plot(rows, about, caption, args.out / "blind_spot.png")
    for row in rows:
        print(
            f"k {row['steps']:4d}  {row['ratio']:8} mean|.| {row['mean_abs']:.1e}  PPO outside "
            f"{row['ppo_outside']:6.2%}  IcePop masked {row['icepop_masked']:6.2%}  TIS std "
            f"{row['tis_std']:.4f}  sequence ESS {row['sequence_ess']:.4f}"
        )
    print(f"{args.out}/blind_spot.csv and blind_spot.png; {about[2]}")


if __name__ == "__main__":
    main()
