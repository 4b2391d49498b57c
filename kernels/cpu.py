"""The CPU backend: `reference`'s kernels with the same bits, on a pool of threads."""

import os
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import fields
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fc_optim.kernels import cpu_kernels as k
from fc_optim.kernels.batch import (
    AdamScalars,
    Batch,
    MuonScalars,
    adam_scalars,
    muon_scalars,
    sample_positions,
)
from fc_optim.kernels.reference import adopt_

__all__ = ["adam_", "adopt_", "flag_foreign", "muon_momentum_", "muon_update_", "round_", "sample"]

SERIAL = 1 << 20  # elements: below, waking a thread costs about what it saves

_ADDRESS_COLUMNS = {
    "containers": k.CONTAINER,
    "masters": k.MASTER,
    "grads": k.GRAD,
    "exp_avgs": k.EXP_AVG,
    "exp_avg_sqs": k.EXP_AVG_SQ,
    "max_exp_avg_sqs": k.MAX_EXP_AVG_SQ,
    "momentum_buffers": k.MOMENTUM_BUFFER,
    "updates": k.UPDATE,
}

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
    futures = [_pool.submit(kernel, counter, *args) for _ in range(helpers)] if _pool else []
    try:
        kernel(counter, *args)
    finally:  # also on KeyboardInterrupt: the helpers hold bare addresses
        wait(futures)
    for future in futures:
        future.result()


# ---- Arguments


