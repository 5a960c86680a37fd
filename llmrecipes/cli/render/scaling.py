"""Output of `scaling`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from llmrecipes.cli.render.table import aligned
from llmrecipes.console import number
from llmrecipes.workflow.scaling import COEFFICIENTS

if TYPE_CHECKING:
    from llmrecipes.workflow.scaling import Interval, ScalingLaw


def lines(found: ScalingLaw) -> Iterator[str]:
    """Human-readable lines of a fit."""
    fit, selection = found.fit, found.selection
    law = fit.law
    rows: list[tuple[str, ...]] = [("run", "parameters", "tokens", "loss", "fitted")]
    for name, point in zip(selection.names, selection.points, strict=True):
        fitted = law.loss(point.parameters, point.tokens)
        rows.append((name, number(point.parameters), number(point.tokens), f"{point.loss:.4f}", f"{fitted:.4f}"))
    yield from aligned(rows)
    for name, reason in selection.left_out:
        yield f"left out: {name}: {reason}"
    yield ""
    yield f"L = E + A/N^alpha + B/D^beta over {len(selection.points)} runs, residual {fit.residual:.2%}"
    rows = [("", "fit", "90 % interval")]
    for coefficient in COEFFICIENTS:
        low, high = fit.interval(coefficient)
        rows.append((coefficient, f"{getattr(law, coefficient):.4g}", f"{low:.4g} to {high:.4g}"))
    yield from aligned(rows)
    if not fit.has_offset:
        yield "E is 0: the loss of these runs does not level off yet, and the law is not to be extrapolated"
    for coefficient in COEFFICIENTS:
        if share := fit.at_bound(coefficient):
            yield f"{coefficient}: {share:.0%} of the bootstrap samples do not determine it (a bound of the fit)"
    yield ""
    yield f"compute-optimal for C = 6ND FLOPs: N grows with C^{law.parameter_exponent:.2f}, D with the rest"
    rows = [("FLOPs", "parameters", "90 % interval", "tokens", "90 % interval", "loss", "90 % interval")]
    for optimum in found.optima:
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
    yield from aligned(rows)


def _range(interval: Interval) -> str:
    low, high = interval
    return f"{number(low)} to {number(high)}"
