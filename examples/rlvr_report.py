"""What rlvr.py reports: where the figures come from, a table, and a plot."""

import argparse
import importlib
import importlib.metadata
import platform
import textwrap
from pathlib import Path
from typing import Any

import matplotlib
import torch

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, PercentFormatter  # noqa: E402

Row = dict[str, Any]


def provenance(args: argparse.Namespace) -> list[str]:
    flags = " ".join(
        f"--{key.replace('_', '-')} {','.join(value) if key == 'arms' else value}"
        for key, value in vars(args).items()
        if key not in ("out", "force", "make_start")
    )
    packages = ("fc_optim", "torch", "transformers", "reasoning-gym")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
    if args.engine == "vllm":
        versions += f", vllm {importlib.import_module('vllm').__version__}"
    hardware = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if args.device == "cuda":
        hardware = torch.cuda.get_device_name()
    elif info.exists():
        names = [x for x in info.read_text().splitlines() if x.startswith("model name")]
        hardware = names[0].partition(": ")[2] if names else hardware
    return [
        f"command: python examples/rlvr.py {flags}",
        f"versions: {versions}, python {platform.python_version()}",
        f"hardware: {hardware}, one torch thread",
    ]


def table(rows: list[Row], args: argparse.Namespace) -> str:
    """One line per arm. Where no step is named, the mean of the last ten (or fewer) steps."""
    at = sorted({min(s, args.steps) for s in (5, 20, args.steps)})
    head = [f"{what}@{s}" for what in ("captured", "lag") for s in at]
    head += ["changed", "hidden|.|", "visible|.|", "reward", "served", "masters"]
    lines = [" " * 7 + "".join(f"{h:>12}" for h in head)]
    for arm in args.arms:
        mine = [r for r in rows if r["arm"] == arm]

        def late(key: str, mine: list[Row] = mine) -> float:
            return sum(r[key] for r in mine[-10:]) / len(mine[-10:])

        cells = [f"{mine[s - 1]['captured']:.3f}" for s in at]
        cells += [f"{mine[s - 1]['lag_steps']:.1f}" for s in at]
        cells += [f"{late('changed_ratio'):.2%}"]
        cells += [f"{late('hidden_mean_abs'):.1e}", f"{late('visible_mean_abs'):.1e}"]
        cells += [f"{late('reward'):.3f}"]
        cells += [f"{mine[-1]['score_served']:.3f}", f"{mine[-1]['score_masters']:.3f}"]
        lines.append(f"{arm:7}" + "".join(f"{c:>12}" for c in cells))
    return "\n".join(lines)


STYLES = {
    "rtn": ("RTN", "#c0392b", "-"),
    "fresh": ("Fair Cast, fresh", "#1b6ca8", "-"),
    "sync": ("Fair Cast, sync", "#e08e0b", "--"),
    "held": ("Fair Cast, held", "#2a7f4f", "-."),
}
PANELS = (
    ("captured", "Share of what was learned that the engine holds", "captured (1 = all)", False),
    ("lag_steps", "How far the engine is behind the optimizer", "lag, in steps", False),
    ("changed_ratio", "bf16 words that one sync changes", "share of all words", True),
    ("hidden_mean_abs", "Hidden gap of masters and served copy", "mean |log-ratio|", True),
)


def plot(rows: list[Row], args: argparse.Namespace, path: Path, parameters: int) -> None:
    figure, axes = plt.subplots(2, 2, figsize=(12, 8.4))
    figure.subplots_adjust(0.07, 0.165, 0.885, 0.89, wspace=0.48, hspace=0.27)
    for ax, (key, title, what, logarithmic) in zip(axes.flat, PANELS, strict=True):
        ends = {}
        for arm in args.arms:
            _, color, line = STYLES[arm]
            xs, ys = zip(*((r["step"], r[key]) for r in rows if r["arm"] == arm), strict=True)
            ax.plot(xs, ys, color=color, linestyle=line, linewidth=1.8)
            ends[arm] = ys[-1]
        if logarithmic:
            ax.set_yscale("log")
            if key == "changed_ratio":
                ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
                ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
                ax.yaxis.set_minor_locator(NullLocator())
        else:
            ax.set_ylim(0, max(1.1, ax.get_ylim()[1]))
        ax.set_xlim(0, args.steps)
        ax.xaxis.set_major_locator(MaxNLocator(8, integer=True, steps=[1, 2, 5, 10]))
        ax.set_title(title, loc="left", fontsize=12, fontweight="bold")
        ax.set_ylabel(what)
        ax.grid(alpha=0.25)
        ax.spines[["top", "right"]].set_visible(False)
        label_ends(ax, ends)
    for ax in axes[1]:
        ax.set_xlabel("step (one rollout and one sync)")
    figure.suptitle(
        "The optimizer learns in fp32. How much of it reaches the bf16 rollout engine?",
        x=0.015, ha="left", fontsize=14,
    )  # fmt: skip
    caption = (
        f"GRPO on knights and knaves, {parameters:,} parameters, {args.optimizer} at lr "
        f"{args.lr:g}, seed {args.seed}; same prompts and sampling noise in every arm. Regime: a "
        f"step's median update is {regime(rows):.3f} of half a bf16 ulp. Round-to-nearest (RTN) "
        "withholds it until enough of them have added up; stochastic rounding (Fair Cast) "
        "delivers it on average. No difference of reward is claimed."
    )
    figure.text(0.015, 0.015, textwrap.fill(caption, 150), fontsize=9.5, va="bottom")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def label_ends(ax: Any, ends: dict[str, float]) -> None:
    """Each curve's name at its right end, moved apart where they would overlap."""
    to_axes = ax.transData + ax.transAxes.inverted()
    heights = {arm: float(to_axes.transform((0, y))[1]) for arm, y in ends.items()}
    gap, lowest = 0.07, -1.0
    placed = {}
    for arm in sorted(heights, key=lambda a: (heights[a], a)):
        lowest = placed[arm] = max(heights[arm], lowest + gap)
    # Crowds have been pushed upwards only: bring each back to where its curves end.
    for arm in placed:
        crowd = [a for a in placed if abs(heights[a] - heights[arm]) < gap]
        shift = sum(placed[a] - heights[a] for a in crowd) / len(crowd)
        shift = min(shift, min(placed[a] for a in crowd) - 0.04)  # clear of the axis' numbers
        name, color, _ = STYLES[arm]
        at = (1.02, placed[arm] - shift)
        ax.text(*at, name, color=color, transform=ax.transAxes, va="center", fontsize=10)


def regime(rows: list[Row]) -> float:
    updates = [row["update_half_ulp"] for row in rows]
    return sum(updates) / len(updates)
