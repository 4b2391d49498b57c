"""A report as one self-contained page: its pictures are inline SVG, nothing is loaded."""

import math
from html import escape

from fc_optim.audit.report import Chart, Heat, Report, Table, percent

_STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1c2430; --soft: #5b6675; --line: #d8dee6;
  --panel: #f5f7fa; --heat: #c2410c; --c0: #c2410c; --c1: #1d4ed8; --c2: #15803d; --c3: #7e22ce; }
@media (prefers-color-scheme: dark) { :root { --paper: #14181f; --ink: #e6eaf0; --soft: #9aa5b4;
  --line: #333c49; --panel: #1c222c; --heat: #fb923c; --c0: #fb923c; --c1: #60a5fa; --c2: #4ade80;
  --c3: #c084fc; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1080px; padding: 28px 24px 60px; background: var(--paper);
  color: var(--ink); font: 15px/1.5 system-ui, "DejaVu Sans", sans-serif; }
h1 { font-size: 24px; margin: 0 0 4px; } h2 { font-size: 17px; margin: 34px 0 8px; }
.subject, .note { color: var(--soft); overflow-wrap: anywhere; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(220px, 1fr)); gap: 10px;
  margin: 20px 0; }
.figure { background: var(--panel); border-radius: 6px; padding: 10px 14px; }
.figure b { display: block; font-size: 20px; overflow-wrap: anywhere; }
.figure span { color: var(--soft); font-size: 13px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13.5px; font-variant-numeric: tabular-nums; }
th, td { padding: 3px 14px 3px 0; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--line); } th { color: var(--soft); font-weight: 600; }
th:first-child, td:first-child { text-align: left; }
td:last-child, th:last-child { padding-right: 0; }
summary { cursor: pointer; color: var(--soft); margin: 28px 0 6px; }
svg { display: block; max-width: 100%; height: auto; } svg text { fill: var(--ink);
  font: 12px system-ui, "DejaVu Sans", sans-serif; } svg .soft { fill: var(--soft); }
