"""What people see while a run goes on."""

from __future__ import annotations

import io
from itertools import pairwise
from queue import SimpleQueue
from typing import Any

import pytest
from rich.console import Console

from llmrecipes.console import duration
from llmrecipes.tracking.events import EvalMetrics, Note, StepMetrics
from llmrecipes.tracking.progress import ProgressSink


def step(number: int, **changes: Any) -> StepMetrics:
    values: dict[str, Any] = {
        "step": number,
        "loss": 5.12341,
        "grad_norm": 1.234,
        "lr": 3e-4,
        "consumed_samples": 1,
        "consumed_tokens": 1,
        "step_seconds": 0.5,
        "tokens_per_second": 12345.4,
        "memory_bytes": int(1.2 * 2**30),
    }
    return StepMetrics(**(values | changes))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def plain(total: int, log_interval: int, resumed_step: int = 0) -> tuple[ProgressSink, io.StringIO, Clock]:
    file, clock = io.StringIO(), Clock()
    sink = ProgressSink(
        Console(file=file, width=40),
        resumed_step=resumed_step,
        total_steps=total,
        log_interval=log_interval,
        clock=clock,
    )
    return sink, file, clock


def test_a_plain_line_has_everything_and_is_never_wrapped() -> None:
    sink, file, _ = plain(total=600, log_interval=10)
    sink.step(step(1, step_seconds=30.0))
    sink.step(step(2))
    sink.step(step(600))
    first, last = file.getvalue().splitlines()
    assert first == "step 1/600  loss 5.1234  lr 3.0e-04  grad 1.23  12,345 tok/s  mem 1.2 GiB"
    assert last == "step 600/600  loss 5.1234  lr 3.0e-04  grad 1.23  12,345 tok/s  mem 1.2 GiB  left 0.0s"


def test_a_gpu_shows_mfu_in_both_conventions() -> None:
    sink, file, _ = plain(total=600, log_interval=1)
    sink.step(step(1, mfu=0.553, mfu_causal=0.501, skipped=True, grad_norm=float("nan")))
    assert "MFU 55.3% (causal 50.1%)" in file.getvalue()
    assert "skipped: fp16 overflow" in file.getvalue()


def test_plain_lines_keep_the_interval_and_at_most_one_a_second() -> None:
    sink, file, clock = plain(total=100, log_interval=2)
    for number in range(1, 101):
        clock.now += 0.3
        sink.step(step(number))
    shown = [int(line.split()[1].split("/")[0]) for line in file.getvalue().splitlines()]
    assert shown[0] == 1 and shown[-1] == 100  # the first and the last always
    assert all(number % 2 == 0 for number in shown[1:])
    assert {later - earlier for earlier, later in pairwise(shown[1:-1])} == {4}


def test_a_resumed_run_shows_its_first_step() -> None:
    sink, file, _ = plain(total=100, log_interval=50, resumed_step=60)
    sink.step(step(61))
    assert file.getvalue().startswith("step 61/100")


def test_evaluations_and_notes_are_always_printed_and_taken_literally() -> None:
    sink, file, _ = plain(total=600, log_interval=10)
    sink.step(step(10))
    sink.eval(
        EvalMetrics(
            step=10,
            valid_loss=4.5,
            valid_bits_per_byte=1.25,
            consumed_samples=1,
            consumed_tokens=1,
            eval_seconds=2.0,
        )
    )
    sink.note(Note(step=10, event="save_failed", details={"error": "[red]disk full[/]", "step": 10}, alarm=True))
    sink.note(Note(step=11, event="hang", details={"text": "rank 3 hangs", "rank": 3}, alarm=True))
    sink.note(Note(step=12, event="loss_spike", details={"loss": 13.885471820831299, "limit": 11.6}, alarm=True))
    assert file.getvalue().splitlines()[1:] == [
        "eval 10/600  valid loss 4.5000  1.2500 bits/byte  in 2.0s",
        "note 10/600  ALARM  save failed  error [red]disk full[/]  step 10",
        "note 11/600  ALARM  hang  rank 3 hangs",
        "note 12/600  ALARM  loss spike  loss 13.89  limit 11.6",
    ]


def terminal(width: int, total: int, log_interval: int, resumed_step: int = 0) -> tuple[ProgressSink, io.StringIO]:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=width, _environ={})
    return (
        ProgressSink(console, resumed_step=resumed_step, total_steps=total, log_interval=log_interval),
        file,
    )


def bar(sink: ProgressSink) -> str:
    """What the bar shows now; it is drawn a few times a second, whatever the tests do."""
    assert sink._live is not None
    console = Console(file=io.StringIO(), width=sink._console.width)
    with console.capture() as captured:
        console.print(sink._live.get_renderable())
    return captured.get()


def test_a_terminal_gets_a_bar_that_moves_at_every_step_and_lines_above_it() -> None:
    sink, file = terminal(width=150, total=10, log_interval=100, resumed_step=5)
    try:
        for number in (6, 7, 8):
            sink.step(step(number, loss=number))
            shown = bar(sink)
            assert f" {number}/10" in shown and f"loss {number}.0000" in shown and "lr 3.0e-04" in shown
            assert "━" in shown and shown.count("\n") == 1
        sink.note(Note(step=8, event="checkpoint_saved"))
    finally:
        sink.close("FINISHED")
    assert "note 8/10  checkpoint saved" in file.getvalue()
    assert " 8/10" in file.getvalue()


def test_on_eighty_columns_the_bar_keeps_to_one_line() -> None:
    sink, _ = terminal(width=80, total=250_000, log_interval=100)
    try:
        sink.step(step(123_455))
        sink.step(step(123_456, tokens_per_second=1_234_567.0, mfu=0.5))
        shown = bar(sink)
    finally:
        sink.close("FINISHED")
    assert shown.count("\n") == 1
    for what in ("123456/250000", "loss 5.1234", "1,234,567 tok/s", "left "):
        assert what in shown


def test_messages_of_other_threads_appear_between_steps_and_at_the_end() -> None:
    file, messages = io.StringIO(), SimpleQueue[str]()
    messages.put("first")
    sink = ProgressSink(
        Console(file=file), resumed_step=0, total_steps=9, log_interval=1, messages=messages, clock=Clock()
    )
    messages.put("second")
    sink.step(step(1))
    messages.put("third")
    sink.close("FINISHED")
    assert [line.split()[0] for line in file.getvalue().splitlines()] == ["first", "second", "step", "third"]


def test_time_left_forgets_a_slow_first_step() -> None:
    sink, file, clock = plain(total=1000, log_interval=1)
    for number, seconds in ((1, 90.0), (2, 1.0), (3, 1.0)):
        clock.now += 10
        sink.step(step(number, step_seconds=seconds))
    assert file.getvalue().splitlines()[-1].endswith("left 16m37s")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0.0s"), (9.94, "9.9s"), (9.96, "10s"), (59.6, "1m00s"), (192, "3m12s"), (3599.7, "1h00m"), (18443, "5h07m"),
     (183600, "2d03h"), (float("nan"), "?"), (float("inf"), "?")],
)  # fmt: skip
def test_durations_are_short(seconds: float, text: str) -> None:
    assert duration(seconds) == text
