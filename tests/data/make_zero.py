"""How `zero1` to `zero3` were made: `DS_ACCELERATOR=cpu python make_zero.py STAGE FOLDER`.

Needs DeepSpeed (0.19.6 was used). Two gloo ranks, bf16, three steps, two groups; for stage 3 also
`truth.pt`, what DeepSpeed itself says that the fp32 parameters and moments are.
"""

import os
import sys

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 24)
        self.layers = nn.ModuleList([nn.Linear(24, 24) for _ in range(2)])
        self.norm = nn.LayerNorm(24)
        self.head = nn.Linear(24, 50, bias=False)

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(self.norm(x))


def work(rank, stage, folder):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_SIZE="2",
                      MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")  # fmt: skip
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    net = Net()
    decay = [p for p in net.parameters() if p.ndim == 2]
    rest = [p for p in net.parameters() if p.ndim != 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    engine, *_ = deepspeed.initialize(
        model=net,
        optimizer=torch.optim.AdamW(groups, lr=1e-3),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
        },
    )
    g = torch.Generator().manual_seed(rank)
    for _ in range(3):
        x = torch.randint(0, 50, (2, 8), generator=g)
        loss = nn.functional.cross_entropy(engine(x).float().flatten(0, 1), x.flatten())
        engine.backward(loss)
        engine.step()
    engine.save_checkpoint(folder, tag="step3")
    if stage == 3:
        truth = {
            n: {"master": safe_get_full_fp32_param(p).clone(),
                **{k: safe_get_full_optimizer_state(p, k).clone()
                   for k in ("exp_avg", "exp_avg_sq")}}
            for n, p in net.named_parameters()
        }  # fmt: skip
        if rank == 0:
            torch.save(truth, f"{folder}/truth.pt")


if __name__ == "__main__":
    torch.multiprocessing.spawn(work, args=(int(sys.argv[1]), sys.argv[2]), nprocs=2)
