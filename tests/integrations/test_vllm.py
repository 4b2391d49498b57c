"""vLLM holds what it was sent: a real LLM in this process, and a real server.

The marked tests have a command of their own, `python -m pytest -m vllm
tests/integrations/test_vllm.py`: with other test files in the same process numba is imported first,
and vLLM does not start after it.
"""

import copy
import hashlib
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.multiprocessing as mp
from ranks import free_port
from torch import Tensor

import fc_optim
from fc_optim import FairCastAdamW, Sync, SyncError
from fc_optim.integrations.vllm_layout import Layout, Ledger, read_checksums

ROOT = Path(__file__).resolve().parents[2]
PROMPT = [2 + 7 * i % 90 for i in range(100)]  # three blocks of the prefix cache
# Log-probs of vLLM's bf16 forward against transformers': other orders of sums, so that roundings
# fall the other way. Logits are below 2, where bf16 has steps of 2**-7: two of them and a half.
BOUND = 2.5 * 2**-7
ENV = {
    "FC_OPTIM_VLLM_PLAIN": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_SERVER_DEV_MODE": "1",
}
ENGINE = {"max_model_len": 128, "max_num_seqs": 4, "block_size": 32, "enforce_eager": True}

real = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]


# ---- Names, fusion and checksums, without vLLM


def layout() -> Layout:
    return Layout({"embed.weight", "0.qkv_proj.weight", "0.qkv_proj.bias", "0.o_proj.weight"})


def test_fused_parts_come_together_and_in_order() -> None:
    names = ["embed.weight", "0.q_proj.weight", "0.q_proj.bias", "0.k_proj.bias"]
    names += ["0.v_proj.weight", "0.v_proj.bias", "0.k_proj.weight", "0.o_proj.weight"]
    kept: list[str] = []
    groups = layout().whole_groups(((n, n) for n in names), lambda n: kept.append(n) or n)  # type: ignore[func-returns-value]
    assert [[n for n, _ in g] for g in groups] == [
        ["embed.weight"],
        ["0.q_proj.bias", "0.k_proj.bias", "0.v_proj.bias"],
        ["0.q_proj.weight", "0.k_proj.weight", "0.v_proj.weight"],
        ["0.o_proj.weight"],
    ]
    assert kept == names[1:5]


def test_a_part_without_the_others_is_refused() -> None:
    given = layout().whole_groups([("0.q_proj.weight", 0), ("0.k_proj.weight", 0)], int)
    with pytest.raises(ValueError, match="'0.q_proj.weight' comes without 0.v_proj.weight"):
        list(given)
    with pytest.raises(ValueError, match="no parameter for 'experts.0.w1.weight'"):
        layout().place("experts.0.w1.weight")
    with pytest.raises(ValueError, match="nothing is sent for 0.o_proj.weight, 0.qkv_proj.bias"):
        layout().check_covered(["embed.weight", "0.k_proj.weight"])


