"""Output of `coordinates`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from llmrecipes.cli.render.table import aligned

if TYPE_CHECKING:
    from llmrecipes.verify.coordinates import Coordinates


def lines(found: Coordinates, most: float) -> Iterator[str]:
    """Human-readable lines: activations in the first and the last step, and how they grow with the width."""
    steps = sorted({0, found.steps - 1})
    for step in steps:
        rows = [("hidden_size", *map(str, found.widths), "growth")]
        rows += [
            (name, *(f"{value:.4g}" for value in values[step]), f"{found.growth(name, step):+.2f}")
            for name, values in found.values.items()
        ]
        yield f"mean absolute activation in step {step + 1}, and its growth (exponent of the width)"
        yield from aligned(rows, right=range(1, len(rows[0])))
        yield ""
    worst = found.growth(found.worst)
    if found.ok:
        yield f"flat: after {found.steps} steps nothing grows faster than width^{most:g} ({found.worst}: {worst:+.2f})"
    else:
        yield f"growing: {found.worst} grows with width^{worst:.2f}, above {most:g}"
