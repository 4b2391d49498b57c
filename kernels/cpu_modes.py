"""The floating-point mode of a thread: how it rounds, and whether it keeps subnormal numbers.

`torch.set_flush_denormal` and some libraries set it, for one thread at a time: what a block of a
launch gave would depend on the thread that claimed it.
"""

import platform
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.extending import intrinsic

P = ParamSpec("P")
R = TypeVar("R")

_MACHINES = {"x86_64": "x86", "amd64": "x86", "aarch64": "arm", "arm64": "arm"}
MACHINE = _MACHINES.get(platform.machine().lower(), "")
IEEE_MODE = np.int64(0x1F80 if MACHINE == "x86" else 0)  # MXCSR's default, and FPCR's


@intrinsic
def _read_mode(typingctx: Any) -> Any:
    """The control register of this thread's floating-point unit; 0 where we know of none."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        i64, i32 = ir.IntType(64), ir.IntType(32)
        if MACHINE == "x86":
            place = builder.alloca(i32)
            pointer = builder.bitcast(place, ir.IntType(8).as_pointer())
            kind = ir.FunctionType(ir.VoidType(), [pointer.type])
            builder.call(_declare(builder.module, kind, "llvm.x86.sse.stmxcsr"), [pointer])
            return builder.zext(builder.load(place), i64)
        if MACHINE == "arm":
            kind = ir.FunctionType(i64, [])
            return builder.call(_declare(builder.module, kind, "llvm.aarch64.get.fpcr"), [])
        return ir.Constant(i64, 0)

    return types.int64(), codegen


@intrinsic
def _write_mode(typingctx: Any, mode: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> None:
        i32 = ir.IntType(32)
        if MACHINE == "x86":
            place = builder.alloca(i32)
            builder.store(builder.trunc(args[0], i32), place)
            pointer = builder.bitcast(place, ir.IntType(8).as_pointer())
            kind = ir.FunctionType(ir.VoidType(), [pointer.type])
            builder.call(_declare(builder.module, kind, "llvm.x86.sse.ldmxcsr"), [pointer])
        elif MACHINE == "arm":
            kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)])
            builder.call(_declare(builder.module, kind, "llvm.aarch64.set.fpcr"), [args[0]])

    return types.void(types.int64), codegen


def _declare(module: Any, kind: Any, name: str) -> Any:
    known = module.globals.get(name)
    return ir.Function(module, kind, name) if known is None else known


@njit(cache=True)
def set_ieee_mode():
    """Round to nearest, subnormals kept, nothing traps: this thread's mode. Returns the old one."""
    mode = _read_mode()
    _write_mode(IEEE_MODE)
    return mode


@njit(cache=True)
def restore_mode(mode):
    _write_mode(mode)


def ieee(function: Callable[P, R]) -> Callable[P, R]:
    """The function in IEEE 754's default mode; the thread then has its own again."""

    @wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        mode = set_ieee_mode()
        try:
            return function(*args, **kwargs)
        finally:
            restore_mode(mode)

    return guarded