def weights(seed: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {
        "embed.weight": (100, 4),
        "0.q_proj.weight": (8, 4),
        "0.k_proj.weight": (4, 4),
    }
    shapes |= {"0.v_proj.weight": (4, 4), "0.o_proj.weight": (4, 8), "norm.weight": (4,)}
    return {n: torch.randn(s, generator=g).bfloat16() for n, s in shapes.items()}


def checksums(w: dict[str, Tensor], dtype: torch.dtype = torch.bfloat16) -> dict[str, str]:
    """As vLLM computes them: of what it holds, fused, and a vocabulary padded to 128 rows."""
    held = {n: t.to(dtype) for n, t in w.items()}
    held["embed.weight"] = torch.cat([held["embed.weight"], torch.zeros(28, 4, dtype=dtype)])
    qkv = [held.pop(f"0.{x}_proj.weight") for x in "qkv"]
    held["0.qkv_proj.weight"] = torch.cat(qkv)
    words = {n: t.contiguous().view(torch.uint8).numpy() for n, t in held.items()}
    return {f"dp0:pp0:pcp0:tp0:{n}": hashlib.sha256(t.data).hexdigest() for n, t in words.items()}


def test_checksums_become_entries_of_the_version_that_they_belong_to() -> None:
    ledger, names = Ledger(), {"embed.weight", "0.qkv_proj.weight", "0.o_proj.weight"}
    old, new = weights(0), weights(1)
    sent = [fc_optim.manifest(v, w.items()) for v, w in enumerate((old, new))]
    for w, m in zip((old, new), sent, strict=True):
        list(ledger.record(Layout(names | {"norm.weight"}), iter(w.items()), m))
        ledger.loaded()

    def held(answer: dict[str, str]) -> dict[str, fc_optim.Entry]:
        return ledger.translate(read_checksums(answer))

    assert held(checksums(new)) == sent[1].parameters
    assert held(checksums(old)) == sent[0].parameters
    assert ledger.holds(read_checksums(checksums(new))) == "new"
    assert ledger.holds(read_checksums(checksums(old))) == "old"
    mixed = checksums(new) | {"dp0:pp0:pcp0:tp0:0.qkv_proj.weight": checksums(old)["dp0:pp0:pcp0:tp0:0.qkv_proj.weight"]}  # fmt: skip # noqa: E501
    assert ledger.holds(read_checksums(mixed)) is None
    for name, found in held(mixed).items():
        assert found == sent["q_proj" not in name and "k_proj" not in name and "v_proj" not in name].parameters[name]  # fmt: skip # noqa: E501
    replica = {k.replace("dp0", "dp1"): v for k, v in checksums(old).items()}
    assert held(checksums(new) | replica) == sent[0].parameters
    half = held(checksums(weights(2), torch.float16))
    assert all(e.digest is None for e in half.values())
    half = held(checksums(new, torch.float16))
    assert half["norm.weight"].dtype == "float16"  # a cast engine is told by its small weights


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ({"dp0:pp0:pcp0:tp1:norm.weight": "12"}, "--tensor-parallel-size 1"),
        ({"dp0:pp0:pcp0:tp0:o.weight": hashlib.sha256().hexdigest()}, "o.weight is empty.*oneDNN"),
    ],
)
def test_engines_that_cannot_be_read_are_refused(answer: dict[str, str], text: str) -> None:
    with pytest.raises(NotImplementedError, match=text):
        read_checksums(answer)


@pytest.mark.parametrize("state", ["missing", "too old"])
def test_one_line_says_what_to_install(state: str, tmp_path: Path) -> None:
    code = "import sys\n"
    if state == "missing":
        code += "sys.modules['vllm'] = None\n"
    else:
        (tmp_path / "vllm").mkdir()
        (tmp_path / "vllm" / "__init__.py").write_text("__version__ = '0.9.0'\n")
        code += f"sys.path.insert(0, {str(tmp_path)!r})\n"
    code += "import fc_optim.integrations.vllm_plugin as plugin\n"
    code += "plugin.register() if 'vllm' not in sys.modules or sys.modules['vllm'] else None\n"
    code += "import fc_optim.integrations.vllm\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "vllm >= 0.32 is needed here; pip install 'vllm>=0.32'" in last


# ---- What trains


class Trainer(NamedTuple):
    model: Any
    opt: fc_optim.FairCastOptimizer

    def step(self) -> None:
        ids = torch.randint(2, 100, (4, 16))
        self.model(input_ids=ids, labels=ids).loss.backward()
        self.opt.step()
        self.opt.zero_grad()

    def log_probs(self, tokens: list[int]) -> Tensor:
        """Of a completion of PROMPT, in a bf16 forward of the served weights."""
        served = copy.deepcopy(self.model).bfloat16()
        logits = served(torch.tensor([PROMPT + tokens])).logits[0, len(PROMPT) - 1 : -1]
        logp: Tensor = logits.float().log_softmax(-1)
        return logp.gather(-1, torch.tensor(tokens)[:, None])[:, 0].detach()


