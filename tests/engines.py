"""Engines for the tests of a sync: one that does right, and many that do wrong."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import fc_optim
from fc_optim import FairCastAdamW, Manifest, Patch


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
        next(model.parameters()).mul_(2.0**-16)
    small, *others = model.named_parameters()
    groups = [{"params": [small], "lr": 1e-6}, {"params": others, "lr": 1e-2}]
    opt = FairCastAdamW(groups, **options).bind(model)
    return model, opt


def step(model: nn.Module, opt: fc_optim.FairCastOptimizer) -> None:
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())).to(p)
    opt.step()
