"""The figure of a fit: loss over tokens for each size, and the compute-optimal size over budgets."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from llmrecipes.console import number
from llmrecipes.errors import UserError
from llmrecipes.scaling.fit import Fit

FORMATS = (".svg", ".png", ".pdf")
SAMPLES = 60
MOST_ROWS = 18
"""Of a column of the legend."""
BEYOND = 100.0
"""The budgets of the figure end at this multiple of the largest run's."""


def require_file(file: Path) -> None:
    """Refuse a file that cannot become a figure, before anything is computed.

    Raises:
        UserError: what is wrong with it.
    """
    if file.suffix.lower() not in FORMATS:
        raise UserError(str(file), where="--plot", rule=f"the file name must end with {', '.join(FORMATS)}")
    if not file.absolute().parent.is_dir():
        raise UserError(f"{file.parent} is not a directory", where="--plot", fix="create it first")


def draw(fit: Fit, file: Path) -> None:
    """Write the figure.

    Raises:
        UserError: the file cannot be written.
    """
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_losses(left, fit)
    _draw_optimum(right, fit)
    try:
        figure.savefig(file, metadata={"Date": None} if file.suffix.lower() == ".svg" else None)
    except OSError as error:
        raise UserError(f"{error.strerror}", where=str(file), rule="--plot needs a writable path") from error


def _draw_losses(axes: Axes, fit: Fit) -> None:
    """Losses of the runs over their tokens, and the law's at each of their sizes."""
    sizes = sorted({point.parameters for point in fit.points})
    tokens = np.geomspace(min(p.tokens for p in fit.points), max(p.tokens for p in fit.points), SAMPLES)
    for place, size in enumerate(sizes):
        colour = colormaps["viridis"](0.9 * place / max(1, len(sizes) - 1))  # its end is too light for a line
        axes.plot(tokens, [fit.law.loss(size, token) for token in tokens], color=colour, linewidth=1)
        of_size = [point for point in fit.points if point.parameters == size]
        axes.plot(
            [p.tokens for p in of_size], [p.loss for p in of_size], "o", color=colour, label=f"{number(int(size))}"
        )
    axes.set(xscale="log", xlabel="training tokens D", ylabel="validation loss [nats/token]", title="runs and fit")
    columns = -(-len(sizes) // MOST_ROWS)
    axes.legend(title="parameters N", fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.02), ncols=columns)


def _draw_optimum(axes: Axes, fit: Fit) -> None:
    """The best size for each budget, and the sizes of the runs."""
    budgets = np.geomspace(min(p.flops for p in fit.points), BEYOND * max(p.flops for p in fit.points), SAMPLES)
    low, high = zip(*(fit.optimum_interval(budget, "parameters") for budget in budgets), strict=True)
    axes.fill_between(budgets, low, high, alpha=0.25, linewidth=0, label="90 % interval")
    axes.plot(budgets, [fit.law.optimum(budget).parameters for budget in budgets], label="optimum")
    axes.plot([p.flops for p in fit.points], [p.parameters for p in fit.points], "k.", label="runs")
    axes.set(
        xscale="log", yscale="log", xlabel="training FLOPs C = 6ND", ylabel="parameters N", title="compute-optimal size"
    )
    axes.legend(fontsize="small")
