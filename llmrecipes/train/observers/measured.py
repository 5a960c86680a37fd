"""Step time and memory of a start beside those that were predicted before it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

import torch
import torch.distributed as dist

from llmrecipes.console import console
from llmrecipes.tracking.events import MEASURED, Note
from llmrecipes.train.observers.base import Observer, StepDone
from llmrecipes.units import GIB

PREDICTED = ("step_seconds", "compute_seconds", "communication_seconds", "memory_bytes")
"""Names of `Forecast.record` that are compared; a machine without coefficients has no forecast."""


class Measured(Observer):
    """The note `measured` and its line: median step and highest memory."""

    def begin(self) -> None:
        """Forget the steps of before."""
        self._steady: list[float] = []

    rewind = begin

    def after_step(self, done: StepDone) -> None:
        """Keep the time of a usual step."""
        if done.steady:
            self._steady.append(done.seconds)

    def end(self) -> None:
        """Compare with what was predicted; a collective of all ranks."""
        loop = self.loop
        predicted = self.joined.spec.predicted
        platform = loop.engine.platform
        # Of the rank with the highest peak.
        most = torch.tensor(platform.peak_memory(), dtype=torch.int64, device=platform.device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        self._values: dict[str, float] = {}
        if not self._steady:
            return
        self._values = {
            "measured/step_seconds": statistics.median(self._steady),
            "measured/steps": float(len(self._steady)),
            "measured/memory_bytes": float(most.item()),
        }
        if predicted is not None:
            span = loop.plan.span
            of_stage = predicted if span is None else predicted["stages"][span.number]
            self._values |= {f"predicted/{name}": float(of_stage[name]) for name in PREDICTED}
        loop.tracker.note(Note(step=loop.progress.step, event=MEASURED, details=self._values))

    def lines(self) -> None:
        """Print the line."""
        if self._values:
            console().print(line(self._values), markup=False)


def line(values: Mapping[str, float]) -> str:
    """One line for the summary."""
    step = values["measured/step_seconds"]
    memory = values["measured/memory_bytes"]
    text = f"measured: {step:.4g} s a step (median of {values['measured/steps']:.0f})"
    room = f"at most {memory / GIB:.2f} GiB a rank"
    if "predicted/step_seconds" not in values:
        return f"{text}, {room}"
    time = values["predicted/step_seconds"]
    held = values["predicted/memory_bytes"]
    return (
        f"{text}, predicted {time:.4g} s ({time / step - 1:+.0%}); "
        f"{room}, predicted {held / GIB:.2f} GiB ({held / memory - 1:+.0%})"
    )
