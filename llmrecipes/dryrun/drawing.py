"""Pictures of a dry run, as SVG files: memory over the operations of a step, and the order of passes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from llmrecipes.dryrun.spec import PARTS, Pass, RankReport
from llmrecipes.units import GIB

WIDTH, HEIGHT, LEFT, TOP = 900, 320, 70, 44
COLOURS = {
    "weights": "#1f77b4",
    "gradients": "#2ca02c",
    "optimizer": "#9467bd",
    "activations": "#ff7f0e",
    "communication": "#17becf",
    "temporary": "#d62728",
}
PASS_COLOURS = {"forward": "#9ecae1", "backward": "#fdae6b"}
ROW, WIDEST_BOX, NARROWEST_BOX, WIDEST_ROW = 26, 22, 3, 3000
LEAST_FOR_TEXT = 16
"""Width of a box that its label fits into."""


def memory_svg(report: RankReport, title: str) -> str:
    """Stacked areas of the parts over the operations of a step, with the peak marked."""
    moments = report.timeline
    first, last = moments[0].when, moments[-1].when
    totals = [sum(moment.parts.values()) for moment in moments]
    top = max(totals)
    across = [LEFT + WIDTH * (moment.when - first) / max(last - first, 1) for moment in moments]

    def up(size: float) -> float:
        return TOP + HEIGHT * (1 - size / top)

    below = [0.0] * len(moments)
    areas = []
    for part in PARTS:
        above = [low + moment.parts.get(part, 0) for low, moment in zip(below, moments, strict=True)]
        points = [f"{x:.1f},{up(y):.1f}" for x, y in zip(across, above, strict=True)]
        points += [f"{x:.1f},{up(y):.1f}" for x, y in reversed(list(zip(across, below, strict=True)))]
        areas.append(f'<polygon fill="{COLOURS[part]}" points="{" ".join(points)}"/>')
        below = above
    peak = totals.index(top)
    x = across[peak]
    marks = [
        f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{TOP + HEIGHT}" stroke="black" stroke-dasharray="3 3"/>',
        *(
            _text(LEFT - 8, up(top * share) + 4, f"{top * share / GIB:.1f}", "end")
            for share in (0.0, 0.25, 0.5, 0.75, 1.0)
        ),
        _text(LEFT - 8, TOP - 12, "GiB", "end"),
        _text(LEFT + WIDTH, TOP + HEIGHT + 18, f"{report.operations:,} operations", "end"),
        *_legend(TOP + HEIGHT + 40),
    ]
    return _document(LEFT + WIDTH + 30, TOP + HEIGHT + 60, title, [*areas, *marks])


def passes_svg(reports: Sequence[RankReport], title: str) -> str:
    """A row for each rank with a box for each pass: its micro-batch, and the chunk if there are several."""
    most = max(len(report.passes) for report in reports)
    box = max(min(WIDEST_ROW // most, WIDEST_BOX), NARROWEST_BOX)
    rows = []
    for row, report in enumerate(reports):
        y = TOP + row * (ROW + 14)
        rows.append(_text(LEFT - 8, y + 15, f"stage {report.stage}", "end"))
        rows += _boxes(report.passes, y, box)
    height = TOP + len(reports) * (ROW + 14)
    marks = [
        *(
            f'<rect x="{LEFT + 100 * number}" y="{height}" width="12" height="12" fill="{colour}"/>'
            + _text(LEFT + 100 * number + 16, height + 11, kind)
            for number, (kind, colour) in enumerate(PASS_COLOURS.items())
        )
    ]
    return _document(LEFT + max(most * box, 400) + 20, height + 26, title, [*rows, *marks])


def _boxes(passes: Sequence[Pass], y: float, width: int) -> Iterator[str]:
    chunks = len({each.chunk for each in passes}) > 1
    for number, each in enumerate(passes):
        x = LEFT + number * width
        yield (
            f'<rect x="{x}" y="{y}" width="{width - 1}" height="{ROW}" fill="{PASS_COLOURS[each.kind]}">'
            f"<title>{each.kind} of micro-batch {each.micro_batch}, chunk {each.chunk}</title></rect>"
        )
        if width >= LEAST_FOR_TEXT:
            label = f"{each.micro_batch}" + (f".{each.chunk}" if chunks else "")
            yield f'<text x="{x + width / 2}" y="{y + 16}" font-size="8" text-anchor="middle">{label}</text>'


def _legend(y: float) -> Iterator[str]:
    for number, part in enumerate(PARTS):
        x = LEFT + 140 * number
        yield f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{COLOURS[part]}"/>' + _text(x + 16, y, part)


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _document(width: float, height: float, title: str, parts: Sequence[str]) -> str:
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
            'font-family="sans-serif" font-size="12">',
            '<rect width="100%" height="100%" fill="white"/>',
            _text(12, 20, title),
            *parts,
            "</svg>\n",
        ]
    )
