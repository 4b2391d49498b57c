"""TRL with a real vLLM: the engine holds what the trainer serves, at every sync.

One process runs all arms on one colocated vLLM, in eager mode on a CPU, and writes what it saw;
the tests read it. A small Qwen2 is made here. Not run: TRL's server mode and AsyncGRPO's own weight
transfer, whose client wants a CUDA device; AsyncGRPO's own attention kernel.
"""

import contextlib
import functools
import json
import os
import socket
import subprocess
import sys
import time
import traceback
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.multiprocessing as mp
import trl_runs
from torch import Tensor

import fc_optim
from fc_optim import FairCastAdamW, metrics

pytestmark = pytest.mark.vllm

STEPS, LR = 8, 1e-6
DITHERS = ("fresh", "sync", "held")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
RANK = 4


# ---- The process with the engine


class Bench:
    """One vLLM, and what the trainers that share it need."""

    def __init__(self, folder: Path, out: Path):
        import trl.generation.vllm_generation as trl_vllm

        self.folder, self.out = folder, out
        self.real = trl_vllm.LLM
        self.llm: Any = None
        trl_vllm.LLM = self.start

    def start(self, **kwargs: Any) -> Any:
        """What TRL calls for each trainer; it has no argument for eager mode."""
        return self.engine()

    def engine(self) -> Any:
        self.llm = self.llm or self.real(
            model=str(self.folder), enforce_eager=True, max_model_len=64, max_num_seqs=8,
            distributed_executor_backend="external_launcher", logprobs_mode="processed_logprobs",
        )  # fmt: skip
        return self.llm

    def model(self) -> Any:
        return self.llm.llm_engine.model_executor.driver_worker.model_runner.model

    def trainer(self, model: Any, out: str, kind: str = "GRPO", **kwargs: Any) -> Any:
        options = {"max_steps": STEPS, "learning_rate": LR, "use_vllm": True, **kwargs}
        options |= {"vllm_mode": "colocate", "vllm_max_model_length": 64}
        return trl_runs.trainer_for(kind, model, self.folder, self.out / out, **options)

    def load(self, dtype: str) -> Any:
        return trl_runs.load(self.folder, DTYPES[dtype])

    def held(self) -> dict[str, Tensor]:
        """The engine's own tensors, as the checkpoint names them; not by our adapter."""

        def read(model: torch.nn.Module) -> dict[str, Tensor]:
            return {n: p.detach().clone() for n, p in model.named_parameters()}

        (runtime,) = self.llm.apply_model(read)
        parts: dict[str, Any] = {"qkv_proj": (("q", 64), ("k", 32), ("v", 32))}
        parts["gate_up_proj"] = (("gate", 128), ("up", 128))
        found = {}
        for name, value in runtime.items():
            module = name.split(".")[-2]
            first = 0
            for part, rows in parts.get(module, ()):
                found[name.replace(module, f"{part}_proj")] = value[first : first + rows]
                first += rows
            if module not in parts:
                found[name] = value
        return found


class Watch:
    """Looks at the engine and the trainer each time that TRL generates."""

    def __init__(self, bench: Bench, trainer: Any, masters: Callable[[], dict[str, Tensor]]):
        self.bench, self.trainer, self.masters = bench, trainer, masters
        self.held: list[dict[str, Tensor]] = []
        self.moved: list[dict[str, Tensor]] = []
        self.equal: list[bool] = []
        self.logprob_errors: list[float] = []
        generation = trainer.vllm_generation
        self.generate = generation.generate
        generation.generate = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        held = self.bench.held()
        model = dict(self.trainer.model.named_parameters())
        assert held.keys() == model.keys()
        self.equal.append(all(same(held[n], p) for n, p in model.items()))
        self.held.append(held)
        self.moved.append(self.masters())
        answer = self.generate(*args, **kwargs)
        prompts, completions, logprobs, _ = answer
        if logprobs is None:  # RLOO asks for none
            return answer
        for prompt, tokens, old in zip(prompts, completions, logprobs, strict=True):
            ids = torch.tensor([[*prompt, *tokens]])
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
                logits = self.trainer.model(ids).logits[0, len(prompt) - 1 : -1]
            new = logits.float().log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])
            self.logprob_errors += (new.view(-1) - torch.tensor(old).view(-1)).abs().tolist()
        return answer

    def report(self) -> dict[str, Any]:
        start, last, masters = (flat(x) for x in (self.held[0], self.held[-1], self.moved[-1]))
        before = flat(self.held[-2])
        return {
            "syncs": len(self.held),
            "equal": self.equal,
            "captured": float(metrics.captured(last, masters, start)),
            "changed": float((last != before).float().mean()),
            "logprob_max": max(self.logprob_errors, default=0.0),
            "logprob_mean": sum(self.logprob_errors) / max(len(self.logprob_errors), 1),
        }


