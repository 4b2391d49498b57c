"""DeepSpeed with FairCastAdamW: ZeRO 0 to 3, the forward runs on the weights that are served.

    deepspeed examples/deepspeed_train.py --deepspeed_config examples/deepspeed_configs/zero2.json

On CPUs, with DS_ACCELERATOR=cpu in the environment and `--num_gpus 2` before the script for two
processes. `--save` writes a checkpoint, `--resume` goes on from it (the data starts over).
"""

import argparse
import json
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from fsdp2_train import Model, send_to_engine

from fc_optim import FairCastAdamW
from fc_optim.integrations.deepspeed import attach, register


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small model under DeepSpeed.")
    parser.add_argument("--deepspeed_config", type=Path, required=True)
    parser.add_argument("--local_rank", type=int, help="set by the launcher")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--sync-every", type=int, default=5)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--dither", default="fresh", choices=("fresh", "sync", "held"))
    parser.add_argument("--resume", help="folder of a checkpoint to go on from")
    parser.add_argument("--save", help="folder for a checkpoint at the end")
    args = parser.parse_args()

    config: dict[str, Any] = register(json.loads(args.deepspeed_config.read_text()))
    deepspeed.init_distributed()
    device = get_accelerator().current_device_name()
    model, rollout = Model(), Model().bfloat16().to(device)
    opt = FairCastAdamW(model.named_parameters(), lr=args.lr, dither=args.dither)
    engine, *_ = deepspeed.initialize(model=model, optimizer=opt, config=config)
    attach(engine)
    if args.resume:
        engine.load_checkpoint(args.resume)

    data = torch.Generator().manual_seed(dist.get_rank())
    for step in range(1, args.steps + 1):
        tokens = torch.randint(256, (4, 17), generator=data).to(device)
        engine.backward(engine(tokens))
        engine.step()
        if step % args.sync_every == 0:
            send_to_engine(opt, rollout)

    if args.save:
        engine.save_checkpoint(args.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
