"""Two gloo ranks under DistributedDataParallel: replicas agree to the bit without communicating."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from models import assert_invariant, loss_of, tiny
from torch.nn.parallel import DistributedDataParallel

from fc_optim import FairCastAdamW


def worker(rank: int, init: str, dtype: torch.dtype, results: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(rank)  # the global RNG must not matter
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=2)
    model = DistributedDataParallel(tiny(dtype), gradient_as_bucket_view=True)
    opt = FairCastAdamW(model.named_parameters(), lr=1e-2).bind(model)
    for i in range(4):
        opt.zero_grad()
        torch.rand(rank + 1)
        loss_of(model, 2 * i + rank).backward()
        opt.step()
    assert_invariant(opt)
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    torch.save((opt.served_digest(), grads), f"{results}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replicas_agree(tmp_path, dtype):
    init = f"file://{tmp_path}/rendezvous"
    mp.spawn(worker, (init, dtype, str(tmp_path)), nprocs=2)
    (one, grads), (two, other_grads) = (
        torch.load(tmp_path / f"{r}.pt", weights_only=False) for r in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(grads, other_grads, strict=True))
    assert one == two
    assert list(one.parameters) == [n for n, _ in tiny().named_parameters()]
