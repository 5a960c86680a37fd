"""What `python -m benchmarks.search` makes of losses and times."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path

import pytest

from benchmarks.search import (
    CONTENDERS,
    EVALUATIONS,
    GRIDS,
    STEPS,
    Job,
    Losses,
    compare,
    idle_seconds,
    in_random_order,
    job_of,
    nearest,
    recipe,
    replay,
)
from llmrecipes.recipe.rules.recipe_rules import check
from llmrecipes.runfiles import RunFiles
from llmrecipes.search.command import quiet

AXES = GRIDS["2 keys"]
RATES, WARMUPS = AXES.values()


def losses() -> Losses:
    """The best point is in the middle; the highest rate diverges after two evaluations."""
    found: Losses = {}
    for rate, warmup in itertools.product(RATES, WARMUPS):
        last = 5 + abs(RATES.index(rate) - 3) + abs(WARMUPS.index(warmup) - 1) / 2
        curve = [last + (EVALUATIONS - number) / 4 for number in range(1, EVALUATIONS + 1)]
        found[rate, warmup] = curve[:2] if rate == RATES[-1] else curve
    return found


@pytest.fixture(autouse=True)
def _quiet() -> None:
    quiet()


def test_recipes_are_valid() -> None:
    for axes, contender in itertools.product(GRIDS.values(), CONTENDERS.values()):
        assert check(recipe(axes, **contender)) == []


def test_the_values_of_a_trial_have_the_losses_of_the_nearest_point() -> None:
    assert nearest(AXES, {"optimizer.lr": 2.4e-3, "scheduler.lr_warmup_iters": 10}) == (2.4e-3, 10)
    # 1.7e-3 is the middle of 1.2e-3 and 2.4e-3 on a logarithmic scale.
    assert nearest(AXES, {"optimizer.lr": 1.68e-3, "scheduler.lr_warmup_iters": 14}) == (1.2e-3, 10)
    assert nearest(AXES, {"optimizer.lr": 1.72e-3, "scheduler.lr_warmup_iters": 16}) == (2.4e-3, 20)


def test_steps_of_the_contenders() -> None:
    table = losses()
    found = compare(AXES, table, seeds=2)
    assert found["full grid"] == [STEPS * 28 + STEPS * 4 // 4]
    assert found["grid in random order"] == [in_random_order(table, seed) for seed in range(2)]
    assert set(found) == {"full grid", "grid in random order", *CONTENDERS}
    reached = [step for steps in found.values() for step in steps if step is not None]
    assert all(each >= STEPS and each % (STEPS // EVALUATIONS) == 0 for each in reached)
    unpruned = replay(AXES, table, CONTENDERS["TPE without pruning"], 0)
    assert unpruned == found["TPE without pruning"][0], "a seed gives the same search"


def test_time_in_which_a_place_is_empty() -> None:
    one = [Job(2, 3, 10), Job(11, 12, 20)]
    assert idle_seconds(one, 1, began=0, ended=21) == (2 + 1 + 1, 21)
    # Two places; from 12 on one trial is left, and the other place has nothing to run.
    two = [Job(1, 2, 10), Job(1.5, 2, 10), Job(10.5, 11, 20), Job(11, 12, 12)]
    idle, whole = idle_seconds(two, 2, began=0, ended=20)
    assert idle == pytest.approx(1 + 0.5 + 2 * 0.5 + 0.5)
    assert whole == pytest.approx(1 + 2 * 11 + 8)


def test_times_of_a_trial_are_those_of_its_process(tmp_path: Path) -> None:
    run = RunFiles(tmp_path)
    for path, text, when in (
        (run.submission, "{}", 100.0),
        (run.metrics, json.dumps({"step": 1, "loss": 5.0, "step_seconds": 0.5, "time": 107.5}) + "\n", 200.0),
        (run.exit_code, "job 0\n", 130.0),
    ):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, "utf-8")
        os.utime(path, (when, when))
    assert job_of(tmp_path) == Job(100.0, 107.0, 130.0)
