"""A verification as text: a table with a scale of the differences, and the verdict."""

from __future__ import annotations

import math

from rich.console import Group
from rich.table import Table
from rich.text import Text

from llmrecipes import figures
from llmrecipes.recipe.variants.proxy import SHORT, with_zero
from llmrecipes.verify.result import PARAMETERS, QUANTITIES, REPLICAS, VerifyResult, relative

WORDS = {"loss": "loss", "grad_norm": "gradient norm"}
HEADS = {"loss": "loss", "grad_norm": "grad norm"}
"""Short, so that the table fits into 80 columns."""
SMALLEST, LARGEST, CELLS = -8, 0, 17
"""The scale covers powers of ten, in steps of half a power."""


def report(result: VerifyResult) -> Group:
    """Table and verdict."""
    title = f"{result.recipe}: {layout_words(result)}"
    table = Table(box=None, padding=(0, 1, 0, 0), title=title, title_justify="left")
    table.add_column("\nstep", justify="right", no_wrap=True)
    for quantity in QUANTITIES:
        for column in (f"{HEADS[quantity]}\none rank", "\nlayout", "\nrelative"):
            table.add_column(column, justify="right", no_wrap=True)
    table.add_column(f"1e{SMALLEST} to 1, and\n┊ the tolerance", no_wrap=True)
    for number, (one, layout) in enumerate(result.steps, start=1):
        differences = [relative(getattr(layout, quantity), getattr(one, quantity)) for quantity in QUANTITIES]
        table.add_row(
            str(number),
            *(f"{one.loss:.6f}", f"{layout.loss:.6f}", _power(differences[0])),
            *(f"{one.grad_norm:.6f}", f"{layout.grad_norm:.6f}", _power(differences[1])),
            scale(max(differences), result.tolerance),
        )
    return Group(table, *_invariants(result), Text(verdict(result)))


def _invariants(result: VerifyResult) -> list[Table]:
    table = Table(box=None, padding=(0, 1, 0, 0), title="\none process, computed in two ways", title_justify="left")
    for column in ("", "relative", ""):
        table.add_column(column, justify="right" if column else "left")
    for row in result.invariants:
        if row.difference is None:
            table.add_row(row.name, "-", row.reason)
        else:
            table.add_row(row.name, _power(row.difference), scale(row.difference, result.tolerance))
    return [table] if result.invariants else []


def verdict(result: VerifyResult) -> str:
    """Whether the layout computes the same, or the first difference; and what did not run."""
    worst = ", ".join(f"{WORDS[quantity]} {_power(result.max_relative(quantity))}" for quantity in QUANTITIES)
    worst += f", weights after step {len(result.steps)} {_power(result.max_rel_param)}"
    if result.ok:
        within = f"within {result.tolerance:g}, replicas bit for bit"
        lines = [f"\nMATCH on {degrees(result)}: {within}. Largest relative differences: {worst}"]
    elif result.first_difference is None:
        lines = [f"\nMISMATCH in one process: beyond {result.tolerance:g}. Layout: {worst}", *_broken(result)]
    else:
        beyond = "" if _replicas_alone(result) else f": beyond {result.tolerance:g}"
        lines = [f"\nMISMATCH{beyond}. Largest relative differences: {worst}", *_first(result)]
    rows = result.scaled.lines("not verified")
    rows += [("" if number else "not covered", text) for number, text in enumerate(result.not_covered)]
    return "\n".join([*lines, *_lines(*rows)])


def layout_words(result: VerifyResult) -> str:
    """The degrees above one, and the number of ranks: `TP2 PP2 DP2 SP, 8 ranks`."""
    return f"{degrees(result)}, {result.layout.layout['world_size']} ranks"


def degrees(result: VerifyResult) -> str:
    """The degrees above one that ran, and the ZeRO stage: `TP2 PP2 DP2 SP`, `DP2, ZeRO 3`."""
    layout = result.layout.layout
    kinds = [name for name in SHORT if name in result.scaled.asked or name == "data_parallel_size"]
    words = [f"{SHORT[name]}{layout[name]}" for name in kinds if layout[name] > 1]
    if layout["sequence_parallel"]:
        words.append("SP")
    return with_zero(" ".join(words) or "one rank", result.zero)


def _first(result: VerifyResult) -> list[str]:
    """The first difference, and replicas that differ."""
    first, replicas = result.first_difference, result.replicas
    lines: list[tuple[str, str]] = []
    if first is not None and first.quantity != REPLICAS:
        if first.quantity == PARAMETERS:
            what = f"weights after step {first.step}"
        else:
            what = f"{WORDS[first.quantity]} of step {first.step}: {first.layout:.9g}, not {first.reference:.9g}"
        lines.append(("first difference", what))
        if first.tensor is None:
            lines.append(("first tensor", "none: all weights and gradients of that step agree"))
        else:
            name = _tensor(first.tensor.name, first.tensor.layer)
            lines.append(("first tensor", f"{name}, by {_power(first.tensor.relative)}"))
            lines.append((first.tensor.kind, f"{first.tensor.differing} of {first.tensor.tensors} differ"))
    if replicas is not None:
        when = f"after step {replicas.step}" if replicas.step else "from the start"
        where = f"rank {replicas.rank} differs from rank {replicas.main_rank} {when}"
        lines.append(("replicas", f"{_tensor(replicas.tensor, replicas.layer)}: {where}"))
        lines.append(("", f"{replicas.differing} of {replicas.copies} copies differ"))
    return _lines(*lines)


def _broken(result: VerifyResult) -> list[str]:
    """Invariants beyond the tolerance."""
    found = [(each.name, each.weight or "loss", _power(each.difference or 0.0)) for each in result.broken]
    return _lines(*(("one process", f"{name}: {what}, by {size}") for name, what, size in found))


def _replicas_alone(result: VerifyResult) -> bool:
    return result.first_difference is not None and result.first_difference.quantity == REPLICAS


def _tensor(name: str, layer: int | None) -> str:
    return name if layer is None else f"{name} (layer {layer})"


def _lines(*rows: tuple[str, str]) -> list[str]:
    return [f"  {heading:16}  {text}" for heading, text in rows]


def scale(value: float, tolerance: float) -> str:
    """A mark on a logarithmic scale, with the tolerance."""
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


LEAST, MOST = 1e-8, 1.0
"""Range of the relative differences in the picture."""


def svg(result: VerifyResult, title: str) -> str:
    """Two panels over the steps: losses of both; relative differences with the tolerance."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    steps = range(1, len(result.steps) + 1)
    figure = Figure(figsize=(8, 6), layout="constrained")
    figure.suptitle(title, parse_math=False)
    upper, lower = figure.subplots(2, 1, sharex=True)
    upper.plot(steps, [one.loss for one, _ in result.steps], linewidth=6, label="one process", gid="loss-one")
    upper.plot(steps, [layout.loss for _, layout in result.steps], linewidth=2, label="this layout", gid="loss-layout")
    upper.set(ylabel="loss")
    for quantity in QUANTITIES:
        differences = (relative(getattr(layout, quantity), getattr(one, quantity)) for one, layout in result.steps)
        shown = [value if math.isnan(value) else min(max(value, LEAST), MOST) for value in differences]
        lower.plot(steps, shown, label=WORDS[quantity], gid=f"relative-{quantity}")
    lower.axhline(result.tolerance, color="tab:red", linewidth=1, label="tolerance")
    lower.set(yscale="log", ylim=(LEAST, MOST), xlabel="step", ylabel="relative difference")
    lower.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (upper, lower):
        axes.legend(fontsize="small")
    return figures.svg(figure)
