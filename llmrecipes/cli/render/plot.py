"""Text plots: coloured braille dots on a terminal, letters otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_

from rich.text import Text

from llmrecipes.console import number

COLOURS = ("cyan", "yellow", "magenta", "green", "red", "blue")
BRAILLE = 0x2800
DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""Bit of each of the 2 × 4 dots of a braille character, by column and row."""
SEVERAL = "*"


@dataclass(frozen=True)
class Series:
    """One curve: its letter, and points with finite coordinates."""

    letter: str
    xs: Sequence[float]
    ys: Sequence[float]


def plot(series: Sequence[Series], *, width: int, height: int, braille: bool) -> list[Text]:
    """Lines of a plot of `width` × `height` characters with axes; empty if there are no points.

    Args:
        series: where curves overlap, braille shows the later one and letters show `*`.
        braille: dots in `COLOURS`, in the order of the series; else letters.
    """
    ys = [y for each in series for y in each.ys]
    if not ys:
        return []
    xs = [x for each in series for x in each.xs]
    box = (min(xs), max(xs), min(ys), max(ys))
    cells: dict[tuple[int, int], dict[int, int]] = {}
    for index, each in enumerate(series):
        for across, up in _dots(each, box, 2 * width, 4 * height):
            row = 4 * height - 1 - up
            bits = cells.setdefault((across // 2, row // 4), {})
            bits[index] = bits.get(index, 0) | DOTS[across % 2][row % 4]
    labels = {0: f"{box[3]:.4g}", height // 2: f"{(box[2] + box[3]) / 2:.4g}", height - 1: f"{box[2]:.4g}"}
    margin = max(map(len, labels.values()))
    lines = []
    for row in range(height):
        line = Text(f"{labels.get(row, ''):>{margin}} {'┤' if row in labels else '│'}")
        for column in range(width):
            line.append(*_cell(cells.get((column, row), {}), series, braille=braille))
        line.rstrip()
        lines.append(line)
    first, last = number(box[0]), number(box[1])
    lines.append(Text(f"{'':{margin}} └{'─' * width}"))
    lines.append(Text(f"{'':{margin}}  {first}{last:>{max(width - len(first), len(last) + 1)}}"))
    return lines


def _dots(series: Series, box: tuple[float, float, float, float], width: int, height: int) -> set[tuple[int, int]]:
    """Dots of the curve from the lower left corner, with straight lines between neighbours."""
    left, right, low, high = box
    found: set[tuple[int, int]] = set()
    before: tuple[int, int] | None = None
    for x, y in zip(series.xs, series.ys, strict=True):
        here = (_place(x, left, right, width), _place(y, low, high, height))
        if here == before:
            continue
        across, up = before or here
        parts = max(abs(here[0] - across), abs(here[1] - up), 1)
        found |= {
            (round(across + (here[0] - across) * n / parts), round(up + (here[1] - up) * n / parts))
            for n in range(parts + 1)
        }
        before = here
    return found


def _place(value: float, low: float, high: float, cells: int) -> int:
    return 0 if high == low else min(int((value - low) / (high - low) * cells), cells - 1)


def _cell(bits: dict[int, int], series: Sequence[Series], *, braille: bool) -> tuple[str, str]:
    if not bits:
        return " ", ""
    top = max(bits)
    if braille:
        return chr(BRAILLE | reduce(or_, bits.values())), COLOURS[top % len(COLOURS)]
    return (series[top].letter if len(bits) == 1 else SEVERAL), ""
