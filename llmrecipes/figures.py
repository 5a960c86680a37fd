"""Figures as SVG. matplotlib takes a second to import, so only what draws imports it."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def svg(figure: Figure) -> str:
    """The figure as SVG: the same text for the same figure, without date and random ids, and with text as text."""
    from matplotlib import rc_context

    out = io.StringIO()
    with rc_context({"svg.hashsalt": "llmrecipes", "svg.fonttype": "none"}):
        figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()
