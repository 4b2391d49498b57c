"""The Triton kernels on a GPU: first that they are right, to the bit, then how fast they are.

    python examples/benchmarks/gpu.py --csv examples/benchmarks/results/gpu.csv    # a few minutes
    TRITON_INTERPRET=1 python examples/benchmarks/gpu.py --dry  # without: bits, and a rehearsal

Device time is that of replays of a captured step, queued behind a pause of the device, so that it
never waits for the host; host time is that of launching a step, and is reported apart. Medians of
pairs taken in turn in one run, on the parameter shapes of Qwen3, against torch's fused AdamW alone,
with a round-to-nearest copy, and with the eager stochastic export. A device copy is the ceiling of
bandwidth.
"""

import argparse
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gpu_bits
import results
import torch
import triton  # type: ignore[import-untyped]
from torch import nn

from fc_optim import FairCastAdamW
from fc_optim.kernels import gpu
from fc_optim.kernels.batch import COUNTS

Step = Callable[[], None]
Shapes = list[tuple[int, ...]]
REPLAYS = 10  # steps that are timed as one


# -- Time ----------------------------------------------------------------------------------------


class Timed:
    """A step, captured; and what it takes of the device and of the host, in milliseconds."""

    def __init__(self, step: Step, device: torch.device) -> None:
        self.step, self.cuda = step, device.type == "cuda"
        if not self.cuda:
            self.replay = step
            return
        side = torch.cuda.Stream()  # as torch's docs warm up what they capture
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            step()
        self.replay = self.graph.replay

    def device_ms(self) -> float:
        """Of a step, in the mean of REPLAYS that are queued before the first one starts."""
        if not self.cuda:
            return self.host_ms()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(20_000_000)  # about 10 ms: a replay takes microseconds to queue
        begin.record()
        for _ in range(REPLAYS):
            self.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / REPLAYS

    def host_ms(self) -> float:
        """Until an eager step is launched, on an idle device."""
        if self.cuda:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        self.step()
        return (time.perf_counter() - begin) * 1e3


def paired(a: Timed, b: Timed, pairs: int) -> tuple[list[float], list[float]]:
    times: tuple[list[float], list[float]] = ([], [])
    for i in range(-1, pairs):  # the first to warm up
        for which in ((0, 1), (1, 0))[i % 2]:
            ms = (a, b)[which].device_ms()
            if i >= 0:
                times[which].append(ms)
    return times


def median_ms(timed: Timed, pairs: int) -> float:
    return statistics.median([timed.device_ms() for _ in range(pairs + 1)][1:])


def host_median(timed: Timed, pairs: int) -> float:
    return statistics.median(timed.host_ms() for _ in range(pairs))


def copy_bandwidth(device: torch.device, size: int, pairs: int) -> float:
    """GB/s of a device copy, read and write counted."""
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def step() -> None:
        target.copy_(source)

    ms = median_ms(Timed(step, device), pairs)
    return 2 * source.numel() / ms / 1e6


# -- What is timed -------------------------------------------------------------------------------


def qwen3_shapes(hidden: int, intermediate: int) -> Shapes:
    """Qwen3 with 28 layers, 16 heads and 8 key-value heads of 128, tied embedding: 310 tensors."""
    layer: Shapes = [
        (2048, hidden), (1024, hidden), (1024, hidden), (hidden, 2048), (128,), (128,),
        (intermediate, hidden), (intermediate, hidden), (hidden, intermediate),
        (hidden,), (hidden,),
    ]  # fmt: skip
    return [(151936, hidden), *layer * 28, (hidden,)]


MODELS = {"Qwen3-0.6B": qwen3_shapes(1024, 3072), "Qwen3-1.7B": qwen3_shapes(2048, 6144)}


