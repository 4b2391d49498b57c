"""Two gloo ranks under DistributedDataParallel: replicas agree to the bit without communicating."""

import pytest
import torch
import torch.distributed as dist
from models import assert_invariant, loss_of, tiny
from torch.nn.parallel import DistributedDataParallel

from fc_optim import FairCastAdamW


def train(dtype: torch.dtype, results: str) -> None:
    rank = dist.get_rank()
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replicas_agree(tmp_path, dtype, ranks):
    ranks(2).run(train, dtype, str(tmp_path))
    (one, grads), (two, other_grads) = (
        torch.load(tmp_path / f"{r}.pt", weights_only=False) for r in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(grads, other_grads, strict=True))
    assert one == two
    assert list(one.parameters) == [n for n, _ in tiny().named_parameters()]
