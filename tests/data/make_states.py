"""How `states_0_1_0` was made, by that version: `PYTHONPATH=.:tests:tests/unit python
tests/data/make_states.py FOLDER`.

One file per case of `tests/unit/state_cases.py`: the weights and the optimizer's state dict, and,
where our kernels alone step them with Adam, which is the same bits on every machine, the weights
two steps later.
"""

import copy
import sys
from pathlib import Path

import torch
from state_cases import CASES, excluded, run

from fc_optim import __version__


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, case in CASES.items():
        model, opt = case.trained()
        made = {"version": __version__, "model": model.state_dict(), "optim": opt.state_dict()}
        made = copy.deepcopy(made)
        if opt.fused and not name.startswith("muon") and case.params is not excluded:
            run(model, opt, case.steps or 0, (case.steps or 0) + 2)
            made["later"] = copy.deepcopy(model.state_dict())
        torch.save(made, folder / f"{name}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