def _segments(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """The table but for addresses, T and SCALARS; and segments' first blocks (last: of all)."""
    segments = tuple(map(tuple, batch.segments))
    cached = batch.cache.get(__name__)
    if cached is None or cached[0] != segments:
        rows = [
            (s.numel, s.inner, s.row_stride, s.base, s.param_id, i, s.offset)
            for i, of_tensor in enumerate(segments)
            for s in of_tensor
        ]
        table = np.zeros((len(rows), k.COLUMNS), np.int64)
        table[:, k.NUMEL : k.T] = np.array(rows, np.int64).reshape(-1, k.T - k.NUMEL)
        one_run = table[:, k.INNER] == table[:, k.ROW_STRIDE]
        table[one_run, k.INNER] = table[one_run, k.NUMEL]
        firsts = np.concatenate(([0], np.cumsum(-(-table[:, k.NUMEL] // k.BLOCK))))
        cached = batch.cache[__name__] = segments, table, firsts
    return cached[1].copy(), cached[2]


def _addresses(tensors: list[Tensor]) -> np.ndarray:
    if not all(map(Tensor.is_contiguous, tensors)):
        raise ValueError("kernels need contiguous tensors")
    return np.fromiter(map(Tensor.data_ptr, tensors), np.int64, len(tensors))


def _table(batch: Batch, *lists: str) -> tuple[np.ndarray, np.ndarray]:
    """The table with the addresses of these lists of the batch, and the first blocks."""
    table, firsts = _segments(batch)
    for name in lists:
        tensors = getattr(batch, name)
        if tensors:  # else the addresses stay 0
            offsets = table[:, k.OFFSET] * tensors[0].element_size()
            column = _ADDRESS_COLUMNS[name]
            table[:, column] = _addresses(tensors)[table[:, k.TENSOR]] + offsets
    return table, firsts


def _rounding(batch: Batch, table: np.ndarray, *, step: bool = False) -> tuple[Any, ...]:
    """Set T; what a kernel that rounds takes last: halves of the key, are containers bf16.

    With `step`, counts one first: nothing may raise after it.
    """
    t: Any = batch.epoch
    if step or t is None:
        epochs = k.read_epochs(_addresses(batch.epochs), step)
        t = epochs[table[:, k.TENSOR]] if t is None else t
    table[:, k.T] = t & 0xFFFFFFFF
    key = np.uint64(batch.seed & 0xFFFFFFFF), np.uint64(batch.seed >> 32 & 0xFFFFFFFF)
    return *key, batch.containers[0].dtype == torch.bfloat16


_adam_row = attrgetter(*(f.name for f in fields(AdamScalars)))
_muon_row = attrgetter(*(f.name for f in fields(MuonScalars)))


def _scalars(
    table: np.ndarray, keys: Iterable[Hashable], row: Callable[[int], tuple[float, ...]]
) -> np.ndarray:
    """Set SCALARS; the distinct rows (fp32): `row(i)` of the first tensor i with each key."""
    rows: list[tuple[float, ...]] = []
    seen: dict[Hashable, int] = {}
    index = []
    for i, key in enumerate(keys):
        if key not in seen:
            seen[key] = len(rows)
            rows.append(row(i))
        index.append(seen[key])
    table[:, k.SCALARS] = np.array(index, np.int64)[table[:, k.TENSOR]]
    return torch.tensor(rows, dtype=torch.float64, device="cpu").to(torch.float32).numpy()


def _muon_scalars(batch: Batch, table: np.ndarray, scale: float = 1.0) -> np.ndarray:
    hypers = batch.muon_hypers
    return _scalars(table, map(id, hypers), lambda i: _muon_row(muon_scalars(hypers[i], scale)))


def _counting(batch: Batch) -> tuple[int | None, bool]:
    """What a kernel that can count takes last; None compiles it without."""
    return (None if batch.counts is None else batch.counts.data_ptr()), batch.count_all


def _scale(batch: Batch) -> float:
    return 1.0 if batch.grad_scale is None else batch.grad_scale.item()


def _skipped(batch: Batch) -> bool:
    return not batch.masters or (batch.found_inf is not None and batch.found_inf.item() != 0)


# ---- Kernels


def round_(batch: Batch) -> None:
    """As `reference.round_`."""
    if batch.masters:
        table, firsts = _table(batch, "containers", "masters")
        rounding = _rounding(batch, table)
        _launch(k.round_kernel, table[:, k.NUMEL].sum(), table, firsts, *rounding)


def flag_foreign(batch: Batch) -> Tensor:
    """As `reference.flag_foreign`."""
    flags = torch.zeros(len(batch.masters), dtype=torch.int32, device="cpu")
    if batch.masters:
        table, _ = _table(batch, "containers", "masters")
        rounding = _rounding(batch, table)
        sizes = table[:, k.NUMEL]
        key = (__name__, "samples")  # depends on sizes only
        if key not in batch.cache or not np.array_equal(batch.cache[key][0], sizes):
            positions = [np.empty(0, np.int64)]  # so that there is something to join
            positions += [sample_positions(n).numpy() for n in sizes.tolist()]
            ends = np.cumsum([p.size for p in positions])[1:]
            batch.cache[key] = sizes.copy(), np.concatenate(positions), ends
        _, positions, ends = batch.cache[key]
        # A sample costs about what 20 elements of a step do: cache and TLB misses.
        work = 20 * positions.size
        _launch(k.flag_kernel, work, table, positions, ends, flags.numpy(), *rounding)
    return flags


def adam_(batch: Batch) -> None:
    """As `reference.adam_`."""
    if _skipped(batch):
        return
    moments = "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs"
    table, firsts = _table(batch, "containers", "masters", "grads", *moments)
    addresses = _addresses(batch.steps)
    steps = k.read_steps(addresses, False) + np.float32(1)
    hypers, counts, scale = batch.hypers, steps.tolist(), _scale(batch)
    scalars = _scalars(
        table,
        zip(map(id, hypers), counts, strict=True),
        lambda i: _adam_row(adam_scalars(hypers[i], int(counts[i]), scale)),
    )
    grad16 = batch.grads[0].dtype == torch.bfloat16
    elements = table[:, k.NUMEL].sum()
    k.read_steps(addresses, True)  # not before: hyper-parameters may have raised
    rounding = *_rounding(batch, table, step=True), *_counting(batch)
    _launch(k.adam_kernel, elements, table, firsts, scalars, grad16, *rounding)


def muon_momentum_(batch: Batch) -> None:
    """As `reference.muon_momentum_`."""
    if _skipped(batch):
        return
    table, firsts = _table(batch, "grads", "momentum_buffers", "updates")
    scalars = _muon_scalars(batch, table, _scale(batch))
    grad16 = batch.grads[0].dtype == torch.bfloat16
    _launch(k.momentum_kernel, table[:, k.NUMEL].sum(), table, firsts, scalars, grad16)


def muon_update_(batch: Batch) -> None:
    """As `reference.muon_update_`."""
    if _skipped(batch):
        return
    table, firsts = _table(batch, "containers", "masters", "updates")
    scalars = _muon_scalars(batch, table)
    rounding = *_rounding(batch, table, step=True), *_counting(batch)
    _launch(k.update_kernel, table[:, k.NUMEL].sum(), table, firsts, scalars, *rounding)


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
