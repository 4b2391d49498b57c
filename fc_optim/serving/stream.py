"""The way out: served weights and masters as a stream of whole, named tensors."""

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fc_optim.params import layouts as shards
from fc_optim.params.collectives import gather
from fc_optim.params.layouts import Group, Layout, Piece
from fc_optim.params.modules import named_parameters
from fc_optim.params.registry import Managed, Registry, names_in
from fc_optim.serving.digests import Digest, sharded_digest

NamedTensors = Iterator[tuple[str, Tensor]]


def served_params(
    model: nn.Module,
    *optimizers: "Serving",
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
    return stream(items, optimizers, full=full, copy=copy, bucket_bytes=bucket_bytes)


class Serving(Optimizer):
    """The part of `FairCastOptimizer` that hands out weights."""

    model: nn.Module | None
    was_bound: bool
    registry: Registry
    _served_version: int

    def publish(self, redraw: bool = False) -> None:
        raise NotImplementedError

    def managed(self) -> list[Managed]:
        raise NotImplementedError

    def served_params(
        self,
        full: bool = True,
        managed_only: bool = False,
        tied: str = "once",
        copy: bool = False,
        bucket_bytes: int | None = None,
    ) -> NamedTensors:
        """Iterate over (name, tensor) as the rollout engine is to hold them.

        With a bound model: every parameter in model order, managed ones in bf16, frozen and
        excluded ones as they are. Without: the parameters of the groups. Names are cleaned of
        wrapper prefixes.

        Args:
            full: whole parameters, gathered one at a time: every rank iterates to the end. False:
                this rank's shards (flat runs of a flat parameter).
            managed_only: leave out frozen and excluded parameters.
            tied: "once" gives a tied parameter under its first name, "all" under each.
            copy: give tensors of their own memory.
            bucket_bytes: gather as many sharded parameters at once as fit in this.

        With dither "sync", call `publish(redraw=True)` right before. The tensors are read-only and
        valid until the next `step()`, unless `copy`. The iterator raises RuntimeError when it is
        resumed after a step. Draws no random numbers. It keeps no reference to what it gave, so
        beside the shards there is one whole parameter, or bucket, for each that the reader holds.
        """
        items = self._items("served", managed_only=managed_only, tied=tied)
        return stream(items, (self,), full=full, copy=copy, bucket_bytes=bucket_bytes)

    def master_params(
        self,
        full: bool = True,
        managed_only: bool = False,
        tied: str = "once",
        copy: bool = False,
        bucket_bytes: int | None = None,
    ) -> NamedTensors:
        """As `served_params`, with the fp32 masters in place of their shadows."""
        items = self._items("master", managed_only=managed_only, tied=tied)
        return stream(items, (self,), full=full, copy=copy, bucket_bytes=bucket_bytes)

    @property
    def served_version(self) -> int:
        """Counts the versions of the served weights: +1 per `step()` and per redraw. Saved."""
        return self._served_version

    def served_digest(self) -> Digest:
        """The digest of `served_params()`; `fc_optim.digest` is the receiver's side.

        Computed shard by shard: every rank calls it, nothing is gathered.
        """
        return sharded_digest(self._items("served"))

    def _items(self, which: str, **options: Any) -> "list[Item]":
        """What there is to serve, in the bound model's order if there is one."""
        if self.was_bound and self.model is None:
            raise RuntimeError(
                "a pickled optimizer does not carry its model: call bind(model) before serving."
            )
        return list_items(self.model, (self,), which, **options)


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
    optimizers: Sequence["Serving"],
    which: str,
    *,
    managed_only: bool = False,
    tied: str = "once",
    frozen_dtype: torch.dtype | None = None,
) -> list[Item]:
    """Publish, and list what is to be served, in the same order on every rank.

    With `frozen_dtype`, frozen floating-point parameters are served in it.
    """
    if tied not in ("once", "all"):
        raise ValueError(f"tied: {tied!r} is neither 'once' (first name only) nor 'all'.")
    managed: dict[Tensor, Managed] = {}
    for opt in optimizers:
        opt.publish()
        managed.update({e.param: e for e in opt.managed()})
    known = {p: layout for opt in optimizers for p, layout in opt.registry.known.items()}
    inside = {p: place for opt in optimizers for p, place in opt.registry.inside.items()}
    if model is None:
        for opt in optimizers:
            opt.registry.numbered.say_served(opt.registry.names(opt.param_groups))
    else:
        shards.reshard(model)
        known |= shards.fsdp1_layouts(model)
        _refuse_replaced(model, managed.keys() | inside.keys(), managed)
    items = []
    for names, p in _named(model, optimizers, tied):
        holder, first = inside.get(p, (p, 0))
        entry = managed.get(holder)
        if managed_only and entry is None:
            continue
        part, dtype = shards.local(p), p.dtype
        if entry is not None:
            dtype = torch.float32 if which == "master" else torch.bfloat16
        elif frozen_dtype is not None and not p.requires_grad and p.is_floating_point():
            dtype = frozen_dtype
        layout = shards.layout_of(holder, known, names[0][0])
        if hasattr(holder, "_is_flat_param") and holder not in known:
            raise RuntimeError(
                f"parameter {names[0][0]!r} is in a flat parameter of FSDP1: call bind(model) with "
                "the FullyShardedDataParallel model before serving."
            )
        piece = layout.pieces[first]
        if entry is not None and which == "master":
            part = shards.local(entry.state["master"])
        elif holder is not p and part.shape == piece.shape:  # whole, beside the buffer
            layout, first = Layout((Piece.whole(piece.shape),)), 0
        elif holder is not p:
            part = shards.local(holder)
        items += [Item(n, part, dtype, layout.pieces[first + i], layout.groups) for n, i in names]
    return items


def _named(
    model: nn.Module | None, optimizers: Sequence["Serving"], tied: str
) -> list[tuple[list[tuple[str, int]], Tensor]]:
    """Each parameter with the names of its pieces: (name, number of the piece)."""
    if model is None:
        return [
            ([(name, i) for i, name in enumerate(slot.names)], p)
            for opt in optimizers
            for _, p, slot in opt.registry.places(opt.param_groups)
        ]
    named = named_parameters(model, remove_duplicate=tied == "once")
    return [(names_in(n, p, aliases=tied == "all"), p) for n, p in named]


def _refuse_replaced(
    model: nn.Module, trained: Set[Tensor], managed: dict[Tensor, Managed]
) -> None:
    """Raise RuntimeError if the optimizer trains parameters that the model no longer has."""
    held = set(model.parameters())
    lost = [e.slot.name for p, e in managed.items() if e.slot.bound and p not in held]
    if lost or (managed and not any(p in trained for p in held)):
        raise RuntimeError(
            f"parameters of the model were replaced after the optimizer was built: "
            f"{', '.join(lost[:8]) or 'all'}. The optimizer trains the old ones; build it from the "
            "model that trains."
        )


# ---- Streaming it


def stream(
    items: list[Item],
    optimizers: Sequence["Serving"],
    *,
    full: bool = True,
    copy: bool = False,
    bucket_bytes: int | None = None,
) -> NamedTensors:
    """The items one after another, or bucket after bucket; see `Serving.served_params`."""
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
                if copy and len(values) > 1:
                    values = [v.clone() for v in values]
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
