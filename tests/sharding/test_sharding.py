"""The same bits on any number of ranks, however the parameters are cut."""

import datetime

import pytest
import strategies
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

DITHERS = ("fresh", "sync", "held")


def start(rank: int, world: int, rendezvous: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(rank)  # the global RNG must not matter
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=120),
    )


def spawn(worker, world: int, tmp_path, *args) -> None:
    """Run `worker(rank, world, rendezvous, *args)` in `world` processes; raises what they raise."""
    rendezvous = str(tmp_path / f"{worker.__name__}-{world}")
    mp.spawn(worker, (world, rendezvous, *args), nprocs=world)


def differences(expected: dict, got: dict) -> list[str]:
    """Names of what is not bitwise equal, or not in the same order."""
    bad = []
    for part in expected.keys() & got.keys():
        a, b = expected[part], got[part]
        if not isinstance(a, dict):
            bad += [part] * (a != b)
            continue
        bad += [f"{part}: order"] * (part != "state" and list(a) != list(b))
        for name, value in a.items():
            same = name in b and (
                torch.equal(value, b[name]) if torch.is_tensor(value) else value == b[name]
            )
            bad += [] if same else [f"{part} {name}"]
    return bad


def compare_all(rank: int, world: int, rendezvous: str) -> None:
    start(rank, world, rendezvous)
    bad = []
    for dtype in (torch.float32, torch.bfloat16):
        for dither in DITHERS if dtype == torch.float32 or world % 2 == 0 else ("fresh",):
            options = {"dither": dither}
            model, opt = strategies.plain(options, dtype)
            expected = strategies.result(model, opt.bind(model))
            for strategy in strategies.ALL:
                got = strategies.result(*strategy(options, dtype))
                bad += [
                    f"{strategy.__name__} {dtype} {dither}: {d}" for d in differences(expected, got)
                ]
    dist.destroy_process_group()
    assert not bad, f"{len(bad)} differences, such as {bad[:5]}"


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_strategy_gives_the_bits_of_the_unsharded_run(world, tmp_path):
    spawn(compare_all, world, tmp_path)