def same(held: Tensor, param: Tensor) -> bool:
    """Whether the engine's bf16 words are those of the trainer's parameter, in any container."""
    return held.dtype == torch.bfloat16 and torch.equal(held.to(param.dtype), param.detach())


def flat(named: dict[str, Tensor]) -> Tensor:
    return torch.cat([named[n].float().flatten() for n in sorted(named)])


def named(model: Any) -> Any:
    return model.named_parameters()


def rtn(bench: Bench) -> dict[str, Any]:
    """What people run: torch's AdamW on fp32 weights, rounded to nearest by vLLM's loader."""
    model = bench.load("fp32")
    opt = torch.optim.AdamW(model.parameters(), lr=LR)
    trainer = bench.trainer(model, "rtn", optimizers=(opt, None))
    watch = Watch(bench, trainer, lambda: {n: p.detach().clone() for n, p in named(model)})
    trainer.train()
    return watch.report()


def fair_cast(bench: Bench, dtype: str, dither: str, **kwargs: Any) -> dict[str, Any]:
    from fc_optim.integrations.trl import register

    model = bench.load(dtype)
    for name in kwargs.pop("frozen", ()):
        model.get_parameter(name).requires_grad_(False)
    trained = [(n, p) for n, p in named(model) if p.requires_grad]
    opt = FairCastAdamW(trained, lr=LR, dither=dither, seed=7)
    trainer = bench.trainer(model, f"{dtype}-{dither}", optimizers=(opt, None), **kwargs)
    assert register(trainer) is opt
    register(trainer)  # may be called again
    watch = Watch(bench, trainer, lambda: dict(opt.master_params(copy=True)))
    trainer.train()
    losses = [row for row in trainer.state.log_history if "loss" in row]
    visible = [row.get("sampling/sampling_logp_difference/max", 0.0) for row in losses]
    return watch.report() | {
        "logged": [row["served_version"] for row in losses],
        "visible": max(visible),
    }


def resumed(bench: Bench, dtype: str, dither: str) -> dict[str, Any]:
    from fc_optim.integrations.trl import register

    def run(resume: str | None) -> tuple[Any, Any, Watch]:
        model = bench.load(dtype)
        trainer = bench.trainer(model, "resumed", save_strategy="steps", save_steps=4)
        trainer.optimizer_cls_and_kwargs = (FairCastAdamW, {"lr": LR, "dither": dither})
        opt = register(trainer)
        watch = Watch(bench, trainer, lambda: dict(opt.master_params(copy=True)))
        trainer.train(resume_from_checkpoint=resume)
        return model, opt.state_dict(), watch

    model, state, whole = run(None)
    again, state2, rest = run(str(bench.out / "resumed/checkpoint-4"))
    tensors = [(k, i) for i, entry in state["state"].items() for k in entry]
    return {
        "syncs": [len(whole.equal), len(rest.equal)],
        "equal": rest.equal,
        "weights": all(torch.equal(p, q) for p, q in zip(
            model.parameters(), again.parameters(), strict=True)),
        "state": all(torch.equal(state["state"][i][k], state2["state"][i][k]) for k, i in tensors),
        "kinds": sorted({k for k, _ in tensors}),
        "groups": state["param_groups"] == state2["param_groups"],
        "held": all(torch.equal(whole.held[-1][n], t) for n, t in rest.held[-1].items()),
    }  # fmt: skip


