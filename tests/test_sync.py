"""A sync proves what the engine holds: engines that do wrong are found, and told apart."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

import fc_optim
from fc_optim import FairCastAdamW, Manifest, Patch, Sync, SyncError


class Store:
    """An engine that does what it is told, on tensors of its own."""

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}
        self.version: int | None = None

    def load(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        for name, tensor in weights:
            self.weights[name] = self.keep(name, tensor)
        self.version = version

    def load_patches(self, patches: Iterator[Patch], version: int) -> None:
        for patch in patches:
            fc_optim.apply_patch(self.weights[patch.name], patch)
        self.version = version

    def keep(self, name: str, tensor: Tensor) -> Tensor:
        return tensor.clone()

    def held(self) -> Manifest:
        return fc_optim.manifest(self.version, self.weights.items())


class Broken(Store):
    """Does right at the first sync, and wrong from then on."""

    sound = True

    def load(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        if self.sound:
            super().load(weights, version)
        else:
            self.spoil(weights, version)
        self.sound = False

    def spoil(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        for name, tensor in weights:
            self.weights[name] = self.wrong(name, tensor)
        self.version = version

    def wrong(self, name: str, tensor: Tensor) -> Tensor:
        raise NotImplementedError


class Drops(Broken):
    def spoil(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        self.version = version


class Late(Broken):
    def spoil(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        self.pending = version, {n: t.clone() for n, t in weights}

    def arrive(self) -> None:
        self.version, self.weights = self.pending


class TimesOut(Broken):
    def spoil(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        raise TimeoutError("no answer in 60 s")


class Mislabels(Broken):
    def spoil(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        super(Broken, self).load(weights, self.version or 0)


class KeepsOld(Broken):
    def wrong(self, name: str, tensor: Tensor) -> Tensor:
        return self.weights[name] if name.startswith("2") else tensor.clone()


class HoldsHalf(Broken):
    def wrong(self, name: str, tensor: Tensor) -> Tensor:
        return tensor.half()


class CastsOnTheWay(Broken):
    def wrong(self, name: str, tensor: Tensor) -> Tensor:
        return tensor.half().to(tensor.dtype)


class Truncates(Broken):
    def wrong(self, name: str, tensor: Tensor) -> Tensor:
        return tensor[:-1].clone()


class Loses(Broken):
    def spoil(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        super().spoil(weights, version)
        del self.weights["0.weight"]

    def wrong(self, name: str, tensor: Tensor) -> Tensor:
        return tensor.clone()


class Dies(Broken):
    def wrong(self, name: str, tensor: Tensor) -> Tensor:
        if name == "2.weight":
            raise ConnectionError("connection reset")
        return tensor.clone()


class Flips(Broken):
    def wrong(self, name: str, tensor: Tensor) -> Tensor:
        out = tensor.clone()
        out.view(torch.int16).view(-1)[0] ^= 1
        return out


class HoldsViews(Store):
    def keep(self, name: str, tensor: Tensor) -> Tensor:
        return tensor


def make(seed: int = 0, **options: Any) -> tuple[nn.Module, fc_optim.FairCastOptimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 8)).bfloat16()
    with torch.no_grad():  # small enough that fp16 loses some of their bits
        model[0].weight *= 2.0**-16
    small, *others = model.named_parameters()
    groups = [{"params": [small], "lr": 1e-6}, {"params": others, "lr": 1e-2}]
    opt = FairCastAdamW(groups, **options).bind(model)
    return model, opt


def step(model: nn.Module, opt: fc_optim.FairCastOptimizer) -> None:
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())).to(p)
    opt.step()


def master_of(opt: fc_optim.FairCastOptimizer) -> dict[str, Tensor]:
    return dict(opt.master_params(copy=True))


CASES: list[tuple[type[Broken], str, str]] = [
    (Drops, "dropped", "says that it holds version 1, but has dropped the update"),
    (Late, "late", "answers late, or dropped the update: it still holds version 0, not 1"),
    (TimesOut, "late", "did not take version 1 in time: no answer in 60 s"),
    (Mislabels, "late", "has the weights of version 1 but still says that it holds version 0"),
    (KeepsOld, "stale", "2 of the 4 that changed are still of version 0: 2.weight, 2.bias"),
    (HoldsHalf, "recast", "as float16, sent as bfloat16"),
    (CastsOnTheWay, "recast", "In 1 of them the bits are: cast to fp16 on the way"),
    (Truncates, "truncated", r"0.weight was sent as \(24, 16\), it holds \(23, 16\)"),
    (Loses, "missing", "the engine has no 0.weight"),
    (Dies, "failed", r"reset. 2 of 4 tensors are as sent, 2 still of version 0"),
    (Flips, "bits", "other bits than it was sent in 4 of 4 tensors"),
]


@pytest.mark.parametrize(("engine", "problem", "text"), CASES, ids=lambda x: getattr(x, "__name__", ""))  # fmt: skip
def test_a_broken_engine_is_named(engine: type[Broken], problem: str, text: str) -> None:
    model, opt = make()
    sync = Sync(opt, held := engine())
    assert sync().version == sync.version == opt.served_version == 0
    step(model, opt)
    with pytest.raises(SyncError, match=text) as caught:
        sync()
    assert caught.value.problem == problem
    assert sync.version is None  # never ahead of what is proved
    held.sound = True
    assert sync().digest == opt.served_digest()  # and the next one sends everything
    assert sync.version == 1
