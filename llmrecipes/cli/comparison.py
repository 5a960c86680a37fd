"""`compare` and `scaling`: parsing and printing only. Curves are text: braille dots on a terminal, else letters."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmrecipes.cli import completion, tables
from llmrecipes.cli.shared_options import RUNS, JsonOption, RunsOption
from llmrecipes.cli.tables import TextTable
from llmrecipes.console import number
from llmrecipes.errors import UserError
from llmrecipes.units import GIB

if TYPE_CHECKING:
    from rich.text import Text

    from llmrecipes.workflow.compare import ComparedRun, Curve, RunComparison
    from llmrecipes.workflow.scaling import Interval, ScalingLaw


LETTERS = "abcdefghijklmnopqrstuvwxyz"
AXES = ("step", "tokens")
HEIGHT = 12
LONGEST_VALUE = 40
COLOURS = ("cyan", "yellow", "magenta", "green", "red", "blue")
BRAILLE = 0x2800
DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""Bit of each of the 2 × 4 dots of a braille character, by column and row."""
SEVERAL = "*"


def compare(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...",
            help="Run directories, recipe/run-ids, run ids, or recipe names (their newest runs).",
            autocompletion=completion.runs,
        ),
    ],
    x: Annotated[
        str | None,
        typer.Option(
            "--x", metavar="AXIS", help="Plot over step or tokens; default: tokens if the batch sizes differ."
        ),
    ] = None,
    as_json: JsonOption = False,
    runs_dir: RunsOption = RUNS,
) -> None:
    """Compare runs: recipes, loss curves and final figures."""
    from llmrecipes.console import console
    from llmrecipes.rundir import Run
    from llmrecipes.workflow.compare import compare as read

    if x is not None and x not in AXES:
        raise UserError(f"{x!r}", where="--x", rule=f"one of {', '.join(AXES)}")
    if len(names) > len(LETTERS):
        raise UserError(f"{len(names)} runs", where="RUN", rule=f"at most {len(LETTERS)} runs can be compared")
    comparison = read([Run.find(name, runs_dir).path for name in names])
    if as_json:
        print(json.dumps(comparison.as_dict(), indent=2))
        return
    out = console()
    axis = x or default_axis(comparison)
    tables.show(*comparison_lines(comparison, axis, width=min(out.width, 110), colours=out.is_terminal))


def scaling(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN]...",
            help="Run directories, recipe/run-ids, run ids, or recipe names (all their runs).",
            autocompletion=completion.runs,
        ),
    ] = None,
    experiment: Annotated[
        str | None, typer.Option("--experiment", metavar="NAME", help="Fit the runs of this MLflow experiment.")
    ] = None,
    flops: Annotated[
        list[float] | None,
        typer.Option("--flops", metavar="C", help="Split a budget of C FLOPs between size and tokens; repeatable."),
    ] = None,
    embeddings: Annotated[
        bool, typer.Option("--embeddings/--no-embeddings", help="Count embeddings and output layer in N.")
    ] = True,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Write a figure to FILE (.svg, .png or .pdf).")
    ] = None,
    as_json: JsonOption = False,
    runs_dir: RunsOption = RUNS,
) -> None:
    """Fit a scaling law to finished runs.

    Loss against parameters and tokens, with the optimal size for a budget.
    """
    from llmrecipes.workflow.scaling import scaling as fit

    if plot is not None:
        from llmrecipes.scaling.plot import draw, require_file

        require_file(plot)
    law = fit(names or [], experiment, runs_dir, budgets=flops or [], embeddings=embeddings)
    if as_json:
        print(json.dumps(law.as_dict(), indent=2))
    else:
        tables.show(*scaling_lines(law))
    if plot is not None:
        draw(law.fit, plot)


@dataclass(frozen=True)
class Series:
    """One curve: its letter, and points with finite coordinates."""

    letter: str
    xs: Sequence[float]
    ys: Sequence[float]


def plot(series: Sequence[Series], *, width: int, height: int, braille: bool) -> list[Text]:
    """Plot with axes, `width` × `height` characters, as lines; no lines without points.

    Args:
        series: where curves overlap, braille shows the later one and letters show `*`.
        braille: dots in `COLOURS`, in the order of the series; else letters.
    """
    from rich.text import Text

    ys = [y for curve in series for y in curve.ys]
    if not ys:
        return []
    xs = [x for curve in series for x in curve.xs]
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
    dots: set[tuple[int, int]] = set()
    before: tuple[int, int] | None = None
    for x, y in zip(series.xs, series.ys, strict=True):
        dot = (_place(x, left, right, width), _place(y, low, high, height))
        if dot == before:
            continue
        across, up = before or dot
        parts = max(abs(dot[0] - across), abs(dot[1] - up), 1)
        dots |= {
            (round(across + (dot[0] - across) * n / parts), round(up + (dot[1] - up) * n / parts))
            for n in range(parts + 1)
        }
        before = dot
    return dots


