"""Real frameworks wrap a model, or hide its shapes: names and Muon's groups are the model's own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from models import backward, tiny
from torch import nn

from fc_optim import FairCastAdamW, muon_param_groups

pytestmark = [
    pytest.mark.integration,
    # Lightning's own imports.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*:lightning.fabric.utilities.warnings.PossibleUserWarning"),
]


class Policy(nn.Module):
    """Everything is in an attribute that is called as wrappers call theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.module = tiny()

    def forward(self, x):
        return self.module(x)


@pytest.mark.parametrize("make", [tiny, Policy])
def test_lightning_fabric(make, tmp_path):
    from lightning.fabric import Fabric

    names = [n for n, _ in make().named_parameters()]
    plain = make()
    fabric = Fabric(accelerator="cpu", devices=1)
    model, wrapped = fabric.setup(plain, FairCastAdamW(plain.parameters(), lr=1e-2))
    backward(model)
    wrapped.step()
    opt = wrapped.optimizer.bind(model)
    assert [n for n, _ in opt.served_params()] == names == list(model.state_dict())
    assert [n for n, _ in opt.served_params(tied="all")] == names
    groups = muon_param_groups(model)
    matrices = [n for n, p in plain.named_parameters() if p.ndim == 2]
    assert [n for n, _ in groups[0]["params"]] == matrices


ZERO = """
import json, logging, sys, torch, deepspeed
logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
from torch import nn
from fc_optim import FairCastAdamW, muon_param_groups
from fc_optim.integrations.deepspeed import attach, register
from fc_optim.params.modules import named_parameters

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        self.lm_head = nn.Linear(8, 4)
    def forward(self, x):
        return self.lm_head(self.module(x))

init = "file://" + sys.argv[1]
torch.distributed.init_process_group("gloo", init_method=init, rank=0, world_size=1)
deepspeed.init_distributed("gloo", verbose=False)
config = register({
    "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3}, "gradient_clipping": 0.0, "steps_per_print": 10**6,
})
with deepspeed.zero.Init(config_dict_or_path=config):
    model = Net()
found = {g["algorithm"]: [n for n, _ in g["params"]] for g in muon_param_groups(model)}
try:
    opt = FairCastAdamW(muon_param_groups(model), lr=1e-3)
    attach(deepspeed.initialize(model=model, optimizer=opt, config=config)[0])
except TypeError as error:
    found["error"] = str(error)
with deepspeed.zero.Init(config_dict_or_path=config):
    model = Net()
opt = FairCastAdamW(model.parameters(), lr=1e-3)
engine = deepspeed.initialize(model=model, optimizer=opt, config=config)[0]
attach(engine)
found["served"] = [n for n, _ in opt.served_params()]
found["engine"] = [n for n, _ in named_parameters(engine)]
print("found:", json.dumps(found))
"""


def test_deepspeed_zero_init(tmp_path: Path) -> None:
    """Parameters are empty tensors there: nobody sees from them which are matrices."""
    ranks = dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost")
    done = subprocess.run(
        [sys.executable, "-c", ZERO, str(tmp_path / "rendezvous")],
        env={**os.environ, **ranks, "MASTER_PORT": "29531", "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    line = next(s for s in done.stdout.splitlines() if s.startswith("found:"))
    found = json.loads(line.removeprefix("found:"))
    assert found["muon"] == ["module.0.weight", "module.1.weight"]
    assert found["adamw"] == [
        "module.0.bias", "module.1.bias", "lm_head.weight", "lm_head.bias"
    ]  # fmt: skip
    assert found["error"].startswith("Muon: ZeRO 1 to 3 cut matrices anywhere")
    names = [f"{m}.{k}" for m in ("module.0", "module.1", "lm_head") for k in ("weight", "bias")]
    assert found["served"] == found["engine"] == names
