"""TRL against a real vLLM server on a CPU, for `test_trl_vllm.py`: files in place of NCCL."""

import contextlib
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import trl_runs
from ranks import free_port
from torch import Tensor

import fc_optim
from fc_optim import FairCastAdamW

LR = 1e-6


@contextlib.contextmanager
def server(folder: Path, out: Path) -> Iterator[str]:
    """A real vLLM server on a CPU, with our weight transfer as its plugin."""
    installed = out / "site/fc_optim-0.dist-info"  # an entry point, as pip would make it
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: fc_optim\nVersion: 0\n")
    (installed / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nfc_optim = fc_optim.integrations.vllm_plugin:register\n"
    )
    port = str(free_port())
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


def served_by_http(folder: Path, out: Path) -> dict[str, Any]:
    """TRL's server mode and AsyncGRPO's own transfer, with files in place of NCCL."""
    found: dict[str, Any] = {}
    with server(folder, out) as url:
        found |= grpo_by_http(folder, out, url)
        found["async"] = async_by_http(folder, out, url)
    return found


def grpo_by_http(folder: Path, out: Path, url: str) -> dict[str, Any]:
    from trl.generation.vllm_client import VLLMClient

    from fc_optim.integrations.trl import register

    lost: dict[str, Tensor] = {}
    model, name = trl_runs.load(folder, torch.float32), "model.embed_tokens.weight"
    opt = FairCastAdamW(model.named_parameters(), lr=LR, dither="sync")
    options = {"max_steps": 4, "learning_rate": LR, "use_vllm": True, "optimizers": (opt, None)}
    options |= {"vllm_mode": "server", "vllm_server_base_url": url}

    def update_named_params(self: Any, metadata: Any, named_params: Any) -> None:
        send_files(self.base_url, ((n, lost.get(n, t)) for n, t in named_params))

    found: dict[str, Any] = {}
    try:
        trl_runs.trainer_for("GRPO", model, folder, out / "http", **options)
    except NotImplementedError as e:
        found["on a CPU"] = str(e)
    with (
        mock.patch.object(VLLMClient, "init_communicator"),
        mock.patch.object(VLLMClient, "update_named_params", update_named_params),
    ):
        trainer = trl_runs.trainer_for("GRPO", model, folder, out / "http", **options)
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


def async_by_http(folder: Path, out: Path, url: str) -> dict[str, Any]:
    import numpy as np
    from trl.experimental.async_grpo.weight_transfer import WeightTransferClient

    from fc_optim.integrations.trl import WeightTransfer, register
    from fc_optim.integrations.vllm import ServerEngine

    draw = np.random.default_rng(0)

    def generate(prompt: list[int], n: int) -> Any:
        tokens = draw.integers(2, trl_runs.WORDS, (n, 6))
        return tokens.tolist(), np.full((n, 6), -np.log(trl_runs.WORDS)).tolist()

    def make(dtype: str, **kwargs: Any) -> Any:
        return trl_runs.async_trainer(folder, out / "async", dtype, generate, **kwargs)

    def send_weights(self: Any, iterator: Any) -> None:
        send_files(self.vllm.server_url, iterator)

    with (
        mock.patch.object(WeightTransferClient, "init_weight_transfer"),
        mock.patch.object(WeightTransferClient, "send_weights", send_weights),
    ):
        trainer = make("float32", vllm_server_base_url=url)
        trainer.optimizer_cls_and_kwargs = (FairCastAdamW, {"lr": LR, "dither": "held"})
        opt = register(trainer)
        trainer.train()
        found = {"theirs": [trainer.model_version, opt.served_version]}

    engine = ServerEngine(url)
    trainer = make("bfloat16", weight_transfer=WeightTransfer(engine))
    trainer.optimizer_cls_and_kwargs = (FairCastAdamW, {"lr": LR, "dither": "sync"})
    opt = register(trainer)
    trainer.train()
    held = engine.held()
    found["ours"] = [trainer.model_version, opt.served_version, held.version]
    return found | {"digest": held.digest == opt.served_digest()}