def _place(value: float, low: float, high: float, cells: int) -> int:
    return 0 if high == low else min(int((value - low) / (high - low) * cells), cells - 1)


def _cell(bits: dict[int, int], series: Sequence[Series], *, braille: bool) -> tuple[str, str]:
    if not bits:
        return " ", ""
    top = max(bits)
    if braille:
        return chr(BRAILLE | reduce(or_, bits.values())), COLOURS[top % len(COLOURS)]
    return (series[top].letter if len(bits) == 1 else SEVERAL), ""


def comparison_lines(
    comparison: RunComparison, axis: str, *, width: int, colours: bool
) -> Iterator[str | Text | TextTable]:
    """Human-readable lines of the comparison."""
    from rich.text import Text

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
        yield _table([("recipe", *letters), *rows])
        if comparison.same_experiment:
            yield "the same experiment, executed otherwise"
    else:
        yield "the recipes are the same"
    for title, curves in (
        ("training loss", [run.train for run in runs]),
        ("validation loss", [run.valid for run in runs]),
    ):
        yield from _curves(title, curves, axis, width=width, braille=colours)
    yield ""
    yield _table([("figure", *letters), *_figures(runs)])


def default_axis(comparison: RunComparison) -> str:
    """Tokens if the runs have different numbers of tokens per step."""
    keys = ("train.global_batch_size", "model.seq_length")
    return "tokens" if any(key in comparison.differences for key in keys) else "step"


def _curves(title: str, curves: Sequence[Curve], axis: str, *, width: int, braille: bool) -> Iterator[str | Text]:

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


def _figures(runs: Sequence[ComparedRun]) -> Iterator[tuple[str, ...]]:
    """Rows of final figures, without those that no run has."""
    from llmrecipes.tracking.energy import energy_rows
    from llmrecipes.workflow.compare import figure_rows

    yield from figure_rows(runs, "-")
    memory = [run.figures["memory_bytes"] for run in runs]
    if any(memory):
        yield ("memory, peak", *("-" if not size else f"{size / GIB:.1f} GiB" for size in memory))
    yield from energy_rows([run.energy for run in runs], [run.figures["tokens"] or 0 for run in runs], "-")


def _value(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 1]}…"


def _table(rows: Sequence[Sequence[str]]) -> TextTable:
    return TextTable(rows, right=range(1, len(rows[0])))


def scaling_lines(scaling: ScalingLaw) -> Iterator[str | TextTable]:
    """Human-readable lines of a fit."""
    from llmrecipes.workflow.scaling import COEFFICIENTS

    fit, selection = scaling.fit, scaling.selection
    law = fit.law
    rows: list[tuple[str, ...]] = [("run", "parameters", "tokens", "loss", "fitted")]
    for name, point in zip(selection.names, selection.points, strict=True):
        fitted = law.loss(point.parameters, point.tokens)
        rows.append((name, number(point.parameters), number(point.tokens), f"{point.loss:.4f}", f"{fitted:.4f}"))
    yield TextTable(rows)
    for name, reason in selection.left_out:
        yield f"left out: {name}: {reason}"
    yield ""
    yield f"L = E + A/N^alpha + B/D^beta over {len(selection.points)} runs, residual {fit.residual:.2%}"
    rows = [("", "fit", "90 % interval")]
    for coefficient in COEFFICIENTS:
        low, high = fit.interval(coefficient)
        rows.append((coefficient, f"{getattr(law, coefficient):.4g}", f"{low:.4g} to {high:.4g}"))
    yield TextTable(rows)
    if not fit.has_offset:
        yield "E is 0: the loss of these runs does not level off yet, so do not extrapolate this law"
    for coefficient in COEFFICIENTS:
        if share := fit.at_bound(coefficient):
            yield f"{coefficient}: not determined in {share:.0%} of the bootstrap samples (at a bound of the fit)"
    yield ""
    yield f"compute-optimal for C = 6ND FLOPs: N grows with C^{law.parameter_exponent:.2f}, D with the rest"
    rows = [("FLOPs", "parameters", "90 % interval", "tokens", "90 % interval", "loss", "90 % interval")]
    for optimum in scaling.optima:
        best = optimum.best
        low, high = optimum.loss
        rows.append(
            (
                f"{optimum.flops:.2e}",
                number(best.parameters),
                _range(optimum.parameters),
                number(best.tokens),
                _range(optimum.tokens),
                f"{best.loss:.3f}",
                f"{low:.3f} to {high:.3f}",
            )
        )
    yield TextTable(rows)


def _range(interval: Interval) -> str:
    low, high = interval
    return f"{number(low)} to {number(high)}"