def ours(shapes: Shapes, container: torch.dtype, grad: torch.dtype, device: torch.device) -> Step:
    params = []
    for shape in shapes:
        p = nn.Parameter(torch.randn(shape, device=device).mul_(0.02).to(container))
        if grad != container:
            p.grad_dtype = grad
        p.grad = torch.randn(shape, device=device).mul_(1e-3).to(grad)
        params.append(p)
    return FairCastAdamW(params, lr=1e-6, backend="triton").step


def torch_fused(shapes: Shapes, export: str | None, device: torch.device) -> Step:
    params = [nn.Parameter(torch.randn(s, device=device).mul_(0.02)) for s in shapes]
    for p in params:
        p.grad = torch.randn_like(p).mul_(1e-3)
    opt = torch.optim.AdamW(params, lr=1e-6, fused=True, capturable=device.type == "cuda")
    copies = [torch.empty_like(p, dtype=torch.bfloat16) for p in params] if export else []

    @torch.no_grad()
    def step() -> None:
        opt.step()
        if export == "rtn":
            torch._foreach_copy_(copies, [*params])
        elif export == "sr":
            for p, target in zip(params, copies, strict=True):
                random = torch.randint_like(p, 1 << 16, dtype=torch.int32)
                target.copy_((p.view(torch.int32) + random & -0x10000).view(torch.float32))

    return step


def measure_models(
    models: dict[str, Shapes], device: torch.device, ceiling: float, pairs: int
) -> Iterator[dict[str, Any]]:
    """A whole step of the optimizer, foreign-write check and all, in pairs with torch's."""
    for model, shapes in models.items():
        elements = sum(torch.Size(s).numel() for s in shapes)
        for container, grad in ((torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32),
                                (torch.float32, torch.float32)):  # fmt: skip
            mine = Timed(ours(shapes, container, grad, device), device)
            host = host_median(mine, pairs)
            for export in (None, "rtn", "sr"):
                theirs = Timed(torch_fused(shapes, export, device), device)
                times, base = paired(mine, theirs, pairs)
                ms, base_ms = statistics.median(times), statistics.median(base)
                # gradient, master and both moments read and written, and the container written
                gb = elements * (grad.itemsize + 24 + container.itemsize) / 1e9
                yield {
                    "what": model,
                    "container": str(container).removeprefix("torch."),
                    "grads": str(grad).removeprefix("torch."),
                    "device_ms": f"{ms:.3f}",
                    "host_ms": f"{host:.3f}",
                    "GB_per_s": f"{gb / ms * 1e3:.0f}",
                    "share_of_copy": f"{gb / ms * 1e3 / ceiling:.3f}",
                    "baseline": "torch fused AdamW" + (f" + {export}" if export else " alone"),
                    "baseline_device_ms": f"{base_ms:.3f}",
                    "baseline_host_ms": f"{host_median(theirs, pairs):.3f}",
                    "ratio_median": f"{statistics.median(map(_ratio, times, base)):.3f}",
                    "pairs": pairs,
                }
                del theirs
                _free(device)
            del mine
            _free(device)