def save_model(folder: Path, tied: bool) -> Path:
    """A small decoder and a tokenizer; 100 words, which vLLM pads to 128."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import (
        AutoModelForCausalLM,
        PreTrainedTokenizerFast,
        Qwen2Config,
        Qwen3Config,
    )

    words = {word: i for i, word in enumerate(["<pad>", "<end>", *map(str, range(98))])}
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<pad>")),
        pad_token="<pad>", eos_token="<end>",
    ).save_pretrained(folder)  # fmt: skip
    config_class: Any = Qwen2Config if tied else Qwen3Config
    config = config_class(
        vocab_size=100, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, max_position_embeddings=128,
        tie_word_embeddings=tied, bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def make_trainer(folder: Path, **options: Any) -> Trainer:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return Trainer(model, FairCastAdamW(model.named_parameters(), lr=1e-2, **options).bind(model))


class Answer(NamedTuple):
    tokens: list[int]
    log_probs: Tensor
    cached: int  # tokens of the prompt that came from the prefix cache


def assert_serves(trainer: Trainer, answer: Answer) -> None:
    assert (trainer.log_probs(answer.tokens) - answer.log_probs).abs().max() < BOUND


# ---- An LLM in this process


class Offline(NamedTuple):
    llm: Any
    folder: Path

    def generate(self) -> Answer:
        from vllm import SamplingParams

        how = SamplingParams(temperature=0, max_tokens=8, logprobs=0, ignore_eos=True)
        (done,) = self.llm.generate({"prompt_token_ids": PROMPT}, how, use_tqdm=False)
        out = done.outputs[0]
        logp = [list(x.values())[0].logprob for x in out.logprobs]
        return Answer(list(out.token_ids), torch.tensor(logp), done.num_cached_tokens)

    def bits(self) -> dict[str, str]:
        (found,) = self.llm.collective_rpc("compute_weight_checksums")
        return dict(found)


@pytest.fixture(scope="module")
def offline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Offline]:
    os.environ.update(ENV)
    os.environ.pop("TRITON_INTERPRET", None)  # vLLM cannot rebind interpreted kernels
    from fc_optim.integrations.vllm import keep_plain_weights

    keep_plain_weights()
    import vllm

    folder = save_model(tmp_path_factory.mktemp("tied"), tied=True)
    llm = vllm.LLM(str(folder), dtype="bfloat16", disable_log_stats=True, **ENGINE)
    yield Offline(llm, folder)


class TestOffline:
    pytestmark = real

    def test_each_sync_is_proved_and_served(self, offline: Offline) -> None:
        from fc_optim.integrations.vllm import sync

        trainer, last = make_trainer(offline.folder), offline.generate()
        for _ in range(3):
            trainer.step()
            held = sync(trainer.opt, offline.llm)
            assert held.version == trainer.opt.served_version
            assert held.digest == trainer.opt.served_digest()
            assert offline.llm.get_weight_version() == str(held.version)
            answer = offline.generate()
            assert_serves(trainer, answer)
            assert answer.tokens != last.tokens or not torch.equal(answer.log_probs, last.log_probs)
            last = answer

    def test_the_prefix_cache_is_never_stale(self, offline: Offline) -> None:
        from fc_optim.integrations.vllm import OfflineEngine

        trainer = make_trainer(offline.folder)
        engine = OfflineEngine(offline.llm)
        sync = Sync(trainer.opt, engine)
        sync()
        offline.generate()
        assert offline.generate().cached == 96
        trainer.step()
        for group in engine._layout.whole_groups(trainer.opt.served_params(), Tensor.clone):
            engine._call(vllm_worker().load_group, group=group)
        stale = offline.generate()  # what a load alone would do
        assert stale.cached == 96
        assert (trainer.log_probs(stale.tokens) - stale.log_probs).abs().max() > 5 * BOUND
        sync.recheck = False
        sync()
        fresh = offline.generate()
        assert fresh.cached == 0
        assert_serves(trainer, fresh)

    def test_a_part_of_a_fused_parameter_is_refused(self, offline: Offline) -> None:
        from fc_optim.integrations.vllm import OfflineEngine

        trainer = make_trainer(offline.folder)
        engine = OfflineEngine(offline.llm)
        Sync(trainer.opt, engine)()
        bits, answer = offline.bits(), offline.generate()
        q = [(n, p) for n, p in trainer.model.named_parameters() if "q_proj" in n]
        sync = Sync(FairCastAdamW(q), engine)
        with pytest.raises(SyncError, match="nothing was sent.*comes without .*k_proj") as caught:
            sync()
        assert (caught.value.problem, sync.version) == ("refused", None)
        with pytest.raises(ValueError, match="comes without"):  # also without a sync before it
            engine.load(((n, p.detach().bfloat16() + 1) for n, p in q), 9)
        assert offline.bits() == bits
        assert torch.equal(offline.generate().log_probs, answer.log_probs)
        rest = [(n, p) for n, p in trainer.model.named_parameters() if "norm" in n]
        with pytest.raises(SyncError, match="nothing is sent for .*embed_tokens"):
            Sync(FairCastAdamW(rest), engine)()

    @pytest.mark.parametrize("dither", ["fresh", "sync", "held"])
    def test_sparse_equals_whole(self, offline: Offline, dither: str) -> None:
        from fc_optim.integrations.vllm import OfflineEngine

        trainer = make_trainer(offline.folder, dither=dither)
        engine = OfflineEngine(offline.llm)
        sync = Sync(trainer.opt, engine, sparse=True)
        for _ in range(3):
            trainer.step()
            sync()
            sparse = offline.bits()
            assert_serves(trainer, offline.generate())
            engine.load(trainer.opt.served_params(), trainer.opt.served_version)
            assert offline.bits() == sparse

    def test_new_nans_are_not_sent_as_patches(self, offline: Offline) -> None:
        from fc_optim.integrations.vllm import OfflineEngine

        trainer = make_trainer(offline.folder)
        sync = Sync(trainer.opt, OfflineEngine(offline.llm), sparse=True)
        sync()
        bits = offline.bits()
        trainer.step()
        weight = next(trainer.model.parameters())
        with torch.no_grad():
            trainer.opt.state[weight]["master"][3] = torch.nan
            weight[3] = torch.nan
        with pytest.raises(SyncError, match="new values of 'model.embed_tokens.weight' are NaN"):
            sync()
        assert sync.version is None
        assert offline.bits() == bits

    @pytest.mark.parametrize("how", ["dropped", "half", "part of qkv"])
    def test_a_load_that_goes_wrong_is_named(self, offline: Offline, how: str) -> None:
        from fc_optim.integrations.vllm import OfflineEngine

        class Wrong(OfflineEngine):
            sound = True

            def load(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
                if self.sound:
                    return super().load(weights, version)
                new = {n: t.clone() for n, t in weights}
                if how == "half":
                    new = dict(list(new.items())[: len(new) // 2 - 1])
                    new.popitem()
                if how == "dropped":
                    new = {}
                if how == "part of qkv":  # plain load_weights of everything but k
                    kept = [(n, t) for n, t in new.items() if "k_proj.weight" not in n]
                    self._call(vllm_worker().load_group, group=kept)
                else:
                    for group in self._layout.whole_groups(whole(self._layout, new), Tensor.clone):
                        self._call(vllm_worker().load_group, group=group)
                self._finish(version)

        def whole(at: Layout, new: dict[str, Tensor]) -> list[tuple[str, Tensor]]:
            return [(n, t) for n, t in new.items() if all(p in new for p in at.place(n)[1])]

        trainer = make_trainer(offline.folder)
        engine = Wrong(offline.llm)
        sync = Sync(trainer.opt, engine)
        sync()
        trainer.step()
        engine.sound = False
        text, problem = {
            "dropped": ("has dropped the update", "dropped"),
            "half": ("kept old tensors", "stale"),
            "part of qkv": ("kept old tensors: 2 of .*layers.0.self_attn.k_proj.weight", "stale"),
        }[how]
        with pytest.raises(SyncError, match=text) as caught:
            sync()
        assert (caught.value.problem, sync.version) == (problem, None)
        engine.sound = True
        assert sync().digest == trainer.opt.served_digest()

    def test_a_repacked_engine_is_refused_by_name(self, offline: Offline) -> None:
        from fc_optim.integrations.vllm import OfflineEngine

        model = offline.llm.collective_rpc(lambda w: w.model_runner.get_model())[0]
        layer = model.model.layers[1].mlp.down_proj
        weight = layer.weight
        layer.weight = torch.nn.Parameter(weight.new_empty(0), requires_grad=False)
        with pytest.raises(NotImplementedError, match="layers.1.mlp.down_proj.weight is empty.*keep_plain_weights"):  # fmt: skip # noqa: E501
            OfflineEngine(offline.llm)
        layer.weight = weight


def in_another_process(rank: int, folder: Path) -> None:
    import vllm

    llm = vllm.LLM(str(folder), dtype="bfloat16", disable_log_stats=True, **ENGINE)
    try:
        sync_with_another_process(llm, folder)
    finally:
        llm.llm_engine.engine_core.shutdown()  # or this process waits for that one


def sync_with_another_process(llm: Any, folder: Path) -> None:
    from fc_optim.integrations.vllm import OfflineEngine, sync

    trainer = make_trainer(folder)
    trainer.step()
    assert sync(trainer.opt, llm).digest == trainer.opt.served_digest()
    sync(trainer.opt, llm, sparse=True)
    trainer.step()
    assert sync(trainer.opt, llm, sparse=True).digest == trainer.opt.served_digest()
    assert_serves(trainer, Offline(llm, folder).generate())
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "0"
    with pytest.raises(RuntimeError, match="VLLM_ENABLE_V1_MULTIPROCESSING=0"):
        OfflineEngine(llm)


@pytest.mark.vllm
@pytest.mark.filterwarnings("default")
def test_an_llm_in_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env = ENV | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    env["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    mp.spawn(in_another_process, (save_model(tmp_path, tied=True),), nprocs=1)


def vllm_worker() -> Any:
    from fc_optim.integrations import vllm_worker

    return vllm_worker


# ---- A server


class Server(NamedTuple):
    url: str
    folder: Path
    process: subprocess.Popen[bytes]

    def ask(self, route: str, body: Any = None, get: bool = False) -> Any:
        data = None if get else json.dumps(body or {}).encode()
        request = urllib.request.Request(
            f"{self.url}/{route}", data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def generate(self) -> Answer:
        body = {"model": "m", "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "logprobs": 0}
        answer = self.ask("v1/completions", body | {"return_token_ids": True, "ignore_eos": True})
        (out,) = answer["choices"]
        details = answer["usage"]["prompt_tokens_details"] or {"cached_tokens": 0}
        logp = torch.tensor(out["logprobs"]["token_logprobs"])
        return Answer(out["token_ids"], logp, details["cached_tokens"] or 0)

    def bits(self) -> dict[str, str]:
        found = self.ask("weight_checker", {"action": "checksum"})["checksums"]
        return dict(found)

    def version(self) -> str:
        return str(self.ask("weight_info", get=True)["weight_version"])

    def paused(self) -> bool:
        return bool(self.ask("is_paused", get=True)["is_paused"])

    def signal(self, which: signal.Signals) -> None:
        os.killpg(self.process.pid, which)  # its own session, started below


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    plugins = importlib.metadata.entry_points(group="vllm.general_plugins").names
    assert "fc_optim" in plugins, "fc_optim's entry points are not installed: pip install -e ."
    folder = save_model(tmp_path_factory.mktemp("untied"), tied=False)
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", folder]
    command += ["--served-model-name", "m", "--dtype", "bfloat16", "--port", port, "--host"]
    command += ["127.0.0.1", "--weight-transfer-config", '{"backend": "fc_optim"}']
    command += ["--enable-prompt-tokens-details", "--enforce-eager"]
    for name, value in ENGINE.items():
        command += [] if value is True else [f"--{name.replace('_', '-')}", value]
    env = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"} | ENV
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [env.get("PYTHONPATH")])])
    log = folder / "server.log"
    with open(log, "w") as out:
        process = subprocess.Popen(
            list(map(str, command)), stdout=out, stderr=out, env=env, start_new_session=True
        )
    try:
        for _ in range(360):
            time.sleep(0.5)
            assert process.poll() is None, log.read_text()[-3000:]
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except OSError:
                pass
        else:
            raise AssertionError(f"the server does not answer: {log.read_text()[-3000:]}")
        yield Server(f"http://127.0.0.1:{port}", folder, process)
        print(log.read_text()[-3000:])
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()


class TestServer:
    pytestmark = real

    def test_each_sync_is_proved_and_served(self, server: Server) -> None:
        from fc_optim.integrations.vllm import sync

        trainer, last = make_trainer(server.folder), server.generate()
        assert server.generate().cached == 96
        for _ in range(3):
            trainer.step()
            held = sync(trainer.opt, server.url)
            assert held.version == trainer.opt.served_version
            assert held.digest == trainer.opt.served_digest()
            assert server.version() == str(held.version)
            answer = server.generate()
            assert answer.cached == 0
            assert_serves(trainer, answer)
            assert not torch.equal(answer.log_probs, last.log_probs)
            last = answer
            assert server.generate().cached == 96

    def test_a_part_of_a_fused_parameter_is_refused(self, server: Server) -> None:
        from fc_optim.integrations.vllm import ServerEngine
        from fc_optim.integrations.vllm_transfer import FileTransfer, FileTransferInit, Routes

        trainer = make_trainer(server.folder)
        Sync(trainer.opt, ServerEngine(server.url))()
        bits, answer, version = server.bits(), server.generate(), server.version()
        q = [(n, p) for n, p in trainer.model.named_parameters() if "q_proj" in n]
        with pytest.raises(SyncError, match="nothing was sent.*comes without .*k_proj"):
            Sync(FairCastAdamW(q), ServerEngine(server.url))()

        # The engine's own end refuses as well, whoever sends.
        routes = Routes(server.url, 60)
        few = {n: p.detach().bfloat16() + 1 for n, p in q}
        cut = {n: p.detach().bfloat16()[:-1] for n, p in trainer.model.named_parameters()}
        no_norm = dict(trainer.opt.served_params(copy=True))
        del no_norm["model.norm.weight"]
        for sent, text in (
            (few, "comes without model.layers.0.self_attn.k_proj.weight"),
            (cut, "do not fit the engine's"),
            (no_norm, "nothing is sent for model.norm.weight"),
        ):
            sender = FileTransfer.trainer_init(
                FileTransferInit(rank=0), client=routes, source=sent.items()
            )
            with pytest.raises(RuntimeError, match=text):
                sender.send_weights()
        assert (server.bits(), server.version()) == (bits, version)
        assert torch.equal(server.generate().log_probs, answer.log_probs)
        trainer.step()
        Sync(trainer.opt, ServerEngine(server.url))()
        assert_serves(trainer, server.generate())

    def test_vllms_own_sender_takes_a_served_source(self, server: Server) -> None:
        from vllm.distributed.weight_transfer import (
            HTTPVLLMWeightSyncClient,
            WeightTransferTrainerFactory,
        )

        from fc_optim.integrations import vllm_plugin
        from fc_optim.integrations.vllm import ServedSource, ServerEngine
        from fc_optim.integrations.vllm_transfer import FileTransferInit

        vllm_plugin.register()
        vllm_plugin.register()  # vLLM may call it again
        trainer = make_trainer(server.folder)
        source = ServedSource(trainer.opt)
        sender = WeightTransferTrainerFactory.trainer_init(
            FileTransferInit(rank=0), client=HTTPVLLMWeightSyncClient(server.url), source=source
        )

        def with_factory(client: Any, source: Any) -> Any:
            return WeightTransferTrainerFactory.trainer_init(
                FileTransferInit(rank=0), client=client, source=source
            )

        for _ in range(2):
            trainer.step()
            assert [(m.name, m.dtype, m.shape) for m in source.metadata()] == [
                (n, t.dtype, tuple(t.shape)) for n, t in source
            ]
            sender.send_weights()
            bits = server.bits()
            Sync(trainer.opt, ServerEngine(server.url, transfer=with_factory))()
            assert server.bits() == bits
        names = [(n, p) for n, p in trainer.model.named_parameters()][::-1]
        other = FairCastAdamW(names)  # unbound: another order, k before q
        Sync(other, ServerEngine(server.url))()

    def test_sparse_equals_whole(self, server: Server) -> None:
        from fc_optim.integrations.vllm import ServerEngine

        trainer = make_trainer(server.folder, dither="held")
        sparse = Sync(trainer.opt, ServerEngine(server.url), sparse=True)
        for _ in range(3):
            trainer.step()
            sparse()
            bits = server.bits()
            assert_serves(trainer, server.generate())
            Sync(trainer.opt, ServerEngine(server.url))()
            assert server.bits() == bits

    @pytest.mark.parametrize("how", ["dropped", "half"])
    def test_an_update_that_does_not_arrive_is_named(self, server: Server, how: str) -> None:
        from fc_optim.integrations.vllm import ServerEngine

        trainer = make_trainer(server.folder)
        engine = ServerEngine(server.url)
        sync = Sync(trainer.opt, engine, sparse=True)
        sync()
        trainer.step()
        lose: Any = engine.routes
        if how == "dropped":
            lose.update_weights = lambda info: None
        else:
            load = engine.load_patches
            lose = engine
            lose.load_patches = lambda patches, v: load(
                (p for p in patches if "layers.0" in p.name), v
            )
        text = {"dropped": "has dropped the update", "half": "kept old tensors"}[how]
        with pytest.raises(SyncError, match=text) as caught:
            sync()
        assert caught.value.problem == {"dropped": "dropped", "half": "stale"}[how]
        assert sync.version is None
        delattr(lose, "update_weights" if how == "dropped" else "load_patches")
        assert sync().digest == trainer.opt.served_digest()

    def test_a_failure_leaves_it_paused_unless_it_is_whole(self, server: Server) -> None:
        from fc_optim.integrations.vllm import ServerEngine

        trainer = make_trainer(server.folder)
        engine = ServerEngine(server.url)
        sync = Sync(trainer.opt, engine, sparse=True)
        sync()
        version = server.version()
        routes: Any = engine.routes
        update = routes.update_weights

        def fail(info: Any) -> None:
            raise ConnectionError("reset by peer")

        trainer.step()
        routes.update_weights = fail
        for _ in range(2):  # the second is whole
            with pytest.raises(SyncError, match="reset by peer"):
                sync()
            assert not server.paused()  # nothing was written
            assert server.version() == version
        server.generate()
        del routes.update_weights
        load = engine.load_patches

        def then_fail(info: Any) -> None:
            update(info)
            fail(info)

        def half(patches: Any, v: int) -> None:
            def first() -> Iterator[Any]:
                yield from (p for p in patches if "norm" in p.name)

            routes.update_weights = then_fail
            load(first(), v)

        sync()
        trainer.step()
        engine.load_patches = half  # type: ignore[assignment]
        with pytest.raises(SyncError, match="left paused: its weights are neither all old nor"):
            sync()
        assert server.paused()
        assert server.version() == "partial"
        del routes.update_weights, engine.load_patches
        assert sync().digest == trainer.opt.served_digest()
        assert not server.paused()
        assert_serves(trainer, server.generate())

    def test_one_that_answers_late_and_one_that_dies(self, server: Server) -> None:
        from fc_optim.integrations.vllm import ServerEngine

        trainer = make_trainer(server.folder)
        engine = ServerEngine(server.url)
        sync = Sync(trainer.opt, engine, recheck=False)
        sync()
        trainer.step()
        engine.routes.timeout_s = 2.0
        server.signal(signal.SIGSTOP)
        try:
            with pytest.raises(SyncError, match="no answer in 2.0 s") as caught:
                sync()
        finally:
            server.signal(signal.SIGCONT)
        assert (caught.value.problem, sync.version) == ("late", None)
        engine.routes.timeout_s = 60.0
        assert sync().digest == trainer.opt.served_digest()
        assert_serves(trainer, server.generate())

        trainer.step()
        routes: Any = engine.routes
        update = routes.update_weights

        def kill(info: Any) -> None:
            assert all(Path(p).exists() for p in info["paths"])
            self.paths = info["paths"]
            server.signal(signal.SIGKILL)
            update(info)

        routes.update_weights = kill
        with pytest.raises(SyncError, match="failed while it loaded version 2") as caught:
            sync()
        assert (caught.value.problem, sync.version) == ("failed", None)
        assert not any(Path(p).parent.exists() for p in self.paths)
