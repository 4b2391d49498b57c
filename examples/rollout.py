"""A small decoder, rollout engines for it, and what trains it.

Trainer and engine exchange token ids, never text, and an engine gets its weights through `load`
alone: what vLLM's differs in is `load` and `generate`.
"""

import os
import tempfile
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from puzzles import END, PAD, WORDS, Puzzle
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM, Qwen3Config

from fc_optim import FairCastAdamW, manifest

NamedTensors = Iterable[tuple[str, Tensor]]
Ids = list[int]


def make_model(dtype: torch.dtype, device: str, hidden: int = 96) -> Any:
    config = Qwen3Config(
        vocab_size=len(WORDS), hidden_size=hidden, intermediate_size=3 * hidden,
        num_hidden_layers=3, num_attention_heads=hidden // 32, num_key_value_heads=hidden // 32,
        head_dim=32, max_position_embeddings=64, tie_word_embeddings=True, bos_token_id=None,
        pad_token_id=PAD, eos_token_id=END,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, dtype=dtype).to(device)


@torch.no_grad()
def load_weights(model: nn.Module, named_tensors: NamedTensors) -> None:
    """Copy every parameter from `named_tensors`; raise ValueError where the two do not match."""
    missing = dict(model.named_parameters())
    for name, tensor in named_tensors:
        p = missing.pop(name, None)
        if p is None or p.shape != tensor.shape:
            raise ValueError(f"named_tensors: {name!r} {tuple(tensor.shape)} fits no parameter.")
        p.copy_(tensor)
    if missing:
        raise ValueError(f"named_tensors: nothing for {sorted(missing)}.")


class Completion(NamedTuple):
    token_ids: Ids  # up to the end word, unless a length limit cut them off
    log_probs: list[float]  # the sampler's, one per token


class RolloutEngine:
    """A second transformers model that gets its weights through `load` alone, as vLLM does."""

    def __init__(
        self, tokenizer: Any, device: str, hidden: int = 96, dtype: torch.dtype = torch.bfloat16
    ):
        self.tokenizer = tokenizer
        self.model = make_model(dtype, device, hidden).eval()

    def load(self, named_tensors: NamedTensors) -> None:
        load_weights(self.model, named_tensors)

    def named_parameters(self) -> NamedTensors:
        """The weights that it generates from."""
        return ((n, p.detach()) for n, p in self.model.named_parameters())

    @torch.no_grad()
    def generate(
        self, prompts: list[Ids], *, max_tokens: int, seed: int | None = None
    ) -> list[Completion]:
        """One completion per prompt: sampled at temperature 1 with `seed`, greedy without one."""
        how: dict[str, Any] = {"do_sample": False}
        if seed is not None:
            torch.manual_seed(seed)
            how = {"do_sample": True, "top_k": 0}
        batch = self.tokenizer.pad({"input_ids": prompts}, return_tensors="pt")
        out = self.model.generate(
            **batch.to(self.model.device), max_new_tokens=max_tokens, output_logits=True,
            return_dict_in_generate=True, **how,
        )  # fmt: skip
        ids = out.sequences[:, batch["input_ids"].shape[1] :]
        logp = torch.stack(out.logits, 1).float().log_softmax(-1)
        logp = logp.gather(-1, ids[:, :, None]).squeeze(-1)
        completions = []
        for row, row_logp in zip(ids.tolist(), logp.tolist(), strict=True):
            length = row.index(END) + 1 if END in row else len(row)
            completions.append(Completion(row[:length], row_logp[:length]))
        return completions

    def score(self, puzzles: list[Puzzle], completions: list[Completion]) -> list[float]:
        texts = [self.tokenizer.decode(c.token_ids, skip_special_tokens=True) for c in completions]
        return [p.score(text) for p, text in zip(puzzles, texts, strict=True)]

    def mean_score(self, puzzles: list[Puzzle], max_tokens: int) -> float:
        """Of greedy answers."""
        prompts = [self.tokenizer.encode(p.prompt) for p in puzzles]
        scores = self.score(puzzles, self.generate(prompts, max_tokens=max_tokens))
        return sum(scores) / len(scores)


