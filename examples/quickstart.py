"""How much of what the optimizer learns reaches the rollout engine? One minute on two CPU cores.

A small transformers model learns knights-and-knaves puzzles from reasoning-gym, then is trained
further on the verifier's reward at an RL-like learning rate, in two arms that differ only in how
the fp32 masters become the bf16 weights of the rollout engine:

    RTN        torch.optim.AdamW; the engine gets p.to(torch.bfloat16), as it does in most stacks
    Fair Cast  FairCastAdamW; the engine gets served_params(), which the model trains on too

Needs `pip install 'fc_optim[examples]'` and downloads nothing. Equal flags print equal tables.
examples/rlvr.py is the longer story: GRPO, all dithers, every figure, and a plot.
"""

import argparse
import copy
import time
from collections.abc import Callable

import torch
from puzzles import SEED_SPACING, Puzzle, make_puzzles, make_tokenizer
from rollout import NamedTensors, RolloutEngine, fit, load_weights, log_probs, make_model
from torch import Tensor, nn

from fc_optim import FairCastAdamW
from fc_optim.metrics import captured, changed_ratio, update_half_ulp

PROMPTS, SAMPLES = 8, 8  # per post-training step; the samples of a prompt are its baseline
MAX_TOKENS = 3  # "A ~B <end>"

# An arm: the optimizer, its fp32 masters, and what it has for the engine.
Arm = tuple[torch.optim.Optimizer, Callable[[], NamedTensors], Callable[[], NamedTensors]]
MakeArm = Callable[[nn.Module, argparse.Namespace], Arm]


def rtn(model: nn.Module, args: argparse.Namespace) -> Arm:
    opt = torch.optim.AdamW(model.named_parameters(), lr=args.lr)
    weights = model.named_parameters
    return opt, weights, lambda: ((n, p.detach().to(torch.bfloat16)) for n, p in weights())


def fair_cast(model: nn.Module, args: argparse.Namespace) -> Arm:
    how = {"lr": args.lr, "seed": args.seed, "dither": args.dither}
    opt = FairCastAdamW(model.named_parameters(), **how).bind(model)

    def served() -> NamedTensors:
        opt.publish(redraw=True)  # "sync" draws new bits here; the other dithers do nothing
        return opt.served_params()

    return opt, opt.master_params, served


def post_train(
    start: nn.Module, make_arm: MakeArm, engine: RolloutEngine, practice: list[Puzzle],
    held_out: list[Puzzle], args: argparse.Namespace,
) -> dict[int, tuple[float, float, float, float]]:  # fmt: skip
    """Policy gradient on the verifier's reward; the engine is loaded after every step.

    Both arms sample with the same random numbers. Returns, for some steps, the update over half a
    bf16 ulp (median), captured, the share of the engine's words that changed, and its score.
    """

    def flat(named: NamedTensors) -> Tensor:
        return torch.cat([t.detach().float().flatten() for _, t in named])

    model = copy.deepcopy(start)
    opt, masters, served = make_arm(model, args)
    engine.load(served())
    W0 = M = S = flat(engine.model.named_parameters())
    assert torch.equal(flat(masters()), W0), "the masters do not start on the bf16 grid"
    order, rows = torch.Generator().manual_seed(args.seed), {}
    for step in range(1, args.steps + 1):
        picked = torch.randint(len(practice), (PROMPTS,), generator=order).tolist()
        group = [practice[i] for i in picked for _ in range(SAMPLES)]
        prompts = [engine.tokenizer.encode(p.prompt) for p in group]
        sampled = engine.generate(prompts, max_tokens=MAX_TOKENS, seed=args.seed + step)
        rewards = torch.tensor(engine.score(group, sampled)).view(PROMPTS, SAMPLES)
        advantages = (rewards - rewards.mean(1, keepdim=True)).flatten().to(args.device)
        logp, mask = log_probs(model, prompts, [c.token_ids for c in sampled])
        loss = -(advantages * (logp * mask).sum(1)).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        engine.load(served())

        last_M, last_S = M, S
        M, S = flat(masters()), flat(engine.model.named_parameters())
        if step in (1, 5, 20, args.steps):
            rows[step] = (
                update_half_ulp(M, last_M),
                captured(S, M, W0),  # nan while nothing has moved
                changed_ratio(S, last_S),
                engine.mean_score(held_out, MAX_TOKENS),
            )
    return rows


def parse_args() -> argparse.Namespace:
    how = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=how)
    parser.add_argument("--fit-steps", type=int, default=220, help="supervised steps (220)")
    parser.add_argument("--steps", type=int, default=40, help="post-training steps (40)")
    parser.add_argument("--lr", type=float, default=3e-6, help="of post-training (3e-6)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dither", choices=("fresh", "sync", "held"), default="fresh")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--puzzles", type=int, default=6000, help="to generate (6000)")
    args = parser.parse_args()
    if not 0 < args.lr < 1 or not 0 <= args.seed < 2**32:
        parser.error("--lr must be between 0 and 1, --seed between 0 and 2**32")
    if min(args.fit_steps, args.steps) < 1 or not 100 <= args.puzzles <= SEED_SPACING:
        parser.error(f"--fit-steps, --steps: at least 1; --puzzles: from 100 to {SEED_SPACING}")
    return args


def main() -> None:
    args = parse_args()
    began = time.perf_counter()
    torch.set_num_threads(1)  # on a model this small, more would only wait for each other
    torch.manual_seed(args.seed)
    puzzles = make_puzzles(args.puzzles, args.seed)
    n = len(puzzles)
    held_out, practice, lessons = puzzles[: n // 20], puzzles[n // 20 : n // 4], puzzles[n // 4 :]
    tokenizer, model = make_tokenizer(), make_model(torch.float32, args.device)
    print(f"{n} distinct puzzles, for example: {puzzles[0].prompt} {puzzles[0].answer}")
    print(f"{model.num_parameters():,} parameters fitted on {len(lessons)} of the puzzles:")
    texts = [(p.prompt, p.answer) for p in lessons]
    fit(model, tokenizer, texts, args.fit_steps, args.seed)
    fitted = time.perf_counter()

    engine = RolloutEngine(tokenizer, args.device)
    engine.load(model.named_parameters())
    load_weights(model, engine.model.named_parameters())
    score = engine.mean_score(held_out, MAX_TOKENS)
    print(f"Cast to bf16, like a released checkpoint. Score on {len(held_out)} others: {score:.3f}")
    print(f"Post-training at lr {args.lr:g}, dither {args.dither!r}, with {len(practice)} others:")
    arms = [post_train(model, m, engine, practice, held_out, args) for m in (rtn, fair_cast)]

    print(f"\n    {'update/half-ulp':>20}{'captured':>20}{'words changed':>20}{'score':>20}")
    print("step" + f"{'RTN':>10}{'Fair Cast':>10}" * 4)
    for step in arms[0]:
        columns = zip((".3f", ".3f", ".2%", ".3f"), *(arm[step] for arm in arms), strict=True)
        print(f"{step:4d}" + "".join(f"{a:10{how}}{b:10{how}}" for how, a, b in columns))
    print("\ncaptured: the share of the masters' movement since step 0 that arrived in the engine.")
    print("Its score is a sanity check: no difference in reward is claimed.")
    print(f"fit {fitted - began:.0f} s, post-training {time.perf_counter() - fitted:.0f} s")


if __name__ == "__main__":
    main()
