"""What runs in vLLM's own processes: writing whole fused parameters, reading what is held.

The functions get vLLM's worker, by `LLM.collective_rpc`; `WeightReceiver` is the other end of
`FileTransfer`.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.weight_transfer import WeightTransferEngine
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.checkpoint_weight_patch import (
    CheckpointWeightPatch,
    load_checkpoint_weight_patches,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from fc_optim.integrations.vllm_layout import Layout, check_shapes, emptied
from fc_optim.sync.manifests import Entry, manifest
from fc_optim.sync.patches import Patch

# ---- The model of a worker


def layout_of(model: nn.Module, config: VllmConfig) -> Layout:
    """Raises NotImplementedError for a model that is split, quantised or repacked."""
    parallel = config.parallel_config
    if parallel.tensor_parallel_size * parallel.pipeline_parallel_size > 1:
        raise NotImplementedError(
            f"engine: tensor_parallel_size={parallel.tensor_parallel_size}, pipeline_parallel_size="
            f"{parallel.pipeline_parallel_size}: what an engine holds that is split cannot be told "
            "yet. Run one engine for each device."
        )
    if config.model_config.quantization is not None:
        raise NotImplementedError(
            f"engine: quantization={config.model_config.quantization!r}: it computes with other "
            "bits than are sent, so no sync can be proved. Start it without."
        )
    shapes = shapes_of(model)
    for name, shape in shapes.items():
        if 0 in shape:
            raise NotImplementedError(emptied(name))
    return Layout(frozenset(shapes), getattr(model, "packed_modules_mapping", {}))


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


def _write_patches(model: nn.Module, patches: Iterable[Patch]) -> None:
    rows = [
        CheckpointWeightPatch(p.name, tuple(p.shape), p.values.dtype, p.values, p.indices)
        for p in patches
    ]
    load_checkpoint_weight_patches(model, rows)


# ---- What OfflineEngine calls: plain lists and dicts, which reach an LLM in another process too


def describe(worker: Any) -> tuple[dict[str, Sequence[str]], dict[str, tuple[int, ...]]]:
    """Which parameters the model fuses, and the shapes of its own. Raises as `layout_of`."""
    model = worker.model_runner.get_model()
    layout = layout_of(model, worker.vllm_config)
    return dict(layout.packed), shapes_of(model)


@torch.no_grad()
def load_group(worker: Any, group: Sequence[tuple[str, Tensor]]) -> None:
    """Write one whole runtime parameter in place, through the model's own loader."""
    with set_current_vllm_config(worker.vllm_config):
        worker.model_runner.get_model().load_weights(group)


def load_patches(worker: Any, patches: Sequence[Patch]) -> None:
    """Write new words in place. A patch may be for a part of a fused parameter."""
    with set_current_vllm_config(worker.vllm_config):
        _write_patches(worker.model_runner.get_model(), patches)


def finish(worker: Any) -> None:
    """Drop what was computed from older weights, except for the prefix cache."""
    worker.model_runner.reset_lora_state()
    worker.model_runner.reset_encoder_cache()


def read(worker: Any, rows: dict[str, int]) -> list[tuple[str, Tensor]]:
    """What the model computes with, by checkpoint names: views of its memory.

    rows: checkpoint name -> its rows, which tell where it lies in a fused parameter.
    """
    model = worker.model_runner.get_model()
    layout = layout_of(model, worker.vllm_config)
    named: list[tuple[str, Tensor]] = []
    for name in rows:
        runtime, parts = layout.place(name)
        first = sum(rows[part] for part in parts[: parts.index(name)])
        named.append((name, model.get_parameter(runtime).detach()[first : first + rows[name]]))
    return named


def entries(worker: Any, rows: dict[str, int]) -> dict[str, Entry]:
    """The same as entries of a manifest."""
    return dict(manifest(None, read(worker, rows)).parameters)


# ---- The other end of FileTransfer


@dataclass
class ReceiverInit(WeightTransferInitInfo):
    """Nothing is agreed on beforehand."""


@dataclass
class Files(WeightTransferUpdateInfo):
    """One whole update. paths: safetensors files; patches: of `write_patches`, else of weights."""

    paths: list[str] = field(default_factory=list)
    patches: bool = False


class WeightReceiver(WeightTransferEngine[ReceiverInit, Files]):
    """Takes an update from files that the trainer wrote, as vLLM's own backends take theirs.

    Every update is checked as a whole before anything is written: all parts of fused parameters,
    shapes, and that no parameter is left out.
    """

    init_info_cls = ReceiverInit
    update_info_cls = Files
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: ReceiverInit) -> None:
        layout_of(self.model, self.vllm_config)  # refuses what cannot be served

    def start_weight_update(self) -> None:
        pass  # a layerwise reload takes the weights out of the model: only once they are here

    def finish_weight_update(self) -> None:
        pass

    def shutdown(self) -> None:
        pass

    @torch.no_grad()
    def receive_weights(self, update_info: Files) -> None:
        missing = [path for path in update_info.paths if not Path(path).exists()]
        if missing:
            raise ValueError(
                f"folder: the engine does not see {missing[0]}, which the trainer wrote; give "
                "ServerEngine(folder=) a folder that both see."
            )
        files = [safe_open(path, "pt") for path in update_info.paths]
        layout = layout_of(self.model, self.vllm_config)
        if update_info.patches:
            patches = [p for file in files for p in _read_patches(file)]
            for p in patches:
                layout.place(p.name)
            return _write_patches(self.model, patches)
        named = {name: file for file in files for name in file.keys()}  # noqa: SIM118
        layout.check_whole(named.keys())
        layout.check_covered(named)
        sent = {name: file.get_slice(name).get_shape() for name, file in named.items()}
        check_shapes(layout, sent, shapes_of(self.model))
        initialize_layerwise_reload(self.model)
        try:
            self.model.load_weights((name, file.get_tensor(name)) for name, file in named.items())
        finally:
            finalize_layerwise_reload(self.model, self.model_config)


def _read_patches(file: Any) -> Iterator[Patch]:
    for name, shape in json.loads(file.metadata()["shapes"]).items():
        yield Patch(name, tuple(shape), file.get_tensor(f"{name}:i"), file.get_tensor(f"{name}:v"))