def broken(bench: Bench) -> dict[str, Any]:
    """The engine loses one tensor from the third sync on; then something else writes into it."""
    from fc_optim.integrations.trl import register

    def run(out: str, spoil: Callable[[Any, Any], None]) -> list[str]:
        model = bench.load("fp32")
        opt = FairCastAdamW(model.named_parameters(), lr=1e-4)
        trainer = bench.trainer(model, out, optimizers=(opt, None))
        register(trainer)
        spoil(trainer, bench.model())
        try:
            trainer.train()
        except fc_optim.SyncError as e:
            return [e.problem, str(e), str(trainer.state.global_step)]
        return ["none", "", ""]

    def lose(trainer: Any, engine: Any) -> None:
        load = type(engine).load_weights

        def some(weights: Any) -> Any:
            weights = list(weights)
            if trainer.state.global_step < 2 or weights[0][0] != "model.norm.weight":
                return load(engine, weights)

        engine.load_weights = some

    def write(trainer: Any, engine: Any) -> None:
        step = trainer.training_step

        def training_step(*args: Any, **kwargs: Any) -> Any:
            out = step(*args, **kwargs)
            engine.get_parameter("model.norm.weight").data[0] = 3.0
            return out

        trainer.training_step = training_step

    found = {"lost": run("lost", lose)}
    del bench.model().load_weights
    return found | {"written": run("written", write)}


def lora(bench: Bench, dtype: str) -> dict[str, Any]:
    """What TRL's merge does: to the base weights in the trainer, and to what the engine gets."""
    import peft

    from fc_optim.integrations.trl import register

    config = peft.LoraConfig(r=RANK, lora_alpha=RANK, target_modules=["q_proj", "v_proj"])
    trainer = bench.trainer(
        bench.load(dtype), f"lora-{dtype}", peft_config=config, max_steps=4, learning_rate=1e-3
    )
    trainer.optimizer_cls_and_kwargs = (FairCastAdamW, {"lr": 1e-3})
    try:
        register(trainer)
    except ValueError as e:
        refused = str(e)
    opt = register(trainer, verify=False)
    model = trainer.model
    base = {n: p.detach().clone() for n, p in named(model) if not p.requires_grad}
    adapters = {e.slot.name: e.param.dtype for e in opt.managed()}
    trainer.train()
    trainer.vllm_generation.sync_weights()
    drift = {n: p.detach() != base[n] for n, p in named(model) if n in base}
    held, layer = bench.held(), model.base_model.model.model.layers[0].self_attn.q_proj
    delta = layer.get_delta_weight("default").detach()
    exact = layer.base_layer.weight.detach().float() + delta.float()
    return {
        "refused": refused,
        "adapters": sorted({str(d) for d in adapters.values()}),
        "managed": all("lora_" in n for n in adapters) and len(adapters) == 8,
        "nearest": float(
            (held["model.layers.0.self_attn.q_proj.weight"] == exact.bfloat16()).float().mean()
        ),
        "drifted": float(torch.cat([d.flatten() for n, d in drift.items() if ".q_proj" in n
                                    and n.endswith("base_layer.weight")]).float().mean()),
        "elsewhere": any(bool(d.any()) for n, d in drift.items() if "base_layer.weight" not in n),
        "checked": opt.check() == {},
    }  # fmt: skip


def async_trainer(bench: Bench, dtype: str, generate: Callable[..., Any], **kwargs: Any) -> Any:
    """The real AsyncGRPO, with a worker that generates in this process after each of its syncs."""
    trl_runs.let_async_grpo_run_on_a_cpu(setattr)
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    own = {"weight_transfer": kwargs.pop("weight_transfer", None)}
    args = AsyncGRPOConfig(
        str(bench.out / "async"), max_steps=4, per_device_train_batch_size=8, token_budget=0,
        dtype={"fp32": "float32", "bf16": "bfloat16"}[dtype], use_cpu=True, report_to="none",
        disable_tqdm=True, save_strategy="no", num_generations=4, **kwargs,
    )  # fmt: skip
    worker: Any = trl_runs.Worker(generate, [[5, 6, 7], [9, 8, 7]], 4)
    return AsyncGRPOTrainer(
        str(bench.folder), args=args, train_dataset=trl_runs.prompts(), rollout_worker=worker, **own
    )


