"""The way out: served weights and masters as a stream of named tensors, and copies to evaluate."""

import contextlib
import copy as copy_module
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fc_optim import shards
from fc_optim.collectives import gather
from fc_optim.naming import clean_name
from fc_optim.registry import Managed, names_in
from fc_optim.shards import Group, Piece

if TYPE_CHECKING:
    from fc_optim.optimizer import FairCastOptimizer

NamedTensors = Iterator[tuple[str, Tensor]]


def served_params(
    model: nn.Module,
    *optimizers: "FairCastOptimizer",
    full: bool = True,
    managed_only: bool = False,
    tied: str = "once",
    copy: bool = False,
    bucket_bytes: int | None = None,
) -> NamedTensors:
    """The served weights of a model that several optimizers train; see
    `FairCastOptimizer.served_params` for the arguments and for who owns the tensors.
    """
    if not optimizers:
        raise ValueError("optimizers: pass at least one FairCastOptimizer.")
    items = list_items(model, optimizers, "served", managed_only=managed_only, tied=tied)
    return _stream(items, optimizers, full=full, copy=copy, bucket_bytes=bucket_bytes)


def stream(
    opt: "FairCastOptimizer",
    which: str,
    *,
    full: bool,
    managed_only: bool,
    tied: str,
    copy: bool,
    bucket_bytes: int | None,
) -> NamedTensors:
    """Served weights or masters of one optimizer, in the bound model's order if there is one."""
    items = list_items(opt.bound_model(), (opt,), which, managed_only=managed_only, tied=tied)
    return _stream(items, (opt,), full=full, copy=copy, bucket_bytes=bucket_bytes)


# ---- What there is to serve


@dataclass(frozen=True, slots=True)
class Item:
    """An unsharded parameter to serve: this rank's buffer with its piece, and who has the rest."""

    name: str
    part: Tensor
    dtype: torch.dtype  # as served; the buffer may be its grid container
    piece: Piece
    groups: tuple[Group, ...]

    @property
    def nbytes(self) -> int:
        return self.piece.shape.numel() * self.dtype.itemsize

    def local(self) -> Tensor:
        """This rank's elements as they are served: a view if the buffer has the dtype."""
        part = self.part
        if len(self.piece.segments) == 1 and self.piece.segments[0].numel != part.numel():
            (run,) = self.piece.segments  # of a flat parameter
            part = part.view(-1)[run.offset : run.offset + run.numel]
        elif not self.piece.segments:
            part = part.view(-1)[:0]
        if not self.groups:
            part = part.view(self.piece.shape) if part.shape != self.piece.shape else part
        return part.to(self.dtype)  # exact: the container is on the grid


def list_items(
    model: nn.Module | None,
    optimizers: Sequence["FairCastOptimizer"],
    which: str,
    *,
    managed_only: bool = False,
    tied: str = "once",
) -> list[Item]:
    """Publish, and list what is to be served, in the same order on every rank."""
    if tied not in ("once", "all"):
        raise ValueError(f"tied: {tied!r} is neither 'once' (first name only) nor 'all'.")
    managed: dict[Tensor, Managed] = {}
    for opt in optimizers:
        opt.publish()
        managed.update({e.param: e for e in opt.managed()})
    known = {p: layout for opt in optimizers for p, layout in opt.registry.known.items()}
    if model is not None:
        shards.reshard(model)
        known |= shards.fsdp1_layouts(model)
        _refuse_replaced(model, managed)
    items = []
    for names, p in _named(model, optimizers, tied):
        entry = managed.get(p)
        if managed_only and entry is None:
            continue
        layout = shards.layout_of(p, known, names[0][0])
        part, dtype = shards.local(p), p.dtype
        if entry is not None:
            dtype = torch.float32 if which == "master" else torch.bfloat16
            part = shards.local(entry.state["master"]) if which == "master" else part
        items += [Item(n, part, dtype, layout.pieces[i], layout.groups) for n, i in names]
    return items


