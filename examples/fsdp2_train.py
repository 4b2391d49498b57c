"""FSDP2 with FairCastAdamW: the forward runs on the weights that the engine is sent.

    torchrun --nproc-per-node 2 examples/fsdp2_train.py      # CPUs with gloo, or GPUs with NCCL

`served_digest()` is of whole parameters, however they are cut: `fc_optim.digest` of what the engine
received must equal it. A run that is saved with --save goes on bit for bit with --resume, on any
number of ranks (the data here depends on that number).
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fc_optim import FairCastAdamW, FairCastOptimizer, digest


class Model(nn.Module):
    """A small transformer; its forward is the loss of predicting the next token."""

    def __init__(self, vocabulary: int = 256, width: int = 64, layers: int = 2):
        super().__init__()
        torch.manual_seed(0)  # every rank makes the same weights, then keeps its shard
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens[:, :-1])
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], x.device, x.dtype)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        logits = self.head(x).float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def send_to_engine(opt: FairCastOptimizer, engine: nn.Module) -> None:
    """All ranks gather each parameter in turn; rank 0 hands it to the engine."""
    opt.publish(redraw=True)
    received = []
    for name, tensor in opt.served_params():
        if dist.get_rank() == 0:
            engine.get_parameter(name).data.copy_(tensor)
            received.append((name, engine.get_parameter(name)))
    sent = opt.served_digest()  # a collective: every rank calls it
    if dist.get_rank() == 0:
        assert digest(received) == sent, "the engine does not hold what was sent"
        print(f"version {opt.served_version}: digest {sent.total:016x}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small model under FSDP2.")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--sync-every", type=int, default=5)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--dither", default="fresh", choices=("fresh", "sync", "held"))
    parser.add_argument("--resume", help="folder of a checkpoint to go on from")
    parser.add_argument("--save", help="new folder for a checkpoint at the end")
    args = parser.parse_args()
    if args.save and os.path.exists(args.save):
        parser.error(f"--save: {args.save} exists; name a new folder")

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    mesh = init_device_mesh(device, (dist.get_world_size(),))

    model, engine = Model().to(device), Model().bfloat16().to(device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    opt = FairCastAdamW(model.named_parameters(), lr=args.lr, dither=args.dither).bind(model)

    if args.resume:
        weights, state = get_state_dict(model, opt)
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=args.resume)
        set_state_dict(model, opt, model_state_dict=weights, optim_state_dict=state)
    opt.publish()  # the first forward, too, runs on served weights

    data = torch.Generator().manual_seed(dist.get_rank())
    for step in range(1, args.steps + 1):
        tokens = torch.randint(256, (4, 17), generator=data).to(device)
        model(tokens).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        if step % args.sync_every == 0:
            send_to_engine(opt, engine)

    if args.save:
        weights, state = get_state_dict(model, opt)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=args.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