def async_grpo(bench: Bench, dtype: str, dither: str) -> dict[str, Any]:
    from vllm import SamplingParams

    from fc_optim.integrations.trl import WeightTransfer, register
    from fc_optim.integrations.vllm import OfflineEngine

    equal: list[bool] = []

    def generate(prompt: list[int], n: int) -> Any:
        held, model = bench.held(), dict(named(trainer.model))
        equal.append(all(same(held[k], p) for k, p in model.items()))
        sampling = SamplingParams(n=n, max_tokens=8, logprobs=0)
        (answer,) = bench.llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        tokens = [list(o.token_ids) for o in answer.outputs]
        return tokens, [[p[t].logprob for p, t in zip(o.logprobs, o.token_ids, strict=True)]
                        for o in answer.outputs]  # fmt: skip

    transfer = WeightTransfer(OfflineEngine(bench.engine()))
    for attempt in ("without register", "with it"):
        trainer = async_trainer(bench, dtype, generate, weight_transfer=transfer)
        trainer.optimizer_cls_and_kwargs = (FairCastAdamW, {"lr": LR, "dither": dither})
        if attempt == "with it":
            opt = register(trainer)
            trainer.train()
            continue
        try:
            trainer.train()
        except RuntimeError as e:
            unregistered = str(e)
    held = transfer.engine.held()
    return {
        "equal": equal,
        "unregistered": unregistered,
        "versions": [trainer.model_version, opt.served_version, held.version],
        "digest": held.digest == opt.served_digest(),
    }


