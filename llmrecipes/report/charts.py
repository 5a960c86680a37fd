"""Curves, bars and maps as SVG inside HTML: labels are text of the page, so that they neither shrink nor overlap.

A picture is as wide as the page, and only its plot is SVG, stretched to the width. Of a long line each of `COLUMNS`
columns has the median, in an area from the least to the largest value: no spike is lost, and a page does not grow with
the run.
Lines differ by dashes as well as by colours, and every picture has its numbers in words.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from llmrecipes.console import number
from llmrecipes.report.records import Values
from llmrecipes.webpage import text

COLUMNS = 500
"""Columns of a plot; a screen of 1600 pixels shows each with two to three pixels."""
HEIGHT = 200
"""Units of a plot's height."""
MOST_CELLS = 160
"""Columns of a map."""
LOG_RATIO = 300.0
"""Largest over smallest value from which on an axis is logarithmic, if all values are positive."""
DASHES = ("", "7 3", "2 3", "9 3 2 3", "4 4", "12 4")

STYLE = """\
figure { margin: .75rem 0 1.25rem; min-width: 0; }
figcaption { font-weight: 600; }
.charts { display: grid; gap: 0 2rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr)); }
.plot { display: grid; margin-top: .5rem; grid-template-columns: minmax(3.5rem, auto) minmax(0, 1fr); }
.plot svg { background: var(--panel); display: block; height: 11rem; overflow: hidden; width: 100%; }
.plot.low svg { height: auto; }
.axis { color: var(--muted); font-size: .8rem; line-height: 1; position: relative; }
.axis.up span { position: absolute; right: .4rem; transform: translateY(-50%); white-space: nowrap; }
.axis.up { min-width: 3.5rem; }
.axis.along { display: flex; grid-column: 2; justify-content: space-between; padding-top: .3rem; }
.rows { color: var(--muted); display: grid; font-size: .8rem; padding-right: .5rem; }
.rows span { align-self: center; line-height: 1.1; text-align: right; }
.keys { display: flex; flex-wrap: wrap; font-size: .85rem; gap: .1rem 1.2rem; margin: .25rem 0; max-width: none; }
.keys svg { height: .8rem; vertical-align: middle; width: 2.2rem; }
.note { color: var(--muted); font-size: .85rem; margin: .1rem 0; }
svg .line { fill: none; stroke-width: 1.6; vector-effect: non-scaling-stroke; }
svg .band { opacity: .22; stroke: none; }
svg .grid { fill: none; stroke: var(--grid); stroke-width: 1; vector-effect: non-scaling-stroke; }
svg .mark { stroke-width: 7; stroke-linecap: round; vector-effect: non-scaling-stroke; }
svg .bad { stroke: var(--bad); stroke-width: 1.5; vector-effect: non-scaling-stroke; }
svg .heat { fill: var(--c0); shape-rendering: crispEdges; }
svg.bar { display: block; height: 1.75rem; margin: .25rem 0; width: 100%; }
table.ranks { table-layout: fixed; width: 100%; }
.ranks thead td:first-child { width: min(34%, 16rem); }
.ranks th.number { width: 7rem; }
.ranks th[scope=row] { font-weight: 400; overflow-wrap: anywhere; }
.ranks td.wide { padding-right: 0; }
.ranks svg.bar { height: 1rem; margin: .15rem 0; }
.swatch { width: 1.5rem; }
.swatch svg { display: block; height: .9rem; margin-top: .25rem; width: .9rem; }
.s0 { stroke: var(--c0); } .s1 { stroke: var(--c1); } .s2 { stroke: var(--c2); }
.s3 { stroke: var(--c3); } .s4 { stroke: var(--c4); } .s5 { stroke: var(--c5); }
.f0 { fill: var(--c0); } .f1 { fill: var(--c1); } .f2 { fill: var(--c2); }
.f3 { fill: var(--c3); } .f4 { fill: var(--c4); } .f5 { fill: var(--c5); }
"""


@dataclass(frozen=True)
class Line:
    """A curve.

    Attributes:
        name: in the legend.
        x: [points] increasing; of a curve over time, seconds.
        y: [points] values; those that are not finite are left out, and marked below the curve.
        points: draw a dot at each of them too: there are few.
    """

    name: str
    x: Values
    y: Values
    points: bool = False


