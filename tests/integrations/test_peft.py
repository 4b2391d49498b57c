"""LoRA: adapters are managed parameters, and a merged bf16 weight has all of what they add."""

from typing import Any

import pytest
import torch
from engines import Store
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from fc_optim import FairCastAdamW, FairCastOptimizer, Sync, SyncError, metrics
from fc_optim.integrations.peft import merge_lora

pytestmark = [
    pytest.mark.integration,
    # PEFT 0.21 asks transformers 5.24 for it by the old name.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
]


def llama(tied: bool = False) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=tied,
    )  # fmt: skip
    return LlamaForCausalLM(config).bfloat16()


def adapted(base: Any, **options: Any) -> Any:
    torch.manual_seed(1)
    return get_peft_model(base, LoraConfig(r=4, lora_alpha=8, **options))


def train(model: Any, steps: int = 5, lr: float = 1e-5, **options: Any) -> FairCastOptimizer:
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    opt = FairCastAdamW(named, lr=lr, weight_decay=0.0, **options).bind(model)
    ids = torch.arange(64).view(4, 16)
    for _ in range(steps):
        model(input_ids=ids, labels=ids).loss.backward()
        opt.step()
        opt.zero_grad()
    return opt


@torch.no_grad()
def exact(base: dict[str, Tensor], model: Any) -> dict[str, Tensor]:
    """W + s B A in float64, by PEFT's own formula."""
    wholes = {n: t.double() for n, t in base.items()}
    for name, module in model.named_modules():
        if hasattr(module, "get_delta_weight"):
            twin = name.removeprefix("base_model.model.") + ".weight"
            wholes[twin] = wholes[twin] + module.double().get_delta_weight("default")
    return wholes


@pytest.mark.parametrize("dither", ["fresh", "sync", "held"])
def test_a_merge_serves_all_of_what_the_adapters_add(dither: str) -> None:
    base = llama()
    start = {n: t.clone() for n, t in base.state_dict().items()}
    model = adapted(base, target_modules="all-linear")
    opt = train(model, lr=3e-6, dither=dither)
    merged = dict(merge_lora(model, opt))
    nearest = dict(merge_lora(model, opt, rounding="nearest"))
    again = dict(merge_lora(model, opt))
    assert list(merged) == [n for n, _ in llama().named_parameters()]
    assert all(torch.equal(merged[n], again[n]) for n in merged)
    wholes = exact(start, model)
    moved = [n for n in wholes if not torch.equal(wholes[n], start[n].double())]
    assert len(moved) == 14

    shift = torch.cat([(wholes[n] - start[n].double()).flatten() for n in moved])
    step = torch.cat([metrics.bf16_ulp(start[n].float()).double().flatten() for n in moved])

    def captured(held: dict[str, Tensor]) -> float:
        made = torch.cat([(held[n].double() - start[n].double()).flatten() for n in moved])
        return float(made @ shift / (shift @ shift))

    # Stochastic rounding takes each weight up with the probability of its place between two steps.
    up = shift.abs() / step % 1
    error = float((shift.square() * up * (1 - up) * step.square()).sum().sqrt() / (shift @ shift))
    for name in moved:  # within one ulp, and the nearest one to nearest
        assert ((merged[name].double() - wholes[name]).abs() <= wholes[name].abs() * 2**-7).all()
        # But where fp32 rounds a sum across the middle: a few of 2**16 places in a step.
        assert (nearest[name] == wholes[name].bfloat16()).float().mean() > 0.999
    print(f"captured: {captured(nearest):.3f} (nearest), {captured(merged):.3f} (merge_lora)")
    assert captured(nearest) < 0.2
    assert captured(merged) == pytest.approx(1, abs=5 * error)
    assert error < 0.03


