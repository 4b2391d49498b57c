"""What the process of `test_trl_vllm.py` runs: TRL's trainers, on one vLLM and on one server."""

import functools
import json
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import trl_runs
import trl_server
from torch import Tensor

import fc_optim
from fc_optim import FairCastAdamW, metrics

STEPS, LR = 8, 1e-6
DITHERS = ("fresh", "sync", "held")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
RANK = 4


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
    adapters = {e.identity.name: e.param.dtype for e in opt.managed()}
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
        trainer = trl_runs.async_trainer(
            bench.folder, bench.out / "async", str(DTYPES[dtype]).removeprefix("torch."), generate,
            weight_transfer=transfer,
        )  # fmt: skip
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


def by_http(bench: Bench) -> dict[str, Any]:
    return trl_server.served_by_http(bench.folder, bench.out)


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
    return found | {"broken": broken, "server": by_http}


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
