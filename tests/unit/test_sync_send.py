"""A sync around a framework that sends the weights itself."""

from typing import Any

import pytest
import torch
from engines import Store, make, step
from torch import nn

import fc_optim
from fc_optim import FairCastAdamW, Manifest, Sync, SyncError


class Framework:
    """Sends a model's parameters to a Store, under no version, as fp32 or bf16."""

    def __init__(self, model: nn.Module, store: Store):
        self.model, self.store = model, store
        self.told: list[int | None] = []
        self.skips: set[str] = set()

    def send(self, now: Manifest) -> None:
        self.told.append(now.version)
        for name, p in self.model.named_parameters():
            if name not in self.skips:
                self.store.weights[name] = p.detach().to(torch.bfloat16, copy=True)

    def fail(self, now: Manifest) -> None:
        raise ConnectionError("connection reset")


@pytest.mark.parametrize("dither", ["fresh", "sync", "held"])
def test_what_a_framework_sends_is_proved(dither: str) -> None:
    model, opt = make(dither=dither)
    store = Store()
    framework = Framework(model, store)
    sync = Sync(opt, store, send=framework.send)
    for _ in range(3):
        assert sync().digest == opt.served_digest()
        step(model, opt)
    assert framework.told == ([1, 3, 5] if dither == "sync" else [0, 1, 2])
    assert store.version is None


def test_what_it_drops_or_fails_to_send_is_named() -> None:
    model, opt = make()
    store = Store()
    framework = Framework(model, store)
    sync = Sync(opt, store, send=framework.send)
    sync()
    step(model, opt)
    framework.skips = {"2.weight"}
    with pytest.raises(SyncError, match="1 of the 4 that changed are still of version 0: 2.weight"):
        sync()
    sync.send = framework.fail
    with pytest.raises(SyncError, match="ConnectionError: connection reset. 3 of 4 tensors are as"):
        sync()
    sync.send, framework.skips = framework.send, set()
    assert sync().version == sync.version == 1
    store.weights["0.bias"][0] += 1.0
    with pytest.raises(SyncError, match="between two syncs 0.bias changed in the engine"):
        sync()


def test_frozen_weights_are_the_frameworks_own() -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(16, 24), nn.Linear(24, 8))  # fp32, off the grid
    model[0].requires_grad_(False)
    opt = FairCastAdamW(model[1].parameters(), lr=1e-3).bind(model)
    store = Store()
    found = Sync(opt, store, send=Framework(model, store).send)()
    assert list(found.parameters) == ["1.weight", "1.bias"]
    assert set(store.weights) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert fc_optim.digest((n, store.weights[n]) for n in found.parameters) == found.digest


def test_a_framework_that_sends_takes_no_patches() -> None:
    model, opt = make()
    with pytest.raises(ValueError, match="sparse: `send` decides what is sent"):
        Sync(opt, Store(), send=Framework(model, Store()).send, sparse=True)