class VLLMRolloutEngine(RolloutEngine):
    """The same with vLLM: an `LLM` in this process. Make it before anything is optimized.

    `load` proves what it did: it reads the engine's memory and compares.
    """

    def __init__(self, tokenizer: Any, device: str, hidden: int = 96):
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        if device == "cpu":
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        from fc_optim.integrations.vllm import OfflineEngine, keep_plain_weights

        keep_plain_weights()
        import vllm

        self.tokenizer = tokenizer
        with tempfile.TemporaryDirectory() as folder:
            make_model(torch.bfloat16, "cpu", hidden).save_pretrained(folder)
            self.llm = vllm.LLM(
                folder, dtype="bfloat16", skip_tokenizer_init=True, enforce_eager=True,
                max_model_len=64, max_num_seqs=64, disable_log_stats=True,
            )  # fmt: skip
        self.engine = OfflineEngine(self.llm)
        self.loads = 0

    def load(self, named_tensors: NamedTensors) -> None:
        sent = list(named_tensors)
        self.loads += 1
        self.engine.load(iter(sent), self.loads)
        if self.engine.held() != manifest(self.loads, sent):
            raise RuntimeError("vLLM holds other weights than it was sent.")

    def named_parameters(self) -> NamedTensors:
        return self.engine.named_parameters()

    def generate(
        self, prompts: list[Ids], *, max_tokens: int, seed: int | None = None
    ) -> list[Completion]:
        from vllm import SamplingParams

        how: dict[str, Any] = {"max_tokens": max_tokens, "logprobs": 0, "detokenize": False}
        params = [
            SamplingParams(temperature=0, **how)
            if seed is None
            else SamplingParams(temperature=1, seed=seed * len(prompts) + i, **how)
            for i in range(len(prompts))
        ]
        asked = [{"prompt_token_ids": ids} for ids in prompts]
        completions = []
        for done in self.llm.generate(asked, params, use_tqdm=False):
            ids = list(done.outputs[0].token_ids)
            logp = [x[i].logprob for x, i in zip(done.outputs[0].logprobs, ids, strict=True)]
            completions.append(Completion(ids, logp))
        return completions


def log_probs(
    model: Any, prompts: Sequence[Ids], completions: Sequence[Ids]
) -> tuple[Tensor, Tensor]:
    """Per token of each completion its log-probability, and the mask of real tokens: [n, longest].

    Laid out as `generate` does it: padding to the left of the prompt, completions from one column.
    """
    width, length = max(map(len, prompts)), max(map(len, completions))
    rows = [
        [PAD] * (width - len(p)) + p + c + [PAD] * (length - len(c))
        for p, c in zip(prompts, completions, strict=True)
    ]
    ids = torch.tensor(rows, device=model.device)
    columns = torch.arange(width + length, device=model.device)
    starts = torch.tensor([width - len(p) for p in prompts], device=model.device)
    lengths = torch.tensor([len(c) for c in completions], device=model.device)
    visible = (columns >= starts[:, None]).long()
    logits = model(input_ids=ids, attention_mask=visible).logits[:, width - 1 : -1]
    logp = logits.float().log_softmax(-1).gather(-1, ids[:, width:, None]).squeeze(-1)
    return logp, columns[:length] < lengths[:, None]


def fit(
    model: nn.Module, tokenizer: Any, lessons: list[tuple[str, str]], steps: int, seed: int
) -> None:
    """Supervised, at an ordinary learning rate, so that there is something to post-train.

    FairCastAdamW stands where torch.optim.AdamW would; schedules and clipping work as ever.
    """
    opt = FairCastAdamW(model.named_parameters(), lr=2e-3, seed=seed)
    schedule = LambdaLR(opt, lambda step: min((step + 1) / 25, 1 - step / (steps + 1)))
    order = torch.Generator().manual_seed(seed)
    encoded = [(tokenizer.encode(p), tokenizer.encode(f"{a} <end>")) for p, a in lessons]
    for step in range(1, steps + 1):
        picked = torch.randint(len(encoded), (128,), generator=order).tolist()
        prompts, completions = zip(*(encoded[i] for i in picked), strict=True)
        logp, mask = log_probs(model, prompts, completions)
        loss = -(logp * mask).sum() / len(picked)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        schedule.step()
        if step % 40 == 0 or step == steps:
            print(f"  fit {step:4d}/{steps}  loss {loss.item():.3f}", flush=True)