def short(value: float) -> str:
    """A number for a label: four digits, or a count in short."""
    if not math.isfinite(value):
        return "not finite"
    if abs(value) >= 10_000:
        return f"{'-' if value < 0 else ''}{number(abs(value))}"
    return f"{value:.4g}"


def curves(title: str, lines: Sequence[Line], *, unit: str = "", along: str = "step", note: str = "") -> str:
    """A figure of curves over one axis; empty if no curve has a finite value.

    Args:
        title: above it.
        lines: at most a dozen.
        unit: of the values.
        along: name of the horizontal axis.
        note: below it.
    """
    finite = [line.y[np.isfinite(line.y)] for line in lines]
    finite = [each for each in finite if each.size]
    if not finite:
        return ""
    across = np.concatenate([line.x for line in lines])
    left, right = float(across.min()), float(across.max())
    scale = _VerticalAxis.of(finite)
    body = [f'<path class="grid" d="{"".join(f"M-4 {_n(scale.up(at))}H{COLUMNS + 4}" for at in scale.ticks)}"/>']
    for place, line in enumerate(lines):
        body += _curve(line, place % 6, _columns(line.x, left, right), scale)
    labels = "".join(
        f'<span style="top:{100 * scale.up(at) / HEIGHT:.1f}%">{text(short(at))}</span>' for at in scale.ticks
    )
    bad = sum(int((~np.isfinite(line.y)).sum()) for line in lines)
    words = "; ".join(_words(line) for line in lines)
    name = f"{title}{f', {unit}' if unit else ''}"
    return "\n".join(
        [
            f"<figure><figcaption>{text(name)}</figcaption>",
            _legend([line.name for line in lines]) if len(lines) > 1 else "",
            f'<div class="plot"><div class="axis up" aria-hidden="true">{labels}</div>',
            f'<svg viewBox="-4 0 {COLUMNS + 8} {HEIGHT}" preserveAspectRatio="none" role="img" '
            f'aria-label="{text(f"{name}. {words}")}">{"".join(body)}</svg>',
            f'<div class="axis along" aria-hidden="true"><span>{text(_end(left, along))}</span>'
            f"<span>{text(along)}</span><span>{text(_end(right, along))}</span></div></div>",
            f'<p class="note">{text(words)}</p>',
            *(f'<p class="note">{text(line)}</p>' for line in _notes(note, scale, bad)),
            "</figure>",
        ]
    )


def _curve(line: Line, kind: int, columns: Values, scale: _VerticalAxis) -> Iterator[str]:
    """Paths of a curve: the values, or their middle in a band where they are many, single points, and where values are
    not finite."""
    known = np.isfinite(line.y)
    if known.sum() > 3 * COLUMNS:
        middle, band = _reduced(columns[known], line.y[known], scale)
        yield f'<path class="band f{kind}" d="{band}"/>'
    else:
        middle = _path(columns[known], [scale.up(at) for at in line.y[known]])
    dash = f' stroke-dasharray="{DASHES[kind]}"' if DASHES[kind] else ""
    yield f'<path class="line s{kind}"{dash} d="{middle}"/>'
    if line.points or known.sum() < 2:
        dots = "".join(f"M{_n(at)} {_n(scale.up(y))}h.01" for at, y in zip(columns[known], line.y[known], strict=True))
        yield f'<path class="mark s{kind}" d="{dots}"/>'
    lost = np.unique(np.round(columns[~known]))
    if lost.size:
        yield f'<path class="bad" d="{"".join(f"M{_n(at)} {HEIGHT}v-14" for at in lost)}"/>'


def _notes(note: str, scale: _VerticalAxis, bad: int) -> Iterator[str]:
    """What is said below curves, of which `bad` values are not finite."""
    if note:
        yield note
    if scale.logarithmic:
        yield "The vertical axis is logarithmic."
    if scale.clipped:
        yield f"{scale.clipped:,} values above {short(scale.high)} are cut off; the largest is {short(scale.most)}."
    if bad:
        yield f"{bad:,} values are not finite; they are marked by short vertical lines at the lower edge."


@dataclass(frozen=True)
class Spans:
    """A row of a time line: `at` has begin and end of each, in seconds; equal for a moment."""

    name: str
    at: Sequence[tuple[float, float]]
    kind: int = 0


