"""Hugging Face accelerate: wrapping, registering, sharding, saving, launching."""

import copy
import functools
import io
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import strategies
import torch
import torch.distributed as dist
from models import (
    assert_equal_states,
    assert_invariant,
    assert_same,
    assert_served,
    loss_of,
    tiny,
    train,
)
from ranks import Worlds
from torch import nn

from fc_optim import FairCastAdamW

pytestmark = pytest.mark.integration


def reset() -> None:
    """Forget the Accelerator of the last test: its state is the process's."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def prepared(dtype=torch.bfloat16, steps=0):
    from accelerate import Accelerator

    reset()
    model = tiny(dtype)
    opt = FairCastAdamW(model.named_parameters(), lr=1e-2)
    train(model, opt, steps)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 1)
    before = copy.deepcopy(opt.state_dict())
    accelerator = Accelerator(cpu=True)
    return accelerator, opt, before, accelerator.prepare(model, opt, scheduler)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wrapping_keeps_fp32_state_bit_for_bit_and_schedulers_attached(dtype):
    from fc_optim.integrations.accelerate import register

    accelerator, opt, before, (model, wrapped, scheduler) = prepared(dtype, steps=3)
    assert wrapped.optimizer is opt
    assert_equal_states(opt.state_dict(), before)
    assert register(accelerator, wrapped) is opt and opt.model is model
    accelerator.backward(loss_of(model))
    wrapped.step()
    scheduler.step()
    assert opt.param_groups[0]["lr"] == pytest.approx(1e-3)
    assert all(e.state["master"].dtype == torch.float32 for e in opt.managed())
    assert_invariant(opt)
    assert [n for n, _ in opt.served_params()] == [n for n, _ in tiny().named_parameters()]


def test_save_state_and_load_state_continue_bit_for_bit(tmp_path):
    def step(accelerator, model, wrapped, i):
        wrapped.zero_grad()
        accelerator.backward(loss_of(model, i))
        wrapped.step()

    accelerator, _, _, (model, wrapped, _) = prepared()
    for i in range(3):
        step(accelerator, model, wrapped, i)
    accelerator.save_state(str(tmp_path))
    for i in range(3, 5):
        step(accelerator, model, wrapped, i)
    again, opt, _, (other, other_wrapped, _) = prepared()
    again.load_state(str(tmp_path))
    for i in range(3, 5):
        step(again, other, other_wrapped, i)
    assert_same(model, other)
    assert opt.check() == {} and opt.served_version == 5


def test_register_names_what_is_wrong():
    from fc_optim.integrations.accelerate import register

    accelerator, _, _, _ = prepared()
    with pytest.raises(TypeError, match="AdamW is not a FairCastOptimizer"):
        register(accelerator, torch.optim.AdamW(tiny().parameters()))
    with pytest.raises(ValueError, match="none of its prepared models"):
        register(accelerator, FairCastAdamW(tiny().parameters()))


def test_a_state_with_masters_loads_with_weights_only():
    _, opt, _, (model, _, _) = prepared(steps=2)
    buffer = io.BytesIO()
    torch.save(opt.state_dict(), buffer)
    buffer.seek(0)
    assert_equal_states(torch.load(buffer, weights_only=True), opt.state_dict())
    assert next(model.parameters()).dtype == torch.bfloat16


def test_an_overflow_leaves_every_bit():
    """With a real GradScaler, as under fp16 on a GPU."""
    from accelerate import Accelerator

    reset()
    accelerator = Accelerator(cpu=True)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
    model = tiny()
    opt = FairCastAdamW(model.named_parameters(), lr=1e-2)
    model, wrapped = accelerator.prepare(model, opt)
    twin = tiny()
    plain = FairCastAdamW(twin.named_parameters(), lr=1e-2)
    for i in range(4):
        wrapped.zero_grad()
        accelerator.backward(loss_of(model, i))
        if i == 2:
            next(model.parameters()).grad.view(-1)[0] = torch.inf
            before = copy.deepcopy((opt.state_dict()["state"], model.state_dict()))
        wrapped.step()
        if i == 2:
            assert_equal_states((opt.state_dict()["state"], model.state_dict()), before)
        else:
            train(twin, plain, 1, first=i)
    assert accelerator.scaler.get_scale() == 2.0**3
    assert_same(model, twin)
    assert_equal_states(opt.state_dict()["state"], plain.state_dict()["state"])


def test_megatron_is_refused(monkeypatch):
    from accelerate.utils import DistributedType

    from fc_optim.integrations.accelerate import register

    accelerator, _, _, (_, wrapped, _) = prepared()
    monkeypatch.setattr(accelerator.state, "distributed_type", DistributedType.MEGATRON_LM)
    with pytest.raises(NotImplementedError, match="MEGATRON_LM is not supported"):
        register(accelerator, wrapped)


# ---- Several ranks. accelerate never shards on a CPU by itself: its FSDP paths are switched on.

STEPS, SAVED = 4, 2
SHARDS = {"state_dict_type": "SHARDED_STATE_DICT"}
WHOLE = {"state_dict_type": "FULL_STATE_DICT"}
FP32, BF16 = torch.float32, torch.bfloat16
Case = tuple[str, str, torch.dtype, dict[str, Any]]
CASES: dict[str, Case] = {  # kind, mixed precision, dtype of the loaded model, FSDP options
    "ddp, fp32": ("ddp", "no", FP32, {}),
    "ddp, bf16": ("ddp", "no", BF16, {}),
    "ddp, autocast": ("ddp", "bf16", FP32, {}),
    "fsdp2, bf16": ("fsdp2", "no", BF16, SHARDS),
    "fsdp2, mixed": ("fsdp2", "bf16", FP32, SHARDS),
    "fsdp2, upcast, checkpointing": (
        "fsdp2", "bf16", BF16, {**SHARDS, "activation_checkpointing": True},
    ),
    "fsdp2, saved whole": ("fsdp2", "bf16", FP32, WHOLE),
    # torch crashes when it gathers an FSDP1 model on a CPU to save it whole, so in shards.
    "fsdp1, bf16": ("fsdp1", "no", BF16, {**SHARDS, "use_orig_params": True}),
    "fsdp1, mixed": ("fsdp1", "bf16", FP32, {**SHARDS, "use_orig_params": True}),
    "fsdp1, upcast": ("fsdp1", "bf16", BF16, {**SHARDS, "use_orig_params": True}),
    "fsdp1, flat": (
        "fsdp1", "bf16", FP32, {**SHARDS, "use_orig_params": False, "ignored_modules": "frozen"},
    ),
}  # fmt: skip


class Even(strategies.Model):
    """Every rank has a part of all shapes: torch cannot load FSDP1's shards where one has none."""

    def __init__(self) -> None:
        super().__init__()
        leaf = {"emb": nn.Embedding(7, 6), "norm": nn.LayerNorm(8), "wide": nn.Linear(5, 8)}
        self.first = strategies.Leaf(**leaf)
        self.second = strategies.Leaf(more=nn.Linear(4, 8), last=nn.Linear(11, 13))
        self.head.weight = self.first.emb.weight  # type: ignore[assignment, union-attr]


