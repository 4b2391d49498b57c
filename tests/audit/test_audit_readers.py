"""Checkpoints and training states in every format, whole and damaged."""

import json
import os
import pickle
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from fc_optim import FairCastAdamW
from fc_optim.audit.readers import open_checkpoint
from fc_optim.audit.states import open_state
from fc_optim.audit.stored import BadCheckpoint, from_boxes, from_parts, in_memory
from fc_optim.audit.updates import next_step

DATA = Path(__file__).parents[1] / "data"


def tensors(legacy=False):
    """Of many dtypes; torch cannot load fp8 from its old format."""
    g = torch.Generator().manual_seed(0)
    return {
        "layers.0.weight": torch.randn(40, 30, generator=g).bfloat16(),
        "layers.0.bias": torch.randn(40, generator=g),
        "norm.weight": torch.ones(30, dtype=torch.float16),
        "scalar": torch.tensor(3.0),
        "empty": torch.zeros(0, 5),
        "embed.weight": torch.randn(50, 30, generator=g).to(
            torch.float32 if legacy else torch.float8_e4m3fn
        ),
    }


def hf_folder(path, suffix="safetensors"):
    """Two shards and their index."""
    path.mkdir()
    all_, stem = tensors(), "model" if suffix == "safetensors" else "pytorch_model"
    names = list(all_)
    parts = {f"{stem}-0000{i}-of-00002.{suffix}": names[i - 1 :: 2] for i in (1, 2)}
    for file, mine in parts.items():
        part = {n: all_[n] for n in mine}
        save_file(part, path / file) if suffix == "safetensors" else torch.save(part, path / file)
    weight_map = {n: f for f, mine in parts.items() for n in mine}
    index = path / f"{stem}.{suffix}.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


def saved(kind, tmp_path):
    path = tmp_path / "checkpoint"
    if kind == "safetensors":
        save_file(tensors(), path := path.with_suffix(".safetensors"))
    elif kind in ("pt", "bin"):
        torch.save(tensors(), path := path.with_suffix(f".{kind}"))
    elif kind == "old pt":
        path = path.with_suffix(".pt")
        torch.save(tensors(legacy=True), path, _use_new_zipfile_serialization=False)
    elif kind == "nested pt":
        torch.save({"step": 3, "model": tensors()}, path := path.with_suffix(".pt"))
    elif kind.startswith("folder"):
        hf_folder(path, kind.split()[1])
    else:
        dcp.save(tensors(), checkpoint_id=path, no_dist=True)
    return path


