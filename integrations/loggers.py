"""Step metrics to loggers, through their own APIs; each takes what the user already made.

None of them is imported here. `fc_optim.telemetry.flatten` gives the floats for any other one.
"""

from collections.abc import Mapping
from typing import Any

from fc_optim.metrics.step import Counts, StepMetrics, flatten


def to_tensorboard(writer: Any, metrics: StepMetrics, step: int, **options: Any) -> None:
    """Write scalars of a step through a `torch.utils.tensorboard.SummaryWriter`.

    `options` are those of `flatten`, here and below.
    """
    for name, value in flatten(metrics, **options).items():
        writer.add_scalar(name, value, step)


def to_wandb(run: Any, metrics: StepMetrics, step: int | None = None, **options: Any) -> None:
    """Log a step to a wandb run (what `wandb.init` returns); `step` as in `wandb.Run.log`."""
    run.log(flatten(metrics, **options), step=step)


def to_trackio(run: Any, metrics: StepMetrics, step: int | None = None, **options: Any) -> None:
    """Log a step to a trackio run (what `trackio.init` returns); `step` as in `trackio.log`."""
    run.log(flatten(metrics, **options), step=step)


def prometheus_text(metrics: StepMetrics, labels: Mapping[str, str] | None = None) -> str:
    """The figures in Prometheus' text exposition format: gauges, one sample per parameter.

    `labels` go to every sample (a job, a rank). What serves or pushes the text is the user's.
    """
    own = dict(labels or {})
    lines = []
    for field, what in _GAUGES.items():
        name = f"fair_cast_{field}"
        lines += [f"# HELP {name} {what}", f"# TYPE {name} gauge"]
        for parameter, counts in metrics.parameters.items():
            lines.append(_sample(name, {**own, "parameter": parameter}, _value(counts, field)))
    for field in ("captured", "lag_steps"):
        name = f"fair_cast_{field}"
        lines += [f"# HELP {name} Of all parameters, on a sample.", f"# TYPE {name} gauge"]
        lines.append(_sample(name, own, getattr(metrics, field)))
    return "\n".join(lines) + "\n"


_GAUGES = {
    "changed_ratio": "Share of bf16 words that the last step changed.",
    "dead_zone_fraction": "Share of updates under half a bf16 ulp.",
    "saturated": "Counted masters at the largest finite bf16.",
    "nonfinite": "Counted masters that are Inf or NaN.",
    "counted": "Elements counted.",
}


def _value(counts: Counts, field: str) -> float:
    return float(counts.n if field == "counted" else getattr(counts, field))


def _sample(name: str, labels: Mapping[str, str], value: float) -> str:
    text = ",".join(f'{key}="{_escaped(x)}"' for key, x in labels.items())
    return f"{name}{{{text}}} {value!r}" if text else f"{name} {value!r}"


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
