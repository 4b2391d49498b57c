"""From what a command computed to its report: which figures lead, which tables and pictures."""

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from fc_optim.audit.compare import Change, Comparison, Export
from fc_optim.audit.layers import KINDS
from fc_optim.audit.predict import Row, Tally
from fc_optim.audit.report import Chart, Report, Table, count, heat, number, percent, plain

if TYPE_CHECKING:
    from fc_optim.audit.probe import ProbeResult

_SHOWN = 12  # names in a note
_FP8_NOTE = (
    "FP8 is for the matrices of linear layers, scale = largest magnitude / 448, which the step "
    "leaves as it is; norms, biases, embeddings and heads stay in bf16."
)


def predicted(
    title: str, subject: str, rows: list[Row], model_of_update: str, data: dict[str, Any]
) -> Report:
    """Of `fc-audit model` and `fc-audit optimizer`."""
    formats = list(dict.fromkeys(f for r in rows for f in r.tallies))
    total = {f: _sum(r.tallies[f] for r in rows if f in r.tallies) for f in formats}
    first = total[formats[0]]
    report = Report(title, subject)
    for f, tally in total.items():
        report.figures.append((f"of one step's updates discarded by {f}", percent(tally.share)))
    report.figures += [
        (f"median steps until a {formats[0]} copy changes", number(first.median_steps)),
        (f"median update / half a {formats[0]} ulp", number(first.median_ratio)),
        ("elements", count(first.elements)),
    ]
    report.notes.append(f"Model of the update: {model_of_update}")
    if any(f.startswith("fp8") for f in formats):
        report.notes.append(_FP8_NOTE)
    if first.nonfinite:
        bad = [r.name for r in rows if r.tallies[formats[0]].nonfinite]
        report.notes.append(f"{count(first.nonfinite)} NaN or Inf elements left out: {_some(bad)}.")
    if first.still:
        report.notes.append(
            f"{percent(first.still / first.elements)} of the elements have no update."
        )
    columns = ["elements", *formats, "median steps", "update / half-ulp"]

    def cells(group: list[Row]) -> list[str]:
        sums = {f: _sum(r.tallies[f] for r in group if f in r.tallies) for f in formats}
        lead = sums[formats[0]]
        return [count(lead.elements), *(percent(t.share) for t in sums.values()),
                number(lead.median_steps), number(lead.median_ratio)]  # fmt: skip

    report.tables = [
        Table("Discarded, by kind", ["kind", *columns], _by(rows, "kind", cells)),
        Table("Discarded, by layer", ["layer", *columns], _by(rows, "layer", cells), True),
        Table(
            "Every tensor", ["name", *columns], [[r.name, *cells([r])] for r in rows], True, True
        ),
    ]
    report.heats = [h for f in formats if (h := heat(
        f"Updates that survive {f}, by layer",
        ((r.name, r.kind, r.layer, 1 - r.tallies[f].share, r.tallies[f].elements)
         for r in rows if f in r.tallies),
    ))][:2]  # fmt: skip
    report.charts = _charts(total)
    report.data = plain(
        {
            **data,
            "model_of_update": model_of_update,
            "formats": {f: _tally_data(t, curves=True) for f, t in total.items()},
            "tensors": [
                {"name": r.name, "kind": r.kind, "layer": r.layer, "shape": r.shape,
                 "formats": {f: _tally_data(t) for f, t in r.tallies.items()}} for r in rows
            ],
        }
    )  # fmt: skip
    return report


def _charts(total: dict[str, Tally]) -> list[Chart]:
    share = {f: _bars(t) for f, t in total.items()}
    on_grid = {f: t.lag() for f, t in total.items() if not f.startswith("fp8")}
    return [
        Chart("Update over half an ulp", "update / half-ulp (left of 1: hidden at once)",
              "share of elements", {f: c for f, c in share.items() if c}, bars=True),
        Chart("Weights whose copy has not moved yet", "equal steps taken", "share of weights",
              {f: [(float(k), y) for k, y in t.unmoved()] for f, t in total.items()}),
        Chart("Lag of a round-to-nearest copy", "equal steps taken", "steps behind",
              {f: [(float(k), y) for k, y in c] for f, c in on_grid.items() if c},
              note="Predicted, not measured: every weight repeats this update. Averaged over half "
              "an octave of steps. FP8 masters start off its grid: there a mean lag says nothing."),
    ]  # fmt: skip


def _bars(tally: Tally) -> list[tuple[float, float]]:
    """Shares per octave to 256 half-ulps (beyond lie exact zeros), ends of < 1 in 10,000 cut."""
    shares = [(float(x), n / tally.elements) for x, n in tally.histogram() if x < 8]
    seen = [i for i, (_, y) in enumerate(shares) if y >= 1e-4]
    return shares[seen[0] : seen[-1] + 1] if seen else []