def measure_kernels(
    elements: int, device: torch.device, ceiling: float, pairs: int
) -> Iterator[dict[str, Any]]:
    """Each kernel alone, on one tensor, by the kind of its segment."""
    bf16, fp32 = torch.bfloat16, torch.float32
    cases: list[tuple[str, str, Any, int]] = [  # bytes of an element that it moves
        ("adam_", "adamw", gpu_bits.whole, 4 + 24 + 2),
        ("adam_, a shard of columns", "adamw", gpu_bits.groups, 4 + 24 + 2),
        ("adam_, a shard at any column", "adamw", gpu_bits.columns, 4 + 24 + 2),
        ("adam_, metrics", "adamw", gpu_bits.whole, 4 + 24 + 2),
        ("adam_, amsgrad", "amsgrad", gpu_bits.whole, 4 + 32 + 2),
        ("muon_momentum_", "muon", gpu_bits.whole, 4 + 8 + 2),
        ("muon_update_", "muon", gpu_bits.whole, 2 + 8 + 2),
        ("round_", "adamw", gpu_bits.whole, 4 + 2),
        ("canonical_", "adamw", gpu_bits.whole, 4),
        ("flag_foreign", "adamw", gpu_bits.whole, 0),
    ]
    for name, kind, places, size in cases:
        host_batch = gpu_bits.make_batch([elements], bf16, fp32, kind, places, False)
        batch = gpu_bits.on_device(host_batch, device)
        if "metrics" in name:
            rows = len(batch.segments[0])
            batch.counts = torch.zeros(rows, len(COUNTS), dtype=torch.int64, device=device)
        function = getattr(gpu, name.partition(",")[0])

        def step(function: Any = function, batch: Any = batch) -> None:
            function(batch)

        timed = Timed(step, device)
        ms = median_ms(timed, pairs)
        rate = elements * size / ms / 1e6
        yield {
            "what": name,
            "container": "bfloat16",
            "grads": "float32",
            "device_ms": f"{ms:.4f}",
            "host_ms": f"{host_median(timed, pairs):.3f}",
            "GB_per_s": f"{rate:.0f}" if size else "",
            "share_of_copy": f"{rate / ceiling:.3f}" if size else "",
            "baseline": "",
            "baseline_device_ms": "",
            "baseline_host_ms": "",
            "ratio_median": "",
            "pairs": pairs,
        }
        del timed, batch
        _free(device)


def _ratio(x: float, y: float) -> float:
    return x / y


def _free(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()


# -- The command ---------------------------------------------------------------------------------


def check(device: torch.device) -> None:
    dry = device.type != "cuda"
    sizes = [1, 9, 1025] if dry else [1, 7, 8, 9, 1023, 1024, 1025, 4096, 100_003, 1_000_000]
    cases = gpu_bits.check_kernels(device, sizes, steps=2 if dry else 5)
    print(f"bit for bit equal to the reference: {cases} cases")
    gpu_bits.check_counts(device)
    print("and so are the counts of the metrics")
    if not dry:
        gpu_bits.check_streams()
        gpu_bits.check_graph()
        print("two streams in turn, and a captured graph, give the bits of eager steps")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dry", action="store_true", help="on the CPU: bits, and a rehearsal")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--models", nargs="*", default=[*MODELS], choices=[*MODELS])
    parser.add_argument("--csv", type=Path, help="append the rows to this file")
    args = parser.parse_args()
    if args.dry and not triton.knobs.runtime.interpret:
        parser.error("--dry needs TRITON_INTERPRET=1 in the environment")
    if not args.dry and not torch.cuda.is_available():
        parser.error("no CUDA device; --dry checks the kernels in Triton's interpreter")
    if args.dry:  # the interpreter computes in numpy, which warns of NaN and overflow
        warnings.simplefilter("ignore", RuntimeWarning)
    device = torch.device("cpu" if args.dry else "cuda")
    check(device)

    # The rehearsal goes the whole way on toys: its figures are an interpreter's, and go nowhere.
    pairs = 1 if args.dry else args.pairs
    models = {"toy": [(3, 5), (7,)]} if args.dry else {name: MODELS[name] for name in args.models}
    ceiling = copy_bandwidth(device, 1 << 10 if args.dry else 1 << 30, pairs)
    print(f"device copy: {ceiling:.0f} GB/s")
    hardware = {
        "gpu": "none" if args.dry else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "command": "python " + " ".join(sys.argv),
    }
    rows = []
    kernels = measure_kernels(1000 if args.dry else 1 << 26, device, ceiling, pairs)
    for source in (kernels, measure_models(models, device, ceiling, pairs)):
        for row in source:
            print("  ".join(f"{k} {v}" for k, v in row.items() if v != ""), flush=True)
            rows.append({**row, **hardware})
    if args.csv and not args.dry:
        results.append(args.csv, rows)


if __name__ == "__main__":
    main()
