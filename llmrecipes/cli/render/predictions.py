"""Output of `plan` in its modes that compare: `--calibration`, `--what-if`, `--scaling-curve`."""

from __future__ import annotations

from collections.abc import Iterator

from llmrecipes.cli.render.table import aligned
from llmrecipes.plan.speed.calibration import Fit, Report
from llmrecipes.units import GIB


def calibration_lines(made: Report) -> Iterator[str]:
    """Errors of runs, bias by device and layout, and factors."""
    head = ("run", "device", "layout", "predicted", "measured", "error", "memory", "measured", "error")
    rows = [
        (
            run.name, run.device, run.layout, f"{run.predicted:.4g} s", f"{run.measured:.4g} s", f"{run.error:+.1%}",
            f"{run.predicted_memory / GIB:.2f} GiB", f"{run.measured_memory / GIB:.2f} GiB", f"{run.memory_error:+.1%}",
        )
        for run in made.runs
    ]  # fmt: skip
    yield from aligned([head, *rows], right=range(3, 9))
    yield ""
    bias = [(b.device, b.layout, f"{b.runs}", f"{b.step:+.1%}", f"{b.memory:+.1%}") for b in made.bias]
    yield from aligned([("device", "layout", "runs", "step", "memory"), *bias], right=(2, 3, 4))
    yield ""
    for fit in made.fits:
        yield from _factors(fit)
    for name, reason in made.left_out:
        yield f"left out: {name}: {reason}"


def _factors(fit: Fit) -> Iterator[str]:
    by = fit.calibration
    yield (
        f"{fit.device}: kernels take {by.compute:.3f} of their predicted time, communication {by.communication:.3f} "
        f"({by.runs} runs); median error {fit.median_error:.1%}, with these factors {fit.corrected_error:.1%}"
    )
    if fit.unknown:
        yield f"{fit.device}: not known: {fit.unknown}"
