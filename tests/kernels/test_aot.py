"""What the Triton kernels compile to, for GPUs that are not here: ptxas needs none.

The compiler runs in a process of its own (this file, as a script), since the tests' process may
have triton in its interpreter.
"""

import functools
import heapq
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

TARGETS = (80, 90, 100)
PER_THREAD = 8  # elements
SILENT = {"counts": None, "COUNT": None}  # without metrics; else `counts` is a pointer
ADAM = {"AMSGRAD": False, "HAS_L2": False, "FROM_GRAD": False, "KIND": 0, **SILENT}
AMSGRAD = {"AMSGRAD": True, "HAS_L2": True, "FROM_GRAD": True}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw": ("adam_kernel", {"C": "int16", "G": "int32", **ADAM}),
    "adamw, bf16 grads": ("adam_kernel", {"C": "int16", "G": "int16", **ADAM}),
    "adam, amsgrad, grid": (
        "adam_kernel",
        {"C": "int32", "G": "int32", **ADAM, **AMSGRAD},
    ),
    "adamw, boxes": ("adam_kernel", {"C": "int16", "G": "int32", **ADAM, "KIND": 2}),
    "adamw, shards of columns": (
        "adam_kernel",
        {"C": "int16", "G": "int32", **ADAM, "KIND": 1},
    ),
    "muon momentum": ("muon_momentum_kernel", {"G": "int32"}),
    "muon momentum, bf16 grads": ("muon_momentum_kernel", {"G": "int16"}),
    "muon update": ("muon_update_kernel", {"C": "int16", "KIND": 0, **SILENT}),
    "muon update, grid": ("muon_update_kernel", {"C": "int32", "KIND": 0, **SILENT}),
    "round": ("round_kernel", {"C": "int16", "KIND": 0}),
    "prepare adam": ("prepare_adam_kernel", {}),
    "prepare muon": ("prepare_muon_kernel", {"ADVANCE": True}),
    "flag": ("flag_kernel", {"C": "int16"}),
    "adopt": ("adopt_kernel", {"C": "int16"}),
    "canonical": ("canonical_kernel", {}),
}
for _mode in ("sampled", "all"):
    VARIANTS |= {
        f"{name}, metrics {_mode}": (
            VARIANTS[name][0],
            {k: x for k, x in VARIANTS[name][1].items() if k != "counts"} | {"COUNT": _mode},
        )
        for name in (
            *("adamw", "adamw, bf16 grads", "adam, amsgrad, grid", "adamw, boxes"),
            *("muon update", "muon update, grid"),
        )
    }
FEW = {name for name in VARIANTS if "metrics" not in name and "grid" not in name}
FEW |= {"adam, amsgrad, grid", "adamw, metrics sampled", "muon update, metrics sampled"}
STREAMS = {  # 128-bit loads and stores, 64-bit stores: two of each for every stream of that width
    "adamw": (8, 6, 2),
    "adamw, bf16 grads": (6, 6, 2),
    "adam, amsgrad, grid": (10, 10, 0),
    "muon momentum": (4, 2, 2),
    "muon momentum, bf16 grads": (2, 2, 2),
    "muon update": (2, 2, 2),
    "muon update, grid": (2, 4, 0),
    "round": (2, 0, 2),
}
POINTERS = {
    "segments": "*i64",
    "tensors": "*i64",
    "epoch": "*i64",
    "counts": "*i64",
    "blocks": "*i32",
    "scalars": "*i32",
    "flags": "*i32",
    "hypers": "*fp64",
}