@contextlib.contextmanager
def server(folder: Path, out: Path) -> Iterator[str]:
    """A real vLLM server on a CPU, with our weight transfer as its plugin."""
    installed = out / "site/fc_optim-0.dist-info"  # an entry point, as pip would make it
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: fc_optim\nVersion: 0\n")
    (installed / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nfc_optim = fc_optim.integrations.vllm_plugin:register\n"
    )
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    paths = [str(installed.parent), str(Path(fc_optim.__file__).parents[1])]
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE",
           "MASTER_ADDR", "MASTER_PORT", "VLLM_ENABLE_V1_MULTIPROCESSING")}  # fmt: skip
    env |= {"PYTHONPATH": ":".join(paths), "FC_OPTIM_VLLM_PLAIN": "1", "VLLM_SERVER_DEV_MODE": "1"}
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--port", port, "--enforce-eager", "--max-model-len", "64", "--max-num-seqs", "8"]
    command += ["--weight-transfer-config", '{"backend": "fc_optim"}', "--host", "127.0.0.1"]
    command += ["--logprobs-mode", "processed_logprobs"]
    with (out / "server.log").open("w") as log:
        running = subprocess.Popen(command, env=env, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(120):
            try:
                urllib.request.urlopen(f"{url}/health")
                break
            except OSError:
                if running.poll() is not None:
                    raise RuntimeError((out / "server.log").read_text()[-3000:]) from None
                time.sleep(1)
        yield url
    finally:
        running.terminate()
        running.wait()


def send_files(url: str, weights: Iterable[tuple[str, Tensor]]) -> None:
    """In place of TRL's NCCL broadcast."""
    from fc_optim.integrations.vllm_transfer import FileTransfer, FileTransferInit, Routes

    routes, source = Routes(url, 60.0), list(weights)
    routes.version = "unknown"
    init: Any = FileTransferInit(rank=0)
    FileTransfer.trainer_init(init, client=routes, source=source).send_weights()  # type: ignore[arg-type]


def served_by_http(bench: Bench) -> dict[str, Any]:
    """TRL's server mode and AsyncGRPO's own transfer, with files in place of NCCL."""
    found: dict[str, Any] = {}
    with server(bench.folder, bench.out) as url:
        found |= grpo_by_http(bench, url)
        found["async"] = async_by_http(bench, url)
    return found


def grpo_by_http(bench: Bench, url: str) -> dict[str, Any]:
    from trl.generation.vllm_client import VLLMClient

    from fc_optim.integrations.trl import register

    lost: dict[str, Tensor] = {}
    model, name = bench.load("fp32"), "model.embed_tokens.weight"
    opt = FairCastAdamW(model.named_parameters(), lr=LR, dither="sync")
    options = {"max_steps": 4, "learning_rate": LR, "use_vllm": True, "optimizers": (opt, None)}
    options |= {"vllm_mode": "server", "vllm_server_base_url": url}

    def update_named_params(self: Any, metadata: Any, named_params: Any) -> None:
        send_files(self.base_url, ((n, lost.get(n, t)) for n, t in named_params))

    found: dict[str, Any] = {}
    try:
        trl_runs.trainer_for("GRPO", model, bench.folder, bench.out / "http", **options)
    except NotImplementedError as e:
        found["on a CPU"] = str(e)
    with (
        mock.patch.object(VLLMClient, "init_communicator"),
        mock.patch.object(VLLMClient, "update_named_params", update_named_params),
    ):
        trainer = trl_runs.trainer_for("GRPO", model, bench.folder, bench.out / "http", **options)
        register(trainer)
        trainer.train()
        rows = [row for row in trainer.state.log_history if "loss" in row]
        found["visible"] = max(row["sampling/sampling_logp_difference/max"] for row in rows)
        found["version"] = opt.served_version
        trainer.vllm_generation.sync_weights()
        lost[name] = model.get_parameter(name).detach().clone()
        try:
            trainer.vllm_generation.sync_weights()  # which redraws
        except fc_optim.SyncError as e:
            found["problem"] = [e.problem, *e.parameters]
    return found


def async_by_http(bench: Bench, url: str) -> dict[str, Any]:
    import numpy as np
    from trl.experimental.async_grpo.weight_transfer import WeightTransferClient

    from fc_optim.integrations.trl import register

    draw = np.random.default_rng(0)

    def generate(prompt: list[int], n: int) -> Any:
        tokens = draw.integers(2, trl_runs.WORDS, (n, 6))
        return tokens.tolist(), np.full((n, 6), -np.log(trl_runs.WORDS)).tolist()

    def send_weights(self: Any, iterator: Any) -> None:
        send_files(self.vllm.server_url, iterator)

    with (
        mock.patch.object(WeightTransferClient, "init_weight_transfer"),
        mock.patch.object(WeightTransferClient, "send_weights", send_weights),
    ):
        trainer = async_trainer(bench, "fp32", generate, vllm_server_base_url=url)
        trainer.optimizer_cls_and_kwargs = (FairCastAdamW, {"lr": LR, "dither": "held"})
        opt = register(trainer)
        trainer.train()
    return {"versions": [trainer.model_version, opt.served_version]}


def arms() -> dict[str, Callable[[Bench], dict[str, Any]]]:
    found: dict[str, Callable[[Bench], dict[str, Any]]] = {"rtn": rtn}
    for dtype in DTYPES:
        for dither in DITHERS:
            found[f"{dtype}-{dither}"] = functools.partial(fair_cast, dtype=dtype, dither=dither)
            found[f"async-{dtype}-{dither}"] = functools.partial(
                async_grpo, dtype=dtype, dither=dither
            )
        found[f"lora-{dtype}"] = functools.partial(lora, dtype=dtype)
    found["rloo"] = functools.partial(fair_cast, dtype="fp32", dither="sync", kind="RLOO")
    found["several"] = functools.partial(
        fair_cast, dtype="bf16", dither="sync", steps_per_generation=2
    )
    frozen = ["model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"]
    found["frozen"] = functools.partial(fair_cast, dtype="fp32", dither="fresh", frozen=frozen)
    found["resumed-fp32"] = functools.partial(resumed, dtype="fp32", dither="fresh")
    found["resumed-bf16"] = functools.partial(resumed, dtype="bf16", dither="sync")
    return found | {"broken": broken, "server": served_by_http}


def process(rank: int, folder: Path, out: Path, only: str | None = None) -> None:
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_CPU_OMP_THREADS_BIND="nobind", HF_HUB_OFFLINE="1",
    )  # fmt: skip
    os.environ.pop("TRITON_INTERPRET", None)  # vLLM cannot rebind interpreted kernels
    torch.set_num_threads(1)
    from trl.trainer.utils import ensure_master_addr_port

    from fc_optim.integrations.vllm import keep_plain_weights

    keep_plain_weights()
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")  # as TRL does
    ensure_master_addr_port()
    bench, results = Bench(folder, out), {}
    for name, run in arms().items():
        if only is None or only in name:
            try:
                results[name] = run(bench)
            except Exception:
                results[name] = {"error": traceback.format_exc()}
    (out / "results.json").write_text(json.dumps(results))
    os._exit(0)  # an engine's threads need not end well


# ---- The tests


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder, out = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("runs")
    trl_runs.save_model(folder)
    mp.spawn(process, (folder, out), nprocs=1)
    found: dict[str, Any] = json.loads((out / "results.json").read_text())
    return found