KINDS = [
    "safetensors",
    "pt",
    "bin",
    "old pt",
    "nested pt",
    "folder safetensors",
    "folder bin",
    "dcp",
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_every_format_reads_back_whole_and_in_pieces(kind, tmp_path):
    found = open_checkpoint(saved(kind, tmp_path))
    wanted = tensors(legacy=kind == "old pt")
    assert found.keys() == wanted.keys()
    for name, want in wanted.items():
        got = found[name]
        assert (got.shape, got.dtype) == (tuple(want.shape), want.dtype)
        flat = want.flatten().float()
        assert torch.equal(got.load().float(), want.float())
        parts = [got.read(a, b) for a, b in got.pieces(37)]
        assert torch.equal(torch.cat([p.float() for p in parts] or [flat]), flat)


def test_views_of_a_shared_storage_and_tied_weights(tmp_path):
    base = torch.arange(24.0).view(4, 6)
    torch.save({"t": base.T, "row": base[2], "tied": base, "again": base}, tmp_path / "a.pt")
    found = open_checkpoint(tmp_path / "a.pt")
    assert torch.equal(found["t"].load(), base.T)
    assert torch.equal(found["row"].load(), base[2])
    assert found["tied"].place == found["again"].place != found["row"].place


def test_names_are_cleaned_of_wrappers(tmp_path):
    torch.save({"module._orig_mod.a": torch.ones(2)}, tmp_path / "a.pt")
    assert list(open_checkpoint(tmp_path / "a.pt")) == ["a"]


def test_boxes_in_two_dimensions():
    whole = torch.arange(7 * 10.0).view(7, 10)
    cut = [(r, c) for r in ((0, 3), (3, 7)) for c in ((0, 4), (4, 10))]
    boxes = [((r[0], c[0]), in_memory(whole[r[0] : r[1], c[0] : c[1]].contiguous()))
             for r, c in cut]  # fmt: skip
    found = from_boxes((7, 10), torch.float32, boxes)
    for a, b in [(0, 70), (5, 37), (29, 31), (69, 70)]:
        assert torch.equal(found.read(a, b), whole.flatten()[a:b])
    with pytest.raises(BadCheckpoint, match="cover"):
        from_boxes((7, 10), torch.float32, boxes[:3])


def test_parts_end_to_end():
    flats = [in_memory(torch.arange(10.0)), in_memory(torch.arange(10.0, 20))]
    found = from_parts((3, 2), [(flats[0], 7, 10), (flats[1], 0, 3)])
    assert found.load().tolist() == [[7, 8], [9, 10], [11, 12]]


# Damage: a message that names the file, never a traceback or a figure.


@pytest.mark.parametrize("kind", ["safetensors", "pt", "folder safetensors", "folder bin", "dcp"])
@pytest.mark.parametrize("keep", [0, 5, 200, 0.5, 0.98])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_truncated_files(kind, keep, tmp_path):
    path = saved(kind, tmp_path)
    files = [path] if path.is_file() else [
        p for p in path.iterdir() if p.suffix in (".safetensors", ".bin", ".distcp")
    ]  # fmt: skip
    for file in files:
        data = file.read_bytes()
        file.write_bytes(data[: int(keep * len(data)) if keep < 1 else keep])
    with pytest.raises(BadCheckpoint, match=str(tmp_path)):
        for tensor in open_checkpoint(path).values():
            tensor.load()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_missing_shards(tmp_path):
    folder = hf_folder(tmp_path / "a")
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(BadCheckpoint, match="model-00002-of-00002.safetensors' that it names is"):
        open_checkpoint(folder)
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(BadCheckpoint, match="1 of 00002 shards"):
        open_checkpoint(folder)
    path = saved("dcp", tmp_path)
    next(path.glob("*.distcp")).unlink()
    with pytest.raises(BadCheckpoint, match="missing"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "/etc/passwd", "a/../../secret.safetensors", "C:\\x", 7, None]
)
def test_an_index_cannot_point_outside_its_folder(name, tmp_path):
    save_file({"w": torch.ones(2)}, tmp_path / "secret.safetensors")
    folder = tmp_path / "model"
    (folder / "a").mkdir(parents=True)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(BadCheckpoint, match="outside the folder|not a file name|not an index"):
        open_checkpoint(folder)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_metadata_cannot_point_outside_its_folder(tmp_path):
    path = saved("dcp", tmp_path)
    metadata = pickle.loads((path / ".metadata").read_bytes())  # our own file
    for info in metadata.storage_data.values():
        info.relative_path = "../" + info.relative_path
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(BadCheckpoint, match="outside the folder"):
        open_checkpoint(path)


class Payload:
    """Unpickling it would create a file."""

    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return os.mkdir, (str(self.target),)


@pytest.mark.parametrize("where", ["pt", "old pt", "optimizer", "dcp metadata", "dcp value"])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_no_pickle_runs_code(where, tmp_path):
    target = tmp_path / "pwned"
    bad = {"w": torch.ones(2), "x": Payload(target)}
    path = tmp_path / "a.pt"
    read = open_checkpoint
    if where.startswith("dcp"):
        path = saved("dcp", tmp_path)
        if where == "dcp metadata":
            (path / ".metadata").write_bytes(pickle.dumps(bad))
        else:
            torch.save(bad, tmp_path / "value")
            record = (tmp_path / "value").read_bytes()
            for file in path.glob("*.distcp"):
                file.write_bytes(record * 3)
    elif where == "optimizer":
        torch.save({"state": {}, "param_groups": [], **bad}, path)
        read = open_state
    else:
        torch.save(bad, path, _use_new_zipfile_serialization=where == "pt")
    with pytest.raises(BadCheckpoint):
        read(path)
    assert not target.exists()
    if where == "pt":
        assert open_checkpoint(path, trust_pickle=True)["w"].load().tolist() == [1, 1]
        assert target.exists()


