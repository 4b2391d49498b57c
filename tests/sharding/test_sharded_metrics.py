"""Step metrics and the precision report of sharded models."""

import functools
import math
from typing import Any

import pytest
import strategies
import torch


@functools.cache
def unsharded(mode: bool | str) -> Any:
    _, opt = strategies.plain({"metrics": mode}, torch.float32)
    return opt.metrics()


def compare(strategy: Any) -> None:
    for mode in (True, "all"):
        expected = unsharded(mode)
        _, opt = strategy({"metrics": mode}, torch.float32)
        got = opt.metrics().over_ranks()
        assert got.parameters == expected.parameters and got.steps == expected.steps
        assert math.isclose(got.captured, expected.captured, rel_tol=1e-9)
        assert math.isclose(got.lag_steps, expected.lag_steps, rel_tol=1e-9, abs_tol=1e-9)


@pytest.mark.parametrize("strategy", strategies.ALL, ids=lambda f: f.__name__)
def test_figures_of_all_ranks_are_those_of_the_unsharded_run(strategy, ranks) -> None:
    ranks(3).run(compare, strategy)


def report_of_a_wrapped_model(strategy: Any) -> None:
    _, opt = strategy({}, torch.float32)
    (row,) = opt.report().groups
    found = row.master, row.container, row.forward, row.grad, row.served
    assert found == ("fp32", "fp32", "bf16", "fp32", "bf16")


@pytest.mark.parametrize("strategy", [strategies.fsdp2, strategies.fsdp1])
def test_the_report_knows_mixed_precision(strategy, ranks) -> None:
    ranks(2).run(report_of_a_wrapped_model, strategy)
