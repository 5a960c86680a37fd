"""Runs side by side, from files that real sinks wrote."""

from __future__ import annotations

import html
import json
import math
from pathlib import Path
from typing import Any

import pytest

from llmrecipes.cli import app as cli
from llmrecipes.cli.comparison import Series, plot
from llmrecipes.hardware.profile import Costs
from llmrecipes.plan.run_plan import derive_run
from llmrecipes.recipe.load import to_yaml
from llmrecipes.tracking.energy import Energy
from llmrecipes.tracking.events import EvalMetrics, StepMetrics
from llmrecipes.tracking.jsonl import JsonlSink
from llmrecipes.tracking.status import StatusSink
from llmrecipes.workflow.compare import compare
from tests.helpers import ROOMY, tiny


def make(runs_dir: Path, run_id: str, losses: list[float], *, closed: bool = True, **sections: dict[str, Any]) -> Path:
    recipe = tiny(sections.pop("named", {}).get("name", "tiny"), **sections)
    run_dir = runs_dir / recipe.name / run_id
    run_dir.mkdir(parents=True)
    (run_dir / "recipe.yaml").write_text(to_yaml(recipe))
    record = JsonlSink(run_dir / "metrics.jsonl", 0)
    status = StatusSink(run_dir, resumed_step=0, total_steps=12)
    batch = recipe.train.global_batch_size
    for number, loss in enumerate(losses, start=1):
        values = StepMetrics(
            step=number, loss=loss, grad_norm=1.0, lr=1e-3, consumed_samples=batch * number,
            consumed_tokens=64 * batch * number, step_seconds=10.0 if number == 1 else 0.5,
            tokens_per_second=50.0 if number == 1 else 1000.0, memory_bytes=number << 30,
        )  # fmt: skip
        record.step(values)
        status.step(values)
    if losses:
        record.eval(
            EvalMetrics(
                step=len(losses),
                valid_loss=losses[-1] + 0.5,
                valid_bits_per_byte=2.0,
                consumed_samples=1,
                consumed_tokens=64 * batch * len(losses),
                eval_seconds=0.1,
            )
        )
    if closed:
        record.close("FINISHED")
        status.close("FINISHED")
    return run_dir


