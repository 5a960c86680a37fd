"""metrics.jsonl: strict JSON, whole lines, and a file that reads as if a resumed run had never stopped."""

from __future__ import annotations

import json
import logging
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmrecipes.tracking.events import EvalMetrics, Note, StepMetrics
from llmrecipes.tracking.jsonl import JsonlSink, record, rewind
from tests.refusals import refused


def step(number: int, **changes: Any) -> StepMetrics:
    values: dict[str, Any] = {
        "step": number,
        "loss": 5.0,
        "grad_norm": 1.0,
        "lr": 3e-4,
        "consumed_samples": 16 * number,
        "consumed_tokens": 4096 * number,
        "step_seconds": 0.5,
        "tokens_per_second": 8192.0,
    }
    return StepMetrics(**(values | changes))


def evaluation(number: int) -> EvalMetrics:
    return EvalMetrics(step=number, valid_loss=4.5, consumed_samples=1, consumed_tokens=1, eval_seconds=0.1)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]


def write(path: Path, *events: StepMetrics | EvalMetrics | Note, resumed_step: int = 0) -> None:
    sink = JsonlSink(path, resumed_step)
    for event in events:
        if isinstance(event, StepMetrics):
            sink.step(event)
        elif isinstance(event, EvalMetrics):
            sink.eval(event)
        else:
            sink.note(event)
    sink.close("FINISHED")


def test_a_step_has_the_keys_that_outside_scripts_read(tmp_path: Path) -> None:
    write(tmp_path / "m", step(1), evaluation(1))
    first, second = lines(tmp_path / "m")
    promised = "step loss grad_norm lr consumed_samples consumed_tokens step_seconds tokens_per_second"
    assert set(promised.split()) <= first.keys()
    assert "loss_scale" not in first and "mfu" not in first  # do not apply to this run
    assert second["valid_loss"] == 4.5 and "loss" not in second


def test_every_line_is_on_disk_before_the_call_returns(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "m", 0)
    sink.step(step(1))
    assert lines(tmp_path / "m")[0]["step"] == 1
    sink.close("FINISHED")


def test_hostile_values_stay_strict_json(tmp_path: Path) -> None:
    note = Note(
        step=1, event='quo"te', details={"path": Path("/a"), "x": [float("nan"), {"y": float("-inf")}], "n": None}
    )
    write(tmp_path / "m", step(1, loss=float("nan"), grad_norm=float("inf"), consumed_tokens=10**30), note)
    first, second = lines(tmp_path / "m")
    assert first["loss"] is None and first["grad_norm"] is None
    assert first["non_finite"] == ["loss", "grad_norm"]
    assert first["consumed_tokens"] == 10**30
    assert second["details"] == {"path": "/a", "x": ["nan", {"y": "-inf"}], "n": None}


def test_resume_drops_records_after_the_checkpoint_and_a_truncated_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "m"
    write(path, step(1), step(2), evaluation(2), step(3), Note(step=3, event="x"))
    with path.open("a") as file:
        file.write('{"step": 4, "lo')
    write(path, step(3, loss=1.0), resumed_step=2)
    assert [(line["step"], line.get("loss")) for line in lines(path)] == [(1, 5.0), (2, 5.0), (2, None), (3, 1.0)]
    assert "dropped 1 unreadable line" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["m"]  # no temporary file stays


def test_a_run_without_checkpoint_starts_with_an_empty_file(tmp_path: Path) -> None:
    write(tmp_path / "m", step(1), step(2))
    write(tmp_path / "m", step(1, loss=3.0))
    assert [line["loss"] for line in lines(tmp_path / "m")] == [3.0]


def test_nothing_to_drop_leaves_the_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "m"
    write(path, step(1))
    before = path.stat().st_ino
    assert rewind(path, 1).dropped == 0
    assert path.stat().st_ino == before
    assert rewind(tmp_path / "missing", 0).dropped == 0


@pytest.mark.parametrize("garbage", [b"\xff\xfe\n", b"[1]\n", b'{"step": "1"}\n', b'{"step": true}\n', b"\n", b"{}\n"])
def test_foreign_lines_are_dropped_not_fatal(tmp_path: Path, garbage: bytes) -> None:
    path = tmp_path / "m"
    write(path, step(1))
    path.write_bytes(garbage + path.read_bytes())
    assert rewind(path, 1).dropped == 1
    assert [line["step"] for line in lines(path)] == [1]


