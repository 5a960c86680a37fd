"""What earlier runs have measured, in the choice of a layout."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from llmrecipes.hardware.load import load_profile
from llmrecipes.hardware.machine import machine
from llmrecipes.plan.speed.choice import Choice, choose
from llmrecipes.recipe.load import load, to_yaml
from llmrecipes.recipe.schema import Recipe
from llmrecipes.rundir import Run
from llmrecipes.tracking.events import MEASURED
from llmrecipes.workflow.measured_steps import MOST, measured_steps
from llmrecipes.workflow.plan import plan_on

H100 = "h100-ib"
SITE, PROFILE = machine(load_profile(H100), 1), load_profile(H100)
RECIPE = load("gpt-1b").recipe
NOTE = '{"event": "measured", "step": 9, "details": {"measured/step_seconds": %s}}\n'


@pytest.fixture(scope="module")
def predicted() -> Choice:
    choice = choose(RECIPE, SITE, 8, PROFILE)
    assert choice is not None
    assert choice.following is not None
    return choice


def ran(
    runs_dir: Path, run_id: str, recipe: Recipe, seconds: float, *, ranks: int = 8, device: str | None = None
) -> Path:
    """The records of a run that has ended: what it planned, and what a step took."""
    run = Run.of(runs_dir, recipe.name, run_id)
    run.create()
    run.recipe_file.write_text(to_yaml(recipe), "utf-8")
    plan = {"world_size": ranks, "predicted": {"device": device or _device()}}
    (run.path / "plan.json").write_text(json.dumps(plan), "utf-8")
    note = {"event": MEASURED, "step": 9, "details": {"measured/step_seconds": seconds}}
    run.metrics.write_text(json.dumps(note) + "\n", "utf-8")
    return run.path


def _device() -> str:
    choice = choose(RECIPE, SITE, 8, PROFILE)
    assert choice is not None
    return choice.chosen.forecast.device.name


def chosen(runs_dir: Path) -> Mapping[str, Any]:
    plan, _ = plan_on(RECIPE, nproc=8, cluster=H100, nodes=None, runs_dir=runs_dir)
    assert plan.chosen is not None
    return plan.chosen


def test_the_faster_of_two_measured_layouts_is_chosen(tmp_path: Path, predicted: Choice) -> None:
    first, second = predicted.chosen, predicted.following
    assert second is not None
    ran(tmp_path, "a", first.forecast.plan.recipe, 1.5 * second.forecast.step.seconds)
    ran(tmp_path, "b", second.forecast.plan.recipe, second.forecast.step.seconds)
    now = chosen(tmp_path)
    assert (now["layout"], now["measured"]) == (second.key, "gpt-1b/b")
    assert "gpt-1b/b" in now["text"]
    assert chosen(tmp_path) == now


def test_a_machine_that_is_slower_in_all_layouts_keeps_its_choice(tmp_path: Path, predicted: Choice) -> None:
    ran(tmp_path, "a", predicted.chosen.forecast.plan.recipe, 3 * predicted.chosen.forecast.step.seconds)
    now = chosen(tmp_path)
    assert now["layout"] == predicted.chosen.key
    assert now["next"]["slower"] == pytest.approx(predicted.slower, abs=0.02)


def test_a_measured_layout_counts_that_was_predicted_slower_than_all(tmp_path: Path, predicted: Choice) -> None:
    slow = RECIPE.with_layout(**{**_values(predicted), "tensor_model_parallel_size": 8, "micro_batch_size": 1})
    plan, _ = plan_on(slow, nproc=8, cluster=H100, nodes=None)
    assert plan.chosen is None
    ran(tmp_path, "a", predicted.chosen.forecast.plan.recipe, predicted.chosen.forecast.step.seconds)
    ran(tmp_path, "b", plan.recipe, 0.5 * predicted.chosen.forecast.step.seconds)
    assert chosen(tmp_path)["measured"] == "gpt-1b/b"


def _values(choice: Choice) -> dict[str, Any]:
    return dict(choice.chosen.forecast.plan.recipe.layout)


def test_other_runs_do_not_count(tmp_path: Path, predicted: Choice) -> None:
    here = predicted.chosen.forecast.plan.recipe
    ran(tmp_path, "ranks", here, 1.0, ranks=16)
    ran(tmp_path, "model", here.model_copy(update={"model": here.model.model_copy(update={"num_layers": 2})}), 1.0)
    longer = here.train.model_copy(update={"train_iters": 5})
    ran(tmp_path, "short", here.model_copy(update={"train": longer}), 2.0)
    ran(tmp_path, "device", here, 1.0, device="another")
    steps = measured_steps(RECIPE, SITE, 8, tmp_path)
    assert {step.run: step.seconds for step in steps} == {"gpt-1b/short": 2.0, "gpt-1b/device": 1.0}
    assert chosen(tmp_path)["measured"] == "gpt-1b/short"
    assert measured_steps(predicted.recipe, SITE, 8, tmp_path) == [], "nothing is to be chosen"
    assert measured_steps(RECIPE, SITE, 8, None) == []


def test_damaged_records_are_counted_and_left_out(
    tmp_path: Path, predicted: Choice, caplog: pytest.LogCaptureFixture
) -> None:
    here = predicted.chosen.forecast.plan.recipe
    for number, (name, text) in enumerate(
        [
            ("plan.json", "{"),
            ("plan.json", "[]"),
            ("plan.json", "{}"),
            ("recipe.yaml", "model: 3\n"),
            ("metrics.jsonl", '{"event": "measured", "step": 9, "details": {}}\n'),
            *(("metrics.jsonl", NOTE % value) for value in ("0", "-1", "1" + "0" * 400, '"x"', "null")),
        ]
    ):
        (ran(tmp_path, f"bad{number}", here, 1.0) / name).write_text(text, "utf-8")
    (ran(tmp_path, "begun", here, 1.0) / "plan.json").unlink()
    (ran(tmp_path, "running", here, 1.0) / "metrics.jsonl").write_text("", "utf-8")
    assert measured_steps(RECIPE, SITE, 8, tmp_path) == []
    (record,) = caplog.records
    assert " 10 runs" in record.getMessage()


def test_only_the_newest_runs_are_read(tmp_path: Path, predicted: Choice) -> None:
    for number in range(MOST + 1):
        folder = tmp_path / "gpt-1b" / f"run{number:03}"
        folder.mkdir(parents=True)
        (folder / "recipe.yaml").write_text("", "utf-8")
    ran(tmp_path, "run000", predicted.chosen.forecast.plan.recipe, 1.0)
    assert measured_steps(RECIPE, SITE, 8, tmp_path) == []
