"""A process that trains and saves every third step, until it is killed."""

import os
import warnings
from typing import Any

import torch
from models import backward, tiny

from fc_optim import FairCastOptimizer


def build(base, dither="fresh"):
    model = tiny(torch.bfloat16)
    cls = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[base]
    opt = FairCastOptimizer(cls, model.named_parameters(), lr=1e-3, dither=dither)
    return model, opt, torch.optim.lr_scheduler.LambdaLR(opt, lambda i: 0.97**i)


def save(folder, step, model, opt, scheduler):
    state = {
        "step": step,
        "model": model.state_dict(),
        "optimizer": opt.state_dict(),
        "scheduler": scheduler.state_dict(),
    }
    torch.save(state, f"{folder}/new.pt")
    os.replace(f"{folder}/new.pt", f"{folder}/last.pt")


def main(pipe: Any, folder: str, steps: int, order: str, base: str) -> None:
    """Sends the number of each step, then what it ends with."""
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    model, opt, scheduler = build(base)
    first = 0
    if os.path.exists(f"{folder}/last.pt"):
        state = torch.load(f"{folder}/last.pt", weights_only=True)
        scheduler.load_state_dict(state["scheduler"])
        loads = [
            lambda: model.load_state_dict(state["model"]),
            lambda: opt.load_state_dict(state["optimizer"]),
        ]
        for load in loads if order == "model" else reversed(loads):
            load()
        first = state["step"]
    for step in range(first, steps):
        opt.zero_grad()
        backward(model, step)
        opt.step()
        scheduler.step()
        if step % 3 == 2:
            save(folder, step + 1, model, opt, scheduler)
        pipe.send(step)
    digest = opt.served_digest().total
    masters = torch.cat([m.flatten() for _, m in opt.master_params()])
    moments = [v.flatten() for s in opt.state.values() for k, v in s.items() if "exp_avg" in k]
    sums = masters.double().sum().item(), sum(m.double().sum().item() for m in moments)
    pipe.send((digest, *sums))
