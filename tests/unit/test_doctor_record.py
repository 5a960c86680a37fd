"""What the doctor says before a start is kept with the run, small and without secrets, and the report shows it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from llmrecipes.cli.app import run
from llmrecipes.doctor import doctor_log
from llmrecipes.doctor.check_result import Finding, fail, ok, warn
from llmrecipes.runfiles import RunFiles


def findings(nodes: int) -> list[Finding]:
    said = [ok("clock", "in time"), warn("port", "12000 is taken", "another port")]
    every = [replace(each, node=f"n{number}") for number in range(nodes) for each in said]
    return [*every, replace(fail("gpu 3", "Xid 79 at https://u:hunter2secret@host/x", "replace <it>"), node="n1")]


def test_findings_that_nodes_share_are_one_and_the_worst_come_first(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    assert doctor_log.read(files) == []
    assert doctor_log.keep(files.doctor, findings(2048), ["n1"]) is None
    assert files.doctor.stat().st_size < 2000 and b"hunter2secret" not in files.doctor.read_bytes()
    (kept,) = doctor_log.read(files)
    assert (kept["ok"], kept["nodes"], kept["bad_nodes"], kept["left_out"]) == (False, 2048, ["n1"], 0)
    assert [each["status"] for each in kept["findings"]] == ["fail", "warn", "ok"]
    assert kept["findings"][1]["number"] == 2048 and kept["findings"][1]["nodes"] == [f"n{n}" for n in range(8)]


def test_a_line_is_bounded_and_broken_ones_are_left_out(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    doctor_log.keep(files.doctor, [ok("gpu", f"serial {number}") for number in range(600)], [])
    with files.doctor.open("ab") as file:
        file.write(b'{"findings": 3}\n[]\n{"findings": [')
    (kept,) = doctor_log.read(files)
    assert (len(kept["findings"]), kept["left_out"]) == (500, 100)


def test_lines_of_a_job_are_moved_to_its_run(tmp_path: Path) -> None:
    files, waiting = RunFiles(tmp_path / "run"), tmp_path / ".doctor-7.jsonl"
    files.logs.mkdir(parents=True)
    doctor_log.adopt(waiting, files)
    assert not files.doctor.exists()
    for _ in range(2):
        doctor_log.keep(waiting, findings(1), [])
    doctor_log.adopt(waiting, files)
    assert len(doctor_log.read(files)) == 2 and not waiting.exists()


def doctor(runs_dir: Path, *words: str) -> int:
    return run(["doctor", "gpt-tiny", "--runs-dir", str(runs_dir), "--data-dir", str(runs_dir / "data"), *words])


def test_the_doctor_of_a_run_keeps_what_it_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = RunFiles(tmp_path / "gpt-tiny" / "one")
    assert doctor(tmp_path, "--run-id", "one") in (0, 1)
    (kept,) = doctor_log.read(files)
    assert {each["check"] for each in kept["findings"]} >= {"runs", "data"}
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "1")  # a pod that does not lead
    doctor(tmp_path, "--run-id", "one")
    assert len(doctor_log.read(files)) == 1
    monkeypatch.delenv("JOB_COMPLETION_INDEX")
    (tmp_path / "file").touch()
    assert doctor(tmp_path, "--record", str(tmp_path / "file" / "below")) in (0, 1)
    assert str(tmp_path / "file" / "below") in capsys.readouterr().err


def test_a_report_shows_it_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from llmrecipes.recipe.load import load, to_yaml

    files = RunFiles(tmp_path / "gpt-tiny" / "one")
    files.logs.mkdir(parents=True)
    files.recipe_file.write_text(to_yaml(load("gpt-tiny", []).recipe))

    def section() -> str:
        assert run(["report", str(files.path), "--runs-dir", str(tmp_path), "--data-dir", str(tmp_path)]) == 0
        html = (files.path / "report.html").read_text()
        return html.split('<section id="doctor">')[1].split("</section>")[0]

    assert "--run-id" in section()
    doctor_log.keep(files.doctor, findings(20), ["n1"])
    doctor_log.keep(files.doctor, findings(20), [])
    shown = section()
    for words in (
        "20 nodes: 1 fail, 1 warn, 1 ok",
        "Of 1 earlier checks, 1 failed",
        "&lt;it&gt;",
        "n7 and 12 more",
    ):
        assert words in shown, words
    files.doctor.write_text(json.dumps({"findings": [3, {"nodes": 4, "what": None}], "time": "x"}) + "\n")
    assert "nothing." in section()
    capsys.readouterr()