def ran(results: dict[str, Any], arm: str) -> dict[str, Any]:
    found: dict[str, Any] = results[arm]
    assert "error" not in found, found["error"]
    print(arm, found)
    return found


@pytest.mark.parametrize("dither", DITHERS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_engine_holds_what_the_trainer_serves_at_every_sync(dtype, dither, results):
    found = ran(results, f"{dtype}-{dither}")
    assert found["equal"] == [True] * STEPS
    assert 0.9 < found["captured"] < 1.1
    per_step = 2 if dither == "sync" else 1  # the step and the redraw before the sync
    assert found["logged"] == [per_step * (i + 1) for i in range(STEPS)]
    assert found["changed"] < 0.03 if dither == "held" else 0.05 < found["changed"] < 0.3


@pytest.mark.parametrize("arm", ["rtn", *(f"{t}-{d}" for t in DTYPES for d in DITHERS)])
def test_log_probs_of_engine_and_trainer_agree(arm, results):
    """Both compute in bf16, by other kernels; a log-prob is about -4.8."""
    found = ran(results, arm)
    assert found["logprob_mean"] < 2e-3
    assert found["logprob_max"] < 2e-2
    if arm != "rtn":
        assert found["visible"] == pytest.approx(found["logprob_max"], abs=5e-3)  # TRL's own


def test_rloo_syncs_by_the_same_method(results):
    found = ran(results, "rloo")
    assert found["equal"] == [True] * STEPS
    assert found["logged"] == [2 * (i + 1) for i in range(STEPS)]


def test_frozen_weights_may_be_fused_with_trained_ones(results):
    found = ran(results, "frozen")
    assert found["equal"] == [True] * STEPS
    assert found["logged"] == list(range(1, STEPS + 1))


def test_dither_sync_redraws_once_per_sync_of_two_steps(results):
    found = ran(results, "several")
    assert found["equal"] == [True] * (STEPS // 2)
    assert found["logged"] == [2, 3, 5, 6, 8, 9, 11, 12]


def test_round_to_nearest_lags(results):
    found = ran(results, "rtn")
    assert found["equal"] == [True] + [False] * (STEPS - 1)
    assert found["captured"] < 0.5
    assert found["changed"] < 0.03


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_resumed_run_equals_the_uninterrupted_one(dtype, results):
    found = ran(results, f"resumed-{dtype}")
    assert found["syncs"] == [8, 4] and all(found["equal"])
    assert found["kinds"] == ["exp_avg", "exp_avg_sq", "master", "param_id", "step"]
    assert found["weights"] and found["state"] and found["groups"] and found["held"]


def test_an_engine_that_holds_something_else_stops_the_run(results):
    found = ran(results, "broken")
    problem, text, step = found["lost"]
    assert (problem, step) == ("stale", "2") and "model.norm.weight" in text
    problem, text, step = found["written"]
    assert (problem, step) == ("changed", "1") and "something else writes into it" in text


@pytest.mark.parametrize("dtype", DTYPES)
def test_trl_rounds_merged_adapters_to_nearest_and_moves_the_base(dtype, results):
    found = ran(results, f"lora-{dtype}")
    assert found["refused"].startswith("verify: True cannot be with a merged adapter.")
    assert found["managed"] and found["checked"]
    assert found["adapters"] == ["torch.float32"]  # PEFT's default, also on a bf16 model
    assert found["nearest"] > 0.95
    assert 0 < found["drifted"] < 0.5 and not found["elsewhere"]  # unmerging restores no bits


@pytest.mark.parametrize("dither", DITHERS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_async_grpo_serves_through_the_weight_transfer(dtype, dither, results):
    found = ran(results, f"async-{dtype}-{dither}")
    assert len(found["equal"]) == 12 and all(found["equal"])
    served = 9 if dither == "sync" else 4
    assert found["versions"] == [5, served, served] and found["digest"]
    assert "call fc_optim.integrations.trl.register(trainer)" in found["unregistered"]


def test_server_mode_but_for_nccl(results):
    found = ran(results, "server")
    assert "NCCL weight-transfer engine, which needs a CUDA device" in found["on a CPU"]
    assert found["version"] == 8 and found["visible"] < 2e-2
    assert found["problem"] == ["stale", "model.embed_tokens.weight"]
    assert found["async"] == {"versions": [5, 4]}  # proved five times