def _named(
    model: nn.Module | None, optimizers: Sequence["FairCastOptimizer"], tied: str
) -> list[tuple[list[tuple[str, int]], Tensor]]:
    """Each parameter with the names of its pieces: (name, number of the piece)."""
    if model is None:
        return [
            ([(name, i) for i, name in enumerate(slot.names)], p)
            for opt in optimizers
            for _, p, slot in opt.registry.places(opt.param_groups)
        ]
    named = model.named_parameters(remove_duplicate=tied == "once")
    return [(names_in(clean_name(n), p, aliases=tied == "all"), p) for n, p in named]


def _refuse_replaced(model: nn.Module, managed: dict[Tensor, Managed]) -> None:
    """Raise RuntimeError if the optimizer trains parameters that the model no longer has."""
    held = set(model.parameters())
    lost = [e.slot.name for p, e in managed.items() if e.slot.bound and p not in held]
    if lost or (managed and not any(p in managed for p in held)):
        raise RuntimeError(
            f"parameters of the model were replaced after the optimizer was built: "
            f"{', '.join(lost[:8]) or 'all'}. The optimizer trains the old ones; build it from the "
            "model that trains."
        )


# ---- Streaming it


def _stream(
    items: list[Item],
    optimizers: Sequence["FairCastOptimizer"],
    *,
    full: bool,
    copy: bool,
    bucket_bytes: int | None,
) -> NamedTensors:
    if bucket_bytes is not None and bucket_bytes <= 0:
        raise ValueError(f"bucket_bytes: {bucket_bytes} is not positive; None: one at a time.")
    versions = [opt.served_version for opt in optimizers]

    def check() -> None:
        for opt, version in zip(optimizers, versions, strict=True):
            if opt.served_version != version:
                raise RuntimeError(
                    f"served_params: the optimizer went from version {version} to "
                    f"{opt.served_version} while its weights were being read; finish the "
                    "iteration before step() or publish(redraw=True), then start again."
                )

    def generate() -> NamedTensors:
        for bucket in _buckets(items, bucket_bytes or 0):
            check()
            if full and bucket[0].groups:
                parts = [(i.part.reshape(-1), i.piece, i.dtype) for i in bucket]
                values = gather(parts, bucket[0].groups)[::-1]
            else:
                values = [_own(i) if copy else i.local() for i in bucket[::-1]]
            for item in bucket:
                check()
                yield item.name, values.pop()  # not kept here: the reader alone holds it

    return generate()


def _own(item: Item) -> Tensor:
    value = item.local()
    return value.clone() if value.dtype == item.part.dtype else value


def _buckets(items: list[Item], size: int) -> Iterator[list[Item]]:
    """Runs of items that one collective gathers: at least one, at most `size` bytes, same groups.

    What this rank has whole comes one at a time.
    """
    bucket: list[Item] = []
    room = 0
    for item in items:
        if bucket and (item.nbytes > room or item.groups != bucket[0].groups or not item.groups):
            yield bucket
            bucket = []
        room = (room if bucket else size) - item.nbytes
        bucket.append(item)
    if bucket:
        yield bucket


@contextlib.contextmanager
def masters_in_model(opt: "FairCastOptimizer") -> Iterator[None]:
    """See `FairCastOptimizer.masters_in_model`."""
    opt.publish()
    entries = opt.managed()
    _refuse_rounding_forward(opt.model, entries)
    swapped: list[tuple[Tensor, Tensor]] = []
    native = any(e.param.dtype == torch.bfloat16 for e in entries)
    masters = {e.param: e.state["master"] for e in entries}
    others = [*opt.model.parameters(), *opt.model.buffers()] if opt.model is not None else []
    with opt.guarded("masters_in_model()"):
        try:
            for t in [*masters, *(o for o in others if o not in masters)]:
                if t in masters:
                    swapped.append((t, t.data))
                    t.data = masters[t]
                elif native and t.dtype == torch.bfloat16:  # frozen weights must match in dtype
                    swapped.append((t, t.data))
                    t.data = t.data.float()
            versions = [t._version for t in masters]
            yield
            written = [e.slot.name for e, v in zip(entries, versions, strict=True)
                       if e.param._version != v]  # fmt: skip
        finally:
            for t, data in swapped:
                t.data = data
    if written:
        raise RuntimeError(
            f"masters_in_model(): the masters of {', '.join(written[:8])} were written inside. "
            "Call restore_weights() to serve them, or load_state_dict() to go back."
        )


