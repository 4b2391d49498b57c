"""watch_casts finds the cast however it is written, and says what it did to the bits."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import tiny
from ranks import spawn, start
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard

import fc_optim
from fc_optim.audit.casts import watch_casts
from fc_optim.audit.formats import BF16
from fc_optim.audit.loss import Loss, measure
from fc_optim.metrics import bf16_ulp

BF = torch.bfloat16
Way = Callable[[Any], Any]


def off_grid(width: int = 24) -> nn.Linear:
    """One matrix and one vector whose values use all bits of fp32."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Linear(width, width)
    for p in model.parameters():
        p.data = torch.randn(p.shape, generator=generator)
    return model


def narrow(p: Tensor) -> Tensor:
    return torch.empty(p.shape, dtype=BF).copy_(p)


def each(cast: Way) -> Way:
    return lambda model: [cast(p) for p in model.parameters()]


def load_like_vllm(model: nn.Linear) -> None:
    engine = off_grid().bfloat16()
    for param, loaded in zip(engine.parameters(), model.parameters(), strict=True):
        param.data.copy_(loaded)


def load_state_dict(model: nn.Linear) -> None:
    off_grid().bfloat16().load_state_dict(model.state_dict())


def foreach(model: nn.Linear) -> None:
    sources = [p.detach() for p in model.parameters()]
    torch._foreach_copy_([torch.empty_like(p, dtype=BF) for p in sources], sources)


def bucket_by_cat(model: nn.Linear) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).bfloat16()


def cat_into_bf16(model: nn.Linear) -> None:
    flat = [p.detach().flatten() for p in model.parameters()]
    torch.cat(flat, out=torch.empty(sum(p.numel() for p in flat), dtype=BF))


def bucket_by_slices(model: nn.Linear) -> None:
    bucket, at = torch.empty(2000), 0
    for p in model.parameters():
        bucket[at : at + p.numel()].view(p.shape).copy_(p.detach())
        at += p.numel()
    bucket[:at].to(BF)


def stacked_experts(model: nn.Linear) -> None:
    w = model.weight.detach()
    experts = torch.stack([w, w.t()])
    for i in range(2):
        experts[i].to(BF)
    model.bias.half()


def inference(model: nn.Linear) -> None:
    with torch.inference_mode():
        for p in model.parameters():
            p.to(BF)


def swap_data(model: nn.Linear) -> None:
    for p in model.parameters():
        p.data = p.data.bfloat16()


def merged_lora(model: nn.Linear) -> None:
    for p in model.parameters():
        (p.detach() + 1e-3).to(BF)


def compiled(model: nn.Linear) -> None:
    cast = torch.compile(lambda x: (x * 1).to(BF))
    for p in model.parameters():
        cast(p.detach())


WAYS: dict[str, Way] = {
    "to": each(lambda p: p.to(BF)),
    "to, keyword, other options": each(lambda p: p.to(dtype=BF, non_blocking=True, copy=True)),
    "to like a tensor": each(lambda p: p.to(torch.empty(1, dtype=BF))),
    "bfloat16": each(lambda p: p.bfloat16()),
    "half of detached": each(lambda p: p.detach().half()),
    "type_as": each(lambda p: p.type_as(torch.empty(1, dtype=BF))),
    "type": each(lambda p: p.data.type("torch.BFloat16Tensor")),
    "copy_ into empty": each(narrow),
    "copy_ of .data": each(lambda p: narrow(p.data)),
    "setitem": each(lambda p: torch.empty(p.shape, dtype=BF).__setitem__(..., p.data)),
    "fp8": each(lambda p: p.detach().to(torch.float8_e4m3fn)),
    "through fp16": each(lambda p: p.half().bfloat16()),
    "clone, then to": each(lambda p: p.detach().clone().to(BF)),
    "view, slice, transpose": each(lambda p: p.detach().view(-1)[: p.numel()].to(BF)),
    "strided view": each(lambda p: p.detach().t().contiguous().to(BF)),
    "widened before": each(lambda p: p.detach().double().to(BF)),
    "out= with arithmetic": each(
        lambda p: torch.mul(p.detach(), 1, out=torch.empty(p.shape, dtype=BF))
    ),
    "stack, out= (no arithmetic)": each(
        lambda p: torch.stack([p.detach()] * 2, out=torch.empty(2, *p.shape, dtype=BF))
    ),
    "scaled fp8": each(lambda p: (p.detach() / 3).to(torch.float8_e4m3fn)),
    "vLLM's loader": load_like_vllm,
    "load_state_dict": load_state_dict,
    "state dict values": lambda model: [v.to(BF) for v in model.state_dict().values()],
    "_foreach_copy_": foreach,
    "cat": bucket_by_cat,
    "cat into bf16": cat_into_bf16,
    "bucket": bucket_by_slices,
    "stack": stacked_experts,
    "inference mode": inference,
    "swapped .data": swap_data,
    "merged": merged_lora,
    "torch.compile": compiled,
    "Module.bfloat16": lambda model: model.bfloat16(),
    "Module.half": lambda model: model.half(),
    "Module.to": lambda model: model.to(BF),
}


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")  # compile's own
@pytest.mark.parametrize("way", WAYS)
def test_finds_the_cast(way: str) -> None:
    model = off_grid()
    with watch_casts(model) as report:
        WAYS[way](model)
    assert {name for c in report.lossy for name in c.names} == {"weight", "bias"}
    for c in report.lossy:
        assert c.place.file == __file__
        assert c.elements in (24, 24 * 24, 24 * 25, 2 * 24, 2 * 24 * 24)
        if c.loss and way != "through fp16":
            assert 0.5 < c.loss.changed / c.elements <= 1
            assert 0.1 < c.loss.max_ulp <= 0.5
    for row in report.summary():  # lines: the bias alone is too short to exclude luck
        if row["elements"] > 48:
            assert row["rounding"] == ("not measured" if "out= " in way else "nearest")


