"""Saving and loading: bit-exact resume, kill -9, plain torch state, what is refused."""

import copy
import io
import logging
import signal

import crash_worker
import pytest
import torch
from models import assert_equal_states, assert_invariant, assert_same, backward, bits, tiny, train
from ranks import processes

import fc_optim
from fc_optim import FairCastAdam, FairCastAdamW, FairCastOptimizer


def run(folder, steps, order, base, kill_at=None):
    """What a process ends with, or None: it is killed when it has taken step `kill_at`."""
    context = processes()
    here, there = context.Pipe()
    process = context.Process(target=crash_worker.main, args=(there, folder, steps, order, base))
    process.start()
    there.close()
    last = None
    with here:
        try:
            while kill_at is None or last != kill_at:
                last = here.recv()
            process.kill()
        except EOFError:  # it has ended
            pass
    process.join()
    assert process.exitcode == (0 if kill_at is None else -signal.SIGKILL)
    process.close()
    return last


@pytest.mark.parametrize("base", ["adamw", "sgd"])
def test_a_killed_run_resumes_bit_for_bit_in_either_order(tmp_path, base):
    straight = tmp_path / "straight"
    straight.mkdir()
    want = run(straight, 12, "model", base)
    assert isinstance(want, tuple)
    for order in ("model", "optimizer"):
        folder = tmp_path / order
        folder.mkdir()
        run(folder, 12, order, base, kill_at=7)
        assert run(folder, 12, order, base) == want


