"""The CPU backend: `reference`'s kernels with the same bits, on a pool of threads."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import fields
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fc_optim.kernels import cpu_kernels as k
from fc_optim.kernels.batch import AdamScalars, Batch, MuonScalars, adam_scalars, muon_scalars
from fc_optim.kernels.cpu_modes import ieee
from fc_optim.kernels.cpu_tables import Table, table_of
from fc_optim.kernels.reference import adopt_

__all__ = ["adam_", "adopt_", "canonical_", "flag_foreign", "muon_momentum_", "muon_update_"]
__all__ += ["round_", "sample"]

SERIAL = 1 << 20  # elements: below, waking a thread costs about what it saves

# ---- Threads

_pool: ThreadPoolExecutor | None = None


def _drop_pool() -> None:
    """A forked child inherits the pool without its threads: what it submits would never run."""
    global _pool
    _pool = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_drop_pool)


def _launch(kernel: Callable[..., object], elements: int, *args: object) -> None:
    """Run a kernel here and in the pool's threads, all claiming work from one counter."""
    global _pool
    counter = np.zeros(1, np.int64)
    helpers = torch.get_num_threads() - 1 if elements >= SERIAL else 0
    if helpers > 0 and _pool is None:
        _pool = ThreadPoolExecutor(max(helpers, os.cpu_count() or 1), "fc_optim")
    futures = [_pool.submit(ieee(kernel), counter, *args) for _ in range(helpers)] if _pool else []
    try:
        kernel(counter, *args)
    finally:  # also on KeyboardInterrupt: the helpers hold bare addresses
        wait(futures)
    for future in futures:
        future.result()


# ---- Arguments

_adam_row = attrgetter(*(f.name for f in fields(AdamScalars)))
_muon_row = attrgetter(*(f.name for f in fields(MuonScalars)))


def _rounding(batch: Batch, table: Table, *, step: bool = False) -> tuple[Any, ...]:
    """Set T; what a kernel that rounds takes last: halves of the key, are containers bf16.

    With `step`, counts one first: nothing may raise after it.
    """
    t: Any = batch.epoch
    if step or t is None:
        epochs = k.read_epochs(table.scalar_addresses(batch, "epochs"), step)
        t = epochs if t is None else t
    table.set_epochs(t)
    key = np.uint64(batch.seed & 0xFFFFFFFF), np.uint64(batch.seed >> 32 & 0xFFFFFFFF)
    return *key, batch.containers[0].dtype == torch.bfloat16


def _muon_scalars(batch: Batch, table: Table, scale: float = 1.0) -> np.ndarray:
    return table.set_muon_scalars(
        batch.muon_hypers, lambda hyper: _muon_row(muon_scalars(hyper, scale))
    )


def _counting(batch: Batch) -> tuple[int | None, bool]:
    """What a kernel that can count takes last; None compiles it without."""
    return (None if batch.counts is None else batch.counts.data_ptr()), batch.count_all


def _scale(batch: Batch) -> float:
    return 1.0 if batch.grad_scale is None else batch.grad_scale.item()


def _skipped(batch: Batch) -> bool:
    return not batch.masters or (batch.found_inf is not None and batch.found_inf.item() != 0)


# ---- Kernels


@ieee
def round_(batch: Batch) -> None:
    """As `reference.round_`."""
    if batch.masters:
        table = table_of(batch)
        table.point(batch, "containers", "masters")
        rounding = _rounding(batch, table)
        _launch(k.round_kernel, table.elements, table.rows, table.firsts, *rounding)


def canonical_(batch: Batch) -> None:
    """As `reference.canonical_`."""
    if batch.masters:
        table = table_of(batch)
        table.point(batch, "masters")
        _launch(k.canonical_kernel, table.elements, table.rows, table.firsts)


def flag_foreign(batch: Batch) -> Tensor:
    """As `reference.flag_foreign`."""
    flags = torch.zeros(len(batch.masters), dtype=torch.int32, device="cpu")
    if batch.masters:
        table = table_of(batch)
        table.point(batch, "containers", "masters")
        rounding = _rounding(batch, table)
        positions, ends, work = table.samples()
        _launch(k.flag_kernel, work, table.rows, positions, ends, flags.numpy(), *rounding)
    return flags


@ieee
def adam_(batch: Batch) -> None:
    """As `reference.adam_`."""
    if _skipped(batch):
        return
    table = table_of(batch)
    table.point(batch, "containers", "masters", "grads")
    table.point(batch, "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs")
    addresses = table.scalar_addresses(batch, "steps")
    steps, scale = k.read_steps(addresses, False) + np.float32(1), _scale(batch)
    scalars = table.set_adam_scalars(
        batch.hypers, steps, lambda hyper, step: _adam_row(adam_scalars(hyper, step, scale))
    )
    arguments = table.rows, table.firsts, scalars, batch.grads[0].dtype == torch.bfloat16
    k.read_steps(addresses, True)  # not before: hyper-parameters may have raised
    rounding = _rounding(batch, table, step=True)
    _launch(k.adam_kernel, table.elements, *arguments, *rounding, *_counting(batch))


@ieee
def muon_momentum_(batch: Batch) -> None:
    """As `reference.muon_momentum_`."""
    if _skipped(batch):
        return
    table = table_of(batch)
    table.point(batch, "grads", "momentum_buffers", "updates")
    scalars = _muon_scalars(batch, table, _scale(batch))
    grad16 = batch.grads[0].dtype == torch.bfloat16
    _launch(k.momentum_kernel, table.elements, table.rows, table.firsts, scalars, grad16)


@ieee
def muon_update_(batch: Batch) -> None:
    """As `reference.muon_update_`."""
    if _skipped(batch):
        return
    table = table_of(batch)
    table.point(batch, "containers", "masters", "updates")
    scalars = _muon_scalars(batch, table)
    rounding = _rounding(batch, table, step=True)
    arguments = table.rows, table.firsts, scalars, *rounding, *_counting(batch)
    _launch(k.update_kernel, table.elements, *arguments)


def sample(tensors: Sequence[Tensor], positions: Sequence[Tensor], cache: dict[Any, Any]) -> Tensor:
    """As `reference.sample`."""
    pointers = tuple(map(Tensor.data_ptr, tensors))
    if cache.get(__name__, ((),))[0] != pointers:
        size = tensors[0].element_size()
        places = [p.numpy() * size + a for p, a in zip(positions, pointers, strict=True)]
        at = np.concatenate(places)
        ends = np.append(np.flatnonzero(np.diff(at) != size) + 1, at.size)
        cache[__name__] = pointers, at[np.append(0, ends[:-1])], ends
    _, addresses, ends = cache[__name__]
    out = torch.empty(int(ends[-1]), dtype=torch.float32, device="cpu")
    k.sample_kernel(addresses, ends, out.numpy(), tensors[0].dtype == torch.bfloat16)
    return out