def timeline(title: str, rows: Sequence[Spans], begin: float, end: float, labels: tuple[str, str]) -> str:
    """Rows of spans and moments over one axis of time.

    Args:
        labels: of both ends of the axis.
    """
    rows = [row for row in rows if row.at]
    if not rows or end <= begin:
        return ""
    high = 22
    body = []
    for place, row in enumerate(rows):
        top, boxes = place * high + 4, set()
        for first, last in row.at:
            left, right = ((at - begin) / (end - begin) * COLUMNS for at in (first, last))
            left = min(max(left, 0.0), COLUMNS - 1.0)
            boxes.add((round(left, 1), round(max(min(right, COLUMNS) - left, 1.0), 1)))
        drawn = "".join(f"M{_n(left)} {top}h{_n(wide)}v{high - 8}h-{_n(wide)}z" for left, wide in sorted(boxes))
        body.append(f'<path class="f{row.kind % 6}" d="{drawn}"/>')
    grid = "".join(f"M0 {place * high}H{COLUMNS}" for place in range(1, len(rows)))
    names = "".join(f"<span>{text(row.name)} ({len(row.at):,})</span>" for row in rows)
    words = "; ".join(f"{row.name}: {len(row.at):,}" for row in rows)
    height = f"{len(rows) * 1.5:.1f}rem"
    return (
        f"<figure><figcaption>{text(title)}</figcaption>\n"
        f'<div class="plot low"><div class="rows" style="grid-template-rows:repeat({len(rows)},1fr)">{names}</div>'
        f'<svg style="height:{height}" viewBox="0 0 {COLUMNS} {len(rows) * high}" preserveAspectRatio="none" '
        f'role="img" aria-label="{text(f"{title}. {words}")}"><path class="grid" d="{grid}"/>{"".join(body)}</svg>\n'
        f'<div class="axis along" aria-hidden="true"><span>{text(labels[0])}</span><span>{text(labels[1])}</span></div>'
        "</div></figure>"
    )


def bars(title: str, parts: Sequence[tuple[str, float, str]], quantity: str) -> str:
    """One bar of parts, with a table of them.

    Args:
        parts: name, size, and the size as text.
        quantity: what the sizes are.
    """
    whole = sum(size for _, size, _ in parts)
    if whole <= 0:
        return ""
    left = 0.0
    body = []
    rows = []
    for place, (name, size, words) in enumerate(parts):
        wide = size / whole * COLUMNS
        hatch = ' fill-opacity=".55"' if place >= 6 else ""
        body.append(
            f'<rect class="f{place % 6}"{hatch} x="{_n(left)}" y="0" width="{_n(max(wide - 1, 0.2))}" height="20"/>'
        )
        left += wide
        key = f'<svg viewBox="0 0 10 10"><rect class="f{place % 6}"{hatch} width="10" height="10"/></svg>'
        rows.append(
            f'<tr><td class="swatch" aria-hidden="true">{key}</td><td>{text(name)}</td><td class="number">{text(words)}'
            f'</td><td class="number">{size / whole:.1%}</td></tr>'
        )
    words = "; ".join(f"{name} {size / whole:.1%}" for name, size, _ in parts)
    return (
        f"<figure><figcaption>{text(title)}</figcaption>\n"
        f'<svg class="bar" viewBox="0 0 {COLUMNS} 20" preserveAspectRatio="none" role="img" '
        f'aria-label="{text(f"{title}. {words}")}">{"".join(body)}</svg>\n'
        f'<div class="scroll"><table><thead><tr><td></td><th scope="col">what</th>'
        f'<th scope="col" class="number">{text(quantity)}</th><th scope="col" class="number">share</th></tr></thead>'
        f"{''.join(rows)}</table></div>"
        '<p class="note">From left to right in the order of the table.</p></figure>'
    )


def ranks(title: str, rows: Sequence[tuple[str, float, str]], quantity: str, note: str = "") -> str:
    """A bar a row, beside its name and its size as text.

    Args:
        rows: name, size, and the size as text.
        quantity: what the sizes are.
        note: below it.
    """
    most = max((size for _, size, _ in rows), default=0)
    if most <= 0:
        return ""
    lines = []
    for name, size, words in rows:
        wide = _n(max(size / most * COLUMNS, 1 if size else 0))
        drawn = f'<rect class="f0" x="0" y="0" width="{wide}" height="20"/>'
        lines.append(
            f'<tr><th scope="row">{text(name)}</th><td class="number">{text(words)}</td><td class="wide">'
            f'<svg class="bar" viewBox="0 0 {COLUMNS} 20" preserveAspectRatio="none" aria-hidden="true">{drawn}</svg>'
            "</td></tr>"
        )
    extra = f'<p class="note">{text(note)}</p>' if note else ""
    return (
        f'<figure><figcaption>{text(title)}</figcaption>\n<table class="ranks"><thead><tr><td></td>'
        f'<th scope="col" class="number">{text(quantity)}</th><td></td></tr></thead>{"".join(lines)}</table>'
        f"{extra}</figure>"
    )


