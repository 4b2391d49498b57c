"""Checkpoints of DeepSpeed."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from zero import OPTIONS, config, differences, initialize, result, train_engine, weights

from fc_optim import FairCastOptimizer
from fc_optim.integrations.deepspeed import attach

SAVED = [("0", "fresh"), ("1", "held"), ("1 fp32 gradients", "fresh"), ("2 offloaded", "sync"),
         ("3", "fresh"), ("3 offloaded", "held")]  # fmt: skip


def other(params: Any) -> FairCastOptimizer:
    """An optimizer whose options a checkpoint overrides."""
    return FairCastOptimizer(torch.optim.AdamW, params, lr=1e-3, weight_decay=0.1, backend="cpu")


def go_on(engine: Any, opt: FairCastOptimizer, steps: Any) -> dict[str, Any]:
    train_engine(engine, steps)
    opt.publish(redraw=True)
    if opt.dither == "sync":
        moved = [n for n, v in weights(engine).items() if n != "frozen.weight"
                 and not torch.equal(v, dict(opt.served_params(copy=True))[n])]  # fmt: skip
        assert not moved, f"the model does not hold the new shadow of {moved}"
    return result(opt)


def resume(folder: str) -> None:
    rank = dist.get_rank()
    for k, (name, dither) in enumerate(SAVED):
        ds_config, how = OPTIONS[name]
        where = f"{folder}/{name}"
        engine, opt = initialize(ds_config, **how, dither=dither)
        attach(engine)
        saved = go_on(engine, opt, [0, 1])
        engine.save_checkpoint(where, client_state={"mine": 3})
        end = go_on(engine, opt, [2, 3])
        if rank == 0:
            torch.save({"saved": saved, "end": end}, f"{where}/expected")
        engine, opt = initialize(ds_config, **how, make=other)
        if k % 2:
            attach(engine)
        _, client = engine.load_checkpoint(where)
        assert client["mine"] == 3
        attach(engine)
        held = weights(engine)
        got = result(opt)
        bad = differences(saved, got)
        bad += [n for n, v in held.items() if not torch.equal(v, got["served"][n])]
        assert opt.seed == 11 and opt.dither == dither
        bad += differences(end, go_on(engine, opt, [2, 3]))
        assert not bad, f"{name}: {bad[:5]}"
    for stage in (1, 3):
        zero = {"stage3_gather_16bit_weights_on_model_save": True} if stage == 3 else {}
        engine, opt = initialize(config(stage, **zero))
        attach(engine)
        served = go_on(engine, opt, [0])["served"]
        engine.save_16bit_model(folder, f"{stage}.bin")
        if rank == 0:
            written = torch.load(f"{folder}/{stage}.bin")
            assert all(torch.equal(v, written[n]) for n, v in served.items())


def load_universal(folder: str) -> None:
    world = dist.get_world_size()
    for name in ("1", "3"):
        ds_config, how = OPTIONS[name]
        expected = torch.load(f"{folder}/{name}/expected", weights_only=False)
        engine, opt = initialize(
            ds_config | {"checkpoint": {"load_universal": True}}, **how, make=other
        )
        if world == 1:  # both orders
            attach(engine)
        engine.load_checkpoint(f"{folder}/{name}-masters", tag="universal")
        attach(engine)
        bad = differences(expected["saved"], result(opt))
        bad += differences(expected["end"], go_on(engine, opt, [2, 3]))
        assert not bad, f"{name} on {world}: {bad[:5]}"
        assert attach(engine) is opt  # changes nothing now
        assert not differences(expected["end"], result(opt))


def convert(folder: Path, name: str) -> None:
    """By our tool and DeepSpeed's own."""
    from argparse import Namespace

    from deepspeed.checkpoint import ds_to_universal

    from fc_optim.integrations.deepspeed_masters import masters_as_fp32

    tag = (folder / name / "latest").read_text()
    masters_as_fp32(folder / name / tag, folder / f"{name}-masters" / tag)
    ds_to_universal.main(
        Namespace(
            input_folder=str(folder / f"{name}-masters" / tag),
            output_folder=str(folder / f"{name}-masters" / "universal"),
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,
        )
    )
