"""Mistakes that are easy to make: one line names the argument, its value and the remedy."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import fc_optim
from fc_optim import FairCastAdamW, FairCastMuon, FairCastOptimizer, Sync, stochastic_round
from fc_optim import _torch as needed


def p():
    return nn.Parameter(torch.ones(3, 3))


TEXT = [
    (lambda: FairCastAdamW([p()], lr="1e-6"), "lr: '1e-6'"),
    (lambda: FairCastAdamW([p()], "1e-6"), "lr: '1e-6'"),
    (lambda: FairCastMuon([p()], weight_decay="0.1"), "weight_decay: '0.1'"),
    (lambda: FairCastOptimizer(torch.optim.SGD, [p()], momentum="0.9"), "momentum: '0.9'"),
    (lambda: FairCastAdamW([{"params": [p()], "lr": "1e-6"}]), "lr: '1e-6'"),
    (lambda: FairCastAdamW([{"params": [p()], "betas": ("0.9", 0.99)}]), r"betas: \('0.9', 0.99\)"),
    (lambda: FairCastOptimizer(torch.optim.SGD([{"params": [p()], "lr": "0.1"}])), "lr: '0.1'"),
]


@pytest.mark.parametrize(("make", "match"), TEXT)
def test_text_in_place_of_a_number(make, match):
    with pytest.raises(TypeError, match=rf"{match} is text, not a number. Pass float.*YAML"):
        make()


def test_text_that_is_meant_is_taken():
    class Named(torch.optim.SGD):
        def __init__(self, params, lr=0.1, kind="plain", skip=()):
            super().__init__(params, lr=lr)
            self.kind, self.skip = kind, skip

    opt = FairCastOptimizer(Named, [p()], kind="other", skip=("bias",))
    assert (opt.kind, opt.skip) == ("other", ("bias",))
    matrices = FairCastMuon([{"params": [p()], "adjust_lr_fn": "original"}])
    matrices.add_param_group({"params": [p()], "lr": torch.tensor(0.1)})


def test_an_iterator_that_was_read_before():
    params = iter([p()])
    list(params)
    for make in (FairCastAdamW, FairCastOptimizer(torch.optim.SGD)):
        with pytest.raises(ValueError, match="params: the list_iterator gives no parameters.*anew"):
            make(params)
        with pytest.raises(ValueError, match="params of group 1: the generator gives no"):
            make([{"params": [p()]}, {"params": (x for x in ())}])
    opt = FairCastAdamW([{"params": [p()]}, {"params": []}])  # no decay for nobody: fine
    with pytest.raises(ValueError, match="params of group 0: the filter gives no parameters"):
        opt.add_param_group({"params": filter(None, [])})
    assert len(opt.param_groups) == 2
    opt.add_param_group({"params": (x for x in [p()])})
    assert len(FairCastAdamW(x for x in [{"params": iter([p()])}]).param_groups[0]["params"]) == 1


def test_served_dtype():
    for dtype in (torch.float16, torch.float32, "fp8"):
        with pytest.raises(ValueError, match=f"served_dtype: .*{dtype}.* not supported.*bfloat16"):
            FairCastAdamW([{"params": [p()], "served_dtype": dtype}])
    for key, value in (("served_dtype", None), ("algorithm", "muon")):
        with pytest.raises(
            TypeError, match=f"{key}: a key of parameter groups.*{key!r}: {value!r}"
        ):
            FairCastAdamW([p()], **{key: value})


@pytest.mark.parametrize("of", [fc_optim.digest, lambda x: fc_optim.manifest(1, x)])
def test_digests_of_what_is_no_pairs(of):
    w = torch.ones(2)
    for wrong, what in (({"a": w}, "dict"), (nn.Linear(2, 2), "Linear"), (w, "Tensor")):
        with pytest.raises(TypeError, match=rf"named_tensors: it is of type {what}; .*\.items\(\)"):
            of(wrong)
    for wrong, what in (([w], r"'tensor\(\[1., 1.\]\)' is no"), (["ab"], "'ab' is no"),
                        ([(0, w)], "is no"), ([("a", w, 1)], "is no")):  # fmt: skip
        with pytest.raises(TypeError, match=rf"{what} \(name, tensor\); pass pairs"):
            of(wrong)
    with pytest.raises(TypeError, match="'a' is of type list; pass pairs"):
        of([("a", [1.0])])
    assert of({"a": w}.items()) == of([["a", w]]) == of(iter([("a", w)]))


def test_stochastic_round():
    def call(x=None, **kwargs):
        x = torch.ones(2) if x is None else x
        return stochastic_round(x, **{"seed": 0, "param_id": 1, "t": 0, **kwargs})

    with pytest.raises(TypeError, match=r"param_id: 'w' is a name; pass fc_optim.param_id\('w'\)"):
        call(param_id="w")
    for name, value in (
        ("seed", 0.5),
        ("t", torch.tensor(1.0)),
        ("offset", "0"),
        ("param_id", None),
    ):
        with pytest.raises(TypeError, match=rf"{name}: .* is no integer; pass int"):
            call(**{name: value})
    with pytest.raises(TypeError, match="x: expected a float32 tensor, got a list"):
        call([1.0])
    x = torch.full((64,), 1.003)
    assert torch.equal(call(x, t=torch.tensor(7)), call(x, t=7))


class Held:
    def held(self):
        return fc_optim.manifest(None, [])


class Load(Held):
    load = None  # no method

    def load_patches(self, patches, version):
        pass


def test_an_engine_without_its_methods_is_refused_when_the_sync_is_made():
    model = nn.Linear(2, 2)
    opt = FairCastAdamW(model.named_parameters()).bind(model)
    for engine, what in (
        (object(), r"object has no load\(\) and no held\(\)"),
        (Held(), r"Held has no load\(\)"),
        (Load(), r"Load has no load\(\)"),
        (Held, "Held is a class"),
        (model, r"Linear has no load\(\) and no held\(\)"),
    ):
        with pytest.raises(TypeError, match=rf"engine: {what}. Pass an object with load\("):
            Sync(opt, engine)
    with pytest.raises(TypeError, match=r"engine: object has no held\(\)\."):
        Sync(opt, object(), send=print)
    Sync(opt, Held(), send=print)  # it is only asked
    Sync(opt, None)


OLD = """
import sys, torch
torch.__version__ = torch.torch_version.TorchVersion(sys.argv[1])
try:
    import fc_optim
except ImportError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("version", "refused"),
    [("2.10.1", True), ("1.13.0+cu117", True), ("2.11.0", False), ("2.11.0.dev20260901", False),
     ("3.0.0a0+git1234", False)],
)  # fmt: skip
def test_an_older_torch_is_one_line(version, refused):
    done = subprocess.run(
        [sys.executable, "-c", OLD, version], capture_output=True, text=True, check=True
    )
    line = f"fc_optim needs torch >= 2.11; pip install 'torch>=2.11' ({version} is installed)."
    assert done.stdout.strip() == (line if refused else "")


def test_the_oldest_torch_is_that_of_the_package():
    text = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text()
    assert f'"torch>={".".join(map(str, needed.MINIMUM))}"' in text