def _refuse_rounding_forward(model: nn.Module | None, entries: list[Managed]) -> None:
    """Raise RuntimeError where a forward would round the masters again."""
    device_types = {e.param.device.type for e in entries}
    fsdp = sys.modules.get("torch.distributed.fsdp")
    wrappers = tuple(
        getattr(fsdp, n) for n in ("FullyShardedDataParallel", "FSDPModule") if hasattr(fsdp, n)
    )
    reason = None
    if any(torch.is_autocast_enabled(t) for t in device_types):
        reason = "autocast is active"
    elif model is not None and any(isinstance(m, wrappers) for m in model.modules()):
        reason = "the model is under FSDP"
    elif any(e.slot.layout.groups for e in entries):
        reason = "parameters are sharded"
    elif any(hasattr(e.param, "ds_id") or hasattr(e.param, "_ds_tensor") for e in entries):
        reason = "the model is under DeepSpeed"
    if reason:
        raise RuntimeError(
            f"masters_in_model(): {reason}, so the forward would not run on fp32 masters. "
            'Use fc_optim.fp32_copy(model, optimizer, which="master") and evaluate that copy.'
        )


def fp32_copy(
    model: nn.Module,
    opt: "FairCastOptimizer",
    which: str = "master",
    into: nn.Module | None = None,
) -> nn.Module:
    """An fp32 copy of `model` with the masters (`which="master"`) or the served weights in it.

    The copy owns its memory, is in eval mode and asks for no gradients; ties are kept. Both
    copies run the same kernels in the same dtype, so a difference between them is the weights'.
    A sharded model cannot be copied: pass `into`, the same model without the sharding (on every
    rank: parameters are gathered one at a time), which is filled, and returned.

    Raises ValueError for another `which` and for an `into` that lacks a parameter, RuntimeError if
    the optimizer does not train `model`.
    """
    if which not in ("master", "served"):
        raise ValueError(f"which: {which!r} is neither 'master' nor 'served'.")
    opt.publish()
    managed = {e.param: e for e in opt.managed()}
    if not any(p in managed for p in model.parameters()):
        raise RuntimeError("fp32_copy: the optimizer trains none of the model's parameters.")
    if into is not None:
        return _fill(into, list_items(model, (opt,), which, tied="all"), (opt,))
    if shards.fsdp1_layouts(model) or any(map(shards.is_dtensor, model.parameters())):
        raise RuntimeError(
            "fp32_copy: the model is sharded and cannot be copied; pass into=, a new model of the "
            "same architecture without the sharding."
        )
    memo: dict[int, Any] = {}
    for p in model.parameters():
        value = managed[p].state["master"] if which == "master" and p in managed else p.detach()
        own = value.to(torch.float32 if p.is_floating_point() else p.dtype, copy=True)
        memo[id(p)] = nn.Parameter(own, requires_grad=False)
    return copy_module.deepcopy(model, memo).float().eval()


@torch.no_grad()
def _fill(
    into: nn.Module, items: list[Item], optimizers: Sequence["FairCastOptimizer"]
) -> nn.Module:
    params = dict(
        into.float().eval().requires_grad_(False).named_parameters(remove_duplicate=False)
    )
    missing = sorted(params.keys() - {i.name for i in items})
    if missing:
        raise ValueError(f"into: the trained model has no {', '.join(missing[:8])}.")
    for name, value in _stream(items, optimizers, full=True, copy=False, bucket_bytes=None):
        if name in params:
            params[name].copy_(value)
    return into