def _tally_data(t: Tally, *, curves: bool = False) -> dict[str, Any]:
    found: dict[str, Any] = {
        "elements": t.elements, "discarded": t.share,
        "dead_zone_fraction": t.dead_share,
        "no_update": t.still, "nonfinite": t.nonfinite,
        "median_steps_to_cross": t.median_steps, "median_update_half_ulp": t.median_ratio,
    }  # fmt: skip
    if curves:
        found |= {"histogram_log2": t.histogram(), "predicted_lag": t.lag(), "unmoved": t.unmoved()}
    return found


def compared(subject: str, result: Comparison, lr: float, with_masters: bool) -> Report:
    """Of `fc-audit checkpoints`."""
    changes = result.changes
    elements = sum(c.elements for c in changes)
    changed = sum(c.changed for c in changes) / max(elements, 1)
    total = _sum(c.tally for c in changes)
    still = [c.name for c in changes if not c.changed]
    ones = sum(c.ones for c in changes)
    dead = total.dead_share
    report = Report("What two served checkpoints show", subject)
    report.figures = [
        ("changed_ratio: words that differ", percent(changed)),
        (f"dead zone at lr {lr:g}: |w| too large for one step", percent(dead)),
        ("tensors exactly unchanged", f"{len(still)} of {len(changes)}"),
        ("entries that are 1.0 in both", count(ones)),
        ("elements compared", count(elements)),
    ]
    if with_masters and "all" in result.exports:
        report.figures += _export_figures(result.exports["all"])
    report.notes = _notes(result, still)
    columns = ["elements", "changed", "dead zone", "unchanged", "at 1.0"]
    columns += ["captured", "rms, ulp", "rounding"] if with_masters else []

    def cells(group: list[Change]) -> list[str]:
        n = sum(c.elements for c in group)
        tally = _sum(c.tally for c in group)
        found = [count(n), percent(sum(c.changed for c in group) / max(n, 1)),
                 percent(tally.dead_share),
                 f"{sum(not c.changed for c in group)} of {len(group)}",
                 count(sum(c.ones for c in group))]  # fmt: skip
        return found + (_export_cells(group) if with_masters else [])

    def short(group: list[Change]) -> list[str]:
        return cells(group)[:7]

    report.tables = [
        Table("By kind", ["kind", *columns[:7]], _by(changes, "kind", short)),
        Table("By layer", ["layer", *columns[:7]], _by(changes, "layer", short), True),
        Table(
            "Every tensor", ["name", *columns], [[c.name, *cells([c])] for c in changes], True, True
        ),
    ]
    if with_masters:
        evidence = [[k, str(v), v.detail] for k, e in _kinds_first(result.exports)
                    if (v := e.evidence.verdict())]  # fmt: skip
        report.tables.insert(1, Table("How the copy was rounded", ["kind", "rule", "evidence"],
                                      evidence))  # fmt: skip
    report.heats = [h for h in (
        heat("Words that changed, by layer", ((c.name, c.kind, c.layer, c.changed / c.elements,
             c.elements) for c in changes if c.elements)),
    ) if h]  # fmt: skip
    report.charts = _charts({"bf16": total}) if total.elements else []
    report.data = plain(_comparison_data(result, lr, changed, dead, still, ones))
    return report


def _notes(result: Comparison, still: list[str]) -> list[str]:
    notes = []
    if still:
        notes.append(f"Exactly unchanged: {_some(still)}.")
    if result.skipped:
        kinds = ", ".join(sorted(set(result.skipped.values())))
        notes.append(f"Not floating point, not compared ({kinds}): {_some(list(result.skipped))}.")
    bad = [c.name for c in result.changes if c.nonfinite]
    if bad:
        total = sum(c.nonfinite for c in result.changes)
        notes.append(f"{count(total)} NaN or Inf entries, left out of the dead zone: {_some(bad)}.")
    off = sum(c.off_grid for c in result.changes)
    if off:
        notes.append(
            f"{count(off)} entries of fp32 tensors are not bf16 values: words are compared as a "
            "bf16 engine would load them, rounded to nearest."
        )
    return notes


def _export_figures(export: Export) -> list[tuple[str, str]]:
    return [
        ("how the second was rounded", str(export.evidence.verdict())),
        ("captured of the movement since the first", number(export.captured)),
        ("rms of the rounding, in ulp", number(export.rms_ulp)),
    ]


