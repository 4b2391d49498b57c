"""torch.distributed.checkpoint: saved on N ranks, loaded on M, continued to the same bits."""

import logging
import os
import signal
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint_cases import (
    CASES,
    CROSSED,
    END,
    NEVER,
    SAVED,
    B,
    Case,
    continued,
    ddp,
    expected,
    fsdp1,
    fsdp1_flat,
    fsdp2,
    held,
    muon,
    named,
    plain,
    quiet,
    rmsprop,
    sgd,
    trained,
)
from models import assert_equal_states
from ranks import spawn, start
from strategies import Model, differences
from torch.distributed.checkpoint import state_dict as dsd
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.multiprocessing.spawn import ProcessExitedException

from fc_optim import FairCastOptimizer, FlatPiece


class DyingWriter(dcp.FileSystemWriter):
    """Leaves half of its data, and no more messages."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        super().write_data(plan, planner).wait()
        for file in Path(self.path).glob("__1_*"):
            os.truncate(file, file.stat().st_size // 2)
        os.kill(os.getpid(), signal.SIGKILL)


def save(case: Case, folder: str) -> None:
    with quiet():
        model, opt = trained(case)
        dcp.save(case.state(model, opt), checkpoint_id=f"{folder}/{case.name}")
        case.train(model, opt, SAVED, END)  # saving changes nothing
        assert not differences(expected(case)[1], held(model, opt))


def load(case: Case, strategy: Any, used: int, folder: str) -> None:
    """In an optimizer that has taken `used` steps of another run."""
    with quiet():
        here = replace(case, strategy=strategy)
        model, opt = here.build_other()
        here.train(model, opt, 0, used)
        here.load(model, opt, f"{folder}/{case.name}")
        assert not continued(here, model, opt)


def die_while_saving(rank: int, world: int, rendezvous: str, path: str) -> None:
    """Rank 1 is killed."""
    start(rank, world, rendezvous)
    case = Case(fsdp2)
    model, opt = trained(case, END)
    writer = DyingWriter if rank == 1 else dcp.FileSystemWriter
    try:
        dcp.save(case.state(model, opt), storage_writer=writer(path))
    finally:
        signal.pause()  # until it is torn down


def refuse(path: str) -> None:
    """A checkpoint that was never finished; and go on."""
    with quiet():
        model, opt = trained(Case(fsdp2))
        with pytest.raises(CheckpointException, match="metadata"):
            Case(fsdp2).load(model, opt, path)
        assert not continued(Case(fsdp2), model, opt)


# ---- One check each, on two ranks


def a_full_state_on_rank_0_loads_everywhere(folder: str) -> list[str]:
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    found = []
    for make in (named, muon, sgd, rmsprop):
        case = Case(fsdp2, B, make=make)
        weights, state = dsd.get_state_dict(*trained(case), options=full)
        if dist.get_rank() == 0:
            # It is what an unsharded run saves.
            alone = dsd.get_optimizer_state_dict(*trained(replace(case, strategy=plain)))
            assert_equal_states(state["state"], alone["state"])
            assert_equal_states(state["param_groups"], alone["param_groups"])
        else:
            assert not weights and not state

        model, opt = case.build_other()
        spread = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        dsd.set_model_state_dict(model, dict(weights), options=spread)
        dsd.set_optimizer_state_dict(model, opt, dict(state), options=spread)
        found += [f"broadcast {make.__name__} {d}" for d in continued(case, model, opt)]

        box = [state]
        dist.broadcast_object_list(box)
        model, opt = case.build_other()
        opt.load_state_dict(box[0])  # whole tensors: it takes its own part
        found += [f"whole {make.__name__} {d}" for d in continued(case, model, opt)]
    return found


def an_async_save_is_of_its_moment(folder: str) -> list[str]:
    """Training goes on, and writes the same tensors, while it is written."""
    group = dist.new_group()  # not the one that training talks on
    found = []
    for case in (Case(fsdp2, B, "sync"), Case(ddp, flat=True), Case(fsdp2, make=sgd)):
        path = f"{folder}/async-{case.name}"
        model, opt = trained(case)
        saving: Any = dcp.async_save(
            case.state(model, opt), checkpoint_id=path, process_group=group
        )
        case.train(model, opt, SAVED, END)
        saving.result()
        found += differences(expected(case)[1], held(model, opt))
        model, opt = case.build_other()
        case.load(model, opt, path)
        found += continued(case, model, opt)
    return found


def saving_a_fresh_optimizer_is_as_harmless_as_torchs(folder: str) -> list[str]:
    """To make state, torch takes a step with zero gradients and a zero rate, which counts."""
    found = []
    for case in (Case(fsdp2), Case(fsdp2, B, make=muon), Case(fsdp2, B, make=sgd)):
        for published in (False, True):
            path = f"{folder}/fresh-{published}-{case.name}"
            model, opt = case.build()
            _, untouched = case.build()
            if published:
                opt.publish()
            dcp.save(case.state(model, opt), checkpoint_id=path)
            steps = {float(s.get("step", s.get("dither_step"))) for s in opt.state.values()}
            assert steps == {0.0 if published else 1.0}
            masters = dict(untouched.master_params(managed_only=True))
            for name, master in opt.master_params(managed_only=True):
                assert torch.equal(master, masters[name])
            if published:  # nothing was counted: the run is the one that was never saved
                model, opt = case.build_other()
                if case.make is sgd:
                    opt.publish()  # as when it was saved, it has no momentum yet
                case.load(model, opt, path)
                case.train(model, opt, 0, SAVED)
                want = {**expected(case)[0], "version": opt.served_version}
                found += differences(want, held(model, opt))  # torch's step was a version too
            else:
                again, other = case.build_other()
                case.load(again, other, path)
                for m, o in ((model, opt), (again, other)):
                    case.train(m, o, 0, 2)
                found += differences(held(model, opt), held(again, other))
    model = Model()
    plain_opt = torch.optim.AdamW(model.parameters())
    dsd.get_optimizer_state_dict(model, plain_opt)
    assert {float(s["step"]) for s in plain_opt.state.values()} == {1.0}
    return found


def a_load_in_place_is_noticed(folder: str) -> list[str]:
    """`dcp.load` writes through `.data`: no version counter moves. One row differs, of rank 0."""
    case = Case(fsdp2)

    def change(weight: torch.Tensor) -> None:
        weight[0] += 1.0

    model, opt = trained(case)
    weights: dict[str, Any] = dsd.get_model_state_dict(model)
    saved = {k: v.clone() for k, v in weights.items()}
    if dist.get_rank() == 0:
        change(saved[NEVER].to_local())
    dcp.save({"model": saved}, checkpoint_id=f"{folder}/changed")
    versions = [p._version for p in model.parameters()]
    dcp.load({"model": dsd.get_model_state_dict(model)}, checkpoint_id=f"{folder}/changed")
    assert [p._version for p in model.parameters()] == versions
    for call in (opt.publish, lambda: list(opt.served_params()), opt.served_digest):
        with pytest.raises(RuntimeError, match="changed since the optimizer last wrote"):
            call()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        case.train(model, opt, SAVED, END)
    adopted = [str(w.message) for w in caught if "adopted as masters" in str(w.message)]
    assert [NEVER in text for text in adopted] == [True] * (dist.get_rank() == 0)

    alone = replace(case, strategy=plain)
    want, want_opt = trained(alone)
    change(want.get_parameter(NEVER).data)
    alone.train(want, want_opt, SAVED, END)
    return differences(held(want, want_opt), held(model, opt))


def damaged_checkpoints_are_refused(folder: str) -> list[str]:
    case = Case(fsdp2)
    model, opt = trained(case, 2)
    before = held(model, opt)
    good = case.state(*trained(case))

    def damaged(change: Callable[[dict[str, Any]], Any], path: str) -> dict[str, Any]:
        state = {**good["optim"], "state": {k: dict(v) for k, v in good["optim"]["state"].items()}}
        change(state["state"])
        dcp.save({"model": good["model"], "optim": state}, checkpoint_id=path)
        return state

    def cast(state: dict[str, Any]) -> None:
        state[NEVER]["master"] = state[NEVER]["master"].bfloat16()

    def resize(state: dict[str, Any]) -> None:
        for key in ("master", "exp_avg"):
            state[NEVER][key] = state[NEVER][key][:, :3]

    cases = [
        (lambda s: s[NEVER].pop("master"), f"{NEVER}.master", f"master of '{NEVER}' is missing"),
        (resize, "Size mismatch", f"of '{NEVER}' has shape \\(13, 3\\)"),
        (lambda s: s.pop(NEVER), f"Missing key.*{NEVER}", f"Missing.*'{NEVER}'"),
        (cast, None, f"master of '{NEVER}' is torch.bfloat16"),  # torch casts it back, unasked
    ]
    for i, (change, in_file, in_memory) in enumerate(cases):
        state = damaged(change, f"{folder}/damaged-{i}")
        if in_file is not None:
            with pytest.raises(CheckpointException, match=in_file):
                case.load(model, opt, f"{folder}/damaged-{i}")
        with pytest.raises((ValueError, RuntimeError), match=in_memory):
            dsd.set_optimizer_state_dict(model, opt, state)
        assert not differences(before, held(model, opt))
    return differences(before, held(model, opt))


def momentum_that_a_load_leaves_out_is_named(folder: str) -> list[str]:
    """`torch.distributed.checkpoint` reads only what the optimizer holds already."""
    case = Case(fsdp2, make=sgd)
    path = f"{folder}/{case.name}"
    save(case, folder)
    records: list[str] = []
    logger = logging.getLogger("fc_optim")
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    for published in (False, True):
        model, opt = case.build_other()
        if published:
            opt.publish()
        case.load(model, opt, path)
        assert any("nothing of the base optimizer" in r for r in records) == published
    logger.removeHandler(handler)
    logger.setLevel(logging.ERROR)
    return []


CHECKS = [
    a_full_state_on_rank_0_loads_everywhere,
    an_async_save_is_of_its_moment,
    saving_a_fresh_optimizer_is_as_harmless_as_torchs,
    a_load_in_place_is_noticed,
    damaged_checkpoints_are_refused,
    momentum_that_a_load_leaves_out_is_named,
]


def run_check(check: Callable[[str], list[str]], folder: str) -> None:
    with quiet():
        assert not check(folder)


# ---- What pytest runs

PAIRS = [(c, c.strategy) for c in CASES] + CROSSED
PLACES = [  # saved on, loaded on, pair, steps of another run before
    (saved, loaded, *pair, i % 3 % 2)
    for saved, loaded in ((2, 1), (1, 2), (2, 3), (2, 4))
    for i, pair in enumerate(PAIRS)
    if loaded < 3 or i % 2 == loaded % 2
]


def loses_groups(loaded: int, case: Case, strategy: Any) -> bool:
    """Of a nested state that holds FSDP1's ShardedTensors, torch 2.13 loses the groups where a rank
    has no shard of some parameter, whatever the optimizer."""
    return bool({fsdp1, fsdp1_flat} & {case.strategy, strategy}) and not case.flat and loaded > 2


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case, int], str]:
    """The folder of what so many ranks saved of a case."""
    folders = {world: str(tmp_path_factory.mktemp(f"saved-{world}")) for world in (1, 2)}

    def of(case: Case, world: int) -> str:
        if not Path(folders[world], case.name).exists():
            ranks(world).run(save, case, folders[world])
        return folders[world]

    return of


@pytest.mark.parametrize(
    ("on", "loaded", "case", "strategy", "used"),
    [pytest.param(*p, id="{}-{}-{}-{}".format(*p[:2], p[2].name, p[3].__name__)) for p in PLACES
     if not loses_groups(*p[1:4])],
)  # fmt: skip
def test_a_saved_run_continues(on, loaded, case, strategy, used, saved, ranks):
    ranks(loaded).run(load, case, strategy, used, saved(case, on))


@pytest.fixture(scope="module")
def unfinished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks leave when one of them is killed while they save."""
    path = tmp_path_factory.mktemp("unfinished") / "killed"
    context = spawn(die_while_saving, 2, path.parent, str(path), join=False)
    with pytest.raises(ProcessExitedException, match="process 1 terminated with signal SIGKILL"):
        while not context.join():
            pass
    assert not any(p.is_alive() for p in context.processes)
    assert list(path.glob("__1_*")) and not (path / ".metadata").exists()
    return path


@pytest.mark.parametrize("world", [1, 3])
def test_a_save_that_was_killed_is_refused(world, unfinished, ranks):
    ranks(world).run(refuse, str(unfinished))


@pytest.mark.parametrize("check", CHECKS, ids=lambda f: f.__name__)
def test_on_two_ranks(check, ranks, tmp_path):
    ranks(2).run(run_check, check, str(tmp_path))


def test_the_padding_of_a_flat_buffer_is_nobodys_weight():
    buffer = torch.nn.Parameter(torch.randn(10))
    opt = FairCastOptimizer(torch.optim.AdamW, [buffer])
    opt.declare_flat(buffer, [FlatPiece("a", (2, 3), 0, 6, 0)])
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        opt.publish()
        buffer.data[8] = 5.0
        assert opt.check() == {}
        buffer.data[5] += 5.0
        assert opt.check() == {"param.0": 1}
    finally:
        torch.use_deterministic_algorithms(False)
