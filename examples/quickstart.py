"""How much of what the optimizer learns reaches the rollout engine? One minute on two CPU cores.

A small transformers model learns knights-and-knaves puzzles from reasoning-gym, then is trained
further on the verifier's reward at an RL-like learning rate, in two arms that differ only in how
the fp32 masters become the bf16 weights of the rollout engine:

    RTN        torch.optim.AdamW; the engine gets p.to(torch.bfloat16), as it does in most stacks
    Fair Cast  FairCastAdamW; the engine gets served_params(), which the model trains on too

Needs `pip install 'fc_optim[examples]'` and downloads nothing. Equal flags print equal tables.
"""

import argparse
import copy
import functools
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import reasoning_gym  # type: ignore[import-untyped]
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

from fc_optim import FairCastAdamW

WORDS = ["<pad>", "<end>", "A", "B", "~A", "~B", "not", "and", "or", "->", "<=>", ":", "="]
PROMPTS, SAMPLES = 8, 8  # per post-training step; the samples of a prompt are its baseline
SEED_SPACING = 1_000_000  # reasoning-gym seeds item i with seed + i: near seeds share puzzles

NamedTensors = Iterable[tuple[str, Tensor]]


class Puzzle(NamedTuple):
    prompt: str  # what A says and what B says, in prefix order: "-> A ~B : and A B ="
    answer: str  # "A ~B": A is a knight, B is a knave
    score: Callable[[str], float]


def make_puzzles(count: int, seed: int) -> list[Puzzle]:
    """The distinct ones among `count` generated puzzles, in compact words."""
    dataset = reasoning_gym.create_dataset(
        "knights_knaves", n_people=2, depth_constraint=3, width_constraint=2,
        size=count, seed=seed * SEED_SPACING,
    )  # fmt: skip

    def words(statement: Any) -> str:
        head, *rest = statement
        if head in ("telling-truth", "lying"):
            return ("" if head == "telling-truth" else "~") + "AB"[rest[0]]
        return " ".join([head, *map(words, rest)])

    puzzles = {}
    for entry in (dataset[i] for i in range(count)):
        prompt = " : ".join(map(words, entry["metadata"]["statements"])) + " ="
        knights = zip("AB", entry["metadata"]["solution"], strict=True)
        answer = " ".join(person if knight else "~" + person for person, knight in knights)
        puzzles[prompt] = Puzzle(prompt, answer, functools.partial(verify, dataset, entry))
    return list(puzzles.values())


def verify(dataset: Any, entry: dict[str, Any], answer: str) -> float:
    """1 if the dataset's own verifier gives full marks (half an answer gets 0.65 from it)."""
    terms, roles = entry["metadata"]["knight_knave_terms"], {}
    for person, name in zip("AB", entry["metadata"]["names"], strict=True):
        roles[person] = f"{name} is {terms['a_knight']}"
        roles["~" + person] = f"{name} is {terms['a_knave']}"
    text = ", and ".join(roles.get(word, word) for word in answer.split())
    return float(dataset.score_answer(text, entry) == 1)


def make_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>", padding_side="left",
        model_input_names=["input_ids", "attention_mask"],
    )  # fmt: skip


def make_model(dtype: torch.dtype, device: str) -> Any:
    config = Qwen3Config(
        vocab_size=len(WORDS), hidden_size=96, intermediate_size=288, num_hidden_layers=3,
        num_attention_heads=3, num_key_value_heads=3, head_dim=32, max_position_embeddings=64,
        tie_word_embeddings=True, bos_token_id=None, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, dtype=dtype).to(device)