def test_held_dither_keeps_merged_deltas_sparse() -> None:
    changed = {}
    for dither in ("fresh", "held"):
        model = adapted(llama(), target_modules="all-linear")
        opt = train(model, dither=dither)
        before = dict(merge_lora(model, opt))
        ids = torch.arange(64).view(4, 16)
        model(input_ids=ids, labels=ids).loss.backward()
        opt.step()
        after = dict(merge_lora(model, opt))
        words = [(before[n] != after[n]).float().mean() for n in after if "_proj" in n]
        changed[dither] = float(torch.stack(words).mean())
    assert changed["held"] < changed["fresh"] / 3


def test_modules_to_save_embeddings_and_conv1d() -> None:
    base = llama()
    start = {n: t.clone() for n, t in base.state_dict().items()}
    model = adapted(base, target_modules=["embed_tokens", "q_proj"], modules_to_save=["lm_head"])
    opt = train(model)
    merged, served = dict(merge_lora(model, opt)), dict(opt.served_params())
    assert list(merged) == list(start)
    assert torch.equal(
        merged["lm_head.weight"], served["base_model.model.lm_head.modules_to_save.default.weight"]
    )
    wholes = exact(start, model)
    for name in ("model.embed_tokens.weight", "model.layers.1.self_attn.q_proj.weight"):
        assert not torch.equal(merged[name], start[name])
        assert ((merged[name].double() - wholes[name]).abs() <= wholes[name].abs() * 2**-7).all()

    gpt = GPT2LMHeadModel(GPT2Config(vocab_size=96, n_embd=64, n_layer=1, n_head=2)).bfloat16()
    start = {n: t.clone() for n, t in gpt.named_parameters()}
    model = adapted(gpt, target_modules=["c_attn"], fan_in_fan_out=True)
    opt = train(model)
    merged, name = dict(merge_lora(model, opt)), "transformer.h.0.attn.c_attn.weight"
    whole = exact(start, model)[name]
    assert list(merged) == list(start)
    assert ((merged[name].double() - whole).abs() <= whole.abs() * 2**-7).all()


def test_a_merged_sync_is_proved() -> None:
    model = adapted(llama(), target_modules=["q_proj"])
    opt = train(model, steps=1)
    engine = Store()
    sync = Sync(opt, engine, source=lambda: merge_lora(model, opt), sparse=True)
    sent = sync()
    assert list(engine.weights) == [n for n, _ in llama().named_parameters()]
    ids = torch.arange(64).view(4, 16)
    model(input_ids=ids, labels=ids).loss.backward()
    opt.step()
    assert sync() != sent
    assert all(torch.equal(engine.weights[n], t) for n, t in merge_lora(model, opt))
    engine.weights["lm_head.weight"][0] = 1
    with pytest.raises(SyncError, match="lm_head.weight changed in the engine"):
        sync()


def test_what_cannot_be_merged_is_refused() -> None:
    model = adapted(llama(), target_modules=["q_proj"], use_dora=True)
    opt = train(model, steps=1)
    with pytest.raises(NotImplementedError, match="adapter 'default' of .*q_proj is DoRA"):
        merge_lora(model, opt)
    with pytest.raises(ValueError, match="rounding: 'up' is neither"):
        merge_lora(model, opt, rounding="up")
    with pytest.raises(TypeError, match="model: LlamaForCausalLM is not a PeftModel"):
        merge_lora(llama(), opt)  # type: ignore[arg-type]
    other = adapted(llama(), target_modules=["q_proj"])
    with pytest.raises(RuntimeError, match="not bound to this model"):
        merge_lora(other, opt)
    opt = train(other, steps=1)
    other.merge_adapter()
    with pytest.raises(RuntimeError, match=r"q_proj are merged; call unmerge_adapter\(\) first"):
        merge_lora(other, opt)
    with pytest.warns(UserWarning, match="tie_word_embeddings"):
        tied = adapted(llama(tied=True), target_modules=["embed_tokens"])
    opt = train(tied, steps=1)
    with pytest.raises(RuntimeError, match="are tied: an adapter on one of them"):
        merge_lora(tied, opt)
