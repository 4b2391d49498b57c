"""A sync proves what the engine holds: engines that do wrong are found, and told apart."""

from collections.abc import Iterator

import pytest
import torch
from engines import (
    Broken,
    CastsOnTheWay,
    Dies,
    Drops,
    Flips,
    HoldsHalf,
    HoldsViews,
    KeepsOld,
    Late,
    Loses,
    Mislabels,
    Store,
    TimesOut,
    Truncates,
    make,
    step,
)
from torch import Tensor, nn

import fc_optim
from fc_optim import FairCastAdamW, Manifest, Patch, Sync, SyncError

CASES: list[tuple[type[Broken], str, str]] = [
    (Drops, "dropped", "says that it holds version 1, but has dropped the update"),
    (Late, "late", "answers late, or dropped the update: it still holds version 0, not 1"),
    (TimesOut, "late", "did not take version 1 in time: no answer in 60 s"),
    (Mislabels, "late", "has the weights of version 1 but still says that it holds version 0"),
    (KeepsOld, "stale", "2 of the 4 that changed are still of version 0: 2.weight, 2.bias"),
    (HoldsHalf, "recast", "as float16, sent as bfloat16"),
    (CastsOnTheWay, "recast", "In 1 of them the bits are: cast to fp16 on the way"),
    (Truncates, "truncated", r"0.weight was sent as \(24, 16\), it holds \(23, 16\)"),
    (Loses, "missing", "the engine has no 0.weight"),
    (Dies, "failed", r"reset. 2 of 4 tensors are as sent, 2 still of version 0"),
    (Flips, "bits", "other bits than it was sent in 4 of 4 tensors"),
]


@pytest.mark.parametrize(("engine", "problem", "text"), CASES, ids=[c[0].__name__ for c in CASES])
def test_a_broken_engine_is_named(engine: type[Broken], problem: str, text: str) -> None:
    model, opt = make()
    sync = Sync(opt, held := engine())
    assert sync().version == sync.version == opt.served_version == 0
    step(model, opt)
    with pytest.raises(SyncError, match=text) as caught:
        sync()
    assert caught.value.problem == problem
    assert sync.version is None  # never ahead of what is proved
    held.sound = True
    assert sync().digest == opt.served_digest()  # and the next one sends everything
    assert sync.version == 1


def test_masters_rounded_by_the_engine_are_named() -> None:
    model, opt = make()

    class Rounds(Broken):
        def wrong(self, name: str, tensor: Tensor) -> Tensor:
            return dict(opt.master_params())[name].bfloat16()

    sync = Sync(opt, Rounds())
    sync()
    step(model, opt)
    with pytest.raises(SyncError, match="the masters rounded to nearest, not what was sent"):
        sync()


def test_views_of_the_trainers_memory() -> None:
    model, opt = make()
    sync = Sync(opt, HoldsViews())
    sync()
    step(model, opt)
    with pytest.raises(SyncError, match="the engine holds views of the trainer's memory") as caught:
        sync()
    assert caught.value.problem == "views"


def test_a_restart_between_two_syncs() -> None:
    model, opt = make()
    sync = Sync(opt, engine := Store())
    sync()
    engine.weights["2.bias"].zero_()
    with pytest.raises(SyncError, match="2.bias changed in the engine: it was restarted") as caught:
        sync()
    assert caught.value.parameters == ("2.bias",) and sync.version is None
    assert sync().version == 0  # whole again
    engine.version = 7
    with pytest.raises(SyncError, match=r"the version \(0, now 7\)"):
        sync()


def test_an_engine_that_loads_behind_its_answer_is_waited_for() -> None:
    model, opt = make()

    class Slow(Late):
        asked = 0

        def held(self) -> Manifest:
            self.asked += 1
            if self.asked == 5:
                self.arrive()
            return super().held()

    sync = Sync(opt, Slow(), wait_s=30)
    sync()
    step(model, opt)
    assert sync().version == 1