def heat(
    title: str,
    rows: Sequence[str],
    columns: Sequence[str],
    cells: Values,
    *,
    unit: str = "",
    along: str = "step",
    note: str = "",
) -> str:
    """A map of numbers: a row a name, stronger for more; its numbers are in a table that unfolds.

    Args:
        rows: names.
        columns: names of the columns; only the ends are shown.
        cells: [rows, columns]; NaN is left empty.
        note: below it.
    """
    if not np.isfinite(cells).any():
        return ""
    kept = np.unique(np.linspace(0, cells.shape[1] - 1, min(MOST_CELLS, cells.shape[1])).round().astype(int))
    cells = cells[:, kept]
    columns = [columns[at] for at in kept]
    low, high = float(np.nanmin(cells)), float(np.nanmax(cells))
    # Eight steps: as many as eyes tell apart, and one path each instead of a rectangle a cell.
    levels = np.zeros(cells.shape) if high == low else np.floor((cells - low) / (high - low) * 7.999)
    body = []
    for level in range(8):
        path = "".join(f"M{column} {row}h1v1h-1z" for row, column in np.argwhere(levels == level))
        if path:
            body.append(f'<path class="heat" fill-opacity="{0.06 + 0.94 * level / 7:.2f}" d="{path}"/>')
    high_rem = max(0.5, min(1.3, 28 / len(rows)))
    stride = max(1, -(-len(rows) // 28)) if high_rem >= 0.9 else max(1, round(1.1 / high_rem))
    names = "".join(f"<span>{text(name) if place % stride == 0 else ''}</span>" for place, name in enumerate(rows))
    where = divmod(int(np.nanargmax(cells)), cells.shape[1])
    words = (
        f"from {short(low)} (faintest) to {short(high)} (strongest, {rows[where[0]]}, {along} {columns[where[1]]})"
        f"{f', {unit}' if unit else ''}"
    )
    extra = f'<p class="note">{text(note)}</p>' if note else ""
    grid = f"grid-template-rows:repeat({len(rows)},minmax(0,1fr))"
    return (
        f"<figure><figcaption>{text(title)}</figcaption>\n"
        f'<div class="plot low"><div class="rows" style="{grid}">{names}</div>'
        f'<svg style="height:{high_rem * len(rows):.1f}rem" viewBox="0 0 {len(columns)} {len(rows)}" '
        f'preserveAspectRatio="none" role="img" aria-label="{text(f"{title}: {words}")}">{"".join(body)}</svg>\n'
        f'<div class="axis along" aria-hidden="true"><span>{text(columns[0])}</span><span>{text(along)}</span>'
        f"<span>{text(columns[-1])}</span></div></div>"
        f'<p class="note">{text(words)}</p>{extra}{_numbers(rows, cells)}</figure>'
    )


def _numbers(rows: Sequence[str], cells: Values) -> str:
    """A table of the rows of a map that have numbers, which unfolds."""
    head = "".join(f'<th scope="col" class="number">{name}</th>' for name in ("first", "last", "least", "most"))
    table = []
    for name, line in zip(rows, cells, strict=True):
        if np.isfinite(line).any():
            values = (line[0], line[-1], np.nanmin(line), np.nanmax(line))
            shown = "".join(f'<td class="number">{text(short(value))}</td>' for value in values)
            table.append(f"<tr><th scope='row'>{text(name)}</th>{shown}</tr>")
    return (
        f'<details><summary>numbers</summary><div class="scroll"><table><thead><tr><td></td>{head}</tr></thead>'
        f"{''.join(table)}</table></div></details>"
    )


@dataclass(frozen=True)
class _VerticalAxis:
    """The vertical axis: from `low` to `high`, which may lie below the largest value, `most`."""

    low: float
    high: float
    logarithmic: bool
    ticks: tuple[float, ...]
    clipped: int
    most: float

    @classmethod
    def of(cls, lines: Sequence[Values]) -> _VerticalAxis:
        values = np.concatenate(lines)
        low, most = float(values.min()), float(values.max())
        high = most
        if low > 0 and most / low > LOG_RATIO:
            ends = math.floor(math.log10(low)), math.ceil(math.log10(most))
            stride = max(1, -(-(ends[1] - ends[0]) // 5))
            ticks = tuple(10.0**power for power in range(ends[0], ends[1] + 1, stride))
            return cls(10.0 ** ends[0], 10.0 ** ends[1], True, ticks, 0, most)
        # A few spikes must not flatten everything else.
        usual, least = (float(np.quantile(values, at)) for at in (0.995, 0.005))
        if values.size > 200 and most - low > 8 * (usual - least) > 0:
            high = min(most, usual + 2 * (usual - least))
        # Nor may a run that diverged flatten the others.
        tame = min(float(np.quantile(line, 0.98)) for line in lines)
        if len(lines) > 1 and high - low > 8 * (tame - low) > 0:
            high = low + 2 * (tame - low)
        step = _step(high - low, max(abs(high), abs(low)))
        first = math.floor(low / step)
        last = math.ceil(high / step)
        if first == last:
            first, last = first - 1, last + 1
        ticks = tuple(at * step for at in range(first, last + 1))
        return cls(first * step, last * step, False, ticks, int((values > last * step).sum()), most)

    def up(self, value: float) -> float:
        """Units from the upper edge."""
        low, high = self.low, self.high
        if self.logarithmic:
            low, high, value = math.log10(low), math.log10(high), math.log10(max(value, low))
        share = (value - low) / (high - low)
        return HEIGHT - 4 - min(max(share, 0.0), 1.0) * (HEIGHT - 8)


def _step(extent: float, size: float) -> float:
    """1, 2 or 5 times a power of ten, so that there are about five ticks."""
    extent = extent or size or 1.0
    power = 10.0 ** math.floor(math.log10(extent / 4))
    return next(power * times for times in (1, 2, 5, 10) if power * times >= extent / 4.5)


def _columns(x: Values, left: float, right: float) -> Values:
    return np.full(len(x), COLUMNS / 2) if right == left else (x - left) / (right - left) * COLUMNS


def _reduced(columns: Values, y: Values, scale: _VerticalAxis) -> tuple[str, str]:
    """The median of each column as a line, and an area from the least to the largest value."""
    place = np.minimum(columns.astype(int), COLUMNS - 1)
    starts = np.flatnonzero(np.diff(place, prepend=-1))
    at = place[starts] + 0.5
    least = np.minimum.reduceat(y, starts)
    most = np.maximum.reduceat(y, starts)
    middle = _medians(y, starts)
    upper = _path(at, [scale.up(value) for value in most])
    lower = _path(at[::-1], [scale.up(value) for value in least[::-1]])
    return _path(at, [scale.up(value) for value in middle]), f"{upper}L{lower[1:]}z"


def _medians(y: Values, starts: npt.NDArray[np.intp]) -> list[float]:
    """The median of each column in one sort: numpy's takes longer to begin than for the values of a column."""
    counts = np.diff(starts, append=len(y))
    ordered = y[np.lexsort((y, np.repeat(np.arange(len(counts)), counts)))]
    medians: list[float] = (0.5 * (ordered[starts + (counts - 1) // 2] + ordered[starts + counts // 2])).tolist()
    return medians


def _path(x: Values, y: Sequence[float]) -> str:
    points = " ".join(f"{_n(across)} {_n(up)}" for across, up in zip(x, y, strict=True))
    return f"M{points}" if points else ""


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _end(value: float, along: str) -> str:
    return f"{value:,.0f}" if along == "step" or abs(value) < 10_000 else short(value)


def _words(line: Line) -> str:
    """A curve in numbers."""
    known = line.y[np.isfinite(line.y)]
    if not known.size:
        return f"{line.name}: no finite value"
    first, last, least, most = (short(float(at)) for at in (known[0], known[-1], known.min(), known.max()))
    return f"{line.name}: first {first}, last {last}, least {least}, most {most}"


def _legend(names: Sequence[str]) -> str:
    keys = []
    for place, name in enumerate(names):
        dash = f' stroke-dasharray="{DASHES[place % 6]}"' if DASHES[place % 6] else ""
        line = f'<svg viewBox="0 0 35 10" aria-hidden="true"><path class="line s{place % 6}"{dash} d="M0 5H35"/></svg>'
        keys.append(f"<span>{line} {text(name)}</span>")
    return f'<p class="keys">{"".join(keys)}</p>'
