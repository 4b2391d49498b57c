"""The probe's figures against plain definitions, its promises to the caller, and a running job."""

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.image import imread
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

import fc_optim
from fc_optim import metrics
from fc_optim.audit.probe import hidden_ratio, plot_probe, probe, token_ids
from fc_optim.audit.text import TEXT


def make_model(dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model: Any = Qwen2ForCausalLM(config).bfloat16()
    return model.to(dtype)


def make_ids(n: int = 6, t: int = 24) -> Tensor:
    return torch.randint(96, (n, t), generator=torch.Generator().manual_seed(1))


# Two ways to compute one log-probability sum the same fp32 terms in other orders. It is near
# ln 96 = 4.6, where fp32 has steps of 2**-21; it and the log-sum-exp in it are rounded to those, in
# both ways, and the logits, which are below 1, add less. A log-ratio has two of them.
TOKEN = 8 * 2.0**-21
SEQUENCE = 23 * TOKEN  # the sum over a sequence


def ess_noise(sums: Tensor) -> float:
    """Of an ESS, 1 - variance(sums) to first order, when each sum is off by SEQUENCE."""
    return 2 * SEQUENCE * float(sums.std(correction=0))


def plain_log_probs(model: Any, ids: Tensor) -> Tensor:
    logp = model(input_ids=ids).logits[:, :-1].log_softmax(-1)
    return logp.gather(-1, ids[:, 1:, None]).squeeze(-1)


def test_figures_equal_the_plain_computation() -> None:
    """With RTN: fp32 masters W0 - k lr sign(g), their bf16 copy, both evaluated in fp32."""
    ids, lr, k = make_ids(), 2e-5, 7
    result = probe(make_model(), text=ids, lr=lr, steps=(k,))
    masters, served = make_model(), make_model()
    (-plain_log_probs(masters, ids).mean()).backward()
    with torch.no_grad():
        for m, s in zip(masters.parameters(), served.parameters(), strict=True):
            assert m.grad is not None
            m -= k * lr * m.grad.sign()
            s.copy_(m.bfloat16())
        log_p, log_q = plain_log_probs(masters, ids), plain_log_probs(served, ids)
    want = metrics.log_ratio(log_p, log_q, torch.ones_like(log_p))
    (rtn,) = (r for r in result.rows if r["copy"] == "rtn")
    assert rtn["mean_abs"] == pytest.approx(want.mean_abs, abs=TOKEN)
    assert rtn["mean"] == pytest.approx(want.mean, abs=TOKEN)
    assert rtn["p99"] == pytest.approx(want.p99, abs=TOKEN)
    assert rtn["sequence_sums"] == pytest.approx(want.sequence_sums.tolist(), abs=SEQUENCE)
    assert want.mean_abs > 25 * TOKEN
    ess, noise = metrics.effective_sample_size(want.sequence_sums), ess_noise(want.sequence_sums)
    assert rtn["sequence_ess"] == pytest.approx(ess, abs=noise)
    assert 1 - ess > 10 * noise


def test_stochastic_rounding_hides_less_of_coherent_steps() -> None:
    result = probe(make_model(), text=make_ids(), lr=1e-6, steps=(2, 8, 50))
    for k in (2, 8, 50):
        rtn, *sr = (r for r in result.rows if r["steps"] == k)
        assert rtn["copy"] == "rtn" and [r["seed"] for r in sr] == [0, 1, 2]
        assert rtn["mean"] > 4 * max(abs(r["mean"]) for r in sr)  # it withholds the improvement
    assert [r["copy"] for r in result.rows].count("ceiling") == 1
    assert result.tokens == 6 * 23 and result.sequences == 6
    loaded = json.loads(json.dumps(result.to_dict()))
    assert loaded["rows"] == result.rows and loaded["lr"] == 1e-6
    assert "sr seed 2" in str(result)


def test_equal_seeds_give_equal_figures() -> None:
    one, two, other = (
        probe(make_model(), text=make_ids(), lr=1e-4, steps=(3,), seed=seed).rows
        for seed in (5, 5, 6)
    )
    assert one == two != other


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_puts_everything_back(dtype: torch.dtype) -> None:
    model = make_model(dtype).train()
    model.model.layers[0].eval()
    model.lm_head.weight.grad = torch.ones_like(model.lm_head.weight)
    tensors = [*model.parameters(), *model.buffers()]
    before = [(t.data_ptr(), t.clone(), t.dtype, t.grad, t._version) for t in tensors]
    modes = [m.training for m in model.modules()]
    probe(model, text=make_ids(), steps=(1,))
    with pytest.raises(IndexError):
        probe(model, text=torch.full((2, 8), 96), steps=(1,))  # not in the vocabulary
    for t, (address, values, kind, grad, _) in zip(tensors, before, strict=True):
        assert t.data_ptr() == address and t.dtype == kind and t.grad is grad
        assert torch.equal(t, values)
    assert [m.training for m in model.modules()] == modes
    loss = model(input_ids=make_ids(), labels=make_ids()).loss  # and it still trains
    loss.backward()
    assert model.model.layers[1].mlp.up_proj.weight.grad.dtype == dtype


def test_frozen_parameters_stay() -> None:
    model = make_model()
    for p in model.parameters():
        p.requires_grad_(False)
    with pytest.raises(ValueError, match="requires_grad"):
        probe(model, text=make_ids())
    model.model.norm.weight.requires_grad_(True)
    rows = probe(model, text=make_ids(), lr=1e-6, steps=(1,)).rows
    assert rows[0]["mean_abs"] < 1e-3


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"lr": 0.0}, ValueError, "lr"),
        ({"steps": ()}, ValueError, "steps"),
        ({"steps": (0,)}, ValueError, "steps"),
        ({"text": torch.zeros(2, 8)}, TypeError, "int64"),
        ({"text": torch.zeros(8, dtype=torch.int64)}, TypeError, "sequences"),
        ({"text": None}, ValueError, "token ids"),
    ],
)
def test_refuses(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        probe(make_model(), **{"text": make_ids(), **options})


def save(folder: Path) -> None:
    words = dict.fromkeys(["<unk>", *TEXT.split()[:95]])
    raw = Tokenizer(WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    raw.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>").save_pretrained(folder)
    make_model().save_pretrained(folder)


def test_from_a_folder_with_the_built_in_text_and_a_plot(tmp_path: Path) -> None:
    folder = tmp_path / "tiny-model"
    save(folder)
    assert 600 < len(TEXT.split()) < 900
    result = probe(folder, lr=1e-4, steps=(1, 4))
    n = len(AutoTokenizer.from_pretrained(folder)(TEXT)["input_ids"]) // 64
    assert result.model == "tiny-model" and (result.sequences, result.tokens) == (n, n * 63)
    assert token_ids(folder, 9 * TEXT).shape == (16, 64)
    with pytest.raises(ValueError, match="at least 128"):
        probe(folder, text="few words")
    plot_probe(result, tmp_path / "probe.png")
    image = imread(tmp_path / "probe.png")
    assert image.shape[0] > 400 and image[..., :3].std() > 0.05


# -- a running job ------------------------------------------------------------------------------


def trained() -> tuple[Any, fc_optim.FairCastOptimizer]:
    model = make_model()
    opt = fc_optim.FairCastAdamW(model.named_parameters(), lr=1e-4).bind(model)
    for i in range(3):
        opt.zero_grad()
        ids = make_ids() + i & 63
        model(input_ids=ids, labels=ids).loss.backward()
        opt.step()
    return model.train(), opt


def test_hidden_ratio_of_a_job() -> None:
    model, opt = trained()
    ids = make_ids()
    attention = torch.ones_like(ids)
    attention[2, 15:] = 0
    said: list[str] = []
    found = hidden_ratio(
        model, opt, {"input_ids": ids, "attention_mask": attention}, say=said.append
    )
    with torch.no_grad():
        model.eval()
        log_q = plain_log_probs(model, ids)
        with opt.masters_in_model():
            log_p = plain_log_probs(model, ids)
        model.train()
    mask = attention[:, 1:].bool()
    want = metrics.log_ratio(log_p, log_q, mask)
    assert want.mean_abs > 25 * TOKEN
    assert found.ratio.mean_abs == pytest.approx(want.mean_abs, abs=TOKEN)
    assert torch.allclose(found.ratio.sequence_sums, want.sequence_sums, rtol=0, atol=SEQUENCE)
    assert found.tokens == int(mask.sum()) == 6 * 23 - 9
    assert found.sequence_ess == pytest.approx(
        metrics.effective_sample_size(want.sequence_sums), abs=ess_noise(want.sequence_sums)
    )
    assert 0.9 < found.token_ess <= 1
    assert found.bytes == 4 * sum(p.numel() for p in model.parameters())
    assert found.served_version == opt.served_version
    assert len(said) == 1 and "2 fp32 copies" in said[0] and "6 sequences of 24 tokens" in said[0]
    assert model.training and "sequence ESS" in str(found)


def test_hidden_ratio_counts_what_labels_ask_for(caplog: pytest.LogCaptureFixture) -> None:
    model, opt = trained()
    ids = make_ids()
    labels = ids.clone()
    labels[:, :10] = -100
    with caplog.at_level("INFO", logger="fc_optim"):
        found = hidden_ratio(model, opt, {"input_ids": ids, "labels": labels})
    assert found.tokens == 6 * 14
    assert "hidden_ratio: 2 fp32 copies" in caplog.text
    other = nn.Linear(2, 2)
    with pytest.raises(KeyError):
        hidden_ratio(other, opt, {})


# -- examples/blind_spot.py ---------------------------------------------------------------------


@pytest.mark.integration
def test_blind_spot(tmp_path: Path) -> None:
    save(tmp_path / "tiny-model")
    script = Path(__file__).parents[2] / "examples" / "blind_spot.py"
    flags = ["--steps", "0,50", "--length", "8", "--lr", "1e-6", "--samples", "64"]
    flags += ["--out", str(tmp_path / "out")]
    command = [sys.executable, "-W", "error", script, tmp_path / "tiny-model", *flags]
    result = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    lines = (tmp_path / "out" / "blind_spot.csv").read_text().splitlines()
    about = [line for line in lines if line.startswith("# ")]
    assert [line.split(":")[0] for line in about] == ["# command", "# versions", "# hardware"]
    rows = list(csv.DictReader(lines[len(about) :]))
    assert [(r["steps"], r["ratio"]) for r in rows] == [
        ("0", "visible"), ("0", "hidden"), ("50", "visible"), ("50", "hidden")
    ]  # fmt: skip
    seen, start, seen_after, hidden = (float(row["mean_abs"]) for row in rows)
    assert start == 0  # masters and copy are equal before the first step
    # The visible one is the arithmetic of bf16: here and there a rounding falls the other way. Its
    # mean |x| has a standard error below sqrt(E[x^2] / n), where k3 is E[x^2] / 2 and n counts
    # sequences, since the tokens of one share their errors.
    squares = [2 * float(row["k3"]) / float(row["sequences"]) for row in rows]
    assert abs(seen_after - seen) <= 5 * (squares[0] + squares[2]) ** 0.5  # it saw nothing
    assert hidden > 5 * squares[3] ** 0.5  # of what it would have seen
    assert imread(tmp_path / "out" / "blind_spot.png").shape[0] > 500