def test_a_full_disk_loses_nothing_once_there_is_room(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "m"
    sink = JsonlSink(path, 0)
    sink.step(step(1))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    room = path.stat().st_size + 50  # the next line gets in half
    with caplog.at_level(logging.WARNING):
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
        try:
            for number in (2, 3, 4):
                sink.step(step(number))
            assert path.stat().st_size == room
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        sink.step(step(5))
        sink.close("FINISHED")
    assert [line["step"] for line in lines(path)] == [1, 2, 3, 4, 5]
    assert [entry.levelname for entry in caplog.records] == ["ERROR", "WARNING"]  # said once, not at each step


def test_a_directory_that_cannot_be_written_is_the_users_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with refused("metrics.jsonl", rule="--runs-dir"):
        JsonlSink(tmp_path / "file" / "metrics.jsonl", 0)


def test_record_keeps_the_values_of_an_fp16_step() -> None:
    values = record(step(7, loss_scale=65536.0, skipped=True, mfu=0.41))
    assert (values["loss_scale"], values["skipped"], values["mfu"]) == (65536.0, True, 0.41)


# -- what is lost or changed -------------------------------------------------------------------------------------------


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """metrics.jsonl of 250 steps with its sums."""
    (tmp_path / "logs").mkdir()
    path = tmp_path / "metrics.jsonl"
    write(path, *(step(number) for number in range(1, 251)))
    return path


def problems(path: Path, resumed_step: int = 250) -> list[str]:
    sink = JsonlSink(path, resumed_step)
    sink.close("FINISHED")
    return sink.problems


Lines = list[bytes]


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (lambda lines: lines, []),
        (
            lambda lines: [lines[0].replace(b"5.0", b"4.0"), *lines[1:]],
            ["lines 1 to 100 have changed since they were written"],
        ),
        (
            lambda lines: [*lines[:-1], lines[-1].replace(b"5.0", b"4.0")],
            ["lines 201 to 250 have changed since they were written"],
        ),
        (
            lambda lines: lines[:150] + lines[153:],
            [
                "lines 101 to 200 have changed since they were written",
                "3 fewer lines than were written",
                "steps 151 to 153 are missing",
            ],
        ),
        (
            lambda lines: lines[:150] + lines[149:],
            ["lines 101 to 250 have changed since they were written", "step 150 is repeated in line 151"],
        ),
        (
            lambda lines: [*lines[:9], lines[9][:30] + b"\n", *lines[10:]],
            ["lines 1 to 100 have changed since they were written", "line 10 cannot be read", "step 10 is missing"],
        ),
        (lambda lines: lines[:240], ["10 fewer lines than were written", "steps 241 to 250 are missing"]),
        (lambda _lines: [], ["250 fewer lines than were written", "steps 1 to 250 are missing"]),
    ],
    ids=["nothing", "number", "last number", "lost", "twice", "cut", "end", "all"],
)
def test_lost_or_changed_lines_are_reported(recorded: Path, damage: Callable[[Lines], Lines], found: list[str]) -> None:
    recorded.write_bytes(b"".join(damage(recorded.read_bytes().splitlines(keepends=True))))
    assert problems(recorded) == found


def test_reported_problems_are_not_reported_again(recorded: Path) -> None:
    written = recorded.read_bytes().splitlines(keepends=True)
    recorded.write_bytes(b"".join(written[:150] + written[153:240]))
    assert problems(recorded)
    assert problems(recorded) == []


def test_lines_after_the_checkpoint_may_be_lost(recorded: Path) -> None:
    with recorded.open("rb+") as file:
        file.truncate(recorded.stat().st_size - 20)
    assert problems(recorded, resumed_step=200) == []


def test_a_file_of_an_older_version_is_taken_as_it_is(recorded: Path) -> None:
    sums = recorded.parent / "logs" / "metrics.sums.json"
    for damaged in (b"", b"{", b'{"lines": "x", "chunks": 1}', b'{"lines": 5, "chunks": []}', b"\xff"):
        sums.write_bytes(damaged)
        assert problems(recorded) == []
    sums.unlink()
    assert problems(recorded) == []
    assert sums.exists()
