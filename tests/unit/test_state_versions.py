"""States that earlier versions saved load to the bit, and their runs go on."""

from pathlib import Path

import pytest
import torch
from models import assert_equal_states, assert_same
from state_cases import CASES, run

DATA = Path(__file__).parents[1] / "data"
FILES = sorted(DATA.glob("states_*/*.pt"))


def test_every_case_has_a_file_of_every_version():
    for folder in DATA.glob("states_*"):
        assert {file.stem for file in folder.iterdir()} == set(CASES)
    assert FILES


@pytest.mark.parametrize("running", [False, True], ids=["fresh", "running"])
@pytest.mark.parametrize("file", FILES, ids=lambda f: f"{f.parent.name}-{f.stem}")
def test_a_saved_state_loads_to_the_bit_and_continues(file, running):
    case, saved = CASES[file.stem], torch.load(file, weights_only=True)
    want = case.build()[0]
    want.load_state_dict(saved["model"])
    model, opt = case.build(seed=7)
    if running and case.steps is not None:
        run(model, opt, 0, 1)
    opt.load_state_dict(saved["optim"])
    params = [p for g in opt.param_groups for p in g["params"]]
    for i, p in enumerate(params):
        entry = saved["optim"]["state"].get(i, {})
        assert entry.keys() <= opt.state.get(p, {}).keys()
        for key, value in entry.items():
            if key == "dither_step":  # its dtype is the kernels' matter
                assert int(opt.state[p][key]) == int(value)
            else:
                assert_equal_states(opt.state[p][key], value)
    for mine, theirs in zip(opt.param_groups, saved["optim"]["param_groups"], strict=True):
        for key in theirs.keys() - {"params", "served_version"}:
            assert mine[key] == theirs[key], key
    if not all(saved["optim"]["state"].get(i) for i in range(len(params))):
        model.load_state_dict(saved["model"])  # nothing was published: the weights are the model's
    elif case.params.__name__ == "excluded":
        for name, p in model.named_parameters():
            if p.ndim < 2:
                p.data.copy_(saved["model"][name])
    assert_same(model, want)
    if "later" in saved:
        steps = case.steps or 0
        run(model, opt, steps, steps + 2)
        want.load_state_dict(saved["later"])
        assert_same(model, want)