def through_a_file(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("base", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("dither", ["fresh", "sync", "held"])
def test_a_saved_state_continues_bit_for_bit(dtype, base, dither):
    kwargs = dict(lr=1e-2, dither=dither, seed=2**63 + 1)
    model = tiny(dtype)
    opt = FairCastOptimizer(base, model.named_parameters(), **kwargs)
    train(model, opt)
    opt.publish(redraw=True)
    state = through_a_file(opt.state_dict())
    # The resumed process starts from other weights, and without names.
    other_model = tiny(dtype, seed=9)
    other = FairCastOptimizer(base, other_model.parameters(), **kwargs)
    other.load_state_dict(state)
    assert_same(model, other_model)
    assert other.served_version == opt.served_version and other.check() == {}
    train(model, opt, 3, 3)
    train(other_model, other, 3, 3)
    assert_same(model, other_model)
    ids = [[e.identity.param_id for e in o.managed()] for o in (opt, other)]
    assert ids[0] == ids[1]


def test_state_is_fp32_and_stays_so():
    model = tiny(torch.bfloat16)
    opt = FairCastAdamW(model.named_parameters(), amsgrad=True)
    train(model, opt)
    before = copy.deepcopy(opt.state_dict())
    opt.load_state_dict(through_a_file(opt.state_dict()))
    after = opt.state_dict()
    for entry in after["state"].values():
        for key in ("master", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"):
            assert entry[key].dtype == torch.float32
    assert_equal_states(after, before)


def test_state_dict_creates_nothing_and_a_fresh_one_loads():
    model = tiny()
    opt = FairCastAdamW(model.parameters())
    assert opt.state_dict()["state"] == {} and not opt.state
    opt.load_state_dict(opt.state_dict())
    assert not opt.state


def test_the_round_trip_at_wrap_changes_nothing():
    """accelerate does state_dict() -> load_state_dict() when it wraps an optimizer."""
    model = tiny(torch.bfloat16)
    opt = FairCastAdamW(model.parameters(), lr=torch.tensor(1e-2))
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 1, gamma=0.5)
    train(model, opt)
    tensors = [t for e in opt.managed() for t in e.state.values()]
    groups, before = opt.param_groups[0], [t.clone() for t in tensors]
    lr = opt.param_groups[0]["lr"]
    opt.load_state_dict(opt.state_dict())
    assert opt.param_groups[0] is groups and opt.param_groups[0]["lr"] is lr
    now = [t for e in opt.managed() for t in e.state.values()]
    assert all(a is b for a, b in zip(tensors, now, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(before, now, strict=True))
    scheduler.step()
    assert float(opt.param_groups[0]["lr"]) == pytest.approx(5e-3)


def test_a_loaded_state_is_not_shared_with_the_dict():
    model = tiny()
    opt = FairCastAdamW(model.named_parameters())
    train(model, opt)
    state = copy.deepcopy(opt.state_dict())
    frozen = copy.deepcopy(state)
    for _ in range(2):
        other_model = tiny()
        other = FairCastAdamW(other_model.named_parameters())
        other.load_state_dict(state)
        train(other_model, other, 2)
    assert_equal_states(state, frozen)


@pytest.mark.parametrize("running", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_plain_torch_state_dict_loads_and_masters_come_from_the_parameters(dtype, running):
    model = tiny(dtype)
    torch_opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train(model, torch_opt)
    other = tiny(dtype)
    opt = FairCastAdamW(other.parameters())
    state = through_a_file(torch_opt.state_dict())
    if running:  # it has masters of its own, which are given up only if that is said
        train(other, opt, 1)
        before = copy.deepcopy(opt.state_dict())
        with pytest.raises(ValueError, match=r"has no masters.*without_masters"):
            opt.load_state_dict(state)
        assert_equal_states(opt.state_dict(), before)
        state = fc_optim.without_masters(state)
    opt.load_state_dict(state)
    other.load_state_dict(model.state_dict())
    assert opt.param_groups[0]["lr"] == 1e-3
    opt.publish()
    for e, p in zip(opt.managed(), model.parameters(), strict=True):
        assert torch.equal(e.state["master"], p.detach().float())
        assert torch.equal(e.state["exp_avg"], torch_opt.state[p]["exp_avg"].float())
        assert int(e.state["step"]) == 3 and e.state["exp_avg"].dtype == torch.float32
    train(other, opt, 1, 3)
    assert_invariant(opt)


def test_the_way_back_to_torch():
    model = tiny()
    opt = FairCastAdamW(model.named_parameters(), lr=1e-3)
    train(model, opt)
    state = opt.to_torch_state_dict()
    assert {k for e in state["state"].values() for k in e} == {"step", "exp_avg", "exp_avg_sq"}
    plain = torch.optim.AdamW(model.named_parameters())
    assert state["param_groups"][0].keys() == plain.state_dict()["param_groups"][0].keys()
    plain.load_state_dict(state)
    for p in model.parameters():
        assert torch.equal(plain.state[p]["exp_avg_sq"], opt.state[p]["exp_avg_sq"])
    backward(model)
    plain.step()
    unstepped = FairCastAdamW(tiny().parameters())
    unstepped.publish()
    assert unstepped.to_torch_state_dict()["state"] == {}


def test_without_masters_takes_moments_only():
    model = tiny()
    opt = FairCastAdamW(model.named_parameters())
    train(model, opt)
    state = opt.state_dict()
    other_model = tiny(seed=4)
    other = FairCastAdamW(other_model.named_parameters())
    held = bits(other_model)
    other.load_state_dict(fc_optim.without_masters(state))
    other.publish()
    assert all(torch.equal(a, b) for a, b in zip(held, bits(other_model), strict=True))
    assert torch.equal(other.state[other_model[0].weight]["exp_avg"], state["state"][0]["exp_avg"])
    assert "master" in state["state"][0]


def test_a_load_says_what_share_of_words_changed(caplog):
    model = tiny()
    opt = FairCastAdamW(model.named_parameters())
    train(model, opt)
    other_model = tiny(seed=4)
    other = FairCastAdamW(other_model.named_parameters(), seed=1, dither="held")
    with caplog.at_level(logging.INFO, "fc_optim"):
        other.load_state_dict(opt.state_dict())
    text = caplog.text
    assert "6 parameters rewritten from their masters, matched by names" in text
    assert "served words changed" in text
    assert "seed=0 of the state replaces 1" in text
    assert "dither='fresh' of the state replaces 'held'" in text
    assert_same(model, other_model)


def test_what_does_not_fit_is_refused_and_changes_nothing():
    model = tiny()
    opt = FairCastAdamW(model.named_parameters())
    train(model, opt)
    good = copy.deepcopy(opt.state_dict())

    def bad(change):
        state = copy.deepcopy(good)
        change(state)
        return state

    def shape(s):
        s["state"][2]["master"] = torch.zeros(3)

    def cast(s):
        s["state"][0]["master"] = s["state"][0]["master"].bfloat16()

    cases = [
        (lambda s: s["param_groups"].append(s["param_groups"][0]), r"\[6, 6\] parameters"),
        (lambda s: s["param_groups"][0]["params"].pop(), r"\[5\] parameters.*\[6\]"),
        (shape, r"master of '1.weight' has shape \(3,\)"),
        (cast, "master of '0.weight' is torch.bfloat16, not float32"),
        (lambda s: s["param_groups"][0].update(rounding_scheme=99), "scheme 99"),
        (lambda s: s["param_groups"][0].update(dither="x"), "dither 'x'"),
        (lambda s: s.pop("state"), "expected the keys"),
    ]
    for change, match in cases:
        with pytest.raises(ValueError, match=match):
            opt.load_state_dict(bad(change))
        assert_equal_states(opt.state_dict(), good)
        assert opt.check() == {}


def test_going_back_in_one_process_is_a_new_version():
    model = tiny()
    opt = FairCastAdamW(model.named_parameters())
    train(model, opt, 2)
    state = copy.deepcopy(opt.state_dict())
    opt.load_state_dict(state)
    assert opt.served_version == 2
    train(model, opt, 3)
    opt.load_state_dict(state)
    assert opt.served_version == 6


def test_hooks_run_and_may_replace_the_state():
    model = tiny()
    opt = FairCastAdamW(model.named_parameters())
    train(model, opt)
    calls = []
    opt.register_state_dict_post_hook(lambda o, s: calls.append("saved"))
    opt.register_load_state_dict_pre_hook(lambda o, s: {**s, "extra": 1})
    opt.register_load_state_dict_post_hook(lambda o: calls.append("loaded"))
    opt.load_state_dict(opt.state_dict())
    assert calls == ["saved", "loaded"]


def test_old_step_formats_load_as_own_fp32_counts():
    model = tiny()
    torch_opt = torch.optim.Adam(model.parameters())
    train(model, torch_opt)
    state = torch_opt.state_dict()
    shared = torch.tensor(3.0)
    for i, entry in enumerate(state["state"].values()):
        entry["step"] = 3 if i % 2 else shared
    opt = FairCastAdam(model.parameters())
    opt.load_state_dict(state)
    train(model, opt, 1, 3)
    assert [float(e.state["step"]) for e in opt.managed()] == [4.0] * 6
    assert float(shared) == 3.0


def test_excluded_state_round_trips():
    model = tiny()
    groups = [
        {"params": list(model[0].parameters())},
        {"params": list(model[2].parameters()), "served_dtype": None},
    ]
    opt = FairCastAdamW(groups, lr=1e-2)
    train(model, opt)
    other = tiny()
    other_groups = [{"params": list(other[0].parameters())}]
    other_groups.append({"params": list(other[2].parameters()), "served_dtype": None})
    other_opt = FairCastAdamW(other_groups)
    other_opt.load_state_dict(through_a_file(opt.state_dict()))
    other.load_state_dict(model.state_dict())
    train(model, opt, 2, 3)
    train(other, other_opt, 2, 3)
    assert_same(model, other)
