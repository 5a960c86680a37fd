"""Progress output: a live bar on a terminal, plain lines anywhere else."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column

from llmrecipes.console import duration, number
from llmrecipes.tracking.events import (
    ENDED_EARLY,
    ENERGY,
    MEASURED,
    STARTED,
    EvalMetrics,
    Note,
    RunStart,
    RunStatus,
    Sink,
    StepMetrics,
)
from llmrecipes.units import GIB

SECONDS_BETWEEN_LINES = 1.0
SECONDS_BEFORE_COUNTING = 2.0
SECONDS_BETWEEN_COUNTS = 10.0
STEPS_FOR_TIME_LEFT = 50
WIDE = 120
"""Terminal columns from which on all values of a step are shown."""
MOST_SETS = 8
"""Held-out sets whose losses are shown."""
SHORT = ("loss", "speed", "skipped", "left")
"""Values shown on a narrower terminal."""


class ProgressSink(Sink):
    """Shows step, loss, learning rate, gradient norm, tokens/s, MFU, memory and time left.

    On a terminal a bar is updated at every step (drawn four times a second at most). Elsewhere (a file, a pipe, Slurm's
    log) it prints plain lines: every `log_interval`-th step, but at most one per second; the first and the last step,
    evaluations and notes always.

    Args:
        messages: lines for the user from other threads; they are printed between two steps.
    """

    def __init__(
        self,
        console: Console,
        *,
        resumed_step: int,
        total_steps: int,
        log_interval: int,
        messages: SimpleQueue[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console
        self._total = total_steps
        self._first = resumed_step + 1
        self._log_interval = log_interval
        self._messages: SimpleQueue[str] = SimpleQueue() if messages is None else messages
        self._clock = clock
        self._printed = float("-inf")
        self._seconds: deque[float] = deque(maxlen=STEPS_FOR_TIME_LEFT)
        self._live: Progress | None = None
        if console.is_terminal:
            # Folded on a narrow terminal: otherwise the time left would be cut off.
            text = TextColumn("{task.description}", table_column=Column(overflow="fold"))
            bar = BarColumn(bar_width=min(max(console.width - 70, 10), 30))
            self._live = Progress(bar, MofNCompleteColumn(), text, console=console, refresh_per_second=4)
            self._task = self._live.add_task("first step ...", total=total_steps, completed=resumed_step)
            self._live.start()
        self._print_messages()

    @classmethod
    def of(cls, start: RunStart) -> Self:
        return cls(
            start.console,
            resumed_step=start.resumed_step,
            total_steps=start.total_steps,
            log_interval=start.recipe.train.log_interval,
            messages=start.messages,
        )

    def step(self, metrics: StepMetrics) -> None:
        self._print_messages()
        self._seconds.append(metrics.step_seconds)
        usual = statistics.median(self._seconds) if len(self._seconds) > 1 else None
        parts = step_parts(metrics, self._total, usual)
        if self._live is not None:
            shown = parts.values() if self._console.width >= WIDE else [parts[name] for name in SHORT if name in parts]
            self._live.update(self._task, completed=metrics.step, description=escape("  ".join(shown)))
            return
        if metrics.step in (self._first, self._total) or (
            metrics.step % self._log_interval == 0 and self._clock() - self._printed >= SECONDS_BETWEEN_LINES
        ):
            self._printed = self._clock()
            self._print(f"step {metrics.step}/{self._total}  {'  '.join(parts.values())}")

    def eval(self, metrics: EvalMetrics) -> None:
        self._print(eval_line(metrics, self._total))

    def note(self, note: Note) -> None:
        if note.event in (ENDED_EARLY, ENERGY, MEASURED, STARTED):  # the summary and the lines above have them
            return
        self._print(note_line(note, self._total), style="bold red" if note.alarm else None)

    def close(self, status: RunStatus) -> None:
        self._print_messages()
        if self._live is not None:
            self._live.stop()

    def _print_messages(self) -> None:
        while not self._messages.empty():  # this is the only reader
            self._print(self._messages.get())

    def _print(self, text: str, style: str | None = None) -> None:
        if self._live is not None:
            self._console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)
        else:  # not through rich, which exits when the reader of a pipe is gone
            print(text, file=self._console.file, flush=True)


class Counted:
    """Shows how much of some work is done, its rate and the time left: a bar on a terminal, else a line now and then.

    Work of less than two seconds shows nothing.

    Args:
        console: None: standard error.
    """

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console or Console(stderr=True)
        self._clock = clock
        self._name = ""
        self._total = 0
        self._done = 0
        self._begun = self._printed = 0.0
        self._live: Progress | None = None

    def begin(self, name: str, total: int | None) -> None:
        """Start a new task of `total` items; None if the number is unknown."""
        self.close()
        self._name = name
        self._total = total or 0
        self._done = 0
        self._begun = self._printed = self._clock()

    def add(self, items: int) -> None:
        """Count finished items."""
        self._done += items
        now = self._clock()
        if now - self._begun < SECONDS_BEFORE_COUNTING:
            return
        if self._console.is_terminal:
            self._draw(now)
        elif now - self._printed >= SECONDS_BETWEEN_COUNTS or self._printed == self._begun:
            self._printed = now
            print(f"{self._name}  {self._text(now)}", file=self._console.file, flush=True)

    def close(self) -> None:
        """Remove the bar."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _draw(self, now: float) -> None:
        text_now = escape(f"{self._name}  {self._text(now)}")
        if self._live is None:
            text = TextColumn("{task.description}")
            self._live = Progress(
                text, BarColumn(30), console=self._console, transient=True, refresh_per_second=4,
                redirect_stdout=False, redirect_stderr=False,
            )  # fmt: skip
            self._task = self._live.add_task(text_now, total=self._total or None)
            self._live.start()
        self._live.update(self._task, completed=self._done, description=text_now)

    def _text(self, now: float) -> str:
        rate = self._done / max(now - self._begun, 1e-9)
        speed = f"{number(rate) if rate >= 1000 else f'{rate:.3g}'}/s"
        if not self._total:
            return f"{self._done:,} done  {speed}"
        left = (now - self._begun) * max(self._total - self._done, 0) / max(self._done, 1)
        return f"{self._done:,}/{self._total:,}  {speed}  left {duration(left)}"