@pytest.mark.parametrize(
    "header",
    [
        b"not json", b"[]", b'{"w": 3}',
        b'{"w": {"dtype": "F4", "shape": [2], "data_offsets": [0, 8]}}',
        b'{"w": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}',
        b'{"w": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}',
        b'{"w": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}}',
        b'{"w": {"dtype": "F32", "shape": [2], "data_offsets": [0]}}',
    ],
)  # fmt: skip
def test_damaged_safetensors_headers(header, tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(BadCheckpoint, match="a.safetensors"):
        open_checkpoint(path)


def test_what_is_no_checkpoint(tmp_path):
    for path in (tmp_path / "none", tmp_path, tmp_path / "a.txt"):
        (tmp_path / "a.txt").write_text("x")
        with pytest.raises(BadCheckpoint, match=str(path)):
            open_checkpoint(path)
        with pytest.raises(BadCheckpoint, match=str(path)):
            open_state(path)


# Training states.


def net():
    torch.manual_seed(0)
    parts = {"embed": torch.nn.Embedding(50, 24), "norm": torch.nn.LayerNorm(24),
             "head": torch.nn.Linear(24, 50, bias=False)}  # fmt: skip
    return torch.nn.ModuleDict(parts)


def train(model, opt, steps=3):
    g = torch.Generator().manual_seed(0)
    for _ in range(steps):
        x = torch.randint(0, 50, (16,), generator=g)
        loss = model["head"](model["norm"](model["embed"](x).float())).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    return opt


def check_updates(model, opt, slots, tolerance=1e-6):
    """What the moments say is what the last step did."""
    by_name = dict(model.named_parameters())
    assert {s.name for s in slots} == by_name.keys()
    for s in slots:
        state = opt.state[by_name[s.name]]
        assert torch.equal(s.state["exp_avg"].load(), state["exp_avg"])
        m = state["exp_avg"].double() / (1 - 0.9**s.step)
        v = state["exp_avg_sq"].double() / (1 - 0.999**s.step)
        masters = s.masters.load().double()
        want = -1e-3 * (m / (v.sqrt() + 1e-8) + s.group["weight_decay"] * masters)
        got = next_step(s)(masters.flatten(), 0, masters.numel())
        assert torch.allclose(got, want.flatten(), rtol=tolerance)


def test_torch_state_with_names(tmp_path):
    model = net()
    opt = train(model, torch.optim.AdamW(model.named_parameters(), lr=1e-3))
    torch.save({"epoch": 1, "optimizer": opt.state_dict()}, tmp_path / "state.pt")
    torch.save(model.state_dict(), tmp_path / "model.pt")
    with pytest.raises(BadCheckpoint, match="--weights"):
        open_state(tmp_path / "state.pt")
    slots = open_state(tmp_path / "state.pt", tmp_path / "model.pt")
    check_updates(model, opt, slots)
    for s in slots:
        assert torch.equal(s.masters.load(), dict(model.named_parameters())[s.name].detach())


def test_torch_state_with_numbers_takes_the_order_of_a_pickle_but_does_not_guess(tmp_path):
    model = net()
    opt = train(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    torch.save(opt.state_dict(), tmp_path / "state.pt")
    torch.save(model.state_dict(), tmp_path / "model.pt")
    save_file(model.state_dict(), tmp_path / "model.safetensors")  # sorted: the order is lost
    check_updates(model, opt, open_state(tmp_path / "state.pt", tmp_path / "model.pt"))
    with pytest.raises(BadCheckpoint, match="which is which"):
        open_state(tmp_path / "state.pt", tmp_path / "model.safetensors")


def test_our_own_state_brings_its_masters(tmp_path):
    model = net().bfloat16()
    opt = FairCastAdamW(model.named_parameters(), lr=1e-3).bind(model)
    for p in model.parameters():
        p.grad = torch.randn(p.shape).bfloat16()
    opt.step()
    torch.save(opt.state_dict(), tmp_path / "state.pt")
    masters = dict(opt.master_params())
    slots = open_state(tmp_path / "state.pt")
    assert {s.name for s in slots} == masters.keys()
    assert all(torch.equal(s.masters.load(), masters[s.name]) for s in slots)
    assert {s.step for s in slots} == {1.0}


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_dcp_states(flat, tmp_path):
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    model = net()
    opt = train(model, torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1))
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    weights, state = get_state_dict(model, opt, options=options)
    dcp.save({"model": weights, "optim": state}, checkpoint_id=tmp_path / "both", no_dist=True)
    slots = open_state(tmp_path / "both")
    check_updates(model, opt, slots)
    assert {s.group["weight_decay"] for s in slots} == {0.1}
    dcp.save({"optimizer": state}, checkpoint_id=tmp_path / "optimizer_0", no_dist=True)
    folder = tmp_path / "pytorch_model_fsdp_0"
    dcp.save({"model": weights}, checkpoint_id=folder, no_dist=True)
    check_updates(model, opt, open_state(tmp_path / "optimizer_0"))
    check_updates(model, opt, open_state(tmp_path))


def test_states_that_are_not_of_a_known_kind(tmp_path):
    model = net()
    path = tmp_path / "state.pt"
    torch.save(torch.optim.AdamW(model.parameters()).state_dict(), path)
    with pytest.raises(BadCheckpoint, match="before the first step"):
        open_state(path)
    torch.save(train(model, torch.optim.Adagrad(model.parameters())).state_dict(), path)
    with pytest.raises(BadCheckpoint, match="only Adam, AdamW, Muon and SGD"):
        open_state(path)
    opt = train(model, torch.optim.AdamW(model.named_parameters(), lr=0.0))
    torch.save(opt.state_dict(), path)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    (slot, *_) = open_state(path, tmp_path / "model.pt")
    with pytest.raises(BadCheckpoint, match="--lr"):
        next_step(slot)
    next_step(slot, 1e-6)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_zero(stage):
    """Files of DeepSpeed 0.19.6 from two ranks (made by tests/data/make_zero.py). Stages 1 and
    2 keep the bf16 weights beside, which must be the masters to nearest; for stage 3 DeepSpeed's
    own view of them is kept."""
    folder = DATA / f"zero{stage}"
    slots = open_state(folder)
    if stage == 3:
        truth = torch.load(folder / "truth.pt", weights_only=True)
        for s in slots:
            found = {"master": s.masters, **s.state}
            for key in ("master", "exp_avg", "exp_avg_sq"):
                assert torch.equal(found[key].load(), truth[s.name][key]), (s.name, key)
    else:
        model = open_checkpoint(folder / "step3/mp_rank_00_model_states.pt")
        for s in slots:
            assert torch.equal(s.masters.load().bfloat16(), model[s.name].load()), s.name
            assert s.state["exp_avg_sq"].load().min() >= 0
    assert [s.step for s in slots] == [3.0] * 8
    decays = {s.name: s.group["weight_decay"] for s in slots}
    assert decays["layers.0.weight"] == 0.1 and decays["norm.weight"] == 0.0


def test_deepspeed_files_with_a_rank_missing(tmp_path):
    import shutil

    folder = shutil.copytree(DATA / "zero2", tmp_path / "zero2")
    next((folder / "step3").glob("*rank_1*optim*")).unlink()
    with pytest.raises(BadCheckpoint, match="1 \\*_optim_states.pt for 2 ranks"):
        open_state(folder)


# Memory.

_LIMITED = """
import resource, sys
import torch, typer, rich
resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
from fc_optim.audit.main import main
sys.argv = ["fc-audit", *sys.argv[1:]]
main()
"""


def sparse_safetensors(path, rows, columns=4096):
    """A real file of fp32 zeros that takes no room on disk."""
    size = rows * columns * 4
    entry = {"dtype": "F32", "shape": [rows, columns], "data_offsets": [0, size]}
    header = json.dumps({"model.layers.0.mlp.up_proj.weight": entry}).encode()
    with open(path, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)
    return size


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(66_000, marks=pytest.mark.integration),
        pytest.param(190_000, marks=pytest.mark.long),
    ],
)
def test_files_that_do_not_fit_into_the_address_space(rows, tmp_path):
    for name in ("a", "b"):
        assert sparse_safetensors(tmp_path / f"{name}.safetensors", rows) > 2**30
    done = subprocess.run(
        [sys.executable, "-c", _LIMITED, "checkpoints", str(tmp_path / "a.safetensors"),
         str(tmp_path / "b.safetensors"), "--json"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout)["changed_ratio"] == 0


def test_reading_takes_no_memory_with_the_size_of_the_file(tmp_path):
    """100 MB read in pieces; the peak of resident memory grows by far less."""
    sparse_safetensors(tmp_path / "a.safetensors", 6_400)
    (stored,) = open_checkpoint(tmp_path / "a.safetensors").values()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert sum(int((stored.read(a, b) != 0).sum()) for a, b in stored.pieces()) == 0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 30_000  # KB
