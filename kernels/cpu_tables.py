"""The table of a batch that the CPU backend's loops read, kept from launch to launch."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from fc_optim.kernels import cpu_kernels as k
from fc_optim.kernels.batch import (
    WHOLE,
    AdamHyper,
    Batch,
    MuonHyper,
    distinct_hypers,
    sample_positions,
)

_COLUMNS = {
    "containers": k.CONTAINER,
    "masters": k.MASTER,
    "grads": k.GRAD,
    "exp_avgs": k.EXP_AVG,
    "exp_avg_sqs": k.EXP_AVG_SQ,
    "max_exp_avg_sqs": k.MAX_EXP_AVG_SQ,
    "momentum_buffers": k.MOMENTUM_BUFFER,
    "updates": k.UPDATE,
}
_FRESH = ("grads",)  # lists whose tensors move without a new list: backward made them anew


class Table:
    """One row per segment; columns as in `cpu_kernels`. Owned by the batch's cache.

    `rows` is what kernels take; `firsts` the segments' first blocks and (last) the number of all;
    `elements` their number. What is known of a list of the batch is taken to hold for as long as
    it is the same list.
    """

    def __init__(self, segments: Sequence[Sequence[Any]]) -> None:
        self.segments = segments
        rows = [
            (s.numel, s.inner, s.row_stride, s.base, s.param_id, i, s.offset)
            for i, of_tensor in enumerate(segments)
            for s in of_tensor
        ]
        table = np.zeros((len(rows), k.COLUMNS), np.int64)
        table[:, k.NUMEL : k.T] = np.array(rows, np.int64).reshape(-1, k.T - k.NUMEL)
        one_run = table[:, k.INNER] == table[:, k.ROW_STRIDE]
        table[one_run, k.INNER] = table[one_run, k.NUMEL]
        self.rows = table
        self.firsts = np.concatenate(([0], np.cumsum(-(-table[:, k.NUMEL] // k.BLOCK))))
        self.elements = int(table[:, k.NUMEL].sum())
        self._tensor = table[:, k.TENSOR].copy()
        self._known: dict[str, tuple[Any, Any]] = {}  # by name: a list and what was made of it
        self._samples: tuple[np.ndarray, np.ndarray, int] | None = None

    def point(self, batch: Batch, *names: str) -> None:
        """Set the addresses of these lists of the batch; those of an empty one are 0.

        Raises ValueError for a tensor that is not contiguous.
        """
        for name in names:
            tensors, column = getattr(batch, name), _COLUMNS[name]
            if name not in _FRESH and self._known.get(name, (None,))[0] is tensors:
                continue
            self.rows[:, column] = 0
            if tensors:
                offsets = self.rows[:, k.OFFSET] * tensors[0].element_size()
                self.rows[:, column] = _addresses(name, tensors)[self._tensor] + offsets
            if name not in _FRESH:  # nor kept alive here
                self._known[name] = tensors, None

    def scalar_addresses(self, batch: Batch, name: str) -> np.ndarray:
        """Of `steps` or `epochs`."""
        tensors = getattr(batch, name)
        known, addresses = self._known.get(name, (None, None))
        if known is not tensors:
            addresses = _addresses(name, tensors)
            self._known[name] = tensors, addresses
        return addresses

    def set_epochs(self, epochs: int | np.ndarray) -> None:
        """Set T: a number for all, or one per tensor."""
        t = epochs if isinstance(epochs, int) else epochs[self._tensor]
        self.rows[:, k.T] = t & 0xFFFFFFFF

    def set_adam_scalars(
        self, hypers: list[AdamHyper], steps: np.ndarray, scalars: Callable[[AdamHyper, int], Any]
    ) -> np.ndarray:
        """Set SCALARS; the rows (fp32) of the distinct pairs of a hyper and a step (fp32)."""
        groups, distinct = self._groups(hypers)
        pairs = groups << 32 | steps.view(np.uint32)
        _, firsts, index = np.unique(pairs, return_index=True, return_inverse=True)
        self.rows[:, k.SCALARS] = index[self._tensor]
        return _rounded([scalars(distinct[groups[i]], int(steps[i])) for i in firsts.tolist()])

    def set_muon_scalars(
        self, hypers: list[MuonHyper], scalars: Callable[[MuonHyper], Any]
    ) -> np.ndarray:
        """Set SCALARS; the rows (fp32) of the distinct hypers."""
        groups, distinct = self._groups(hypers)
        self.rows[:, k.SCALARS] = groups[self._tensor]
        return _rounded([scalars(h) for h in distinct])

    def samples(self) -> tuple[np.ndarray, np.ndarray, int]:
        """Positions that `flag_foreign` compares in segments of more than WHOLE elements.

        Also where each segment's end, and how many elements of a step that work is worth.
        """
        if self._samples is None:
            sizes = self.rows[:, k.NUMEL].tolist()
            positions = [np.empty(0, np.int64)]  # so that there is something to join
            positions += [sample_positions(n if n > WHOLE else 0).numpy() for n in sizes]
            ends = np.cumsum([p.size for p in positions])[1:]
            # A sample costs about what 20 elements of a step do: cache and TLB misses.
            work = 20 * int(ends[-1] if ends.size else 0) + sum(n for n in sizes if n <= WHOLE)
            self._samples = np.concatenate(positions), ends, work
        return self._samples

    def _groups(self, hypers: list[Any]) -> tuple[np.ndarray, list[Any]]:
        """Each tensor's place in the list of distinct hypers, and the list."""
        known, groups = self._known.get("hypers", (None, None))
        if known is not hypers:
            index, distinct = distinct_hypers(hypers)
            groups = np.array(index, np.int64), distinct
            self._known["hypers"] = hypers, groups
        return groups  # type: ignore[return-value]


def table_of(batch: Batch) -> Table:
    """The batch's table, made anew for another list of segments."""
    table = batch.cache.get(__name__)
    if table is None or table.segments is not batch.segments:
        table = batch.cache[__name__] = Table(batch.segments)
    return table


def _addresses(name: str, tensors: list[Tensor]) -> np.ndarray:
    if not all(map(Tensor.is_contiguous, tensors)):
        i = next(i for i, x in enumerate(tensors) if not x.is_contiguous())
        raise ValueError(
            f"batch.{name}[{i}]: strides {tensors[i].stride()} of shape {tuple(tensors[i].shape)}: "
            "kernels need contiguous tensors; pass a contiguous copy."
        )
    return np.fromiter(map(Tensor.data_ptr, tensors), np.int64, len(tensors))


def _rounded(rows: list[Any]) -> np.ndarray:
    """fp32 numbers, each rounded once; what does not fit is Inf, without a warning."""
    with np.errstate(over="ignore"):
        return np.array(rows, np.float64).astype(np.float32)
