"""Hugging Face accelerate on one process: wrapping, registering, saving."""

import copy
import io

import pytest
import torch
from models import assert_equal_states, assert_invariant, assert_same, loss_of, tiny, train

from fc_optim import FairCastAdamW

pytestmark = pytest.mark.integration


def prepared(dtype=torch.bfloat16, steps=0):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    model = tiny(dtype)
    opt = FairCastAdamW(model.named_parameters(), lr=1e-2)
    train(model, opt, steps)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 1)
    before = copy.deepcopy(opt.state_dict())
    accelerator = Accelerator(cpu=True)
    return accelerator, opt, before, accelerator.prepare(model, opt, scheduler)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wrapping_keeps_fp32_state_bit_for_bit_and_schedulers_attached(dtype):
    from fc_optim.integrations.accelerate import register

    accelerator, opt, before, (model, wrapped, scheduler) = prepared(dtype, steps=3)
    assert wrapped.optimizer is opt
    assert_equal_states(opt.state_dict(), before)
    assert register(accelerator, wrapped) is opt and opt.model is model
    accelerator.backward(loss_of(model))
    wrapped.step()
    scheduler.step()
    assert opt.param_groups[0]["lr"] == pytest.approx(1e-3)
    assert all(e.state["master"].dtype == torch.float32 for e in opt.managed())
    assert_invariant(opt)
    assert [n for n, _ in opt.served_params()] == [n for n, _ in tiny().named_parameters()]


def test_save_state_and_load_state_continue_bit_for_bit(tmp_path):
    def step(accelerator, model, wrapped, i):
        wrapped.zero_grad()
        accelerator.backward(loss_of(model, i))
        wrapped.step()

    accelerator, _, _, (model, wrapped, _) = prepared()
    for i in range(3):
        step(accelerator, model, wrapped, i)
    accelerator.save_state(str(tmp_path))
    for i in range(3, 5):
        step(accelerator, model, wrapped, i)
    again, opt, _, (other, other_wrapped, _) = prepared()
    again.load_state(str(tmp_path))
    for i in range(3, 5):
        step(again, other, other_wrapped, i)
    assert_same(model, other)
    assert opt.check() == {} and opt.served_version == 5


def test_register_names_what_is_wrong():
    from fc_optim.integrations.accelerate import register

    accelerator, _, _, _ = prepared()
    with pytest.raises(TypeError, match="AdamW is not a FairCastOptimizer"):
        register(accelerator, torch.optim.AdamW(tiny().parameters()))
    with pytest.raises(ValueError, match="none of its prepared models"):
        register(accelerator, FairCastAdamW(tiny().parameters()))


def test_a_state_with_masters_loads_with_weights_only():
    _, opt, _, (model, _, _) = prepared(steps=2)
    buffer = io.BytesIO()
    torch.save(opt.state_dict(), buffer)
    buffer.seek(0)
    assert_equal_states(torch.load(buffer, weights_only=True), opt.state_dict())
    assert next(model.parameters()).dtype == torch.bfloat16
