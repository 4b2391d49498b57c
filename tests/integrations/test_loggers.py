"""Step metrics in the loggers' own packages, offline."""

import math

import pytest
import torch
from models import tiny, train

from fc_optim import FairCastOptimizer
from fc_optim.integrations.loggers import (
    prometheus_text,
    to_tensorboard,
    to_trackio,
    to_wandb,
)
from fc_optim.metrics.step import flatten


@pytest.fixture(scope="module")
def figures():
    model = tiny()
    opt = FairCastOptimizer(torch.optim.AdamW, model.named_parameters(), lr=1e-4, metrics="all")
    train(model, opt)
    return opt.metrics()


def test_flat_names_and_values(figures):
    flat = flatten(figures)
    assert set(flat) == {
        f"fair_cast/{name}"
        for name in (
            *("changed_ratio", "dead_zone_fraction", "saturated", "nonfinite"),
            *("counted", "captured", "lag_steps"),
        )
    }
    assert all(type(x) is float for x in flat.values())
    assert flat["fair_cast/changed_ratio"] == figures.total.changed / figures.total.n
    each = flatten(figures, prefix="", per_parameter=True)
    for name, counts in figures.parameters.items():
        assert each[f"changed_ratio/{name}"] == counts.changed_ratio
        assert each[f"counted/{name}"] == counts.n


def test_prometheus_text_escapes_labels(figures):
    text = prometheus_text(figures, {"job": 'a"b\\c\nd'})
    assert 'job="a\\"b\\\\c\\nd",parameter="0.weight"' in text
    assert text.count("# TYPE") == 7 and text.endswith("\n")


@pytest.mark.integration
def test_prometheus_reads_the_text(figures):
    from prometheus_client.parser import text_string_to_metric_families

    label = 'a"b\\c\nd'
    families = {
        f.name: f.samples
        for f in text_string_to_metric_families(prometheus_text(figures, {"job": label}))
    }
    found = {s.labels["parameter"]: s.value for s in families["fair_cast_changed_ratio"]}
    assert found == {n: c.changed_ratio for n, c in figures.parameters.items()}
    (captured,) = families["fair_cast_captured"]
    assert captured.value == figures.captured and captured.labels == {"job": label}


@pytest.mark.integration
def test_tensorboard(figures, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        to_tensorboard(writer, figures, step=3)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    for name, value in flatten(figures).items():
        (event,) = events.Scalars(name)
        assert event.step == 3 and math.isclose(event.value, value, rel_tol=1e-6)


@pytest.mark.integration
@pytest.mark.filterwarnings("default")
def test_wandb(figures, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    import wandb

    with wandb.init(project="fair_cast", dir=str(tmp_path)) as run:
        to_wandb(run, figures, step=3)
        run.log({"later": 1.0}, step=4)  # a step is complete when the next one begins
        found = dict(run.summary)
    assert {k: found[k] for k in flatten(figures)} == flatten(figures)
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


@pytest.mark.integration
@pytest.mark.filterwarnings("default")
def test_trackio(figures, tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    run = trackio.init(project="fair_cast", name="one", embed=False)
    to_trackio(run, figures, step=3)
    trackio.finish()
    (row,) = SQLiteStorage.get_logs("fair_cast", "one")
    assert {k: row[k] for k in flatten(figures)} == flatten(figures) and row["step"] == 3
