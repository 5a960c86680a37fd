"""What earlier runs have measured, in the choice of a layout."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from llmrecipes.hardware.load import load_profile
from llmrecipes.hardware.machine import machine
from llmrecipes.launch.run_options import RunOptions
from llmrecipes.plan.speed.choice import Choice, choose
from llmrecipes.recipe.load import load, to_yaml
from llmrecipes.recipe.schema import Recipe
from llmrecipes.rundir import Run
from llmrecipes.tracking.events import MEASURED, STARTED
from llmrecipes.workflow.measured_steps import MOST, measured_steps
from llmrecipes.workflow.plan import plan_on
from llmrecipes.workflow.run import Paths, TrainOptions
from llmrecipes.workflow.start import Machine, plan_start

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
    runs_dir: Path,
    run_id: str,
    recipe: Recipe,
    seconds: float,
    *,
    ranks: int = 8,
    device: str | None = None,
    profile: str | None = H100,
) -> Path:
    """The records of a run that has ended: what it planned, and what a step took."""
    run = Run.of(runs_dir, recipe.name, run_id)
    run.create()
    run.recipe_file.write_text(to_yaml(recipe), "utf-8")
    plan = {"world_size": ranks, "predicted": {"device": device or _device(), "profile": profile}}
    (run.path / "plan.json").write_text(json.dumps(plan), "utf-8")
    note = {"event": MEASURED, "step": 9, "details": {"measured/step_seconds": seconds}}
    run.metrics.write_text(json.dumps(note) + "\n", "utf-8")
    return run.path


@cache
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
    ran(tmp_path, "links", here, 1.0, profile="aws-p5-efa")
    ran(tmp_path, "detected", here, 1.0, profile=None)
    steps = measured_steps(RECIPE, SITE, 8, PROFILE, tmp_path)
    assert {step.run: step.seconds for step in steps} == {"gpt-1b/short": 2.0, "gpt-1b/device": 1.0}
    assert chosen(tmp_path)["measured"] == "gpt-1b/short"
    assert measured_steps(predicted.recipe, SITE, 8, PROFILE, tmp_path) == [], "nothing is to be chosen"
    assert measured_steps(RECIPE, SITE, 8, PROFILE, None) == []


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
    assert measured_steps(RECIPE, SITE, 8, PROFILE, tmp_path) == []
    (record,) = caplog.records
    assert " 10 runs" in record.getMessage()


def test_only_the_newest_runs_are_read(tmp_path: Path, predicted: Choice) -> None:
    for number in range(MOST + 1):
        folder = tmp_path / "gpt-1b" / f"run{number:03}"
        folder.mkdir(parents=True)
        (folder / "recipe.yaml").write_text("", "utf-8")
    ran(tmp_path, "run000", predicted.chosen.forecast.plan.recipe, 1.0)
    assert measured_steps(RECIPE, SITE, 8, PROFILE, tmp_path) == []


def test_only_what_the_last_start_has_measured_counts(tmp_path: Path, predicted: Choice) -> None:
    """A start in another layout replaces recipe and plan, but not the note of the start before."""
    path = ran(tmp_path, "a", predicted.chosen.forecast.plan.recipe, 1.0) / "metrics.jsonl"
    started = json.dumps({"event": STARTED, "step": 9, "details": {}}) + "\n"
    path.write_text(started + path.read_text("utf-8"), "utf-8")
    assert [step.seconds for step in measured_steps(RECIPE, SITE, 8, PROFILE, tmp_path)] == [1.0]
    path.write_text(path.read_text("utf-8") + started, "utf-8")
    assert measured_steps(RECIPE, SITE, 8, PROFILE, tmp_path) == []


def started(runs_dir: Path, run_id: str, *, nodes: int = 1, from_scratch: bool = False, recipe: Recipe = RECIPE) -> Any:
    site = machine(PROFILE, nodes)
    options = TrainOptions(run_id=run_id, run=RunOptions(from_scratch=from_scratch))
    plan = plan_start(recipe, Paths(runs_dir, runs_dir), options, Machine(site, 8 * nodes, nodes, PROFILE))
    assert plan.chosen is not None
    return plan.chosen


def test_a_run_that_goes_on_keeps_its_layout(tmp_path: Path, predicted: Choice) -> None:
    first, second = predicted.chosen, predicted.following
    assert second is not None
    plan = ran(tmp_path, "killed", first.forecast.plan.recipe, 1.0) / "plan.json"
    (plan.parent / "metrics.jsonl").unlink()
    plan.write_text(json.dumps({**json.loads(plan.read_text("utf-8")), "chosen": {"layout": first.key}}), "utf-8")
    ran(tmp_path, "slow", first.forecast.plan.recipe, 1.5 * second.forecast.step.seconds)
    ran(tmp_path, "fast", second.forecast.plan.recipe, second.forecast.step.seconds)
    assert started(tmp_path, "new")["layout"] == second.key
    again = started(tmp_path, "killed")
    assert (again["layout"], again["text"]) == (first.key, f"{first.key}: as at the last start of this run")
    assert started(tmp_path, "killed", from_scratch=True)["layout"] == second.key
    smaller = load("gpt-1b", ["layout.micro_batch_size=2"]).recipe
    other = started(tmp_path, "killed", recipe=smaller)
    assert other["layout"] == "MBS2" and "last start" not in other["text"], "another layout is asked for"
    plan.write_text("{", "utf-8")
    assert started(tmp_path, "killed")["layout"] == second.key


def test_nodes_that_plan_by_themselves_do_not_look_at_runs(tmp_path: Path, predicted: Choice) -> None:
    """Their runs' directories may differ, and a run may end between two looks; their layouts must not."""
    alone = started(tmp_path, "new", nodes=2)
    other = RECIPE.with_layout(**{**_values(predicted), "tensor_model_parallel_size": 2, "micro_batch_size": 1})
    plan, _ = plan_on(other, nproc=16, cluster=H100, nodes=2)
    usual, _ = plan_on(RECIPE, nproc=16, cluster=H100, nodes=2)
    ran(tmp_path, "a", plan.recipe, 0.01, ranks=16)
    ran(tmp_path, "b", usual.recipe, 100.0, ranks=16)
    seen, _ = plan_on(RECIPE, nproc=16, cluster=H100, nodes=2, runs_dir=tmp_path)
    assert seen.chosen is not None and seen.chosen["measured"] == "gpt-1b/a"
    assert started(tmp_path, "new", nodes=2) == alone