def model_for(case: Case) -> strategies.Model:
    return (Even() if case[0] == "fsdp1" else strategies.Model()).to(case[2])


def gradients(model: nn.Module, step: int) -> dict[str, torch.Tensor]:
    """Of few bits, so that sums and means over ranks are exact."""
    generator = torch.Generator().manual_seed(step)
    return {
        strategies.clean(n).removeprefix("module."): torch.randint(
            -8, 9, p.shape, generator=generator
        )
        / 16
        for n, p in model.named_parameters()
        if p.requires_grad
    }


def accelerator_for(kind: str, mixed: str, options: dict[str, Any]):
    from accelerate import Accelerator, DataLoaderConfiguration, FullyShardedDataParallelPlugin
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    reset()
    accelerator = Accelerator(
        cpu=True,
        mixed_precision=mixed,
        gradient_accumulation_steps=2,
        dataloader_config=DataLoaderConfiguration(split_batches=True),  # schedulers step once
    )
    if kind != "ddp":
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=int(kind[-1]),
            auto_wrap_policy="SIZE_BASED_WRAP",
            min_num_params=160,  # wraps `second`; a tied weight must stay in one unit
            **options,
        )
        if mixed != "no":
            plugin.set_mixed_precision(mixed)
        accelerator.state.fsdp_plugin = plugin
        for state in (accelerator.state, PartialState()):
            state.distributed_type = DistributedType.FSDP
            state.device = torch.device("cpu")  # FSDP1 refuses "cpu:0"
    return accelerator