def compile_all(capability: int, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Assembly and resources of these variants."""
    import triton  # type: ignore[import-untyped]
    import triton.language as tl  # type: ignore[import-untyped]
    from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]
    from triton.compiler import ASTSource  # type: ignore[import-untyped]

    from fc_optim.kernels import gpu, gpu_kernels, gpu_tables

    results = {}
    for name in names:
        kernel_name, options = VARIANTS[name]
        kernel = getattr(gpu_kernels, kernel_name)
        constants = {
            (kernel.arg_names.index(k),): getattr(tl, x) if k in ("C", "G") else x
            for k, x in options.items()
        }
        signature = {
            k: "constexpr" if k in options else POINTERS.get(k, "i32") for k in kernel.arg_names
        }
        registers = gpu_tables.REGISTERS
        if kernel_name == "adam_kernel":
            counting = options["COUNT"] is not None
            registers = gpu.adam_registers(
                options["KIND"], amsgrad=options["AMSGRAD"], counting=counting
            )
        compiled = triton.compile(
            ASTSource(kernel, signature, constants),
            target=GPUTarget("cuda", capability, 32),
            options={"num_warps": 4, "enable_fp_fusion": False, "maxnreg": registers},
        )
        results[name] = {
            "ptx": compiled.asm["ptx"],
            "sass": _cuobjdump("-sass", compiled.asm["cubin"]),
            "resources": _cuobjdump("-res-usage", compiled.asm["cubin"]),
        }
    return results


def _cuobjdump(option: str, cubin: bytes) -> str:
    import triton

    program = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [program, option, file.name], capture_output=True, text=True, check=True
        )
    return done.stdout


def launch_all() -> dict[str, int]:
    """Launch everything up to the point where code would be loaded; count the compilations."""
    import torch
    import triton  # type: ignore[import-untyped]
    from kernel_cases import make_batch, make_muon_batch
    from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]

    from fc_optim.kernels import gpu, gpu_kernels

    class Driver:
        def get_current_target(self) -> Any:
            return GPUTarget("cuda", 90, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

    triton.runtime.driver.set_active(Driver())
    kernel_type: Any = type(gpu_kernels.adam_kernel)
    run = kernel_type.run
    kernel_type.run = lambda self, *args, **kwargs: run(self, *args, **{**kwargs, "warmup": True})
    for sizes in ([1], [16, 17], [3] * 300):
        for step in (0, 15):
            options: dict[str, Any] = {"epoch": step or None, "seed": step * 2**60}
            batch = make_batch(sizes, step=step, lr=step, **options)
            gpu.adam_(batch)
            gpu.round_(batch)
            gpu.canonical_(batch)
            gpu.flag_foreign(batch)
            gpu.adopt_(batch, torch.zeros(len(sizes) + 1, dtype=torch.int32)[1:])
            matrices = make_muon_batch(sizes, step=step, lr=step, nesterov=step == 0, **options)
            gpu.muon_momentum_(matrices)
            gpu.muon_update_(matrices)
            for b, function in ((batch, gpu.adam_), (matrices, gpu.muon_update_)):
                b.counts = torch.zeros(len(sizes), 4, dtype=torch.int64)
                function(b)
    names = {kernel for kernel, _ in VARIANTS.values()}
    return {name: len(getattr(gpu_kernels, name).device_caches[0][0]) for name in names}


@functools.cache
def run_apart(*job: str) -> dict[str, Any]:
    """What this file prints as a script, in a process without triton's interpreter: once a job."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    with tempfile.TemporaryDirectory() as cache:
        env["TRITON_CACHE_DIR"] = cache
        done = subprocess.run(
            [sys.executable, __file__, *job], env=env, capture_output=True, text=True
        )
    assert done.returncode == 0, done.stderr
    results: dict[str, Any] = json.loads(done.stdout)
    return results


def variants(names: Iterable[str]) -> list[Any]:
    """Those of FEW for one GPU, and (`-m long`) all of them for all."""
    cases = [pytest.param("90 few", name, id=f"sm_90-{name}") for name in names if name in FEW]
    for target in TARGETS:
        marks, prefix = pytest.mark.long, f"all of sm_{target}"
        cases += [pytest.param(f"{target} all", n, id=f"{prefix}-{n}", marks=marks) for n in names]
    return cases


def each_variant(names: Iterable[str]) -> Any:
    return pytest.mark.parametrize(("compiled", "name"), variants([*names]), indirect=["compiled"])


@pytest.fixture
def compiled(request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    return run_apart(*request.param.split())


def instructions(sass: str) -> list[tuple[int, str]]:
    """Address and text of each; the padding at the end is left out."""
    found = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", sass, re.M)
    while found[-1][1] == "NOP":
        found.pop()
    return [(int(address, 16), text) for address, text in found]


def count(sass: str, pattern: str) -> int:
    return sum(bool(re.search(pattern, text)) for _, text in instructions(sass))


def shortest_path(sass: str) -> int:
    """Instructions from entry to exit through all 128-bit accesses: the way of a whole block."""
    code = instructions(sass)
    place = {address: i for i, (address, _) in enumerate(code)}

    def successors(i: int) -> list[int]:
        guard, operation, operands = _parse(code[i][1])
        if not operation.startswith(("BRA", "EXIT", "RET")):
            return [i + 1]
        following = [i + 1] if guard or "P" in operands else []
        return following + [place[int(x, 16)] for x in re.findall("0x([0-9a-f]+)$", operands)]

    def nearest(start: int, goals: set[int]) -> tuple[int, int]:
        best, queue = {start: 0}, [(0, start)]
        while queue:
            length, i = heapq.heappop(queue)
            if i in goals:
                return length, i
            for j in successors(i):
                if length + 1 < best.get(j, len(code)):
                    best[j] = length + 1
                    heapq.heappush(queue, (length + 1, j))
        raise AssertionError("no path")

    wide = [{i} for i, (_, text) in enumerate(code) if re.search(r"(LDG|STG)\.E\.128", text)]
    exits = {i for i, (_, text) in enumerate(code) if "EXIT" in text}
    total, at = 1, 0
    for goals in [*wide, exits]:
        length, at = nearest(at, goals)
        total += length
    return total


def _parse(text: str) -> tuple[str, str, str]:
    """The guard (or nothing), operation and operands of an instruction."""
    match = re.fullmatch(r"(@\S+ )?\s*(\S+)\s*(.*)", text)
    assert match
    return match[1] or "", match[2], match[3]


@each_variant(VARIANTS)
def test_no_spills_and_no_stack(compiled: dict[str, dict[str, Any]], name: str) -> None:
    assert re.search(r"STACK:0 .*LOCAL:0\b", compiled[name]["resources"])
    assert count(compiled[name]["sass"], r"\b(LDL|STL)\b") == 0


@each_variant(STREAMS)
def test_accesses_are_wide(compiled: dict[str, dict[str, Any]], name: str) -> None:
    sass = compiled[name]["sass"]
    loads, stores, halves = STREAMS[name]
    assert count(sass, r"LDG\.E\.128") == loads
    assert count(sass, r"STG\.E\.128") == stores
    assert count(sass, r"STG\.E\.64") == halves


LENGTHS = {  # of the kernel with its slow paths, and of the way of a block that needs none of them
    "adamw": (150, 86),
    "adamw, bf16 grads": (150, 86),
    "adamw, shards of columns": (155, 92),
    "muon momentum": (55, 34),
    "muon momentum, bf16 grads": (55, 34),
    "muon update": (64, 43),
    "round": (50, 36),
}


@each_variant(LENGTHS)
def test_instructions_per_element(compiled: dict[str, dict[str, Any]], name: str) -> None:
    whole, path = LENGTHS[name]
    sass = compiled[name]["sass"]
    assert len(instructions(sass)) <= whole * PER_THREAD
    assert shortest_path(sass) <= path * PER_THREAD


@each_variant(VARIANTS)
def test_every_operation_rounds_once(compiled: dict[str, dict[str, Any]], name: str) -> None:
    """No FMA, no flush to zero, and no operation that ptxas may contract (those without `.rn`)."""
    ptx = compiled[name]["ptx"]
    assert "fma." not in ptx and ".ftz" not in ptx and ".approx" not in ptx
    assert not re.search(r"\b(add|sub|mul)\.f(32|64)", ptx)
    needed = {
        "adam_kernel": ("div.rn.f32", "sqrt.rn.f32"),
        "prepare_adam_kernel": ("div.rn.f64", "sqrt.rn.f64"),
        "prepare_muon_kernel": ("div.rn.f64",),
    }
    for operation in needed.get(VARIANTS[name][0], ()):
        assert operation in ptx


def test_one_compilation_per_kernel() -> None:
    """Over steps, rates, epochs, seeds, and batches of 1, 2 and 300 tensors."""
    expected = {name: 1 for name, _ in VARIANTS.values()}
    expected["prepare_muon_kernel"] = 2  # one for the momentum, one for the update
    expected |= {"adam_kernel": 2, "muon_update_kernel": 2}  # with metrics and without
    assert run_apart("launch") == expected


if __name__ == "__main__":
    if sys.argv[1] == "launch":
        json.dump(launch_all(), sys.stdout)
    else:
        target, which = sys.argv[1:]
        json.dump(compile_all(int(target), FEW if which == "few" else VARIANTS), sys.stdout)
