"""Timing in pairs: two ways of doing the same, back to back in one process, and their ratio."""

import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Step = Callable[[], None]


def seconds(step: Step, clock: Callable[[], float] = time.perf_counter) -> float:
    begin = clock()
    step()
    return clock() - begin


def pairs(
    a: Step, b: Step, count: int, clock: Callable[[], float] = time.perf_counter
) -> tuple[list[float], list[float]]:
    """Times of `a` and `b`, taken in turn after two warm-up steps of each."""
    for _ in range(2):
        a()
        b()
    times_a, times_b = [], []
    for i in range(count):
        first, second = (a, b) if i % 2 == 0 else (b, a)
        x, y = seconds(first, clock), seconds(second, clock)
        times_a.append(x if i % 2 == 0 else y)
        times_b.append(y if i % 2 == 0 else x)
    return times_a, times_b


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(x.split(":")[1].strip() for x in lines if x.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def row_of(
    ours: str, baseline: str, mine: list[float], theirs: list[float], params: int, **more: Any
) -> dict[str, Any]:
    """A CSV row: the ratio's median and range over pairs, and all that is needed to repeat it."""
    ratios = [x / y for x, y in zip(mine, theirs, strict=True)]
    ns = [statistics.median(t) / params * 1e9 for t in (mine, theirs)]
    return {
        "ours": ours,
        "baseline": baseline,
        "ratio_median": f"{statistics.median(ratios):.3f}",
        "ratio_min": f"{min(ratios):.3f}",
        "ratio_max": f"{max(ratios):.3f}",
        "ours_ns_per_element": f"{ns[0]:.2f}",
        "baseline_ns_per_element": f"{ns[1]:.2f}",
        "pairs": len(mine),
        "params": params,
        **more,
        "threads": torch.get_num_threads(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "command": "python " + " ".join(sys.argv),
    }


def print_header() -> None:
    print(f"{'ours':30} {'baseline':24} {'ratio':>6} {'min':>6} {'max':>6}  ns/element")


def print_row(row: dict[str, Any]) -> None:
    print(
        f"{row['ours']:30} {row['baseline']:24} {row['ratio_median']:>6} {row['ratio_min']:>6} "
        f"{row['ratio_max']:>6}  {row['ours_ns_per_element']} / {row['baseline_ns_per_element']}",
        flush=True,
    )
