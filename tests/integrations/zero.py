"""One model under DeepSpeed, step by step beside the run without it."""

import contextlib
import logging
import os
import weakref
import zlib
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import caches  # noqa: E402
import deepspeed  # noqa: E402
import pytest  # noqa: E402
import ranks  # noqa: E402
import strategies  # noqa: E402
import torch  # noqa: E402
from deepspeed.comm.torch import build_shm_op  # noqa: E402
from deepspeed.runtime.config import DeepSpeedConfigError  # noqa: E402
from strategies import Model, gradients  # noqa: E402

from fc_optim import FairCastOptimizer  # noqa: E402
from fc_optim.integrations.deepspeed import attach, register  # noqa: E402

STEPS = 4
logging.getLogger("DeepSpeed").setLevel(logging.ERROR)


def start(rank: int, world: int, rendezvous: str) -> None:
    # DeepSpeed asks for a port; it goes into the name of memory that the ranks of one job share.
    port = str(zlib.crc32(rendezvous.encode()))
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=port)
    with caches.building_extensions():
        build_shm_op()
    ranks.start(rank, world, rendezvous)
    deepspeed.init_distributed("gloo", verbose=False)
    torch.distributed.barrier()
    forget_shared_memory(port)


def forget_shared_memory(port: str) -> None:
    """All ranks have it open. Nobody else removes its name, and 66 MB of each rank would stay."""
    for file in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_*"):
        file.unlink(missing_ok=True)


def config(stage: int, offload: bool = False, top: Any = None, **zero: Any) -> dict[str, Any]:
    zero = {"stage": stage, "reduce_bucket_size": 100, **zero}
    if stage == 3:  # many sub-groups
        zero = {"sub_group_size": 100, "stage3_param_persistence_threshold": 0, **zero}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
    made = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "gradient_clipping": 0.0,  # DeepSpeed's default is 1
        "steps_per_print": 10**6,
    }
    return made | (top or {})


def groups(model: torch.nn.Module, several: bool = False) -> list[Any]:
    named = list(model.named_parameters())
    if not several:
        return named
    flat = [(n, p) for n, p in named if getattr(p, "ds_shape", p.shape)[1:] == ()]
    rest = [(n, p) for n, p in named if getattr(p, "ds_shape", p.shape)[1:] != ()]
    return [{"params": rest}, {"params": flat, "weight_decay": 0.0, "lr": 3e-3}]


def initialize(
    ds_config: dict[str, Any],
    several: bool = False,
    init: bool = False,
    make: Any = strategies.optimizer,
    **options: Any,
) -> tuple[Any, Any]:
    """The engine and its optimizer, not attached. `init`: parameters are made partitioned."""
    ds_config = register(ds_config)
    with deepspeed.zero.Init(config_dict_or_path=ds_config) if init else contextlib.nullcontext():
        model = Model()
    opt = make(groups(model.bfloat16() if not init else model, several), **options)
    engine, *_ = deepspeed.initialize(model=model, optimizer=opt, config=ds_config)
    return engine, opt


def reference(engine: Any, several: bool = False, **options: Any) -> tuple[Any, Any]:
    """The run without DeepSpeed, from the weights that the engine has now."""
    model = Model().float()
    with torch.no_grad():
        for name, value in weights(engine).items():
            model.get_parameter(name).copy_(value)
    opt = strategies.optimizer(groups(model, several), **options)
    return model, opt.bind(model)


def weights(engine: Any) -> dict[str, torch.Tensor]:
    """The module's own weights, whole."""
    found = {}
    for name, p in engine.module.named_parameters():
        sharded = hasattr(p, "ds_id")
        with deepspeed.zero.GatheredParameters([p]) if sharded else contextlib.nullcontext():
            found[name] = p.detach().clone()
    return found


def train_engine(engine: Any, steps: Any) -> None:
    for i in steps:
        for _ in range(engine.gradient_accumulation_steps()):
            engine.backward(engine(gradients(i)))
            engine.step()


def train(model: Any, opt: torch.optim.Optimizer, steps: Any, scale: Any = 1.0) -> None:
    for i in steps:
        for name, g in gradients(i).items():
            model.get_parameter(name).grad = g * scale
        opt.step()


def clip_scale(engine: Any) -> Any:
    """What DeepSpeed multiplies gradients by, from the norm that it found."""
    limit = engine.gradient_clipping()
    if not limit:
        return 1.0
    norm = engine.optimizer._global_grad_norm  # a tensor or a float, as the stage has it
    return 1.0 / max((norm + 1e-6) / limit, 1.0)


def result(opt: FairCastOptimizer) -> dict[str, Any]:
    digest = opt.served_digest().parameters
    return {
        "served": dict(opt.served_params(copy=True)),
        "masters": dict(opt.master_params(copy=True)),
        "digest": digest,
        "version": opt.served_version,
    }


def differences(expected: dict[str, Any], got: dict[str, Any]) -> list[str]:
    """As values: a frozen weight is bf16 in the engine and fp32 in the reference."""

    def wide(found: dict[str, Any]) -> dict[str, Any]:
        wider = {k: {n: t.float() for n, t in found[k].items()} for k in ("served", "masters")}
        digest = {k: v for k, v in found["digest"].items() if k != "frozen.weight"}
        return {**wider, "digest": digest, "version": found["version"]}

    return strategies.differences(wide(expected), wide(got))


def beside(ds_config: dict[str, Any], several: bool = False, init: bool = False) -> list[str]:
    """Train both; what differs between them after any step."""
    engine, opt = initialize(ds_config, several, init)
    model, ref = reference(engine, several)
    assert attach(engine) is opt
    bad = []
    for i in range(STEPS):
        train_engine(engine, [i])
        train(model, ref, [i], clip_scale(engine))
        for name, value in weights(engine).items():
            if not torch.equal(value.float(), model.get_parameter(name).float()):
                bad.append(f"step {i}: module's {name}")
    return bad + differences(result(ref), result(opt))


OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "0": (config(0), {}),
    "0 clipped": (config(0, top={"gradient_clipping": 1.0}), {"several": True}),
    "1": (config(1), {}),
    "1 fp32 gradients": (
        config(
            1,
            top={"data_types": {"grad_accum_dtype": "fp32"}, "gradient_accumulation_steps": 2},
        ),
        {"several": True},
    ),
    "1 round robin": (config(1, round_robin_gradients=True), {}),
    "1 offloaded": (config(1, True), {"several": True}),
    "2": (config(2, overlap_comm=True, contiguous_gradients=True), {"several": True}),
    "2 round robin": (config(2, round_robin_gradients=True, contiguous_gradients=False), {}),
    "2 offloaded": (config(2, True, top={"gradient_clipping": 1.0}), {}),
    "3": (config(3), {}),
    "3 persistent": (
        config(3, stage3_param_persistence_threshold=20, overlap_comm=True),
        {"several": True},
    ),
    "3 offloaded": (config(3, True, top={"gradient_clipping": 1.0}), {}),
    "3 init, offloaded weights": (
        config(3, True, offload_param={"device": "cpu", "pin_memory": False}),
        {"init": True},
    ),
}


# ---- What the processes of a test run


def compare(names: list[str]) -> None:
    bad = []
    for name in names:
        ds_config, how = OPTIONS[name]
        bad += [f"{name}: {d}" for d in beside(ds_config, **how)]
    assert not bad, f"{len(bad)} differences, such as {bad[:5]}"


def plain_adamw(params: Any) -> torch.optim.Optimizer:
    params = [p if isinstance(p, dict) else p[1] for p in params]
    return torch.optim.AdamW(params, lr=1e-3, weight_decay=0.1)


def check_behaviour() -> None:
    rounds_to_nearest_without_us()
    refusals()
    sub_groups_are_looked_at_once()
    one_parameter_whole()


def rounds_to_nearest_without_us() -> None:
    """The comparison can fail: torch's AdamW leaves masters that DeepSpeed rounds to nearest."""
    for stage in (0, 1, 2, 3):
        engine, _ = initialize(config(stage), make=plain_adamw)
        model, ref = reference(engine)
        plain = Model().bfloat16().float()
        opt = plain_adamw(groups(plain))
        if stage == 0:  # DeepSpeed tries a step, with decay
            train(plain, opt, [0], scale=0.0)
        with pytest.raises(TypeError, match="steps AdamW"):
            attach(engine)
        for i in range(STEPS):
            train_engine(engine, [i])
            train(model, ref, [i])
            train(plain, opt, [i])
        nearest = other = 0
        for name, value in weights(engine).items():
            nearest += int((value == plain.get_parameter(name).bfloat16()).sum())
            other += int((value.float() != model.get_parameter(name)).sum())
        total = sum(p.numel() for p in plain.parameters())
        assert nearest > 0.99 * total and other > 0.1 * total, (stage, nearest, other, total)


def refusals() -> None:
    engine, opt = initialize(config(0))
    assert not opt.state  # DeepSpeed has tried a step
    before = weights(engine)
    engine, opt = initialize(config(1))
    with pytest.raises(RuntimeError, match=r"attach\(engine\)"):
        train_engine(engine, [0])
    assert all(torch.equal(before[n], v) for n, v in weights(engine).items())

    engine, _ = initialize(config(1), make=lambda ps: strategies.optimizer([{"params": ps,
                           "served_dtype": None}]))  # fmt: skip
    with pytest.raises(ValueError, match="served_dtype"):
        attach(engine)

    def muon(ps: Any) -> Any:
        matrices = [(n, p) for n, p in ps if len(getattr(p, "ds_shape", p.shape)) == 2]
        return strategies.optimizer([{"params": matrices, "algorithm": "muon"}])

    with pytest.raises(DeepSpeedConfigError, match="MiCS ZeRO-3 sharding has been removed"):
        initialize(config(3, mics_shard_size=2))
    engine, _ = initialize(config(1))
    engine._config._param_dict["bf16"] = {"enabled": False}  # as if it had not been registered
    with pytest.raises(ValueError, match="bf16.enabled: must be true"):
        attach(engine)

    for stage in (1, 2, 3):
        engine, _ = initialize(config(stage), make=muon)
        with pytest.raises(TypeError, match="a fragment must never be orthogonalised"):
            attach(engine)


def sub_groups_are_looked_at_once() -> None:
    engine, opt = initialize(config(3, sub_group_size=30))
    attach(engine)
    assert len(opt.weights.buffers.all) > 2, len(opt.weights.buffers.all)
    seen: list[str] = []
    adopt = opt.weights.foreign.adopt

    def counting(calls: Any, **options: Any) -> None:
        seen.extend(e.identity.name for call in calls for e in call.entries)
        adopt(calls, **options)

    opt.weights.foreign.adopt = counting
    plan = opt.weights.plan()
    train_engine(engine, [0])
    assert sorted(seen) == sorted(e.identity.name for e in opt.managed())
    assert opt.served_version == 1
    assert opt.weights.plan() is plan  # not a new one for each sub-group


def one_parameter_whole() -> None:
    engine, opt = initialize(config(3))
    attach(engine)
    given: list[Any] = []
    for _, tensor in opt.served_params():
        given.append(weakref.ref(tensor))
        assert sum(ref() is not None for ref in given) == 1
        assert all(p.numel() == 0 for p in engine.module.parameters())
        del tensor
