"""Methods of a base on shards: the weights, versions and digests of the unsharded run."""

import schedulefree
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from models import assert_invariant, backward, tiny
from torch.distributed.fsdp import fully_shard

from fc_optim import FairCastOptimizer


def run(model):
    """Both ranks have the same batch, so that averaged gradients are those of one process."""
    opt = FairCastOptimizer(schedulefree.SGDScheduleFree, model.named_parameters(), lr=0.1)
    opt.bind(model)
    found = []
    for i in range(4):
        opt.train()
        opt.zero_grad()
        backward(model, i)
        opt.step()
        found.append((opt.served_version, opt.served_digest()))
        opt.eval()
        found.append((opt.served_version, opt.served_digest()))
    assert opt.check() == {}
    return opt, found


def worker(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/r", rank=rank, world_size=2)
    model = tiny()
    for module in (*model, model):
        fully_shard(module)
    opt, found = run(model)
    # Only one rank has the rows that change: all count the version, and draw new bits alike.
    version = opt.served_version
    with torch.no_grad():
        for e in opt.managed():
            e.state["z"].copy_(e.state["master"])
        z = opt.managed()[0].state["z"].to_local()
        z.add_(1.0 if rank == 0 else 0.0)
    opt.train()
    steps = [int(e.state["dither_step"]) for e in opt.managed()]
    torch.save((found, opt.served_version - version, steps), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_schedule_free_under_fsdp2_is_that_of_one_process(tmp_path):
    mp.spawn(worker, (str(tmp_path),), nprocs=2)
    model = tiny()
    opt, want = run(model)
    assert_invariant(opt)
    for rank in range(2):
        found, versions, steps = torch.load(tmp_path / f"{rank}.pt", weights_only=False)
        assert found == want
        assert versions == 1 and len(set(steps)) == 1
    assert want[-1][0] > 4  # steps, and changes between the two sets of weights