def prepare(case: Case, **options: Any):
    kind, mixed, _, plugin = case
    accelerator = accelerator_for(kind, mixed, plugin)
    model = model_for(case)
    flat = plugin.get("use_orig_params") is False
    if flat:  # the original parameters will be gone
        model = accelerator.prepare(model)
    opt = strategies.optimizer(model.named_parameters(), **options)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 1, gamma=0.5)
    if flat:
        wrapped, scheduler = accelerator.prepare(opt, scheduler)
    else:
        model, wrapped, scheduler = accelerator.prepare(model, opt, scheduler)
    return accelerator, model, wrapped, scheduler


def run(case: Case, accelerator, model, wrapped, scheduler, steps) -> None:
    """Two micro-batches a step, clipping (to no effect, so that bits can be compared)."""
    whole = model_for(case)
    for i in steps:
        grads = gradients(whole, i)
        for _ in range(2):
            with accelerator.accumulate(model):
                accelerator.backward(model(grads))
                if accelerator.sync_gradients:
                    make_exact(model, grads)
                    norm = accelerator.clip_grad_norm_(model.parameters(), 1e6)
                    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
                    expected = torch.cat([g.flatten() for g in grads.values()]).norm()
                    torch.testing.assert_close(norm.float(), expected, rtol=2e-2, atol=0)
                wrapped.step()
                scheduler.step()
                wrapped.zero_grad()


def make_exact(model, grads) -> None:
    """DDP multiplies by 1/3, which rounds."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        for name, g in grads.items():
            found = model.module.get_parameter(name).grad
            torch.testing.assert_close(found, g.to(found.dtype))
            found.copy_(g)


def reference(case: Case) -> dict[str, object]:
    """The same steps without accelerate, on one process."""
    model = model_for(case)
    opt = strategies.optimizer(model.named_parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 1, gamma=0.5)
    for i in range(STEPS):
        for name, g in gradients(model, i).items():
            model.get_parameter(name).grad = g.to(case[2])
        opt.step()
        scheduler.step()
    return strategies.result(model, opt.bind(model))


def prepared_and_registered(case: Case) -> tuple[Any, Any, Any, Any]:
    from fc_optim.integrations.accelerate import register

    accelerator, model, wrapped, scheduler = prepare(case)
    opt = register(accelerator, wrapped)
    assert opt is wrapped.optimizer and not opt.state
    upcast = case[0] != "ddp" and case[1] == "bf16"  # by accelerate: seen before any forward
    assert {e.param.dtype for e in opt.managed()} == {FP32 if upcast else case[2]}
    return accelerator, model, wrapped, scheduler


def assert_equal_results(expected: dict[str, object], opt, model) -> None:
    bad = strategies.differences(expected, strategies.result(model, opt))
    assert not bad, f"{len(bad)} differences, such as {bad[:5]}"


def train_save_and_go_back(name: str, folder: str) -> None:
    case = CASES[name]
    accelerator, model, wrapped, scheduler = rest = prepared_and_registered(case)
    expected, saved = reference(case), f"{folder}/{name}"
    run(case, *rest, range(SAVED))
    accelerator.save_state(saved)
    run(case, *rest, range(SAVED, STEPS))
    assert_equal_results(expected, wrapped.optimizer, model)
    accelerator.load_state(saved)
    run(case, *rest, range(SAVED, STEPS))
    del expected["version"]  # never goes back
    assert_equal_results(expected, wrapped.optimizer, model)


def load_and_finish(name: str, folder: str) -> None:
    case = CASES[name]
    accelerator, model, wrapped, scheduler = rest = prepared_and_registered(case)
    accelerator.load_state(f"{folder}/{name}")
    held = [e for e in wrapped.optimizer.managed() if e.local.numel()]
    assert {e.state["master"].dtype for e in held} == {FP32}
    run(case, *rest, range(SAVED, STEPS))
    assert_equal_results(reference(case), wrapped.optimizer, model)


def refusals() -> None:
    """What `register` finds: on every rank, before there are masters."""
    from fc_optim.integrations.accelerate import register

    rank = dist.get_rank()
    for name in ("ddp, fp32", "fsdp2, mixed", "fsdp1, upcast"):
        accelerator, _, wrapped, _ = prepare(CASES[name], dither=("fresh", "held")[rank])
        with pytest.raises(RuntimeError, match="disagree about dither"):
            register(accelerator, wrapped)
    accelerator = accelerator_for("fsdp2", "bf16", SHARDS)
    model = strategies.Model()
    opt = strategies.optimizer(model.named_parameters())
    opt.publish()
    _, wrapped = accelerator.prepare(model, opt)
    with pytest.raises(RuntimeError, match="masters were replaced in param_groups"):
        register(accelerator, wrapped)
    accelerator = accelerator_for("fsdp1", "bf16", {"use_orig_params": False})
    model = Even().requires_grad_()
    _, wrapped = accelerator.prepare(model, strategies.optimizer(model.named_parameters()))
    with pytest.raises(ValueError, match="under FSDP1 set use_orig_params"):
        register(accelerator, wrapped)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worlds]:
    """Ranks of this file: accelerate's state is the process's."""
    worlds = Worlds(tmp_path_factory.mktemp("ranks"))
    yield worlds
    worlds.close()


@pytest.fixture(scope="module")
def saved(ranks: Worlds, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The folder of what two ranks saved of a case, after they were compared."""
    folder = str(tmp_path_factory.mktemp("saved"))

    @functools.cache
    def of(name: str) -> str:
        ranks(2).run(train_save_and_go_back, name, folder)
        return folder

    return of


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_have_the_bits_of_one_and_go_back_to_what_they_saved(name, saved):
    saved(name)


