"""A verification for people: a table with a scale of the differences, the verdict, and a drawing."""

from __future__ import annotations

import math

from rich.console import Group
from rich.table import Table
from rich.text import Text

from llmrecipes.verify.result import PARAMETERS, Result
from llmrecipes.verify.scale import QUANTITIES, relative

WORDS = {"loss": "loss", "grad_norm": "gradient norm"}
HEADS = {"loss": "loss", "grad_norm": "grad norm"}
"""Short, so that the table fits into 80 columns."""
SMALLEST, LARGEST, CELLS = -8, 0, 17
"""The scale goes over powers of ten, in steps of half a power."""


def report(result: Result) -> Group:
    """Table and verdict."""
    title = f"{result.recipe}: {layout_words(result)}"
    table = Table(box=None, padding=(0, 1, 0, 0), title=title, title_justify="left")
    table.add_column("\nstep", justify="right", no_wrap=True)
    for quantity in QUANTITIES:
        for column in (f"{HEADS[quantity]}\none rank", "\nlayout", "\napart"):
            table.add_column(column, justify="right", no_wrap=True)
    table.add_column(f"1e{SMALLEST} to 1, and\n┊ the tolerance", no_wrap=True)
    for number, (one, layout) in enumerate(result.steps, start=1):
        apart = [relative(getattr(layout, quantity), getattr(one, quantity)) for quantity in QUANTITIES]
        table.add_row(
            str(number),
            *(f"{one.loss:.6f}", f"{layout.loss:.6f}", _power(apart[0])),
            *(f"{one.grad_norm:.6f}", f"{layout.grad_norm:.6f}", _power(apart[1])),
            scale(max(apart), result.tolerance),
        )
    return Group(table, Text(verdict(result)))


def verdict(result: Result) -> str:
    """Whether the layout is the same training, or the first thing that differs."""
    worst = ", ".join(f"{WORDS[quantity]} {_power(result.max_relative(quantity))}" for quantity in QUANTITIES)
    worst += f", weights after step {len(result.steps)} {_power(result.max_rel_param)}"
    first = result.first_difference
    if first is None:
        return f"\nSAME training within {result.tolerance:g}. Largest relative differences: {worst}"
    lines = [f"\nANOTHER training: beyond {result.tolerance:g}. Largest relative differences: {worst}"]
    if first.quantity == PARAMETERS:
        what = f"weights after step {first.step}"
    else:
        what = f"{WORDS[first.quantity]} of step {first.step}: {first.layout:.9g}, not {first.reference:.9g}"
    lines.append(f"  first difference  {what}")
    if first.tensor is None:
        lines.append("  first tensor      none: all weights and gradients of that step agree")
    else:
        where = "" if first.tensor.layer is None else f" (layer {first.tensor.layer})"
        lines.append(f"  first tensor      {first.tensor.name}{where}, by {_power(first.tensor.relative)}")
        lines.append(f"  {first.tensor.kind:16}  {first.tensor.differing} of {first.tensor.tensors} differ")
    return "\n".join(lines)


def layout_words(result: Result) -> str:
    """The degrees above one, and the ranks: `TP2 PP2 DP2, 8 ranks`."""
    layout = result.layout.layout
    short = {"tensor": "TP", "pipeline": "PP", "virtual_pipeline": "VPP", "context": "CP", "expert": "EP"}
    names = {f"{name}_model_parallel_size": label for name, label in short.items()}
    names |= {"context_parallel_size": "CP", "data_parallel_size": "DP"}
    degrees = [f"{label}{layout[name]}" for name, label in names.items() if layout.get(name, 1) > 1]
    if layout.get("sequence_parallel"):
        degrees.append("SP")
    return f"{' '.join(degrees) or 'one rank'}, {layout['world_size']} ranks"


def scale(value: float, tolerance: float) -> str:
    """A mark on a logarithmic line, with the tolerance on it."""
    cells = ["·"] * CELLS
    cells[_cell(tolerance)] = "┊"
    cells[_cell(value)] = "●"
    return "".join(cells)


def _cell(value: float) -> int:
    if value <= 0:
        return 0
    share = (min(math.log10(value), LARGEST) - SMALLEST) / (LARGEST - SMALLEST)
    return round(max(0.0, share) * (CELLS - 1))


def _power(value: float) -> str:
    return f"{value:.1e}" if value else "0"