def step_parts(metrics: StepMetrics, total: int, seconds_a_step: float | None) -> dict[str, str]:
    """One step as text parts by name: `loss 5.1234`, `lr 3.0e-04`, ..., `left 3m12s`, in this order.

    Args:
        seconds_a_step: None: not known, as after the first step of a start, which compiles and connects.
    """
    parts = {
        "loss": f"loss {metrics.loss:.4f}",
        "lr": f"lr {metrics.lr:.1e}",
        "grad": f"grad {metrics.grad_norm:.2f}",
        "speed": f"{metrics.tokens_per_second:,.0f} tok/s",
    }
    if metrics.mfu is not None:
        causal = f" (causal {metrics.mfu_causal:.1%})" if metrics.mfu_causal is not None else ""
        parts["mfu"] = f"MFU {metrics.mfu:.1%}{causal}"
    if metrics.memory_bytes:
        parts["memory"] = f"mem {metrics.memory_bytes / GIB:.1f} GiB"
    if metrics.skipped:
        parts["skipped"] = f"skipped: {'fp16 overflow' if math.isnan(metrics.grad_norm) else 'spike'}"
    if seconds_a_step is None and metrics.step < total:
        return parts
    return parts | {"left": f"left {duration((total - metrics.step) * (seconds_a_step or 0.0))}"}


def eval_line(metrics: EvalMetrics, total: int) -> str:
    """One evaluation as text."""
    bits = "" if metrics.valid_bits_per_byte is None else f"  {metrics.valid_bits_per_byte:.4f} bits/byte"
    losses = list((metrics.valid_source_loss or {}).items())
    sets = "".join(f"  {label} {loss:.4f}" for label, loss in losses[:MOST_SETS])
    sets += f"  and {len(losses) - MOST_SETS} more" if len(losses) > MOST_SETS else ""
    pairs = "".join(f"  {name} {value:.3f}" for name, value in (metrics.valid_rewards or {}).items())
    shown = f"valid loss {metrics.valid_loss:.4f}{bits}{sets}{pairs}"
    return f"eval {metrics.step}/{total}  {shown}  in {duration(metrics.eval_seconds)}"


def note_line(note: Note, total: int) -> str:
    """One note as text; alarms are marked. Details that the note's own text says are not repeated."""
    alarm = "ALARM  " if note.alarm else ""
    return f"note {note.step}/{total}  {alarm}{note.event.replace('_', ' ')}  {_details(note)}".rstrip()


def _details(note: Note) -> str:
    if "text" in note.details:
        return str(note.details["text"])
    return "  ".join(f"{key} {_value(value)}" for key, value in note.details.items())


def _value(value: Any) -> str:
    if isinstance(value, str):
        return value
    return f"{value:.4g}" if isinstance(value, float) else json.dumps(value, default=str)