@pytest.mark.parametrize("world", [1, 3, 4])
@pytest.mark.parametrize("name", CASES)
def test_saved_on_two_ranks_continued_on_any_number_with_the_bits_of_one(name, world, saved, ranks):
    ranks(world).run(load_and_finish, name, saved(name))


def test_register_refuses_on_every_rank(ranks):
    ranks(2).run(refusals)


# ---- The example, launched as a user does.


def launch(*command: str) -> list[str]:
    example = str(Path(__file__).parents[2] / "examples" / "accelerate_train.py")
    done = subprocess.run(
        [sys.executable, "-W", "error", *command, example, "--steps", "20"],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith("step")]


def test_the_example_runs_alone_and_under_accelerate_launch():
    two = ("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2")
    two += ("--main_process_port", "0")  # any
    quiet = ("--num_machines", "1", "--mixed_precision", "bf16", "--dynamo_backend", "no")
    for command in [(), (*two, *quiet)]:
        lines = launch(*command)
        assert len(lines) == 2 and all("engine has it: True" in line for line in lines)
        first, last = (float(re.findall(r"loss (\S+)", line)[0]) for line in lines)
        assert last < first < 4.16  # ln 64: nothing learned
        assert "served version 22" in lines[1]


# ---- State that others saved, or that was lost.


def test_load_state_takes_the_checkpoint_of_plain_torch(tmp_path):
    """A run that switches to masters half-way: they begin as the weights that were saved."""
    from accelerate import Accelerator

    from fc_optim.integrations.accelerate import register

    reset()
    accelerator = Accelerator(cpu=True)
    model = tiny()
    base = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(base, 1)
    model, plain, _ = accelerator.prepare(model, base, scheduler)
    train(model, plain)
    accelerator.save_state(str(tmp_path))
    again, opt, _, (other, wrapped, _) = prepared(torch.float32)
    register(again, wrapped)
    again.load_state(str(tmp_path))
    opt.publish()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        mine, saved = opt.state[q], plain.state[p]
        assert torch.equal(mine["master"], p)
        assert torch.equal(mine["exp_avg"], saved["exp_avg"]) and mine["step"] == saved["step"]
    assert_served(opt)


def load_what_was_lost(folder: str, kind: str) -> None:
    from fc_optim.integrations.accelerate import register

    case = CASES[f"{kind}, mixed"]
    accelerator, model, wrapped, scheduler = prepare(case)
    opt = register(accelerator, wrapped)
    run(case, accelerator, model, wrapped, scheduler, range(SAVED))
    accelerator.save_state(folder)
    saved = strategies.result(model, opt)
    opt.state.clear()
    with pytest.raises(RuntimeError, match=r"are gone.*load_state_dict\(\) a saved state"):
        opt.publish()
    accelerator.load_state(folder)
    assert not strategies.differences(saved, strategies.result(model, opt))


@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2"])
def test_load_state_brings_back_masters_that_were_lost(kind, tmp_path):
    worlds = Worlds(tmp_path)
    try:
        worlds(2).run(load_what_was_lost, str(tmp_path / "saved"), kind)
    finally:
        worlds.close()