class RolloutEngine:
    """A second model, in bf16, that gets its weights through `load` alone, as vLLM does."""

    def __init__(self, tokenizer: Any, device: str):
        self.tokenizer = tokenizer
        self.model = make_model(torch.bfloat16, device).eval()

    @torch.no_grad()
    def load(self, named_tensors: NamedTensors) -> None:
        missing = dict(self.model.named_parameters())
        for name, tensor in named_tensors:
            missing.pop(name).copy_(tensor)
        if missing:
            raise ValueError(f"named_tensors: nothing for {sorted(missing)}.")

    @torch.no_grad()
    def generate(self, prompts: list[str], sample: bool = False) -> list[str]:
        """One answer per prompt: greedy, or sampled at temperature 1 from torch's global RNG."""
        batch = self.tokenizer(prompts, return_tensors="pt", padding=True).to(self.model.device)
        how: dict[str, Any] = {"do_sample": True, "top_k": 0} if sample else {"do_sample": False}
        ids = self.model.generate(**batch, max_new_tokens=3, **how)
        answers = ids[:, batch["input_ids"].shape[1] :]
        return self.tokenizer.batch_decode(answers, skip_special_tokens=True)

    def mean_score(self, puzzles: list[Puzzle]) -> float:
        answers = self.generate([p.prompt for p in puzzles])
        return sum(p.score(a) for p, a in zip(puzzles, answers, strict=True)) / len(puzzles)


def log_probs(model: Any, tokenizer: Any, prompts: list[str], answers: list[str]) -> Tensor:
    """Log-probability of each answer and its end word (also where a length limit cut it off)."""
    texts = [f"{p} {a} <end>" for p, a in zip(prompts, answers, strict=True)]
    batch = tokenizer(texts, return_tensors="pt", padding=True).to(model.device)
    ids = batch["input_ids"]
    logp = model(**batch).logits[:, :-1].float().log_softmax(-1)
    logp = logp.gather(-1, ids[:, 1:, None]).squeeze(-1)
    lengths = torch.tensor([len(a.split()) + 1 for a in answers], device=ids.device)
    from_end = torch.arange(ids.shape[1] - 1, 0, -1, device=ids.device)  # padding is on the left
    return (logp * (from_end <= lengths[:, None])).sum(1)


def fit(model: nn.Module, tokenizer: Any, puzzles: list[Puzzle], steps: int, seed: int) -> None:
    """Supervised, at an ordinary learning rate, so that there is something to post-train.

    FairCastAdamW stands where torch.optim.AdamW would; schedules and clipping work as ever.
    """
    opt = FairCastAdamW(model.named_parameters(), lr=2e-3, seed=seed)
    schedule = LambdaLR(opt, lambda step: min((step + 1) / 25, 1 - step / (steps + 1)))
    order = torch.Generator().manual_seed(seed)
    for step in range(1, steps + 1):
        batch = [puzzles[i] for i in torch.randint(len(puzzles), (128,), generator=order)]
        prompts, answers = [p.prompt for p in batch], [p.answer for p in batch]
        loss = -log_probs(model, tokenizer, prompts, answers).mean()
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        schedule.step()
        if step % 40 == 0 or step == steps:
            print(f"  fit {step:4d}/{steps}  loss {loss.item():.3f}", flush=True)


# An arm: the optimizer, its fp32 masters, and what it has for the engine.
Arm = tuple[torch.optim.Optimizer, Callable[[], NamedTensors], Callable[[], NamedTensors]]


def rtn(model: nn.Module, args: argparse.Namespace) -> Arm:
    opt = torch.optim.AdamW(model.named_parameters(), lr=args.lr)

    def served() -> NamedTensors:
        return ((name, p.detach().to(torch.bfloat16)) for name, p in model.named_parameters())

    return opt, model.named_parameters, served


def fair_cast(model: nn.Module, args: argparse.Namespace) -> Arm:
    opt = FairCastAdamW(
        model.named_parameters(), lr=args.lr, seed=args.seed, dither=args.dither
    ).bind(model)

    def served() -> NamedTensors:
        opt.publish(redraw=True)  # "sync" draws new bits here; the other dithers do nothing
        return opt.served_params()

    return opt, opt.master_params, served


