"""Open a saved training state: moments, hyper-parameters and masters of every parameter.

Reads what torch.optim and fc_optim save with `torch.save`, folders of transformers' Trainer and of
accelerate, `torch.distributed.checkpoint` (FSDP), and DeepSpeed ZeRO 1, 2 and 3.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fc_optim.audit.layers import kind_of
from fc_optim.audit.readers import inside, open_checkpoint, open_dcp
from fc_optim.audit.stored import DEEPSPEED_CLASSES, BadCheckpoint, Stored, from_parts, load_pickle
from fc_optim.params.names import clean_name

_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")
_FILES = ("optimizer.pt", "optimizer.bin", "optimizer_0.bin", "optimizer", "optimizer_0")


@dataclass(frozen=True)
class Slot:
    """One parameter of a training state.

    Attributes:
        masters: fp32 masters if the state has them, else the weights that were given.
        state: `exp_avg` and so on, each of the parameter's shape.
        step: steps taken.
        group: its hyper-parameters.
    """

    name: str
    masters: Stored
    state: dict[str, Stored]
    step: float
    group: dict[str, Any]


def open_state(
    path: Path, weights: Path | None = None, *, trust_pickle: bool = False
) -> list[Slot]:
    """The parameters of a saved training state; tensors stay on disk.

    Args:
        path: a file of `torch.save`, or a folder of accelerate, Trainer, DCP or DeepSpeed.
        weights: a checkpoint of the weights, for states that hold no masters. A folder that has
            both finds it by itself.
        trust_pickle: let `torch.load` unpickle arbitrary objects, which can run code.

    Raises BadCheckpoint with the reason.
    """
    path = Path(path)
    if not path.exists():
        raise BadCheckpoint(f"{path}: no such file or folder.")
    if path.is_dir():
        if (path / "latest").is_file():  # DeepSpeed's
            path = inside(path, (path / "latest").read_text().strip())
        if any(path.glob("*_optim_states.pt")):
            return list(_deepspeed(path, trust_pickle))
        if (path / ".metadata").exists():
            return list(_dcp(path, weights, trust_pickle))
        found = [path / f for f in _FILES if (path / f).exists()]
        if not found:
            raise BadCheckpoint(
                f"{path}: holds none of {', '.join(_FILES)}, *_optim_states.pt, .metadata."
            )
        return open_state(found[0], weights or _weights_beside(path), trust_pickle=trust_pickle)
    loaded = load_pickle(path, trust=trust_pickle, allowed=DEEPSPEED_CLASSES)
    state = _find_state(loaded)
    if state is None:
        raise BadCheckpoint(f"{path}: holds no optimizer state ('state' and 'param_groups').")
    return list(_torch(path, state, weights, trust_pickle))


def _weights_beside(folder: Path) -> Path | None:
    for name in ("pytorch_model_fsdp_0", "pytorch_model_0"):
        if (folder / name).is_dir():
            return folder / name
    models = (*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin"))
    return folder if models else None


def _find_state(value: Any) -> dict[str, Any] | None:
    if isinstance(value, dict):
        if {"state", "param_groups"} <= value.keys():
            return value
        value = [value[k] for k in ("optimizer", "optim", "optimizer_state_dict") if k in value] + [
            v for v in value.values() if isinstance(v, dict | list)
        ]
    if isinstance(value, list):
        for v in value[:64]:
            found = _find_state(v) if isinstance(v, dict | list) else None
            if found is not None:
                return found
    return None


def _torch(path: Path, saved: dict[str, Any], weights: Path | None, trust: bool) -> Iterator[Slot]:
    entries = saved["state"]
    groups = saved["param_groups"]
    try:
        numbers = [k for g in groups for k in g["params"]]
        group_of = {k: g for g in groups for k in g["params"]}
        shapes = {k: _shape(entries[k]) for k in numbers if k in entries}
    except (TypeError, KeyError, AttributeError) as error:
        raise BadCheckpoint(f"{path}: not a state of torch.optim ({error!r}).") from None
    if not shapes:
        raise BadCheckpoint(
            f"{path}: no parameter has a state: it was saved before the first step."
        )
    model = open_checkpoint(weights, trust_pickle=trust) if weights else {}
    names = _names(path, groups, shapes, model, weights)
    for k in numbers:
        if k in entries:
            state = {n: v for n, v in entries[k].items() if isinstance(v, Stored)}
            masters = state.get("master") or _weight(path, names[k], shapes[k], model)
            yield _slot(names[k], masters, state, entries[k].get("step", 1), group_of[k])


def _shape(entry: dict[str, Any]) -> tuple[int, ...]:
    found = [entry[n].shape for n in ("master", *_MOMENTS) if isinstance(entry.get(n), Stored)]
    if not found:
        raise KeyError(f"none of {_MOMENTS}: only Adam, AdamW, Muon and SGD momentum are known")
    return found[0]


def _weight(path: Path, name: str, shape: tuple[int, ...], model: dict[str, Stored]) -> Stored:
    if not model:
        raise BadCheckpoint(
            f"{path}: the state holds no masters: give the weights too, --weights CHECKPOINT."
        )
    if name not in model:
        raise BadCheckpoint(f"{path}: the weights have no {name!r}, which the state has.")
    if model[name].shape != shape:
        raise BadCheckpoint(
            f"{path}: {name!r} has shape {shape} in the state, {model[name].shape} in the weights."
        )
    return model[name]


def _slot(name: str, masters: Stored, state: dict[str, Stored], step: Any, group: Any) -> Slot:
    plain = {k: _number(v) for k, v in group.items() if k not in ("params", "param_names")}
    return Slot(name, masters, {k: v for k, v in state.items() if k in _MOMENTS},
                float(_number(step)), plain)  # fmt: skip


def _number(value: Any) -> Any:
    return value.load().item() if isinstance(value, Stored) and value.numel == 1 else value


def _names(
    path: Path,
    groups: list[dict[str, Any]],
    shapes: dict[Any, tuple[int, ...]],
    model: dict[str, Stored],
    weights: Path | None,
) -> dict[Any, str]:
    """Which parameter each number is. Never a guess: shapes must leave no choice, or the order
    must be the model's."""
    numbers = [k for g in groups for k in g["params"]]
    given = [n for g in groups for n in g.get("param_names", ())]
    if len(given) == len(numbers):
        return {k: clean_name(n) for k, n in zip(numbers, given, strict=True)}
    if all(isinstance(k, str) for k in numbers):
        return {k: clean_name(k) for k in numbers}
    if not model:
        return {k: f"param.{k}" for k in numbers}
    for order in _orders(groups, shapes, model, weights):
        if len(order) == len(numbers) and all(
            n in model and model[n].shape == shapes[k]
            for k, n in zip(numbers, order, strict=True)
            if k in shapes
        ):
            return dict(zip(numbers, order, strict=True))
    raise BadCheckpoint(
        f"{path}: the state numbers its parameters, and their shapes do not say which is which. "
        "Build the optimizer from model.named_parameters(), so that the state has names, or give "
        "weights saved by torch.save(model.state_dict()), which keep the model's order."
    )


