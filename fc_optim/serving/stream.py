"""The way out: served weights and masters as a stream of whole, named tensors."""

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fc_optim.kernels.reference import cast
from fc_optim.params import sources
from fc_optim.params.collectives import gather
from fc_optim.params.layouts import Group, Layout, Piece
from fc_optim.params.modules import named_parameters
from fc_optim.params.registry import Managed
from fc_optim.params.sources import source_of
from fc_optim.update.state import MASTER
from fc_optim.weights import ServedWeights

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
    owners = [opt.weights for opt in optimizers]
    for weights in owners:
        weights.publish()
    items = list_items(model, owners, "served", managed_only, tied)
    return stream(items, owners, full, copy, bucket_bytes)


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
        return cast(part, self.dtype)  # exact: the container is on the grid


def publish_items(
    weights: ServedWeights, which: str, managed_only: bool = False, tied: str = "once"
) -> list[Item]:
    """Publish one optimizer's weights, and list them in the bound model's order if there is one."""
    if weights.was_bound and weights.model is None:
        raise RuntimeError(
            "a pickled optimizer does not carry its model: call bind(model) before serving."
        )
    weights.publish()
    return list_items(weights.model, (weights,), which, managed_only, tied)


def list_items(
    model: nn.Module | None,
    owners: Sequence[ServedWeights],
    which: str,
    managed_only: bool = False,
    tied: str = "once",
    frozen_dtype: torch.dtype | None = None,
) -> list[Item]:
    """What is to be served of published weights, in the same order on every rank.

    With `frozen_dtype`, frozen floating-point parameters are served in it.
    """
    if tied not in ("once", "all"):
        raise ValueError(f"tied: {tied!r} is neither 'once' (first name only) nor 'all'.")
    managed = {e.param: e for weights in owners for e in weights.entries()}
    known = {p: layout for w in owners for p, layout in w.registry.known.items()}
    inside = {p: place for w in owners for p, place in w.registry.inside.items()}
    if model is None:
        for w in owners:
            w.registry.numbered.say_served(w.registry.names(w.groups))
    else:
        sources.reshard(model)
        known |= sources.layouts_in(model)
        _check_replaced(model, managed.keys() | inside.keys(), managed)
    items = []
    for names, p in _named(model, owners, tied):
        holder, first = inside.get(p, (p, 0))
        entry = managed.get(holder)
        if managed_only and entry is None:
            continue
        part, dtype = sources.to_local(p), p.dtype
        if entry is not None:
            dtype = torch.float32 if which == "master" else torch.bfloat16
        elif frozen_dtype is not None and not p.requires_grad and p.is_floating_point():
            dtype = frozen_dtype
        layout = sources.layout_of(holder, known, names[0][0])
        if source_of(holder).is_flat(holder) and holder not in known:
            raise RuntimeError(
                f"parameter {names[0][0]!r} is in a flat parameter of FSDP1: call bind(model) with "
                "the FullyShardedDataParallel model before serving."
            )
        piece = layout.pieces[first]
        if entry is not None and which == "master":
            part = sources.to_local(entry.state[MASTER])
        elif holder is not p and part.shape == piece.shape:  # whole, beside the buffer
            layout, first = Layout((Piece.whole(piece.shape),)), 0
        elif holder is not p:
            part = sources.to_local(holder)
        items += [Item(n, part, dtype, layout.pieces[first + i], layout.groups) for n, i in names]
    return items


def _named(
    model: nn.Module | None, owners: Sequence[ServedWeights], tied: str
) -> list[tuple[list[tuple[str, int]], Tensor]]:
    """Each parameter with the names of its pieces: (name, number of the piece)."""
    if model is None:
        return [
            ([(name, i) for i, name in enumerate(identity.names)], p)
            for weights in owners
            for _, p, identity in weights.registry.places(weights.groups)
        ]
    named = named_parameters(model, remove_duplicate=tied == "once")
    return [(source_of(p).pieces(n, p, aliases=tied == "all"), p) for n, p in named]


def _check_replaced(model: nn.Module, trained: Set[Tensor], managed: dict[Tensor, Managed]) -> None:
    """Raise RuntimeError if the optimizer trains parameters that the model no longer has."""
    held = set(model.parameters())
    lost = [e.identity.name for p, e in managed.items() if e.identity.bound and p not in held]
    if lost or (managed and not any(p in trained for p in held)):
        raise RuntimeError(
            f"parameters of the model were replaced after the optimizer was built: "
            f"{', '.join(lost[:8]) or 'all'}. The optimizer trains the old ones; build it from the "
            "model that trains."
        )


# ---- Streaming it


def stream(
    items: list[Item],
    owners: Sequence[ServedWeights],
    full: bool = True,
    copy: bool = False,
    bucket_bytes: int | None = None,
) -> NamedTensors:
    """The items one by one, or bucket after bucket; see `FairCastOptimizer.served_params`."""
    if bucket_bytes is not None and bucket_bytes <= 0:
        raise ValueError(f"bucket_bytes: {bucket_bytes} is not positive; None: one at a time.")
    versions = [weights.version for weights in owners]

    def check() -> None:
        for weights, version in zip(owners, versions, strict=True):
            if weights.version != version:
                raise RuntimeError(
                    f"served_params: the optimizer went from version {version} to "
                    f"{weights.version} while its weights were being read; finish the "
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
