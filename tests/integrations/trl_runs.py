"""What the tests of TRL share: a small model on disk, its trainers, and CPU parts for AsyncGRPO."""

import os
import queue
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

WORDS, LENGTH = 128, 12


def save_model(folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """A Qwen2 that vLLM can run, and its tokenizer: one word, one token."""
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    words = {word: i for i, word in enumerate(["<pad>", "<end>", *map(str, range(WORDS - 2))])}
    tokens = Tokenizer(WordLevel(words, unk_token="<pad>"))
    tokens.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokens, pad_token="<pad>", eos_token="<end>"
    ).save_pretrained(folder)
    config = Qwen2Config(
        vocab_size=WORDS, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = Qwen2ForCausalLM(config)
    model.to(dtype).save_pretrained(folder)


def load(folder: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def even_words(completions: list[str], **kwargs: Any) -> list[float | None]:
    """A reward: the share of even numbers."""
    shares = [[int(word) % 2 == 0 for word in text.split()] for text in completions]
    return [sum(s) / max(len(s), 1) for s in shares]


def prompts(size: int = 64) -> Any:
    import datasets

    return datasets.Dataset.from_dict({"prompt": [f"{i} {2 * i} {i + 7}" for i in range(size)]})


def trainer_for(kind: str, model: Any, folder: Path, out: Path, **kwargs: Any) -> Any:
    """A trainer "SFT", "GRPO" or "RLOO"; keywords are those of its arguments or of itself."""
    import datasets
    import trl
    from transformers import AutoTokenizer

    own = ("optimizers", "optimizer_cls_and_kwargs", "callbacks", "peft_config")
    given = {k: kwargs.pop(k) for k in own if k in kwargs}
    given["processing_class"] = AutoTokenizer.from_pretrained(folder)
    options: dict[str, Any] = {
        "output_dir": str(out),
        "max_steps": 2,
        "per_device_train_batch_size": 8,
        "learning_rate": 1e-6,
        "lr_scheduler_type": "constant",
        "report_to": "none",
        "use_cpu": True,
        "bf16": True,
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_steps": 1,
        "gradient_checkpointing": False,
    }
    if kind == "SFT":
        rows = datasets.Dataset.from_dict({"text": ["1 2 3 4", "5 6 7 8"] * 32})
        args = trl.SFTConfig(**{**options, "max_length": LENGTH, **kwargs})
        return trl.SFTTrainer(model, args, train_dataset=rows, **given)
    options |= {"num_generations": 4, "max_completion_length": LENGTH, **kwargs}
    args = getattr(trl, f"{kind}Config")(**options)
    cls = getattr(trl, f"{kind}Trainer")
    return cls(model, even_words, args=args, train_dataset=prompts(), **given)


# ---- AsyncGRPO without a server and without FlashAttention-3


def let_async_grpo_run_on_a_cpu() -> None:
    """Replace the two things in it that need a GPU: its attention kernel, and a figure of speed."""
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    from trl.experimental.async_grpo import async_grpo_trainer, packing

    kernels = type("Kernels", (), {"flash_attn_varlen_func": staticmethod(attend)})
    changed: dict[Any, dict[str, Any]] = {
        packing: {"_flash_attn": lambda: kernels},
        async_grpo_trainer: {"get_peak_flops_per_device": lambda *args: 1e12},
    }
    for module, names in changed.items():
        vars(module).update(names)


def attend(
    query: Tensor, key: Tensor, value: Tensor, starts_q: Tensor, starts_k: Tensor,
    *longest: int, softmax_scale: float | None = None, causal: bool = True, window_size: Any = None,
) -> Tensor:  # fmt: skip
    """`flash_attn_varlen_func` on a CPU: causal, aligned at the ends, each sequence for itself."""
    assert causal and window_size == (-1, -1)
    groups = query.shape[1] // key.shape[1]
    out = []
    for i in range(len(starts_q) - 1):
        q = query[starts_q[i] : starts_q[i + 1]].transpose(0, 1)
        k, v = (
            x[starts_k[i] : starts_k[i + 1]].transpose(0, 1).repeat_interleave(groups, 0)
            for x in (key, value)
        )
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        out.append(
            torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, scale=softmax_scale
            ).transpose(0, 1)
        )
    return torch.cat(out)


class Worker:
    """A rollout worker of AsyncGRPO that generates in this process, when a version goes live.

    Args:
        generate: (prompts as token ids, generations of each) -> (completions, their log-probs).
        prompts: token ids to go through, over and over.
    """

    def __init__(self, generate: Callable[..., Any], prompts: list[list[int]], generations: int):
        self.generate, self.prompts, self.generations = generate, prompts, generations
        self.rollout_buffer: queue.Queue[Any] = queue.Queue()
        self.metrics_queue: queue.Queue[Any] = queue.Queue()
        self.version = self.group = 0
        self.started = False

    def start(self) -> None:
        self.started = True
        self._fill()
        self._fill()  # the data loader reads one batch ahead

    def update_model_version(self, model_version: int) -> None:
        self.version = model_version
        if self.started:
            self._fill()

    def _fill(self) -> None:
        from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

        for prompt in self.prompts:
            completions, logprobs = self.generate(prompt, self.generations)
            rewards = torch.tensor([sum(t % 2 == 0 for t in c) / len(c) for c in completions])
            advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
            for tokens, old, advantage in zip(completions, logprobs, advantages, strict=True):
                ids = [*prompt, *tokens]
                self.rollout_buffer.put(
                    RolloutSample(
                        prompt=[], completion=[], input_ids=np.array(ids),
                        completion_mask=np.array([0] * len(prompt) + [1] * len(tokens)),
                        old_log_probs=np.array([0.0] * len(prompt) + list(old), dtype=np.float32),
                        advantage=float(advantage), model_version=self.version,
                        group_id=self.group, metrics={},
                    )
                )  # fmt: skip
            self.group += 1

    def stop(self) -> None:
        self.started = False

    def check_health(self, stale_after_s: float) -> None:
        pass


def async_trainer(
    folder: Path, out: Path, dtype: str, generate: Callable[..., Any], **kwargs: Any
) -> Any:
    """The real AsyncGRPO, with a `Worker` that generates by `generate`."""
    let_async_grpo_run_on_a_cpu()
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    own = {"weight_transfer": kwargs.pop("weight_transfer", None)}
    args = AsyncGRPOConfig(
        str(out), max_steps=4, per_device_train_batch_size=8, token_budget=0, dtype=dtype,
        use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no", num_generations=4,
        **kwargs,
    )  # fmt: skip
    worker: Any = Worker(generate, [[5, 6, 7], [9, 8, 7]], 4)
    return AsyncGRPOTrainer(
        str(folder), args=args, train_dataset=prompts(), rollout_worker=worker, **own
    )