def _orders(
    groups: list[dict[str, Any]],
    shapes: dict[Any, tuple[int, ...]],
    model: dict[str, Stored],
    weights: Path | None,
) -> Iterator[list[str]]:
    """Orders that an optimizer may have been given the model's parameters in."""
    by_shape = {t.shape: n for n, t in model.items()}
    if len(by_shape) == len(model):
        yield [by_shape.get(s, "") for s in shapes.values()]
    known = _model_order(weights, model)
    if known:
        yield known
        if len(groups) == 2:  # transformers' Trainer: with weight decay, then without

            def plain(n: str) -> bool:
                return kind_of(n, len(model[n].shape)) in ("norm", "bias")

            yield [n for n in known if not plain(n)] + [n for n in known if plain(n)]


def _model_order(weights: Path | None, model: dict[str, Stored]) -> list[str] | None:
    """The order of `model.named_parameters()`: safetensors files sort names, pickles do not."""
    if weights is None or not (weights / "config.json").is_file():
        if weights is None or weights.suffix not in (".bin", ".pt", ".pth"):
            return None
        first = {t.place or n: n for n, t in reversed(model.items())}  # a tied head is one
        return [n for n, t in model.items() if first[t.place or n] == n]
    try:
        from transformers import AutoConfig, AutoModelForCausalLM

        with torch.device("meta"):
            config = AutoConfig.from_pretrained(weights, trust_remote_code=False)
            built = AutoModelForCausalLM.from_config(config)
    except (ImportError, ValueError, OSError):
        return None
    names = [clean_name(n) for n, p in built.named_parameters() if p.requires_grad]
    return names if set(names) <= model.keys() else None


