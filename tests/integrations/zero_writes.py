"""Weights of an engine that something other than its optimizer wrote."""

import os
import warnings
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from zero import (
    OPTIONS,
    beside,
    config,
    differences,
    initialize,
    reference,
    result,
    train,
    train_engine,
    weights,
)

from fc_optim.integrations.deepspeed import attach


def check(folder: str) -> None:
    for name in ("0", "1", "1 fp32 gradients", "1 offloaded", "3", "3 persistent"):
        late_weights(name)
        foreign_weights(name)
    for name in ("0", "1", "1 fp32 gradients", "2 offloaded", "3 persistent"):
        written_where_another_rank_steps(name, folder)
    gathered_weights()
    secondary_partitions()


@torch.no_grad()
def write(engine: Any, name: str) -> None:
    """As a late load of weights does it."""
    p = engine.module.get_parameter(name)
    if not hasattr(p, "ds_id"):
        engine.module.load_state_dict({name: p + 1}, strict=False)
        return
    with deepspeed.zero.GatheredParameters([p], modifier_rank=0):
        if dist.get_rank() == 0:
            p.add_(1)


def late_weights(name: str) -> None:
    """Between initialize() and attach(): the masters begin there."""
    ds_config, how = OPTIONS[name]
    engine, opt = initialize(ds_config, **how)
    write(engine, "second.last.weight")
    model, ref = reference(engine, **how)
    attach(engine)
    train_engine(engine, [0])
    train(model, ref, [0])
    assert not differences(result(ref), result(opt)), name


def foreign_weights(name: str) -> None:
    ds_config, how = OPTIONS[name]
    engine, opt = initialize(ds_config, **how)
    model, ref = reference(engine, **how)
    attach(engine)
    train_engine(engine, [0])
    train(model, ref, [0])
    target = model.get_parameter("second.last.weight")

    before = weights(engine)
    write(engine, "second.last.weight")
    for action in (opt.publish, lambda: list(opt.served_params())):
        with pytest.raises(RuntimeError, match="second.last.weight changed|other ranks"):
            action()
    if opt.check():  # saving asks no other rank
        with pytest.raises(RuntimeError, match="second.last.weight changed"):
            opt.state_dict()
    opt.restore_weights()
    opt.publish()
    assert all(torch.equal(before[n], v) for n, v in weights(engine).items()), name

    write(engine, "second.last.weight")
    opt.adopt_weights()
    target.data.copy_(weights(engine)["second.last.weight"])
    ref.adopt_weights()
    assert not differences(result(ref), result(opt)), name

    write(engine, "second.last.weight")
    target.data.copy_(weights(engine)["second.last.weight"])
    here = bool(opt.check())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        train_engine(engine, [1])
    assert here == any("adopted as masters" in str(w.message) for w in said), name
    with pytest.warns(match="adopted as masters"):
        train(model, ref, [1])
    assert not differences(result(ref), result(opt)), name


def written_where_another_rank_steps(name: str, folder: str) -> None:
    """Rank 1 writes an element that rank 0 steps: all ranks refuse to serve and to save."""
    ds_config, how = OPTIONS[name]
    engine, opt = initialize(ds_config, **how)
    attach(engine)
    train_engine(engine, [0])
    before = dict(opt.served_params(copy=True))  # from the module, where it is whole
    written = engine.module.get_parameter("first.norm.weight")
    for heal in (opt.restore_weights, opt.adopt_weights if name != "0" else opt.restore_weights):
        if dist.get_rank() == 1:
            written.data[0] += 1
            assert name == "0" or not opt.check()
        where = f"{folder}/{name}"
        for action in (
            opt.publish,
            lambda: list(opt.served_params()),
            lambda where=where: engine.save_checkpoint(where),
        ):
            with pytest.raises(RuntimeError, match="first.norm.weight changed|other ranks"):
                action()
        assert not os.path.exists(where)
        heal()
        opt.publish()
        assert all(torch.equal(before[n], v) for n, v in opt.served_params()), name


def gathered_weights() -> None:
    """ZeRO-3 keeps small weights whole: a load writes them there, beside their partitions."""
    ds_config, how = OPTIONS["3 persistent"]
    engine, opt = initialize(ds_config, **how)
    model, ref = reference(engine, **how)
    attach(engine)
    train_engine(engine, [0])
    train(model, ref, [0])
    for module, optimizer in ((engine.module, opt), (model, ref)):
        module.load_state_dict({"first.norm.weight": torch.arange(5.0)}, strict=False)
        with pytest.raises(RuntimeError, match="first.norm.weight changed|other ranks"):
            optimizer.publish()
        optimizer.adopt_weights()
    assert torch.equal(weights(engine)["first.norm.weight"], torch.arange(5.0).bfloat16())
    train_engine(engine, [1])
    train(model, ref, [1])
    assert not differences(result(ref), result(opt))


def secondary_partitions() -> None:
    """hpZ gathers for the backward from a second copy, which must follow every write."""
    from deepspeed.utils import groups as kept

    ds_config = config(3, zero_hpz_partition_size=2)
    try:
        assert not beside(ds_config)
        engine, opt = initialize(ds_config)
        model, ref = reference(engine)
        attach(engine)
        train_engine(engine, [0])
        train(model, ref, [0])
        before = weights(engine)  # leaves secondary partitions
        assert engine.module.get_parameter("second.last.weight").ds_secondary_tensor is not None
        write(engine, "second.last.weight")
        assert not torch.equal(before["second.last.weight"], weights(engine)["second.last.weight"])
        opt.restore_weights()
        assert all(torch.equal(before[n], v) for n, v in weights(engine).items())
        train_engine(engine, [1])
        train(model, ref, [1])
        assert not differences(result(ref), result(opt))
    finally:
        kept._ZERO_PARAM_INTRA_PARALLEL_GROUP = None  # for the process's next engine
