"""Progress on the terminal: a live line where there is one, plain lines anywhere else."""

from __future__ import annotations

import json
import statistics
import time
from collections import deque
from collections.abc import Callable

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, TaskProgressColumn, TextColumn
from rich.table import Column

from llmrecipes.console import duration
from llmrecipes.tracking.events import EvalMetrics, Note, RunStatus, StepMetrics

SECONDS_BETWEEN_LINES = 1.0
STEPS_FOR_TIME_LEFT = 50


class ProgressSink:
    """Shows step, loss, learning rate, gradient norm, tokens/s, MFU, memory and time left.

    On a terminal one live line is redrawn. Elsewhere (a file, a pipe, Slurm's log) it is plain lines: every
    `log_interval`-th step, but at most one a second; the first and the last step, evaluations and notes always.
    """

    def __init__(
        self,
        console: Console,
        *,
        resumed_step: int,
        total_steps: int,
        log_interval: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console
        self._total = total_steps
        self._first = resumed_step + 1
        self._log_interval = log_interval
        self._clock = clock
        self._printed = float("-inf")
        self._seconds: deque[float] = deque(maxlen=STEPS_FOR_TIME_LEFT)
        self._live: Progress | None = None
        if console.is_terminal:
            # Folded where the terminal is narrow: what would be cut off is the time left.
            text = TextColumn("{task.description}", table_column=Column(overflow="fold"))
            columns = (TaskProgressColumn(), text)
            self._live = Progress(*columns, console=console, refresh_per_second=4)
            self._task = self._live.add_task("first step ...", total=total_steps, completed=resumed_step)
            self._live.start()

    def step(self, metrics: StepMetrics) -> None:
        self._seconds.append(metrics.step_seconds)
        text = step_line(metrics, self._total, statistics.median(self._seconds))
        if self._live is not None:
            if metrics.step % self._log_interval == 0 or metrics.step in (self._first, self._total):
                self._live.update(self._task, completed=metrics.step, description=escape(text))
            return
        if metrics.step in (self._first, self._total) or (
            metrics.step % self._log_interval == 0 and self._clock() - self._printed >= SECONDS_BETWEEN_LINES
        ):
            self._printed = self._clock()
            self._print(text)

    def eval(self, metrics: EvalMetrics) -> None:
        self._print(eval_line(metrics, self._total))

    def note(self, note: Note) -> None:
        self._print(note_line(note, self._total), style="bold red" if note.alarm else None)

    def close(self, status: RunStatus) -> None:
        if self._live is not None:
            self._live.stop()

    def _print(self, text: str, style: str | None = None) -> None:
        if self._live is not None:
            self._console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)
        else:  # not through rich, which ends the program when the reader of a pipe is gone
            print(text, file=self._console.file, flush=True)


def step_line(metrics: StepMetrics, total: int, seconds_a_step: float) -> str:
    """One step as text: `step 10/600  loss 5.1234  lr 3.0e-04  grad 1.23  12,345 tok/s  mem 1.2 GiB  left 3m12s`."""
    parts = [
        f"step {metrics.step}/{total}",
        f"loss {metrics.loss:.4f}",
        f"lr {metrics.lr:.1e}",
        f"grad {metrics.grad_norm:.2f}",
        f"{metrics.tokens_per_second:,.0f} tok/s",
    ]
    if metrics.mfu is not None:
        causal = f" (causal {metrics.mfu_causal:.1%})" if metrics.mfu_causal is not None else ""
        parts.append(f"MFU {metrics.mfu:.1%}{causal}")
    if metrics.memory_bytes:
        parts.append(f"mem {metrics.memory_bytes / 2**30:.1f} GiB")
    if metrics.skipped:
        parts.append("skipped: fp16 overflow")
    parts.append(f"left {duration((total - metrics.step) * seconds_a_step)}")
    return "  ".join(parts)


def eval_line(metrics: EvalMetrics, total: int) -> str:
    """One evaluation as text."""
    bits = "" if metrics.valid_bits_per_byte is None else f"  {metrics.valid_bits_per_byte:.4f} bits/byte"
    return (
        f"eval {metrics.step}/{total}  valid loss {metrics.valid_loss:.4f}{bits}  in {duration(metrics.eval_seconds)}"
    )


def note_line(note: Note, total: int) -> str:
    """One note as text; an alarm says so."""
    details = "  ".join(
        f"{key} {value if isinstance(value, str) else json.dumps(value, default=str)}"
        for key, value in note.details.items()
    )
    alarm = "ALARM  " if note.alarm else ""
    return f"note {note.step}/{total}  {alarm}{note.event.replace('_', ' ')}  {details}".rstrip()