def post_train(
    model: nn.Module, arm: Arm, engine: RolloutEngine, puzzles: list[Puzzle],
    held_out: list[Puzzle], args: argparse.Namespace,
) -> dict[int, tuple[float, float, float, float]]:  # fmt: skip
    """Policy gradient on the verifier's reward; the engine is loaded after every step.

    Returns, for some steps, the update over half a bf16 ulp (median), captured, the share of the
    engine's words that the step changed, and the engine's score.
    """

    def flat(named: NamedTensors) -> Tensor:
        return torch.cat([t.detach().double().flatten() for _, t in named])

    opt, masters, served = arm
    engine.load(served())
    M, S = flat(masters()), flat(engine.model.named_parameters())
    start = S
    assert torch.equal(M, start), "the masters do not start on the bf16 grid"
    order, rows = torch.Generator().manual_seed(args.seed), {}
    for step in range(1, args.steps + 1):
        torch.manual_seed(args.seed + step)  # both arms sample with the same random numbers
        picked = torch.randint(len(puzzles), (PROMPTS,), generator=order).tolist()
        group = [puzzles[i] for i in picked for _ in range(SAMPLES)]
        prompts = [p.prompt for p in group]
        answers = engine.generate(prompts, sample=True)
        scores = [p.score(a) for p, a in zip(group, answers, strict=True)]
        rewards = torch.tensor(scores).view(PROMPTS, SAMPLES)
        advantages = (rewards - rewards.mean(1, keepdim=True)).flatten().to(args.device)
        loss = -(advantages * log_probs(model, engine.tokenizer, prompts, answers)).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        engine.load(served())

        last_M, last_S = M, S
        M, S = flat(masters()), flat(engine.model.named_parameters())
        if step in (1, 5, 20, args.steps):
            moved = M - start
            half_ulp = torch.exp2(last_M.abs().log2().floor() - 8)  # bf16 has 8 significant bits
            rows[step] = (
                ((M - last_M).abs() / half_ulp).median().item(),
                ((S - start) @ moved / (moved @ moved)).item(),  # nan while nothing has moved
                (S != last_S).double().mean().item(),
                engine.mean_score(held_out),
            )
    return rows


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fit-steps", type=int, default=220, help="supervised steps (220)")
    parser.add_argument("--steps", type=int, default=40, help="post-training steps (40)")
    parser.add_argument("--lr", type=float, default=3e-6, help="of post-training (3e-6)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dither", choices=("fresh", "sync", "held"), default="fresh")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--puzzles", type=int, default=6000, help="to generate (6000)")
    args = parser.parse_args()
    for ok, error in (
        (min(args.fit_steps, args.steps) >= 1, "--fit-steps and --steps must be at least 1"),
        (0 < args.lr < 1, "--lr must be between 0 and 1"),
        (0 <= args.seed < 2**32, "--seed must be between 0 and 2**32"),
        (100 <= args.puzzles <= SEED_SPACING, f"--puzzles must be from 100 to {SEED_SPACING}"),
        (args.device != "cuda" or torch.cuda.is_available(), "--device: no CUDA here"),
    ):
        if not ok:
            parser.error(error)
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
    fit(model, tokenizer, lessons, args.fit_steps, args.seed)
    fitted = time.perf_counter()

    with torch.no_grad():
        for p in model.parameters():  # model.to() would round the rotary buffers as well
            p.copy_(p.to(torch.bfloat16))
    engine = RolloutEngine(tokenizer, args.device)
    engine.load(model.named_parameters())
    print("Cast to bf16 and back, like a released checkpoint: fp32 masters start on the bf16 grid.")
    print(f"Its score on {len(held_out)} held-out puzzles: {engine.mean_score(held_out):.3f}")
    print(f"Post-training at lr {args.lr:g}, dither {args.dither!r}, with {len(practice)} others:")
    arms = []
    for make_arm in (rtn, fair_cast):
        twin = copy.deepcopy(model)
        arms.append(post_train(twin, make_arm(twin, args), engine, practice, held_out, args))

    print(f"\n    {'update/half-ulp':>20}{'captured':>20}{'words changed':>20}{'score':>20}")
    print("step" + f"{'RTN':>10}{'Fair Cast':>10}" * 4)
    for step in arms[0]:
        columns = zip((".3f", ".3f", ".2%", ".3f"), *(arm[step] for arm in arms), strict=True)
        print(f"{step:4d}" + "".join(f"{a:10{how}}{b:10{how}}" for how, a, b in columns))
    print(
        "\nMeasured was the share of the fp32 masters' movement since step 0 that arrived in the "
        "second model\n(captured; 1 = all); its score is a sanity check, and no difference in "
        "reward is claimed."
    )
    print(f"fit {fitted - began:.0f} s, post-training {time.perf_counter() - fitted:.0f} s")


if __name__ == "__main__":
    main()