def _export_cells(group: list[Change]) -> list[str]:
    exports = [c.export for c in group if c.export is not None]
    if not exports:
        return ["-", "-", "-"]
    rules = list(dict.fromkeys(str(e.evidence.verdict()) for e in exports))
    told = [r for r in rules if r != "cannot tell"] or rules
    length = sum(e.length for e in exports)
    square, elements = sum(e.square for e in exports), sum(e.elements for e in exports)
    captured = sum(e.along for e in exports) / length if length else math.nan
    rms = math.sqrt(square / elements) if elements else math.nan
    return [number(captured), number(rms), told[0] if len(told) == 1 else f"{len(told)} rules"]


def _comparison_data(
    result: Comparison, lr: float, changed: float, dead: float, still: list[str], ones: int
) -> dict[str, Any]:
    def export(e: Export) -> dict[str, Any]:
        v = e.evidence.verdict()
        return {
            "rule": v.rule, "regridded_masters": v.regridded, "detail": v.detail,
            "elements": v.elements, "captured": e.captured, "export_rms_ulp": e.rms_ulp,
        }  # fmt: skip

    return {
        "command": "checkpoints", "lr": lr, "changed_ratio": changed, "dead_zone_fraction": dead,
        "unchanged_tensors": still, "ones": ones, "skipped": result.skipped,
        "nonfinite": sum(c.nonfinite for c in result.changes),
        "export": {k: export(e) for k, e in _kinds_first(result.exports)},
        "tensors": [
            {"name": c.name, "kind": c.kind, "layer": c.layer, "shape": c.shape,
             "dtype": str(c.dtype).removeprefix("torch."), "changed": c.changed, "ones": c.ones,
             "nonfinite": c.nonfinite, "off_grid": c.off_grid,
             "dead_zone_fraction": c.tally.dead_share,
             **({"export": export(c.export)} if c.export else {})} for c in result.changes
        ],
    }  # fmt: skip


def probed(result: "ProbeResult") -> Report:
    """Of `fc-audit probe`."""
    columns = ["copy", "seed", "steps", "mean |r|", "mean r", "p99 |r|", "k3", "sequence ESS"]

    def cells(r: dict[str, Any]) -> list[str]:
        figures = [number(r[k]) for k in ("mean_abs", "mean", "p99", "k3", "sequence_ess")]
        return [r["copy"], "-" if r["seed"] is None else str(r["seed"]),
                "-" if r["steps"] is None else str(r["steps"]), *figures]  # fmt: skip

    report = Report("The hidden log-ratio of a cast", result.model)
    for r in result.rows:
        if r["copy"] == "rtn":
            label = f"mean |hidden log-ratio| per token, round-to-nearest, {r['steps']} steps"
            report.figures.append((label, number(r["mean_abs"])))
    curves: dict[str, list[tuple[float, float]]] = {}
    for r in result.rows:
        if r["steps"] is not None and r["seed"] in (None, min(_seeds(result))):
            curves.setdefault(r["copy"], []).append((float(r["steps"]), r["mean_abs"]))
    ceiling = [r["mean_abs"] for r in result.rows if r["copy"] == "ceiling"]
    if ceiling and curves:
        ks = [k for k, _ in next(iter(curves.values()))]
        curves["ceiling of stochastic rounding"] = [(k, max(ceiling)) for k in ks]
    report.tables = [Table("Masters against copies", columns, [cells(r) for r in result.rows])]
    report.charts = [Chart("Hidden log-ratio per token", "coherent steps at this lr",
                           "mean |log p(masters) - log p(copy)|, nats", curves)]  # fmt: skip
    report.notes = [
        f"{count(result.parameters)} parameters, {result.tokens} tokens in {result.sequences} "
        f"sequences, lr {result.lr:g}, {result.seconds:.0f} s on {result.hardware}."
    ]
    report.data = plain({"command": "probe", **result.to_dict()})
    return report


def _seeds(result: "ProbeResult") -> list[int]:
    return [r["seed"] for r in result.rows if r["seed"] is not None] or [0]


def _kinds_first(exports: dict[str, Export]) -> list[tuple[str, Export]]:
    return [(k, exports[k]) for k in (*KINDS, "all") if k in exports]


def _sum(tallies: Iterable[Tally]) -> Tally:
    total = Tally()
    for t in tallies:
        total += t
    return total


def _by(items: list[Any], key: str, cells: Callable[[list[Any]], list[str]]) -> list[list[str]]:
    """A row per kind (norms first) or per layer (those outside the stack last), and of all."""
    groups: dict[Any, list[Any]] = {}
    for item in items:
        groups.setdefault(getattr(item, key), []).append(item)
    order = sorted(groups, key=KINDS.index if key == "kind" else lambda n: (n is None, n or 0))
    rows = [["outside" if g is None else str(g), *cells(groups[g])] for g in order]
    return [*rows, ["all", *cells(items)]]


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