def _dcp(path: Path, weights: Path | None, trust: bool) -> Iterator[Slot]:
    """Keys are `[anything.]state.<name>.<exp_avg ...>`; hyper-parameters `param_groups...`."""
    tensors, values = open_dcp(path)
    found: dict[str, dict[str, Stored]] = {}
    steps: dict[str, Any] = {}
    for key, tensor in tensors.items():
        match = re.fullmatch(r"(?:.*?\.)?state\.(.+)\.(\w+)", key)
        if match and match[2] in (*_MOMENTS, "master"):
            found.setdefault(match[1], {})[match[2]] = tensor
        elif match and match[2] == "step":
            steps[match[1]] = tensor
    for key, load in values.items():
        match = re.fullmatch(r"(?:.*?\.)?state\.(.+)\.step", key)
        if match:
            steps[match[1]] = load()
    if not found:
        raise BadCheckpoint(f"{path}: no key of it ends in exp_avg or momentum_buffer.")
    model = _dcp_weights(path, tensors, weights, trust)
    for name, state in found.items():
        group = _dcp_group(path, name, tensors, values)
        clean = clean_name(name)
        masters = state.get("master") or _weight(path, clean, _shape(state), model)
        yield _slot(clean, masters, state, steps.get(name, 1), group)


def _dcp_weights(
    path: Path, tensors: dict[str, Stored], weights: Path | None, trust: bool
) -> dict[str, Stored]:
    if weights is None:
        beside = path.parent / path.name.replace("optimizer", "pytorch_model_fsdp")
        weights = beside if beside != path and beside.exists() else None
    if weights is not None:
        own = open_checkpoint(weights, trust_pickle=trust)
    else:
        own = {n: t for n, t in tensors.items() if not re.search(r"(^|\.)state\.", n)}
    return {clean_name(n.removeprefix("model.")): t for n, t in own.items()} | own


def _dcp_group(
    path: Path, name: str, tensors: dict[str, Stored], values: dict[str, Any]
) -> dict[str, Any]:
    """Flattened groups have one entry per parameter; others are a list of dicts with names."""
    flat = re.compile(rf"(?:.*?\.)?param_groups\.{re.escape(name)}\.(\w+)")
    group = {m[1]: t for n, t in tensors.items() if (m := flat.fullmatch(n))}
    group |= {m[1]: load() for n, load in values.items() if (m := flat.fullmatch(n))}
    if group:
        return group
    numbered = re.compile(r"(?:.*?\.)?param_groups\.(\d+)\.(\w+)")
    groups: dict[str, dict[str, Any]] = {}
    for n, load in values.items():
        if m := numbered.fullmatch(n):
            groups.setdefault(m[1], {})[m[2]] = load()
        elif re.fullmatch(r"(?:.*?\.)?param_groups", n):
            groups |= {str(i): g for i, g in enumerate(load())}
    for n, t in tensors.items():
        if m := numbered.fullmatch(n):
            groups.setdefault(m[1], {})[m[2]] = t
    mine = [g for g in groups.values() if name in (g.get("params") or ())]
    if not mine and len(groups) == 1:
        mine = list(groups.values())
    if not mine:
        raise BadCheckpoint(f"{path}: its param_groups do not say the lr and betas of {name!r}.")
    return mine[0]


