"""A bar chart as an SVG file."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

LEFT, WIDTH, BAR, GAP, TOP = 230, 420, 22, 10, 44


def bars(title: str, values: Mapping[str, float], unit: str) -> str:
    """One horizontal bar for each value, in order; values are positive or zero."""
    highest = max(values.values(), default=0.0) or 1.0
    height = TOP + len(values) * (BAR + GAP) + GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 110} {height}" '
        f'width="{LEFT + WIDTH + 110}" height="{height}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="12" y="24" font-weight="bold">{escape(title)}</text>',
    ]
    for number, (name, value) in enumerate(values.items()):
        y = TOP + number * (BAR + GAP)
        long = WIDTH * value / highest
        parts += [
            f'<text x="{LEFT - 8}" y="{y + 15}" text-anchor="end">{escape(name)}</text>',
            f'<rect x="{LEFT}" y="{y}" width="{long:.1f}" height="{BAR}" fill="#1f77b4"/>',
            f'<text x="{LEFT + long + 8:.1f}" y="{y + 15}">{value:,.1f} {escape(unit)}</text>',
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"
