"""Puzzles with a verifier: reasoning-gym's knights and knaves, in a language of 16 words."""

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import reasoning_gym  # type: ignore[import-untyped]
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

WORDS = "<pad> <end> A B ~A ~B not and or -> <=> : = ; T F".split()
PAD, END = 0, 1
SEED_SPACING = 1_000_000  # reasoning-gym seeds item i with seed + i: near seeds share puzzles


class Puzzle(NamedTuple):
    prompt: str  # what A says and what B says, in prefix order: "-> A ~B : and A B ="
    answer: str  # "A ~B": A is a knight, B is a knave
    search: str  # who they might be and whether each statement then holds: "A B F T ; A ~B T F ="
    score: Callable[[str], float]


def make_puzzles(count: int, seed: int) -> list[Puzzle]:
    """The distinct ones among `count` generated puzzles, in compact words."""
    dataset = reasoning_gym.create_dataset(
        "knights_knaves", n_people=2, depth_constraint=3, width_constraint=2,
        size=count, seed=seed * SEED_SPACING,
    )  # fmt: skip
    puzzles = {}
    for entry in (dataset[i] for i in range(count)):
        statements = entry["metadata"]["statements"]
        prompt = " : ".join(map(in_words, statements)) + " ="
        answer = roles(entry["metadata"]["solution"])
        score = functools.partial(verify, dataset, entry)
        puzzles[prompt] = Puzzle(prompt, answer, search(statements), score)
    return list(puzzles.values())


def in_words(statement: Any) -> str:
    head, *rest = statement
    if head in ("telling-truth", "lying"):
        return ("" if head == "telling-truth" else "~") + "AB"[rest[0]]
    return " ".join([head, *map(in_words, rest)])


def roles(knights: Iterable[bool]) -> str:
    return " ".join(p if knight else "~" + p for p, knight in zip("AB", knights, strict=True))


def holds(statement: Any, knights: tuple[bool, bool]) -> bool:
    head, *rest = statement
    if head in ("telling-truth", "lying"):
        return knights[rest[0]] == (head == "telling-truth")
    values = [holds(part, knights) for part in rest]
    if head in ("and", "or"):
        return all(values) if head == "and" else any(values)
    first, last = values[0], values[-1]
    return {"not": not first, "->": last or not first, "<=>": first == last}[head]


def search(statements: Any) -> str:
    """Who they might be, in a fixed order, until the statements of knights alone hold."""
    tried = []
    for knights in ((True, True), (True, False), (False, True), (False, False)):
        values = tuple(holds(s, knights) for s in statements)
        tried.append(f"{roles(knights)} {' '.join('FT'[v] for v in values)}")
        if values == knights:
            break
    return " ; ".join(tried) + " ="


def verify(dataset: Any, entry: dict[str, Any], response: str) -> float:
    """1 if the dataset's verifier gives full marks (half an answer gets 0.65) to the last words."""
    terms, names = entry["metadata"]["knight_knave_terms"], entry["metadata"]["names"]
    full = {}
    for person, name in zip("AB", names, strict=True):
        full[person] = f"{name} is {terms['a_knight']}"
        full["~" + person] = f"{name} is {terms['a_knave']}"
    answer = response.split("=")[-1].split()
    text = ", and ".join(full.get(word, word) for word in answer)
    return float(dataset.score_answer(text, entry) == 1)


def make_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>", padding_side="left",
        model_input_names=["input_ids", "attention_mask"],
    )  # fmt: skip
