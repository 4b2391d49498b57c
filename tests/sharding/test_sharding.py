"""The same bits on any number of ranks, however the parameters are cut."""

import functools
from typing import Any

import pytest
import strategies
import torch
import torch.distributed as dist

DITHERS = ("fresh", "sync", "held")


@functools.cache
def unsharded(dither: str, dtype: torch.dtype) -> dict[str, object]:
    model, opt = strategies.plain({"dither": dither}, dtype)
    return strategies.result(model, opt.bind(model))


def compare(strategy: Any) -> None:
    bad = []
    for dtype in (torch.float32, torch.bfloat16):
        every = dtype == torch.float32 or dist.get_world_size() % 2 == 0
        for dither in DITHERS if every else ("fresh",):
            got = strategies.result(*strategy({"dither": dither}, dtype))
            differences = strategies.differences(unsharded(dither, dtype), got)
            bad += [f"{dtype} {dither}: {d}" for d in differences]
    assert not bad, f"{len(bad)} differences, such as {bad[:5]}"


@pytest.mark.parametrize("strategy", strategies.ALL, ids=lambda f: f.__name__)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_strategy_gives_the_bits_of_the_unsharded_run(world, strategy, ranks) -> None:
    ranks(world).run(compare, strategy)
