"""A sync of a sharded model: one rank has the engine."""

import pytest
import torch
import torch.distributed as dist
from engines import Dies
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fc_optim import FairCastAdamW, Sync, SyncError


def fail_once() -> None:
    """Rank 0 has the engine; the other ranks gather, and raise when it fails."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 8))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    opt = FairCastAdamW(model.named_parameters(), lr=1e-2).bind(model)
    sync = Sync(opt, Dies() if rank == 0 else None, sparse=True, bucket_bytes=1 << 10)

    def train() -> None:
        model(torch.ones(4, 16)).square().sum().backward()
        opt.step()
        opt.zero_grad()

    assert sync().digest == opt.served_digest()
    sync.sparse = False
    train()
    with pytest.raises(SyncError) as caught:
        sync()
    assert caught.value.problem == ("failed" if rank == 0 else "elsewhere")
    assert sync.version is None
    sync.sparse = True
    for _ in range(2):
        if sync.engine is not None:
            sync.engine.sound = True  # type: ignore[attr-defined]
        assert sync().version == sync.version == opt.served_version
        train()


def test_every_rank_learns_of_a_failure(ranks) -> None:
    ranks(2).run(fail_once)
