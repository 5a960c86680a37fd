"""`llmrecipes gpu-report` with tiny models on a CPU, and its pages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmrecipes.bench import parity
from llmrecipes.bench.report import ROWS, Row, append, page, read
from llmrecipes.bench.report_worker import BIG, DEPTHS, cut, whole
from llmrecipes.cli.app import run
from llmrecipes.hardware.load import load_profile
from llmrecipes.hardware.machine import machine
from llmrecipes.plan.derive import derive


def test_what_does_not_fit_the_budget_is_skipped_and_measured_by_the_next_call(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["gpu-report", "right", "--device", "cpu", "--out", str(tmp_path)]
    assert run([*command, "--budget", "60"]) == 0
    (skipped,) = read(tmp_path)
    assert (skipped.status, skipped.item) == ("skipped", "parity")
    assert run([*command, "--budget", "500"]) == 0
    rows = read(tmp_path)
    assert [row.quantity for row in rows] == [*parity.MODELS, "time"]
    assert not any(row.off for row in rows)
    lines = (tmp_path / ROWS).read_text("utf-8").splitlines()
    assert len(lines) == 1 + len(rows)
    for name in ("report.md", "report.html"):
        assert all(model in (tmp_path / name).read_text("utf-8") for model in parity.MODELS)
    assert run([*command, "--budget", "500"]) == 0  # nothing is left to measure
    assert (tmp_path / ROWS).read_text("utf-8").splitlines() == lines
    capsys.readouterr()


def test_a_result_that_is_off_is_flagged_and_a_cut_line_is_ignored(tmp_path: Path) -> None:
    near = Row(stage="fast", item="model", quantity="memory", value=1.09, unit="GiB", expected=1.0)
    far = near.model_copy(update={"quantity": "speed", "value": 0.89})
    wrong = Row(stage="right", item="parity", quantity="gpt", value=float("nan"), limit=1e-4, note="<b>")
    for row in (near, far, wrong):
        append(tmp_path, row, ["an H200"])
    with (tmp_path / ROWS).open("a") as file:
        file.write('{"stage": "fa')
    assert [row.off for row in read(tmp_path)] == [False, True, True]
    text = (tmp_path / "report.md").read_text("utf-8")
    assert "OFF -11%" in text and "an H200" in text
    assert "&lt;b&gt;" in page([wrong], []) and "<b>" not in page([wrong], []).partition("right:")[2]


def test_a_gradient_that_differs_is_seen() -> None:
    golden = parity.goldens()["llama"]
    assert parity.difference(golden, golden)[0] == 0
    wrong = json.loads(json.dumps(golden))
    name = next(iter(wrong["gradients"]))
    wrong["gradients"][name][1] += 0.01 * wrong["gradients"][name][0]  # the same norm, another direction
    apart, where = parity.difference(wrong, golden)
    assert apart > parity.LIMITS["fp32"] and name in where


@pytest.mark.parametrize("name", BIG)
def test_large_models_fit_on_one_gpu_at_both_depths(name: str) -> None:
    h200 = machine(load_profile("h200-ib"), 1)
    plans = [derive(cut(name, depth, "cuda"), 1, h200) for depth in DEPTHS]
    assert plans[0].num_parameters.total < plans[1].num_parameters.total
    for plan in (*plans, derive(whole("gpt-1b", "cuda"), 1, h200)):
        assert plan.memory.total < 0.95 * plan.memory_capacity_bytes


def test_a_stage_that_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["gpu-report", "slow", "--device", "cpu", "--out", str(tmp_path)]) == 2
    assert "STAGE" in capsys.readouterr().err