svg .axis { stroke: var(--line); } svg .paper { fill: var(--panel); }
"""
_WIDTH = 1030
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 14, 46


def page(report: Report) -> str:
    """The whole document. Every text that comes from a file is escaped."""
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        f"<title>{escape(report.title)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{escape(report.title)}</h1><p class='subject'>{escape(report.subject)}</p>",
        "<div class='figures'>",
        *(f"<div class='figure'><b>{escape(value)}</b><span>{escape(label)}</span></div>"
          for label, value in report.figures),
        "</div>",
        *(f"<p class='note'>{escape(note)}</p>" for note in report.notes),
        *(_table(t) for t in report.tables if not t.folded),
        *(_heat(h) for h in report.heats),
        *(_chart(c) for c in report.charts),
        *(_table(t) for t in report.tables if t.folded),
        "</body></html>\n",
    ]  # fmt: skip
    return "\n".join(parts)


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(c)}</th>" for c in table.columns)
    rows = "\n".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows
    )
    body = f"<div class='scroll'><table><tr>{head}</tr>\n{rows}</table></div>"
    title = escape(table.title)
    if table.folded:
        return f"<details><summary>{title}</summary>{body}</details>"
    return f"<h2>{title}</h2>{body}"


def _heat(heat: Heat) -> str:
    """Opacity is the value, from 0 to the largest one; each cell says its own in a tooltip."""
    label = min(300, 20 + max(7 * len(r) for r in heat.rows))
    wide = min(30.0, (_WIDTH - label - 10) / len(heat.columns))
    tall = 20
    largest = max((v for row in heat.values for v in row if v is not None), default=0.0)
    width, height = label + wide * len(heat.columns) + 10, tall * len(heat.rows) + 72
    every = math.ceil(len(heat.columns) * 24 / (_WIDTH - label))
    out = [_svg(width, height, heat.title)]
    for y, (row, values) in enumerate(zip(heat.rows, heat.values, strict=True)):
        short = row if len(row) <= 40 else "..." + row[-37:]
        out.append(_text(label - 8, y * tall + 15, short, anchor="end"))
        for x, value in enumerate(values):
            if value is None:
                continue
            place = (
                f"x='{label + x * wide:.1f}' y='{y * tall + 1}' width='{wide - 1:.1f}' height='18'"
            )
            opacity = 0.04 + 0.96 * value / largest if largest else 0.04
            tip = escape(f"{row}, layer {heat.columns[x]}: {percent(value)}")
            out.append(
                f"<rect {place} class='paper'/><rect {place} fill='var(--heat)' "
                f"fill-opacity='{opacity:.3f}'><title>{tip}</title></rect>"
            )
    bottom = tall * len(heat.rows)
    for x, column in enumerate(heat.columns):
        if x % every == 0:
            out.append(_text(label + (x + 0.5) * wide, bottom + 15, column, soft=True))
    out.append(_text(label - 8, bottom + 15, "layer", anchor="end", soft=True))
    for i in range(40):
        out.append(
            f"<rect x='{label + i * 4}' y='{bottom + 34}' width='4' height='12' "
            f"fill='var(--heat)' fill-opacity='{0.04 + 0.96 * i / 39:.3f}'/>"
        )
    out.append(_text(label - 8, bottom + 45, "0 %", anchor="end", soft=True))
    out.append(_text(label + 168, bottom + 45, percent(largest), anchor="start", soft=True))
    return f"<h2>{escape(heat.title)}</h2><div class='scroll'>{''.join(out)}</svg></div>"


def _chart(chart: Chart) -> str:
    points = [p for curve in chart.curves.values() for p in curve]
    if not points:
        return ""
    xs = [x if chart.bars else math.log2(x) for x, _ in points]
    low, high = min(xs), max(xs) + (1.0 if chart.bars else 0.0)
    top = _nice(max(y for _, y in points))
    width, height = _WIDTH, 320
    inner, tall = width - _LEFT - _RIGHT, height - _TOP - _BOTTOM

    def at(x: float, y: float) -> tuple[float, float]:
        return (_LEFT + (x - low) / ((high - low) or 1) * inner, _TOP + (1 - y / top) * tall)

    out = [_svg(width, height, chart.title), *_axes(chart, low, high, top, at)]
    for i, (name, curve) in enumerate(chart.curves.items()):
        colour = f"var(--c{i % 4})"
        line = " ".join(f"{a:.1f},{b:.1f}" for a, b in _outline(chart, curve, at))
        out.append(
            f"<polyline points='{line}' fill='none' stroke='{colour}' stroke-width='2'>"
            f"<title>{escape(name)}</title></polyline>"
        )
    out.append("</svg>")
    legend = " ".join(
        f"<span style='color:var(--c{i % 4})'>&#9632;</span> {escape(name)} &nbsp;"
        for i, name in enumerate(chart.curves)
    )
    note = f"<p class='note'>{escape(chart.note)}</p>" if chart.note else ""
    return f"<h2>{escape(chart.title)}</h2>{note}<p>{legend}</p>{''.join(out)}"


def _outline(chart: Chart, curve, at):  # type: ignore[no-untyped-def]
    if not chart.bars:
        return [at(math.log2(x), y) for x, y in curve]
    steps = [p for x, y in curve for p in (at(x, y), at(x + 1, y))]
    return [at(curve[0][0], 0), *steps, at(curve[-1][0] + 1, 0)]


def _axes(chart: Chart, low: float, high: float, top: float, at) -> list[str]:  # type: ignore[no-untyped-def]
    out = []
    for i in range(5):
        y = top * i / 4
        (x0, py), (x1, _) = at(low, y), at(high, y)
        out.append(f"<line class='axis' x1='{x0}' x2='{x1}' y1='{py:.1f}' y2='{py:.1f}'/>")
        text = f"{100 * y:g} %" if chart.y.startswith("share") else f"{y:g}"
        out.append(_text(x0 - 8, py + 4, text, anchor="end", soft=True))
    first, last = math.ceil(low * math.log10(2) - 1e-9), math.floor(high * math.log10(2) + 1e-9)
    decades = range(first, last + 1)
    every = max(1, math.ceil(len(decades) / 12))
    few = len(decades) <= 4
    for decade in decades:
        for mark in (1, 2, 5) if few else (1,):
            x = math.log2(mark * 10.0**decade)
            if x <= high + 1e-9 and decade % every == 0:
                px, py = at(x, 0)
                out.append(f"<line class='axis' x1='{px:.1f}' x2='{px:.1f}' y1='{py}' "
                           f"y2='{py + 5}'/>")  # fmt: skip
                out.append(_text(px, py + 18, f"{mark * 10.0**decade:g}", soft=True))
    if chart.bars and low < 0 < high:
        px, py = at(0, 0)
        out.append(f"<line stroke='var(--soft)' stroke-dasharray='4 3' x1='{px:.1f}' "
                   f"x2='{px:.1f}' y1='{_TOP}' y2='{py}'/>")  # fmt: skip
    out.append(_text(_LEFT + (_WIDTH - _LEFT - _RIGHT) / 2, 312, chart.x, soft=True))
    return out


def _nice(x: float) -> float:
    """The least 1, 2, 4 or 10 times a power of ten that is not below x: quarters stay short."""
    if x <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(x))
    return next(m * power for m in (1, 2, 4, 6, 8, 10) if m * power >= x * (1 - 1e-9))


def _svg(width: float, height: float, title: str) -> str:
    return (
        f"<svg viewBox='0 0 {width:.0f} {height:.0f}' width='{width:.0f}' role='img' "
        f"aria-label='{escape(title, quote=True)}'>"
    )


def _text(x: float, y: float, text: str, *, anchor: str = "middle", soft: bool = False) -> str:
    kind = " class='soft'" if soft else ""
    return f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}'{kind}>{escape(text)}</text>"
