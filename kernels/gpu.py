"""The Triton backend: one launch for all tensors of a batch; same functions as `reference`.

The host never waits, and a captured graph replays (see `gpu_tables`). CUDA, XPU and (interpreted)
CPU tensors are taken.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from fc_optim.kernels import gpu_kernels as k
from fc_optim.kernels.batch import AdamHyper, Batch
from fc_optim.kernels.gpu_ops import PREPARE_BLOCK
from fc_optim.kernels.gpu_tables import SCALAR_COLUMNS, SCATTERED, Launch, Tables

PROGRAMS_PER_CORE = 4  # of the adoption kernel, which in most steps has nothing to do


def round_(batch: Batch) -> None:
    """See `reference.round_`."""
    if not batch.masters:
        return
    with Launch(batch) as launch:
        table, maps = launch.segments("containers", "masters")
        others = launch.tensors(), launch.epoch(), *launch.seed()
        for blocks, kind in maps:
            k.round_kernel[(len(blocks),)](
                *(table, blocks, *others),
                C=_patterns(batch.containers),
                KIND=kind,
                **launch.options(),
            )


def canonical_(batch: Batch) -> None:
    """See `reference.canonical_`."""
    if not batch.masters:
        return
    with Launch(batch) as launch:
        table, maps = launch.segments("masters")
        for blocks, _ in maps:
            k.canonical_kernel[(len(blocks),)](table, blocks, **launch.options())


def flag_foreign(batch: Batch) -> Tensor:
    """See `reference.flag_foreign`."""
    flags = torch.zeros(len(batch.masters), dtype=torch.int32, device=batch.masters[0].device)
    with Launch(batch) as launch:
        table, _ = launch.segments("containers", "masters")
        arguments = table, launch.tensors(), launch.epoch(), flags, *launch.seed()
        if len(table):
            k.flag_kernel[(len(table),)](
                *arguments, C=_patterns(batch.containers), **launch.options()
            )
    return flags


def adopt_(batch: Batch, flags: Tensor) -> Tensor:
    """See `reference.adopt_`."""
    counts = torch.zeros(len(batch.masters), dtype=torch.int64, device=batch.masters[0].device)
    with Launch(batch) as launch:
        table, maps = launch.segments("containers", "masters")
        arguments = table, len(table), launch.tensors(), launch.epoch(), flags, counts
        programs = min(launch.cores() * PROGRAMS_PER_CORE, sum(len(blocks) for blocks, _ in maps))
        if programs:
            k.adopt_kernel[(programs,)](
                *arguments, *launch.seed(), C=_patterns(batch.containers), **launch.options()
            )
    return counts


def adam_(batch: Batch) -> None:
    """See `reference.adam_`."""
    if not batch.masters:
        return
    streams = ("containers", "masters", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs")
    with Launch(batch) as launch:
        table, maps = launch.segments(*streams)
        scalars = _prepare(launch, k.prepare_adam_kernel)
        hypers = cast(list[AdamHyper], launch.host.hypers)
        for blocks, kind in maps:
            k.adam_kernel[(len(blocks),)](
                *(table, blocks, scalars, batch.counts, *launch.seed()),
                C=_patterns(batch.containers),
                G=_patterns(batch.grads),
                AMSGRAD=bool(batch.max_exp_avg_sqs),
                HAS_L2=any(not h.decoupled and h.weight_decay != 0 for h in hypers),
                FROM_GRAD=any(isinstance(h.beta1, Tensor) or 1 - h.beta1 >= 0.5 for h in hypers),
                KIND=kind,
                COUNT=_counting(batch),
                **launch.options(
                    adam_registers(
                        kind,
                        amsgrad=bool(batch.max_exp_avg_sqs),
                        counting=batch.counts is not None,
                    )
                ),
            )


def muon_momentum_(batch: Batch) -> None:
    """See `reference.muon_momentum_`."""
    if not batch.masters:
        return
    with Launch(batch) as launch:
        table, maps = launch.segments("grads", "momentum_buffers", "updates")
        scalars = _prepare(launch, k.prepare_muon_kernel, ADVANCE=False)
        for blocks, _ in maps:
            k.muon_momentum_kernel[(len(blocks),)](
                table, blocks, scalars, G=_patterns(batch.grads), **launch.options()
            )


def muon_update_(batch: Batch) -> None:
    """See `reference.muon_update_`."""
    if not batch.masters:
        return
    with Launch(batch) as launch:
        table, maps = launch.segments("containers", "masters", "updates")
        scalars = _prepare(launch, k.prepare_muon_kernel, ADVANCE=True)
        for blocks, kind in maps:
            k.muon_update_kernel[(len(blocks),)](
                *(table, blocks, scalars, batch.counts, *launch.seed()),
                C=_patterns(batch.containers),
                KIND=kind,
                COUNT=_counting(batch),
                **launch.options(),
            )


def sample(tensors: Sequence[Tensor], positions: Sequence[Tensor], cache: dict[Any, Any]) -> Tensor:
    """See `reference.sample`."""
    pointers, key = [t.data_ptr() for t in tensors], "gpu sample of"
    if cache.get(key, ((), None))[0] != pointers:
        size = tensors[0].element_size()
        places = [p * size + a for p, a in zip(positions, pointers, strict=True)]
        cache[key] = pointers, torch.cat(places)
    with Tables(tensors[0].device, cache) as tables:
        addresses = tables.table("gpu sample", cache[key][1])
        out = torch.empty(len(addresses), dtype=torch.float32, device=addresses.device)
        programs = triton.cdiv(len(addresses), k.SCAN.value)
        arguments = addresses, out.view(torch.int32), len(addresses)
        if programs:
            k.sample_kernel[(programs,)](*arguments, C=_patterns(tensors))
    return out


def _prepare(launch: Launch, kernel: Any, **constants: bool) -> Tensor:
    """Launch a prologue: what the update kernel needs of each tensor's scalars."""
    count = len(launch.batch.masters)
    scalars = torch.empty(count, SCALAR_COLUMNS.value, dtype=torch.int32, device=launch.device)
    tables = (launch.tensors(), launch.epoch(), launch.hypers())
    programs = triton.cdiv(count, PREPARE_BLOCK.value)
    kernel[(programs,)](*tables, scalars, count, **constants, **launch.options())
    return scalars


def adam_registers(kind: int, *, amsgrad: bool, counting: bool) -> int:
    """The bound that each variant of Adam's kernel needs in order not to spill.

    Without one ptxas spills some variants in order to stay at 64 or 72.
    """
    if kind == SCATTERED.value:
        return 144
    return 80 + 16 * amsgrad + 8 * counting


def _counting(batch: Batch) -> str | None:
    """None compiles a kernel without (and without its argument, which is None as well)."""
    return None if batch.counts is None else "all" if batch.count_all else "sampled"


def _patterns(tensors: Sequence[Tensor]) -> tl.dtype:
    """Integers of these tensors' width."""
    return tl.int16 if tensors[0].dtype == torch.bfloat16 else tl.int32