@pytest.mark.parametrize("dither", ["fresh", "sync", "held"])
def test_sparse_syncs_equal_whole_ones(dither: str) -> None:
    model, opt = make(dither=dither)
    sparse, whole = Store(), Store()
    syncs = Sync(opt, sparse, sparse=True), Sync(opt, whole)
    for _ in range(4):
        step(model, opt)
        step(model, opt)
        assert syncs[0]() == syncs[1](redraw=False)
        assert all(torch.equal(sparse.weights[n], t) for n, t in opt.served_params())


def test_after_a_failed_patch_everything_is_sent() -> None:
    model, opt = make()

    class Stumbles(Store):
        loads = 0

        def load(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
            self.loads += 1
            super().load(weights, version)

        def load_patches(self, patches: Iterator[Patch], version: int) -> None:
            fc_optim.apply_patch(self.weights[(first := next(patches)).name], first)
            raise ConnectionError("reset")

    sync = Sync(opt, engine := Stumbles(), sparse=True)
    sync()
    step(model, opt)
    with pytest.raises(SyncError, match="reset. 1 of 4 tensors are as sent, 3 still of version 0"):
        sync()
    assert sync().version == 1 and engine.loads == 2


def test_patches_hold_what_changed_and_nothing_else() -> None:
    model, opt = make()
    list(model.parameters())[3].data[3] = float("nan")
    baseline = fc_optim.sync.patches.Baseline()
    assert len(list(baseline.record(opt.served_params()))) == 4
    assert list(baseline.patches(opt.served_params())) == []  # a NaN is equal to itself
    old = dict(opt.served_params(copy=True))
    step(model, opt)
    for patch in baseline.patches(opt.served_params()):
        new = dict(opt.served_params())[patch.name]
        words = new.view(torch.int16), old[patch.name].view(torch.int16)
        assert patch.indices.dtype == torch.int32 and patch.indices.diff().gt(0).all()
        assert torch.equal((words[0] != words[1]).view(-1).nonzero().view(-1), patch.indices.long())
        with pytest.raises(ValueError, match=f"patch: '{patch.name}' is for"):
            fc_optim.apply_patch(new.float(), patch)


def test_a_manifest_travels_as_json() -> None:
    _, opt = make()
    sent = Sync(opt, Store())()
    assert Manifest.from_json(sent.to_json()) == sent
    assert sent.digest == opt.served_digest()
    for text in ("", "[]", '{"version": 1}', '{"version": 1, "parameters": {"a": 3}}'):
        with pytest.raises(ValueError, match="is not a manifest in JSON"):
            Manifest.from_json(text)
    unknown = Manifest(1, {"a": fc_optim.Entry("bfloat16", (2,), None)})
    with pytest.raises(ValueError, match="cannot tell the bits of 'a'"):
        unknown.digest  # noqa: B018
    with pytest.raises(ValueError, match="'a' comes twice"):
        fc_optim.manifest(0, [("a", torch.ones(1)), ("a", torch.ones(1))])


def test_frozen_fp32_weights_for_a_bf16_engine() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 24), nn.Linear(24, 8))
    model[0].requires_grad_(False)
    opt = FairCastAdamW(model[1].named_parameters("1"), lr=1e-2).bind(model)

    class InBf16(Store):
        def keep(self, name: str, tensor: Tensor) -> Tensor:
            return tensor.to(torch.bfloat16, copy=True)

    with pytest.raises(SyncError, match="holds 0.weight, 0.bias as bfloat16, sent as float32"):
        Sync(opt, InBf16())()
    for sparse in (False, True):
        sync = Sync(opt, engine := InBf16(), frozen_dtype=torch.bfloat16, sparse=sparse)
        sync()
        step(model, opt)
        sync()
        assert torch.equal(
            engine.weights["0.weight"], dict(model.named_parameters())["0.weight"].bfloat16()
        )


def test_bad_arguments() -> None:
    _, opt = make()
    with pytest.raises(TypeError, match="optimizer: SGD is not a FairCastOptimizer"):
        Sync(torch.optim.SGD([torch.ones(1)]), Store())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="wait_s: -1 is negative"):
        Sync(opt, Store(), wait_s=-1)

    class Whole:
        load, held = Store.load, Store.held

    with pytest.raises(TypeError, match=r"sparse: Whole has no load_patches\(\)"):
        Sync(opt, Whole(), sparse=True)  # type: ignore[arg-type]