def _deepspeed(path: Path, trust: bool) -> Iterator[Slot]:
    """ZeRO's partitions of flat fp32 groups, which `param_shapes` of the model files cut up."""
    ranks = _ranks(path, "*_optim_states.pt", trust)
    models = _ranks(path, "*_model_states.pt", trust)
    if not models:
        raise BadCheckpoint(f"{path}: no *_model_states.pt, which holds names and shapes.")
    try:
        states = [r["optimizer_state_dict"] for r in ranks]
        shapes = models[0]["param_shapes"]
        three = "fp32_flat_groups" in states[0]
        key = "fp32_flat_groups" if three else "single_partition_of_fp32_groups"
        bases = [s["optimizer_state_dict" if three else "base_optimizer_state"] for s in states]
        world = states[0]["partition_count"]
        world = max(world) if isinstance(world, list) else world
        groups = bases[0]["param_groups"]
        flats = [[_group_state(b, s[key], g) for b, s in zip(bases, states, strict=True)]
                 for g in range(len(shapes))]  # fmt: skip
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise BadCheckpoint(f"{path}: not files of ZeRO 1, 2 or 3 as known ({error!r}).") from None
    if len(ranks) != world:
        raise BadCheckpoint(f"{path}: {len(ranks)} *_optim_states.pt for {world} ranks.")
    for named, group, flat in zip(shapes, groups, flats, strict=True):
        at = 0
        for name, shape in named.items():
            shape = tuple(shape)
            state = {}
            for kind in flat[0]:
                if kind != "step":
                    pieces = [f[kind] for f in flat]
                    state[kind] = _cut(pieces, at, shape, each=three)
            numel = math.prod(shape)
            at += -(-numel // world) if three else numel
            yield _slot(clean_name(name), state["master"], state, flat[0].get("step", 1), group)


def _ranks(path: Path, pattern: str, trust: bool) -> list[Any]:
    def rank(file: Path) -> int:
        found = re.search(r"pp_rank_(\d+)", file.name)
        return int(found[1]) if found else 0

    files = sorted(path.glob(pattern), key=rank)
    if any("mp_rank_00" not in f.name for f in files):
        raise BadCheckpoint(f"{path}: tensor-parallel ZeRO files (mp_rank_01) are not supported.")
    return [load_pickle(f, trust=trust, allowed=DEEPSPEED_CLASSES) for f in files]


def _group_state(base: dict[str, Any], masters: list[Stored], group: int) -> dict[str, Any]:
    entry = base["state"][group]
    state = {n: v for n, v in entry.items() if n in (*_MOMENTS, "step")}
    return {"master": masters[group], **state}


def _cut(pieces: list[Stored], at: int, shape: tuple[int, ...], *, each: bool) -> Stored:
    """A parameter out of the ranks' flat partitions.

    `each` (stage 3): every rank has 1/world of every parameter. Otherwise (1, 2) the ranks'
    partitions are consecutive parts of one flat group.
    """
    left, parts, before = math.prod(shape), [], 0
    for flat in pieces:
        if each:
            start, stop = at, at + min(left, -(-math.prod(shape) // len(pieces)))
        else:
            start = min(max(at - before, 0), flat.numel)
            stop = min(start + left, flat.numel)
            before += flat.numel
        if stop > flat.numel:
            raise BadCheckpoint(f"a ZeRO partition of {flat.numel} elements ends too early.")
        parts.append((flat, start, stop))
        left -= stop - start
    return from_parts(shape, parts)
