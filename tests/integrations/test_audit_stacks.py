"""watch_casts on export code as TRL, vLLM and verl ship it: it names their lines, not torch's.

Each runs in a process of its own, on a small Qwen2 that is made here. TRL's VLLMGeneration is
whole, with a real vLLM on the CPU; of verl, the real FSDPEngine's export methods run on a real
FSDP2 module, but not its set-up, which wants a training configuration and an accelerator.
"""

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

import fc_optim
from fc_optim.audit.casts import watch_casts


def save_model(folder: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    words = {word: i for i, word in enumerate(["<pad>", "<end>", *map(str, range(126))])}
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<pad>")),
        pad_token="<pad>", eos_token="<end>",
    ).save_pretrained(folder)  # fmt: skip
    config = Qwen2Config(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).bfloat16().save_pretrained(folder)


def load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def train(model: Any, fair_cast: bool) -> None:
    """A step of AdamW on fp32 weights; with Fair Cast they stay on the bf16 grid."""
    cls = fc_optim.FairCastAdamW if fair_cast else torch.optim.AdamW
    opt = cls(model.named_parameters(), lr=1e-4)
    ids = torch.randint(2, 128, (4, 16))
    model(input_ids=ids, labels=ids).loss.backward()
    opt.step()


def trl_with_vllm(folder: Path, fair_cast: bool) -> Any:
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_CPU_OMP_THREADS_BIND="nobind", HF_HUB_OFFLINE="1",
    )  # fmt: skip
    import trl.generation.vllm_generation as trl_vllm  # type: ignore[import-not-found]
    import vllm._custom_ops  # type: ignore[import-not-found]
    from accelerate import Accelerator
    from transformers import AutoTokenizer

    # On CPUs with AVX-512 this vLLM repacks its weights for oneDNN and drops the originals, after
    # which it can load none again; and TRL has no argument for eager mode.
    vllm._custom_ops._supports_onednn = False
    trl_vllm.LLM = functools.partial(trl_vllm.LLM, enforce_eager=True)
    model = load(folder)
    generation = trl_vllm.VLLMGeneration(
        model, Accelerator(cpu=True), AutoTokenizer.from_pretrained(folder),
        max_model_length=64, max_num_seqs=2,
    )  # fmt: skip
    train(model, fair_cast)  # after vLLM, which does not start once llvmlite has been imported
    with watch_casts(model) as report:
        generation.sync_weights()
    return report


def verl_engine(folder: Path, fair_cast: bool) -> Any:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from verl.plugin.platform import (  # type: ignore[import-not-found]
        platform_manager,
    )

    base = platform_manager.PlatformRegistry.get("nvidia")
    assert base is not None
    cpu = {
        "device_name": property(lambda self: "cpu"),
        "is_available": lambda self: True,
        "current_device": lambda self: "cpu",
        "device_count": lambda self: 1,
    }
    platform_manager.PlatformRegistry.register(platform="cpu")(type("PlatformCPU", (base,), cpu))
    os.environ["VERL_PLATFORM"] = "cpu"
    from verl.workers.engine.fsdp import transformer_impl  # type: ignore[import-not-found]

    FSDPEngine = transformer_impl.FSDPEngine

    dist.init_process_group("gloo", init_method=f"file://{folder}/rdv", rank=0, world_size=1)
    model = load(folder)
    train(model, fair_cast)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    engine = FSDPEngine.__new__(FSDPEngine)
    engine.module = model
    engine._uses_fsdp2_cpu_offload_policy = engine._is_offload_param = False
    with watch_casts(model) as report:
        shards, _ = engine.get_per_tensor_param_shard()
        assert all(local.dtype == torch.bfloat16 for _, local, _ in shards)
        engine.prime_delta_snapshots()
        deltas, _ = engine.get_per_tensor_param_delta_shard()
        list(deltas)
    dist.destroy_process_group()
    return report


def worker(
    rank: int, run: Callable[[Path, bool], Any], folder: Path, fair_cast: bool, out: Path
) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    os.environ.pop("TRITON_INTERPRET", None)  # vLLM cannot rebind interpreted kernels
    report = run(folder, fair_cast)
    lossy = {name for c in report.lossy for name in c.names}
    seen = {name for c in report.casts for name in c.names}
    out.write_text(json.dumps([report.summary(), sorted(lossy), sorted(seen), str(report)]))
    os._exit(0)  # an engine's threads need not end well


@pytest.mark.parametrize("fair_cast", [False, True], ids=["rtn", "fair cast"])
@pytest.mark.parametrize(
    "stack",
    [pytest.param("trl", marks=pytest.mark.vllm), pytest.param("verl", marks=pytest.mark.long)],
)
def test_real_exports(stack: str, fair_cast: bool, tmp_path: Path) -> None:
    if stack == "verl":
        pytest.importorskip("verl", reason="needs verl: pip install --no-deps verl==0.9.1")
    save_model(tmp_path)
    run = trl_with_vllm if stack == "trl" else verl_engine
    mp.spawn(worker, (run, tmp_path, fair_cast, tmp_path / "report.json"), nprocs=1)
    rows, lossy, seen, text = json.loads((tmp_path / "report.json").read_text())
    print(text)
    names = {n for n, _ in load(tmp_path).named_parameters()}
    assert set(seen) == names
    assert set(lossy) == (set() if fair_cast else names)
    assert all(Path(row["file"]).parts.count("torch") == 0 for row in rows)
    for row in rows:  # norm gains one step from 1.0 are too few to exclude luck
        expected = "exact" if fair_cast else "nearest"
        assert row["rounding"] == expected or (
            row["elements"] < 1000 and expected in row["rounding"]
        )
    where = "vllm" if stack == "trl" else "verl"
    assert any(f"/{where}/" in row["file"] for row in rows)