def test_names_the_line_and_what_it_says() -> None:
    model = off_grid()
    with watch_casts(model) as report:
        served = {n: p.to(BF) for n, p in model.named_parameters()}  # the line
    assert len(served) == len(report.casts) == 2
    for c, name in zip(report.casts, served, strict=True):
        assert c.names == (name,)
        assert c.place.code.endswith("# the line")
        assert (c.source, c.target) == (torch.float32, BF)
        assert c.stack[-1].function != "<unknown>"
    (row,) = report.summary()
    assert row["names"] == ["weight", "bias"] and row["elements"] == 600
    assert row["changed"] == sum(
        int((served[n].float() != p).sum()) for n, p in model.named_parameters()
    )
    assert "rounding: nearest" in str(report) and f"{__file__}:" in str(report)


def test_buckets_remember_whose_part_is_whose() -> None:
    model = off_grid()
    with watch_casts(model) as report:
        flat = torch.cat([p.detach().flatten() for p in model.parameters()])
        flat[:576].to(BF)
        flat[576:].to(BF)
        flat[500:580].to(BF)
    assert [c.names for c in report.casts] == [("weight",), ("bias",), ("weight", "bias")]


def test_other_tensors_and_exact_casts_are_no_alarm() -> None:
    model = off_grid()
    with watch_casts(model) as report:
        torch.randn(5, 5).to(BF)
        model(torch.randn(2, 24)).to(BF)  # an activation
        model.weight.detach().double()
        (model.weight.detach() > 0).to(BF)
        bucket = model.weight.detach().clone()
        bucket.copy_(torch.randn(24, 24))  # now somebody else's values
        bucket.to(BF)
    assert report.casts == [] and str(report) == "No parameter was narrowed."
    with watch_casts(model):
        pass
    model.weight.to(BF)
    assert report.casts == []


@pytest.mark.parametrize("dtype", [torch.float32, BF], ids=["grid", "native"])
def test_a_fair_cast_model_loses_nothing(dtype: torch.dtype) -> None:
    model = tiny(dtype)
    opt = fc_optim.FairCastAdamW(model.named_parameters(), lr=1e-3).bind(model)
    engine = tiny(BF)
    with watch_casts(model) as report:
        for i in range(3):
            for p in model.parameters():
                p.grad = torch.full_like(p, 1e-3 * (i + 1))
            opt.step()
            for p, (_, served) in zip(engine.parameters(), opt.served_params(), strict=True):
                p.data.copy_(served)
            load = {n: p.to(BF) for n, p in model.named_parameters()}
        assert load
    assert report.lossy == []
    assert {c.rounding for c in report.casts} == ({"exact"} if dtype == torch.float32 else set())


# -- which rounding it was ----------------------------------------------------------------------


def truncate_by_mask(x: Tensor) -> Tensor:
    return (x.view(torch.int32) & -65536).view(torch.float32).to(BF)


def truncate_in_place(x: Tensor) -> Tensor:
    y = x.clone()
    y.view(torch.int32).bitwise_and_(-65536)
    return y.to(BF)


def truncate_by_shift(x: Tensor) -> Tensor:
    return (x.view(torch.int32) >> 16).to(torch.int16).view(BF)


def truncate_by_halves(x: Tensor) -> Tensor:
    return x.view(BF)[..., 1::2].contiguous()


def stochastic(x: Tensor) -> Tensor:
    r = torch.randint(65536, x.shape, dtype=torch.int32)
    return ((x.view(torch.int32) + r) & -65536).view(torch.float32).to(BF)


def stochastic_by_shift(x: Tensor) -> Tensor:
    bits = x.clone().view(torch.int32)
    bits.add_(torch.randint(65536, x.shape, dtype=torch.int32))
    return bits.bitwise_right_shift(16).to(torch.int16).view(BF)


def away_from_zero(x: Tensor) -> Tensor:
    return ((x.view(torch.int32) + 65535) & -65536).view(torch.float32).to(BF)


