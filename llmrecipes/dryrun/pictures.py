"""Pictures of a dry run, as SVG: memory over the operations of a step, and the order of passes."""

from __future__ import annotations

from collections.abc import Sequence

from llmrecipes import figures
from llmrecipes.dryrun.dry_run_spec import PARTS, RankReport
from llmrecipes.units import GIB

COLOURS = {
    "weights": "tab:blue",
    "gradients": "tab:green",
    "optimizer": "tab:purple",
    "activations": "tab:orange",
    "communication": "tab:cyan",
    "temporary": "tab:red",
}
PASS_COLOURS = {"forward": "#9ecae1", "backward": "#fdae6b"}
PASS_INCHES, WIDEST_INCHES = 0.22, 32.0
LEAST_FOR_TEXT = 0.16
"""Inches of a box that its label fits into."""


def memory_svg(report: RankReport, title: str) -> str:
    """Stacked areas of the parts over the operations of a step, with the peak marked."""
    from matplotlib.figure import Figure

    when = [moment.when for moment in report.timeline]
    totals = [sum(moment.parts.values()) for moment in report.timeline]
    figure = Figure(figsize=(10, 4), layout="constrained")
    axes = figure.subplots()
    areas = axes.stackplot(
        when,
        *([moment.parts.get(part, 0) / GIB for moment in report.timeline] for part in PARTS),
        labels=PARTS,
        colors=[COLOURS[part] for part in PARTS],
    )
    for part, area in zip(PARTS, areas, strict=True):
        area.set_gid(part)
    axes.axvline(when[totals.index(max(totals))], color="black", linewidth=1, linestyle=":")
    axes.set_title(title, parse_math=False)
    axes.set(xlabel=f"{report.operations:,} operations", ylabel="GiB", ylim=(0, None))
    axes.margins(x=0)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=len(PARTS), frameon=False, fontsize="small")
    return figures.svg(figure)


def passes_svg(reports: Sequence[RankReport], title: str) -> str:
    """A row for each rank with a box for each pass: its micro-batch, and the chunk if there are several."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    most = max(len(report.passes) for report in reports)
    box = min(PASS_INCHES, WIDEST_INCHES / most)
    figure = Figure(figsize=(max(5.0, 1.0 + most * box), 1.0 + 0.4 * len(reports)), layout="constrained")
    axes = figure.subplots()
    for row, report in enumerate(reports):
        chunks = len({one.chunk for one in report.passes}) > 1
        places = range(len(report.passes))
        axes.broken_barh(
            [(place, 0.95) for place in places],
            (row - 0.35, 0.7),
            facecolors=[PASS_COLOURS[one.kind] for one in report.passes],
            gid=f"rank-{report.rank}",
        )
        for place, one in zip(places, report.passes, strict=True):
            if box >= LEAST_FOR_TEXT:
                label = f"{one.micro_batch}.{one.chunk}" if chunks else f"{one.micro_batch}"
                axes.text(place + 0.475, row, label, ha="center", va="center", fontsize=6)
    axes.set_title(title, parse_math=False)
    axes.set(xlim=(0, most), ylim=(len(reports) - 0.5, -0.5), xticks=[])
    axes.set_yticks(range(len(reports)), [f"stage {report.stage}" for report in reports])
    axes.legend(
        handles=[Patch(color=colour, label=kind) for kind, colour in PASS_COLOURS.items()],
        loc="upper left",
        bbox_to_anchor=(0, 0),
        ncols=2,
        frameon=False,
        fontsize="small",
    )
    axes.spines[:].set_visible(False)
    return figures.svg(figure)
