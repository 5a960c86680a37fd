"""Output of `compare`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from llmrecipes.cli.render.table import aligned
from llmrecipes.console import number
from llmrecipes.units import GIB

if TYPE_CHECKING:
    from rich.text import Text

    from llmrecipes.workflow.compare import Comparison, Curve, Run

LETTERS = "abcdefghijklmnopqrstuvwxyz"
AXES = ("step", "tokens")
HEIGHT = 12
LONGEST_VALUE = 40


def lines(comparison: Comparison, axis: str, *, width: int, colours: bool) -> Iterator[str | Text]:
    """Human-readable lines of the comparison."""
    from rich.text import Text

    from llmrecipes.cli.render.plot import COLOURS

    runs = comparison.runs
    wide = max(len(run.name) for run in runs)
    for index, run in enumerate(runs):
        planned = run.figures["steps_planned"]
        steps = f"{run.figures['steps']}/{'?' if planned is None else f'{planned:.0f}'}"
        style = COLOURS[index % len(COLOURS)] if colours else ""
        yield Text.assemble((LETTERS[index], style), f"  {run.name:{wide}}  {run.state}, step {steps}")
    letters = LETTERS[: len(runs)]
    yield ""
    if comparison.differences:
        rows = [(key, *map(_value, values)) for key, values in comparison.differences.items()]
        yield from _table([("recipe", *letters), *rows])
    else:
        yield "the recipes are the same"
    for title, curves in (
        ("training loss", [run.train for run in runs]),
        ("validation loss", [run.valid for run in runs]),
    ):
        yield from _curves(title, curves, axis, width=width, braille=colours)
    yield ""
    yield from _table([("figure", *letters), *_figures(runs)])


def default_axis(comparison: Comparison) -> str:
    """Tokens if the runs have different numbers of tokens per step."""
    keys = ("train.global_batch_size", "model.seq_length")
    return "tokens" if any(key in comparison.differences for key in keys) else "step"


def _curves(title: str, curves: Sequence[Curve], axis: str, *, width: int, braille: bool) -> Iterator[str | Text]:
    from llmrecipes.cli.render.plot import Series, plot

    series = []
    for letter, curve in zip(LETTERS, curves, strict=False):
        xs = curve.tokens if axis == "tokens" else curve.steps
        finite = [(at, loss) for at, loss in zip(xs, curve.losses, strict=True) if math.isfinite(loss)]
        series.append(Series(letter, [at for at, _ in finite], [loss for _, loss in finite]))
    drawn = plot(series, width=width - 12, height=HEIGHT, braille=braille)
    if drawn:
        yield ""
        yield f"{title} over {'tokens' if axis == 'tokens' else 'steps'}"
        yield from drawn


def _figures(runs: Sequence[Run]) -> Iterator[tuple[str, ...]]:
    """Rows of final figures, without those that no run has."""
    shapes = {
        "loss": ("training loss, last", "{:.4f}"),
        "valid_loss": ("validation loss, last", "{:.4f}"),
        "valid_loss_best": ("validation loss, best", "{:.4f}"),
        "bits_per_byte": ("bits per byte, last", "{:.4f}"),
        "tokens_per_second": ("tokens/s, median", "{:,.0f}"),
        "step_seconds": ("seconds a step, median", "{:.3g}"),
        "mfu": ("MFU, median", "{:.1%}"),
    }
    yield ("tokens", *(number(run.figures["tokens"] or 0) for run in runs))
    for key, (words, shape) in shapes.items():
        values = [run.figures[key] for run in runs]
        if any(value is not None for value in values):
            yield (words, *("-" if value is None else shape.format(value) for value in values))
    memory = [run.figures["memory_bytes"] for run in runs]
    if any(memory):
        yield ("memory, peak", *("-" if not size else f"{size / GIB:.1f} GiB" for size in memory))


def _value(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 1]}…"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    return aligned(rows, right=range(1, len(rows[0])))
