"""The way out: served weights, masters, digests, and fp32 copies for evaluation."""

import contextlib
import copy as copy_module
import hashlib
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from fc_optim.naming import clean_name
from fc_optim.registry import Managed

if TYPE_CHECKING:
    from fc_optim.optimizer import FairCastOptimizer

NamedTensors = Iterator[tuple[str, Tensor]]

_DIGEST_CHUNK = 1 << 20
_MASK64 = 2**64 - 1
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def served_params(
    model: nn.Module,
    *optimizers: "FairCastOptimizer",
    full: bool = True,
    managed_only: bool = False,
    tied: str = "once",
    copy: bool = False,
) -> NamedTensors:
    """The served weights of a model that several optimizers train; see
    `FairCastOptimizer.served_params` for the arguments and for who owns the tensors.
    """
    if not optimizers:
        raise ValueError("optimizers: pass at least one FairCastOptimizer.")
    return _stream(model, optimizers, "served", full, managed_only, tied, copy)


def stream(
    opt: "FairCastOptimizer", which: str, *, full: bool, managed_only: bool, tied: str, copy: bool
) -> NamedTensors:
    """Served weights or masters of one optimizer, in the bound model's order if there is one."""
    if opt.was_bound and opt.model is None:
        raise RuntimeError(
            "a pickled optimizer does not carry its model: call bind(model) before serving."
        )
    return _stream(opt.model, (opt,), which, full, managed_only, tied, copy)


def _stream(
    model: nn.Module | None,
    optimizers: tuple["FairCastOptimizer", ...],
    which: str,
    full: bool,
    managed_only: bool,
    tied: str,
    copy: bool,
) -> NamedTensors:
    if tied not in ("once", "all"):
        raise ValueError(f"tied: {tied!r} is neither 'once' (first name only) nor 'all'.")
    managed: dict[Tensor, Managed] = {}
    for opt in optimizers:
        opt.publish()
        managed.update({e.param: e for e in opt.managed()})
    named = _named(model, optimizers, tied)
    if model is not None:
        _refuse_replaced(model, managed)
    if managed_only:
        named = [(n, p) for n, p in named if p in managed]
    versions = [opt.served_version for opt in optimizers]

    def generate() -> NamedTensors:
        for name, p in named:
            for opt, version in zip(optimizers, versions, strict=True):
                if opt.served_version != version:
                    raise RuntimeError(
                        f"served_params: the optimizer went from version {version} to "
                        f"{opt.served_version} while its weights were being read; finish the "
                        "iteration before step() or publish(redraw=True), then start again."
                    )
            value = _value(managed.get(p), p, which)
            owned = which == "served" and p in managed and p.dtype != value.dtype
            yield name, value.clone() if copy and not owned else value

    return generate()


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


def _named(
    model: nn.Module | None,
    optimizers: tuple["FairCastOptimizer", ...],
    tied: str,
) -> list[tuple[str, Tensor]]:
    if model is None:
        every = (p for opt in optimizers for g in opt.param_groups for p in g["params"])
        return [(optimizers[0].name_of(p), p) for p in every]
    named = model.named_parameters(remove_duplicate=tied == "once")
    return [(clean_name(n), p) for n, p in named]


def _value(entry: Managed | None, param: Tensor, which: str) -> Tensor:
    if entry is None:
        return param.detach()
    if which == "master":
        return entry.state["master"].detach()
    return param.detach().to(torch.bfloat16)  # exact: the container is on the grid


class Digest(NamedTuple):
    """A fingerprint of named weights: equal bits give equal digests (not a cryptographic hash).

    Sums of 64-bit mixes over elements, modulo 2**64, so that it can be computed shard by shard.
    """

    total: int
    parameters: dict[str, int]


def digest(named_tensors: Iterable[tuple[str, Tensor]]) -> Digest:
    """The digest of named tensors: the receiver's side of `FairCastOptimizer.served_digest()`.

    Each element contributes a mix of (name and dtype, row-major flat index, bit pattern).
    """
    parameters = {}
    for name, tensor in named_tensors:
        if name in parameters:
            raise ValueError(f"named_tensors: {name!r} comes twice.")
        parameters[name] = _digest_one(name, tensor)
    return Digest(sum(parameters.values()) & _MASK64, parameters)


def _digest_one(name: str, tensor: Tensor) -> int:
    tensor = tensor.detach().contiguous().view(-1)
    key = f"{name}:{str(tensor.dtype).removeprefix('torch.')}".encode()
    seed = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little", signed=True)
    size = tensor.element_size()
    words = tensor.view(_WORDS[size]) if size in _WORDS else torch.view_as_real(tensor).view(-1)
    words = words.view(torch.int64) if words.is_floating_point() else words
    total = 0
    for start in range(0, words.numel(), _DIGEST_CHUNK):
        part = words[start : start + _DIGEST_CHUNK].to(torch.int64)
        if size < 8:
            part &= (1 << 8 * size) - 1
        index = torch.arange(start, start + part.numel(), device=part.device)
        x = _mix(_mix(index + seed) ^ part)
        total += int(x.sum().item())  # int64 sums wrap, which is the modulus wanted
    return total & _MASK64


def _mix(x: Tensor) -> Tensor:
    """The splitmix64 finalizer (Steele et al. 2014) in wrapping int64 arithmetic."""
    x = (x ^ (x >> 30 & 2**34 - 1)) * (0xBF58476D1CE4E5B9 - 2**64)
    x = (x ^ (x >> 27 & 2**37 - 1)) * (0x94D049BB133111EB - 2**64)
    return x ^ (x >> 31 & 2**33 - 1)


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
    elif any(hasattr(e.param, "ds_id") or hasattr(e.param, "_ds_tensor") for e in entries):
        reason = "the model is under DeepSpeed"
    if reason:
        raise RuntimeError(
            f"masters_in_model(): {reason}, so the forward would round the masters to bf16. "
            'Use fc_optim.fp32_copy(model, optimizer, which="master") and evaluate that copy.'
        )


def fp32_copy(model: nn.Module, opt: "FairCastOptimizer", which: str = "master") -> nn.Module:
    """An fp32 copy of `model` with the masters (`which="master"`) or the served weights in it.

    The copy owns its memory, is in eval mode and asks for no gradients; ties are kept. Both
    copies run the same kernels in the same dtype, so a difference between them is the weights'.
    Raises ValueError for another `which`, RuntimeError if the optimizer does not train `model`.
    """
    if which not in ("master", "served"):
        raise ValueError(f"which: {which!r} is neither 'master' nor 'served'.")
    opt.publish()
    managed = {e.param: e for e in opt.managed()}
    if not any(p in managed for p in model.parameters()):
        raise RuntimeError("fp32_copy: the optimizer trains none of the model's parameters.")
    memo: dict[int, Any] = {}
    for p in model.parameters():
        value = _value(managed.get(p), p, which)
        own = value.to(torch.float32 if p.is_floating_point() else p.dtype, copy=True)
        memo[id(p)] = nn.Parameter(own, requires_grad=False)
    return copy_module.deepcopy(model, memo).float().eval()