@pytest.mark.parametrize(
    "cast, rounding",
    [
        (lambda x: x.to(BF), "nearest"),
        (truncate_by_mask, "truncation"),
        (truncate_in_place, "truncation"),
        (truncate_by_shift, "truncation"),
        (truncate_by_halves, "truncation"),
        (stochastic, "stochastic"),
        (stochastic_by_shift, "stochastic"),
        (away_from_zero, "other"),
    ],
)
def test_names_the_rounding(cast: Callable[[Tensor], Tensor], rounding: str) -> None:
    torch.manual_seed(0)
    model = off_grid(64)
    with watch_casts(model) as report:
        result = cast(model.weight.detach())
    (c,) = report.casts
    assert c.rounding == rounding and c.loss is not None
    assert c.loss.changed == int((result.float() != model.weight).sum())
    want = measure(model.weight, result)
    assert (c.loss.mean_ulp, c.loss.max_ulp) == (want.mean_ulp, want.max_ulp)


def test_measure_against_the_definitions() -> None:
    torch.manual_seed(1)
    x = torch.randn(5000) * 10.0 ** torch.randint(-42, 38, (5000,)).float()
    got = measure(x, x.bfloat16())
    error = (x.double() - x.bfloat16().double()).abs() / bf16_ulp(x)
    assert torch.equal(bf16_ulp(x), BF16.ulp(x))
    assert got.changed == int((error > 0).sum()) == got.off_grid == got.nearest
    assert got.mean_ulp == pytest.approx(float(error.mean()))
    assert got.max_ulp == float(error.max())


def test_special_values_and_overflow() -> None:
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([0.0, -0.0, inf, -inf, nan, 1e-45, 3.4e38, 1.0, 70000.0])
    to_bf16 = measure(x, x.bfloat16())
    assert (to_bf16.overflowed, to_bf16.out_of_range, to_bf16.altered) == (1, 1, 0)
    to_fp16 = measure(x, x.half())
    assert (to_fp16.overflowed, to_fp16.out_of_range, to_fp16.changed) == (2, 2, 3)
    assert measure(x[:5], x[:5].bfloat16()).rounding == "exact"
    assert measure(torch.tensor([1.0]), torch.tensor([2.0]).bfloat16()).rounding == "other"
    with pytest.raises(ValueError, match="shape"):
        measure(torch.zeros(2), torch.zeros(3).bfloat16())


def test_too_few_elements_cannot_tell() -> None:
    one = torch.tensor([1.001])
    assert measure(one, one.bfloat16()).rounding == "nearest or truncation or stochastic"
    assert Loss().rounding == "exact"


# -- sharded parameters -------------------------------------------------------------------------

SHARDED: dict[str, Way] = {
    "to_local": each(lambda p: p.to_local().to(BF)),
    "DTensor.to": each(lambda p: p.to(BF)),
    "copy_ between DTensors": each(lambda p: torch.empty_like(p, dtype=BF).copy_(p.detach())),
    "full_tensor": each(lambda p: p.full_tensor().to(BF)),
    "full_tensor of the state dict": lambda model: [
        p.full_tensor().to(BF) for p in model.state_dict().values()
    ],
    "cast, then gather": each(lambda p: p.to(BF).full_tensor()),
    "gather, then load": each(lambda p: narrow(p.full_tensor())),
    "mixed precision forward": lambda model: model(torch.randn(2, 24)),
}


def shards(rank: int, world: int, rendezvous: str, out: str) -> None:
    start(rank, world, rendezvous)
    mesh = init_device_mesh("cpu", (2,))
    found: dict[str, Any] = {}
    for way, cast in SHARDED.items():
        policy = MixedPrecisionPolicy(param_dtype=BF if "mixed" in way else None)
        model = off_grid()
        fully_shard(model, mesh=mesh, mp_policy=policy)
        with watch_casts(model) as report:
            cast(model)
        found[way] = [(c.names, c.elements, c.place.file, c.rounding) for c in report.lossy]
    flat = FullyShardedDataParallel(off_grid(), use_orig_params=True, device_id=torch.device("cpu"))
    with watch_casts(flat) as report, FullyShardedDataParallel.summon_full_params(flat):
        for p in flat.parameters():
            p.to(BF)
    found["FSDP1"] = [(c.names, c.elements, c.place.file, c.rounding) for c in report.lossy]
    torch.save(found, f"{out}/{rank}.pt")
    dist.destroy_process_group()


def test_sharded_parameters(tmp_path: Path) -> None:
    """Two gloo ranks: local shards, DTensors, gathered tensors, FSDP's own cast."""
    spawn(shards, 2, tmp_path, str(tmp_path))
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt")
        flat = found.pop("FSDP1")  # one flat parameter: this rank's part of it gives the names
        assert [elements for _, elements, _, _ in flat] == [576, 24]
        assert found.keys() == SHARDED.keys()
        for way, casts in found.items():
            gathered = "full_tensor" in way or "gather, then" in way
            sizes = [576, 24] if gathered else [288, 12]
            assert [(n, e) for n, e, _, _ in casts] == [
                (("weight",), sizes[0]),
                (("bias",), sizes[1]),
            ], way
            assert {file for _, _, file, _ in casts} == {__file__}
            assert casts[0][3] == "nearest"
