"""From parameters and their state to the batches that kernels take, and back."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fc_optim.kernels.backends import Backend
from fc_optim.kernels.batch import AdamHyper, Batch, Segment
from fc_optim.kernels.reference import canonical_bits
from fc_optim.registry import CONTAINER_DTYPES, Managed, check_dtype


@dataclass(slots=True)
class Work:
    """A batch, the parameters it came from, and the backend that will run it."""

    batch: Batch
    entries: list[Managed]
    backend: Backend

    def write_back(self) -> None:
        """Copy containers that had to be staged (strided, or state on another device)."""
        for entry, container in zip(self.entries, self.batch.containers, strict=True):
            if container.data_ptr() != entry.param.data_ptr():
                entry.param.detach().copy_(container)


@dataclass(frozen=True, slots=True)
class Context:
    """What all batches of an optimizer share."""

    seed: int
    epoch: int | None  # None: fresh
    step_key: str  # state key of the parameter's own step count
    backend_for: Callable[[torch.device], Backend]
    caches: dict[Any, dict[Any, Any]]


def new_master(param: Tensor) -> Tensor:
    """A contiguous fp32 copy of a parameter, canonical: the caller owns it."""
    master = param.detach().to(torch.float32, memory_format=torch.contiguous_format, copy=True)
    bits = master.view(torch.int32)
    bits.copy_(canonical_bits(bits))
    return master


def complete_state(entry: Managed, fused: bool) -> None:
    """Add what is missing of a parameter's state; widen what a base made in bf16 to fp32."""
    if fused:
        _adam_state(entry)
        return
    for key, value in entry.state.items():
        if isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16):
            entry.state[key] = value.float()
    entry.state.setdefault("dither_step", torch.zeros((), device=entry.param.device))


def _adam_state(entry: Managed) -> None:
    state, master = entry.state, entry.state["master"]
    state.setdefault("step", torch.zeros((), dtype=torch.float32, device=master.device))
    keys = ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * bool(entry.group.get("amsgrad"))
    for key in keys:
        if key not in state:
            state[key] = torch.zeros_like(master)
        elif state[key].dtype != torch.float32 or not state[key].is_contiguous():
            state[key] = state[key].to(torch.float32, memory_format=torch.contiguous_format)


def state_work(
    context: Context, entries: Iterable[Managed], *, scratch: bool = False
) -> list[Work]:
    """Batches of masters and containers, for publishing and checking.

    With `scratch` the containers are new tensors, for comparing with what the model holds.
    """

    def key(e: Managed) -> tuple:
        return (e.state["master"].device, e.param.dtype)

    works = []
    for (device, dtype), part in _grouped(entries, key):
        batch = Batch(
            containers=[_container(e.param, device, empty=scratch) for e in part],
            masters=[e.state["master"] for e in part],
            segments=[_segments(e) for e in part],
            steps=[e.state[context.step_key].to(device) for e in part],
            seed=context.seed,
            epoch=context.epoch,
            cache={} if scratch else context.caches.setdefault(("state", device, dtype), {}),
            shared=context.caches.setdefault(device, {}),
        )
        works.append(Work(batch, part, context.backend_for(device)))
    return works


def adam_work(
    context: Context,
    entries: Iterable[Managed],
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> list[Work]:
    """Batches for one Adam or AdamW step of the parameters that have a gradient."""

    def key(e: Managed) -> tuple:
        assert e.param.grad is not None
        return (e.param.device, e.param.dtype, e.param.grad.dtype, bool(e.group.get("amsgrad")))

    hypers = {}
    works = []
    for keys, part in _grouped((e for e in entries if e.param.grad is not None), key):
        device, _, _, amsgrad = keys
        for e in part:
            _check_grad(e)
            _adam_state(e)
            _to_device(e.state, device)
            if id(e.group) not in hypers:
                hypers[id(e.group)] = _hyper(e.group)
        batch = Batch(
            containers=[_container(e.param, device) for e in part],
            masters=[e.state["master"] for e in part],
            segments=[_segments(e) for e in part],
            steps=[e.state["step"] for e in part],
            seed=context.seed,
            epoch=context.epoch,
            grads=[e.param.grad.detach().contiguous() for e in part if e.param.grad is not None],
            exp_avgs=[e.state["exp_avg"] for e in part],
            exp_avg_sqs=[e.state["exp_avg_sq"] for e in part],
            max_exp_avg_sqs=[e.state["max_exp_avg_sq"] for e in part] if amsgrad else [],
            hypers=[hypers[id(e.group)] for e in part],
            grad_scale=_scalar_on(grad_scale, device),
            found_inf=_scalar_on(found_inf, device),
            cache=context.caches.setdefault(keys, {}),
            shared=context.caches.setdefault(device, {}),
        )
        works.append(Work(batch, part, context.backend_for(device)))
    return works


def _grouped(
    entries: Iterable[Managed], key: Callable[[Managed], tuple]
) -> Iterator[tuple[tuple, list[Managed]]]:
    groups: dict[tuple, list[Managed]] = {}
    for entry in entries:
        check_dtype(entry.param, entry.slot.name)
        if entry.param.numel():
            groups.setdefault(key(entry), []).append(entry)
    yield from groups.items()


def _hyper(group: dict[str, Any]) -> AdamHyper:
    beta1, beta2 = group["betas"]
    return AdamHyper(
        lr=group["lr"],
        beta1=beta1,
        beta2=beta2,
        eps=group["eps"],
        weight_decay=group["weight_decay"],
        decoupled=group["algorithm"] == "adamw",
        maximize=group["maximize"],
    )


def _segments(entry: Managed) -> tuple[Segment, ...]:
    return (Segment.whole(entry.slot.param_id, entry.param.numel()),)


def _container(param: Tensor, device: torch.device, empty: bool = False) -> Tensor:
    if empty:
        return torch.empty(param.shape, dtype=param.dtype, device=device)
    return param.detach().to(device).contiguous()


def _to_device(state: dict[str, Any], device: torch.device) -> None:
    """Bring state back that was moved elsewhere (verl offloads it between phases)."""
    for key in ("master", "step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
        if key in state and state[key].device != device:
            state[key] = state[key].to(device, non_blocking=True)


def _scalar_on(value: Tensor | None, device: torch.device) -> Tensor | None:
    return None if value is None else value.detach().to(device, torch.float32)


def _check_grad(entry: Managed) -> None:
    grad, name = entry.param.grad, entry.slot.name
    assert grad is not None
    if grad.layout != torch.strided:
        raise TypeError(
            f"the gradient of {name!r} is {grad.layout}: sparse gradients are not supported. "
            "Use a dense embedding (sparse=False), or put it in a group with served_dtype=None."
        )
    if grad.dtype not in CONTAINER_DTYPES:
        raise TypeError(f"the gradient of {name!r} is {grad.dtype}, not bfloat16 or float32.")
