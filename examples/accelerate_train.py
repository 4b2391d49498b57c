"""Train with Hugging Face accelerate and hand the served weights to a rollout engine.

    python examples/accelerate_train.py
    accelerate launch --multi_gpu --num_processes 2 examples/accelerate_train.py
    accelerate launch --use_fsdp --fsdp_version 2 --num_processes 2 --mixed_precision bf16 \
        examples/accelerate_train.py

Unchanged on one process, under DDP and FSDP, on GPUs with NCCL and CPUs with gloo (where accelerate
turns FSDP into DDP). Needs `pip install accelerate`; downloads nothing.
"""

import argparse

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fc_optim
from fc_optim import FairCastAdamW
from fc_optim.integrations.accelerate import register

WORDS, LENGTH = 64, 16


def make_model() -> nn.Module:
    """Predicts each word from the one before it."""
    return nn.Sequential(
        nn.Embedding(WORDS, 32), nn.Linear(32, 128), nn.SiLU(), nn.LayerNorm(128),
        nn.Linear(128, WORDS),
    )  # fmt: skip


def make_data(size: int) -> TensorDataset:
    """Sequences in which word w is followed by 5 w + 1 or 5 w + 2."""
    generator = torch.Generator().manual_seed(0)
    words = [torch.randint(WORDS, (size,), generator=generator)]
    for _ in range(LENGTH):
        words.append((5 * words[-1] + torch.randint(1, 3, (size,), generator=generator)) % WORDS)
    return TensorDataset(torch.stack(words, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--sync-every", type=int, default=10, help="steps between two syncs")
    parser.add_argument("--lr", type=float, default=3e-3)
    args = parser.parse_args()

    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        gradient_accumulation_steps=2,
        step_scheduler_with_optimizer=False,
    )
    torch.manual_seed(0)  # the same weights on every process
    model = make_model()
    optimizer = FairCastAdamW(model.named_parameters(), lr=args.lr, dither="sync")
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    loader = DataLoader(make_data(4096), batch_size=16, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    served = register(accelerator, optimizer)  # the FairCastOptimizer behind accelerate's wrapper
    served.publish()  # random weights are no bf16 values: the first forward must run on served ones
    engine = make_model().bfloat16()  # stands in for vLLM: it knows names and tensors alone

    done = 0
    while done < args.steps:
        for (words,) in loader:
            with accelerator.accumulate(model):
                logits = model(words[:, :-1])
                loss = nn.functional.cross_entropy(
                    logits.flatten(0, 1).float(), words[:, 1:].flatten()
                )
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue
            scheduler.step()
            done += 1
            if done % args.sync_every == 0:
                served.publish(redraw=True)  # once per sync, right before serving ("sync")
                weights = {
                    n: w.cpu() for n, w in served.served_params()
                }  # every process takes part
                engine.load_state_dict(weights)
                digest = served.served_digest()
                same = fc_optim.digest(engine.named_parameters()) == digest
                mean = accelerator.reduce(loss.detach(), "mean").item()
                accelerator.print(
                    f"step {done:3d}  loss {mean:.3f}  served version {served.served_version}, "
                    f"digest {digest.total:016x}, engine has it: {same}"
                )
            if done == args.steps:
                break


if __name__ == "__main__":
    main()
