"""What a command found, in one shape for the terminal, the JSON and the page."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

Curve = list[tuple[float, float]]


@dataclass(frozen=True)
class Table:
    """Cells are text already. `folded` in the page below the pictures; `long` ones not in the
    terminal."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    folded: bool = False
    long: bool = False


@dataclass(frozen=True)
class Heat:
    """`values[row][column]` in [0, 1], None where there is nothing; the text is for tooltips."""

    title: str
    rows: list[str]
    columns: list[str]
    values: list[list[float | None]]


@dataclass(frozen=True)
class Chart:
    """Curves over a logarithmic axis. `bars`: x are log2 of the lower edges of octaves, y shares;
    otherwise x are counts of steps."""

    title: str
    x: str
    y: str
    curves: dict[str, Curve]
    bars: bool = False
    note: str = ""


@dataclass
class Report:
    """`figures` are the headline, `data` is the JSON."""

    title: str
    subject: str
    figures: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    heats: list[Heat] = field(default_factory=list)
    charts: list[Chart] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)


def percent(share: float) -> str:
    """Two digits of what is missing, too: 99.9962 % and not 100.00 %."""
    if math.isnan(share):
        return "-"
    if share in (0.0, 1.0):
        return f"{share:.0%}".replace("%", " %")
    distance = min(share, 1 - share) * 100
    digits = max(2, 1 - math.floor(math.log10(distance)))
    return f"{share * 100:.{min(digits, 9)}f} %"


def number(x: float) -> str:
    if math.isnan(x):
        return "-"
    if math.isinf(x):
        return "never"
    if abs(x) >= 100 or x == int(x):
        return f"{x:,.0f}"
    return f"{x:.3g}"


def count(n: int) -> str:
    """Exact up to a million, then with three digits."""
    for unit, size in (("G", 10**9), ("M", 10**6)):
        if n >= size:
            return f"{n / size:.{2 if n < 10 * size else 1 if n < 100 * size else 0}f} {unit}"
    return f"{n:,}"


def plain(value: Any) -> Any:
    """For JSON: NaN and Inf become null, tuples lists."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def heat(title: str, cells: Iterable[tuple[str, str, int | None, float, int]]) -> Heat | None:
    """A map of layers from (name, kind, layer, value, weight).

    Rows are names without their number, or kinds if there are more than 24 of those; what shares
    a cell is averaged by weight. None if the model has no layers.
    """
    found = [c for c in cells if c[2] is not None and not math.isnan(c[3])]
    labels = {_unnumbered(name, layer) for name, _, layer, _, _ in found}
    by_kind = len(labels) > 24
    sums: dict[tuple[str, int], list[float]] = {}
    for name, kind, layer, value, weight in found:
        assert layer is not None
        row = kind if by_kind else _unnumbered(name, layer)
        cell = sums.setdefault((row, layer), [0.0, 0.0])
        cell[0] += value * weight
        cell[1] += weight
    if not sums:
        return None
    rows = list(dict.fromkeys(r for r, _ in sums))
    layers = sorted({n for _, n in sums})
    values: list[list[float | None]] = [
        [sums[r, n][0] / sums[r, n][1] if (r, n) in sums and sums[r, n][1] else None
         for n in layers] for r in rows
    ]  # fmt: skip
    return Heat(title, rows, [str(n) for n in layers], values)


def _unnumbered(name: str, layer: int | None) -> str:
    parts = name.split(".")
    at = parts.index(next(p for p in parts if p.isdecimal() and int(p) == layer))
    return ".".join(parts[at + 1 :]) or name
