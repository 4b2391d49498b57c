"""A DeepSpeed checkpoint with the masters in place of the served fp32 weights.

    python -m fc_optim.integrations.deepspeed_masters run/global_step100 masters/global_step100

A checkpoint holds the served weights where DeepSpeed's tools look for fp32 weights, and the
masters in the optimizer's state, which those tools drop. Its copy made here is for them:
`ds_to_universal` then carries the masters to another number of ranks, and `zero_to_fp32.py`
exports them. Every other file is linked, not copied.
"""

import argparse
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from fc_optim.integrations.deepspeed import MASTERS_MARK

# Where ZeRO 1 and 2, and ZeRO 3, keep the base optimizer's state dict and the fp32 weights.
_KEYS = (
    ("base_optimizer_state", "single_partition_of_fp32_groups"),
    ("optimizer_state_dict", "fp32_flat_groups"),
)


def masters_as_fp32(checkpoint: str | Path, output: str | Path) -> None:
    """Write a copy of a ZeRO checkpoint folder in which DeepSpeed's fp32 weights are the masters.

    Args:
        checkpoint: the folder of one tag (`<save_dir>/global_step100`), ZeRO 1, 2 or 3.
        output: a new folder; `latest` is written beside it. Put it on the same file system.

    Reads one rank's optimizer file at a time. Raises ValueError if a file has no masters, was
    saved with `amsgrad` (ds_to_universal drops its maximum) or `round_robin_gradients` (the
    offsets that DeepSpeed saves are then wrong), FileExistsError if `output` exists.
    """
    source, target = Path(checkpoint), Path(output)
    files = sorted(source.glob("*_optim_states.pt"))
    if not files:
        raise ValueError(f"checkpoint: {source} has no *_optim_states.pt; is it a tag's folder?")
    target.mkdir(parents=True)
    for path in files:
        saved = torch.load(path, map_location="cpu", weights_only=False)
        _exchange(saved, path)
        torch.save(saved, target / path.name)
    for path in source.iterdir():
        if path not in files:
            _link(path, target / path.name)
    script = source.parent / "zero_to_fp32.py"
    if script.exists():
        shutil.copy(script, target.parent)
    (target.parent / "latest").write_text(target.name)


def _exchange(saved: dict[str, Any], path: Path) -> None:
    zero = saved["optimizer_state_dict"]
    found = [(zero[a], zero[b]) for a, b in _KEYS if a in zero and b in zero]
    if not found or not isinstance(found[0][0], dict):
        raise ValueError(f"checkpoint: {path} is not of ZeRO 1 to 3 (without elastic_checkpoint).")
    ((base, weights),) = found
    if saved.get("ds_config", {}).get("zero_optimization", {}).get("round_robin_gradients"):
        raise ValueError("checkpoint: saved with round_robin_gradients, whose offsets are wrong.")
    for i, held in enumerate(weights):
        state = base["state"][i]
        if "master" not in state:
            raise ValueError(f"checkpoint: {path} has no masters: not saved by FairCastOptimizer.")
        if "max_exp_avg_sq" in state:
            raise ValueError("checkpoint: amsgrad's max_exp_avg_sq would be lost by DeepSpeed.")
        weights[i] = state["master"].view(-1)[: held.numel()].clone()
    for group in base["param_groups"]:
        group[MASTERS_MARK] = True


def _link(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target)
        return
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy(source, target)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkpoint", help="folder of one tag, such as run/global_step100")
    parser.add_argument("output", help="new folder, such as masters/global_step100")
    args = parser.parse_args()
    masters_as_fp32(args.checkpoint, args.output)


if __name__ == "__main__":
    main()