@pytest.fixture
def runs_dir(tmp_path: Path) -> Path:
    make(tmp_path, "one", [8.0, 7.0, 6.0, 5.0])
    make(tmp_path, "two", [8.0, 7.5, math.nan], closed=False, optimizer={"lr": 5e-4}, train={"global_batch_size": 16})
    make(tmp_path, "wide", [8.0, 6.0, 4.0], named={"name": "other"}, model={"hidden_size": 128})
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], runs_dir: Path, *arguments: str) -> tuple[int, str, str]:
    code = cli.run(["compare", *arguments, "--runs-dir", str(runs_dir)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_runs_of_several_recipes_in_any_state(runs_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (runs_dir / "tiny/two/metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # a run in progress
    code, out, _ = run(capsys, runs_dir, "one", "tiny/two", "other", "--json")
    assert code == 0
    told = json.loads(out)
    assert {row["key"]: row["values"] for row in told["differences"]} == {
        "model.hidden_size": [64, 64, 128],
        "name": ["tiny", "tiny", "other"],
        "optimizer.lr": [1e-3, 5e-4, 1e-3],
        "train.global_batch_size": [8, 16, 8],
    }
    one, two, wide = told["runs"]
    assert [each["state"] for each in (one, two, wide)] == ["finished", "running", "finished"]
    assert one["figures"] == {
        "steps": 4, "steps_planned": 12, "tokens": 2048, "loss": 5.0, "valid_loss": 5.5, "valid_loss_best": 5.5,
        "bits_per_byte": 2.0, "tokens_per_second": 1000.0, "step_seconds": 0.5, "memory_bytes": 4 << 30, "mfu": None,
    }  # fmt: skip
    assert (one["energy"], wide["energy"]) == ({}, {})
    assert two["figures"]["loss"] is None and two["train"][-1] == [3, 3072, None]
    assert wide["train"] == [[1, 512, 8.0], [2, 1024, 6.0], [3, 1536, 4.0]]


def test_people_see_differences_curves_and_figures(runs_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, runs_dir, "one", "two")
    assert code == 0
    rows = {line.split("  ")[0]: line.split()[-2:] for line in out.splitlines() if line}
    assert rows["optimizer.lr"] == ["0.001", "0.0005"]
    assert rows["training loss, last"] == ["5.0000", "-"]
    assert rows["memory, peak"] == ["GiB", "3.0", "GiB"][-2:]
    assert "training loss over tokens" in out  # the batches differ
    assert "training loss over steps" in run(capsys, runs_dir, "one", "two", "--x", "step")[1]
    assert "the recipes are the same" in run(capsys, runs_dir, "one", "one")[1]


def test_a_notebook_shows_figures_and_keys(runs_dir: Path) -> None:
    compared = compare([runs_dir / "tiny" / "one", runs_dir / "tiny" / "two"])
    assert repr(compared) == f"RunComparison({compared.runs[0].name}, {compared.runs[1].name})"
    page = compared._repr_html_()
    assert page.count("<tr") == 1 + len(compared.runs[0].figures) + len(compared.differences)
    assert "optimizer.lr" in page and "0.0005" in page
    plan = derive_run(tiny(), 1, ROOMY)
    assert plan._repr_html_() == f"<pre>{html.escape(str(plan))}</pre>"


def test_energy_is_compared_with_how_it_is_known(runs_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    used = Energy().plus(3.6e6, ["nvml"], Costs(kg_co2_per_kwh=0.5)).details(2048)
    with (runs_dir / "tiny/one/metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 4, "event": "energy", "details": used}) + "\n")
    _, out, _ = run(capsys, runs_dir, "one", "two")
    rows = {line.split("  ")[0]: line.split() for line in out.splitlines() if line}
    assert [rows[name][-2:] for name in ("energy, kWh", "carbon, kg CO2")] == [["1", "-"], ["0.5", "-"]]
    assert rows["energy is"][-2:] == ["nvml", "-"]
    one, two = json.loads(run(capsys, runs_dir, "one", "two", "--json")[1])["runs"]
    assert one["energy"]["kwh"] == 1 and one["energy"]["run_tokens_per_joule"] == 2048 / 3.6e6 and two["energy"] == {}
    assert "energy" not in run(capsys, runs_dir, "two", "other")[1], "no row without a value"


def test_runs_in_two_layouts_are_one_experiment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path, "one", [8.0])
    make(tmp_path, "two", [8.0], layout={"micro_batch_size": 4, "zero": {"stage": 1}})
    make(tmp_path, "three", [8.0], train={"seed": 7}, layout={"micro_batch_size": 4})
    told = json.loads(run(capsys, tmp_path, "one", "two", "--json")[1])
    assert told["same_experiment"] is True and "layout.micro_batch_size" in {row["key"] for row in told["differences"]}
    assert "the same experiment" in run(capsys, tmp_path, "one", "two")[1]
    assert json.loads(run(capsys, tmp_path, "one", "two", "three", "--json")[1])["same_experiment"] is False
    assert "the same experiment" not in run(capsys, tmp_path, "one", "three")[1]


def test_how_values_were_found_is_no_difference_between_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run of the recipe has the section `search`, a trial of its search has none."""
    space = {"space": [{"key": "optimizer.lr", "low": 1e-4, "high": 1e-2}], "n_trials": 2}
    make(tmp_path, "full", [8.0], search=space)
    make(tmp_path, "trial", [8.0], optimizer={"lr": 5e-4})
    told = json.loads(run(capsys, tmp_path, "full", "trial", "--json")[1])
    assert told["differences"] == [{"key": "optimizer.lr", "values": [1e-3, 5e-4]}]


@pytest.mark.parametrize(
    ("names", "where", "rule"),
    [
        (["one"], "RUN", ""),
        (["one", "empty"], "tiny/empty", ""),
        (["one", "nobody"], "", "recipe/run-id"),
        (["one", "two", "--x", "time"], "--x", "tokens"),
    ],
)
def test_what_cannot_be_compared_is_one_message(
    runs_dir: Path, names: list[str], where: str, rule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    make(runs_dir, "empty", [])
    code, out, _ = run(capsys, runs_dir, *names, "--json")
    told = json.loads(out)
    assert code == told["exit_code"] == 2
    assert where in told["where"] and rule in told["rule"]


def test_a_long_curve_is_thinned_and_keeps_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path, "long", [1 / n for n in range(1, 2502)])
    told = json.loads(run(capsys, tmp_path, "long", "long", "--json")[1])
    steps = [point[0] for point in told["runs"][0]["train"]]
    assert len(steps) <= 1001 and steps[0] == 1 and steps[-1] == 2501


def test_a_plot_in_letters_and_in_braille() -> None:
    series = [Series("a", [0, 10], [0.0, 1.0]), Series("b", [0, 10], [1.0, 0.0])]
    letters = [line.plain for line in plot(series, width=9, height=3, braille=False)]
    assert letters == [
        "  1 ┤bbb   aaa",
        "0.5 ┤   ***",
        "  0 ┤aaa   bbb",
        "    └─────────",
        "     0      10",
    ]  # fmt: skip
    dots = plot(series, width=9, height=3, braille=True)
    assert all(0x2800 < ord(char) < 0x2900 for char in dots[0].plain.split("┤")[1].replace(" ", ""))
    assert {str(span.style) for span in dots[0].spans} == {"cyan", "yellow"}
    assert not plot([Series("a", [], [])], width=9, height=3, braille=True)
    flat = plot([Series("a", [5], [2.0])], width=9, height=3, braille=False)
    assert sum(line.plain.count("a") for line in flat) == 1
