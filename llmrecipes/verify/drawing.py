"""The losses of both trainings and their differences, as an SVG file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from llmrecipes.verify.result import Result
from llmrecipes.verify.scale import relative

WIDTH, HEIGHT, LEFT, TOP = 640, 200, 70, 40
POWERS = (-8, 0)
"""Range of the differences, as powers of ten."""


def svg(result: Result, title: str) -> str:
    """Two panels over the steps: losses of both; relative differences with the tolerance."""
    one = [step.loss for step, _ in result.steps]
    layout = [step.loss for _, step in result.steps]
    finite = [value for value in (*one, *layout) if math.isfinite(value)]
    low, high = min(finite), max(finite)
    count = len(result.steps)
    upper = [
        *_axes(count),
        _line(one, low, high, "#1f77b4", 6),
        _line(layout, low, high, "#ff7f0e", 2),
        _label(f"{high:.4g}", TOP),
        _label(f"{low:.4g}", TOP + HEIGHT),
        _text(LEFT, TOP - 8, "loss: one process (wide), this layout (narrow)"),
    ]
    losses = [_log(relative(step.loss, expected.loss)) for expected, step in result.steps]
    norms = [_log(relative(step.grad_norm, expected.grad_norm)) for expected, step in result.steps]
    bound = [_log(result.tolerance)] * len(result.steps)
    lower = [
        *_axes(count),
        _line(losses, *POWERS, "#1f77b4", 2),
        _line(norms, *POWERS, "#2ca02c", 2),
        _line(bound, *POWERS, "#d62728", 1),
        _label("1", TOP),
        _label(f"1e{POWERS[0]}", TOP + HEIGHT),
        _text(LEFT, TOP - 8, "relative difference: loss (blue), gradient norm (green), tolerance (red)"),
    ]
    size = f'width="{WIDTH + 2 * LEFT}" height="{2 * (HEIGHT + 2 * TOP) + 20}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">',
            '<rect width="100%" height="100%" fill="white"/>',
            _text(LEFT, 16, title),
            '<g transform="translate(0 10)">',
            *upper,
            "</g>",
            f'<g transform="translate(0 {HEIGHT + 2 * TOP + 10})">',
            *lower,
            "</g>",
            "</svg>\n",
        ]
    )


def _axes(steps: int) -> list[str]:
    """A frame, with at most ten step numbers below it."""
    frame = f'<rect x="{LEFT}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#bbbbbb"/>'
    every = -(-steps // 10)
    numbers = (
        f'<text x="{_across(number, steps):.1f}" y="{TOP + HEIGHT + 16}" text-anchor="middle">{number + 1}</text>'
        for number in range(0, steps, every)
    )
    return [frame, *numbers, f'<text x="{LEFT + WIDTH + 8}" y="{TOP + HEIGHT + 16}">step</text>']


def _across(number: int, steps: int) -> float:
    return LEFT + WIDTH * (number + 0.5) / steps


def _line(values: Sequence[float], low: float, high: float, colour: str, width: int) -> str:
    points = " ".join(
        f"{_across(number, len(values)):.1f},{TOP + HEIGHT * (1 - _share(value, low, high)):.1f}"
        for number, value in enumerate(values)
        if math.isfinite(value)
    )
    return f'<polyline fill="none" stroke="{colour}" stroke-width="{width}" points="{points}"/>'


def _share(value: float, low: float, high: float) -> float:
    return 0.5 if high == low else min(max((value - low) / (high - low), 0.0), 1.0)


def _log(value: float) -> float:
    return POWERS[0] if value <= 0 else min(math.log10(value), POWERS[1])


def _label(text: str, y: float) -> str:
    return f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{escape(text)}</text>'


def _text(x: float, y: float, text: str) -> str:
    return f'<text x="{x}" y="{y}">{escape(text)}</text>'
