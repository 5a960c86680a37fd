"""Searches on a real Slurm: each trial a job; and an array of workers, one of which is preempted."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from llmrecipes.recipe.load import load
from llmrecipes.recipe.schema import Recipe
from llmrecipes.search.command import quiet
from llmrecipes.search.study import load as load_study
from llmrecipes.search.study import place_of, require_section
from llmrecipes.search.trials import own_trials
from tests.helpers import ROOT, lines, tiny_on, write_recipe
from tests.system.slurm.conftest import Site

SEARCH = str(ROOT / "slurm/search.sbatch")


def searched(corpus: Path, **search: Any) -> Recipe:
    space = [{"key": "optimizer.lr", "low": 1e-4, "high": 1e-1, "log": True}]
    return tiny_on(
        corpus,
        train={"train_iters": 20, "global_batch_size": 32, "eval_interval": 5},
        checkpoint={"save_interval": 5},
        search={
            "space": space,
            "n_trials": 4,
            "sampler": {"seed": 1},
            "pruner": {"type": "NopPruner"},
            "heartbeat_interval": 5,
            **search,
        },
    )


def outcomes(site: Site, recipe: Recipe) -> tuple[Counter[str], list[str]]:
    """How the trials of a study ended, and their runs."""
    quiet()
    study = load_study(recipe, place_of(recipe, require_section(recipe), site.folder / "runs"))
    trials = list(own_trials(study))
    return Counter(trial.state.name for trial in trials), [trial.user_attrs["run_id"] for trial in trials]


@pytest.mark.rotating
def test_each_trial_is_a_job(site: Site, corpus: Path) -> None:
    """Two at a time; the job of one that is pruned is cancelled."""
    points = [{"optimizer.lr": 1e-2}, {"optimizer.lr": 1e-4}]
    pruner = {"type": "MedianPruner", "n_startup_trials": 1}
    recipe = searched(corpus, n_trials=3, pruner=pruner, enqueue_trials=points)
    printed = site.llmrecipes(
        "search", write_recipe(recipe, site.folder), "--to", "slurm", "--cluster", str(site.folder / "lab.yaml"),
        "--workers", "2", "--submit", "time=1:00:00", "--data-dir", str(site.data_dir), "--json",
    )  # fmt: skip
    answer = json.loads(printed[printed.index("{") :])
    assert sum(answer["trials"].values()) == 3
    assert answer["trials"]["complete"] >= 1
    best = load(str(site.folder / answer["recipes"][0])).recipe
    assert best.optimizer.lr == answer["best"][0]["values"]["optimizer.lr"]
    jobs = {}
    for _, run_id in zip(range(3), outcomes(site, recipe)[1], strict=True):
        job = json.loads((site.folder / "runs/tiny-search" / run_id / "logs/submission.json").read_text())["job_id"]
        jobs[run_id] = site.lab.job(job)["JobState"]
    assert len(jobs) == 3
    assert set(jobs.values()) <= {"COMPLETED", "CANCELLED", "FAILED"}
    assert Counter(jobs.values())["COMPLETED"] == answer["trials"]["complete"]


def test_an_array_of_workers_and_a_preempted_one(site: Site, corpus: Path) -> None:
    recipe = searched(corpus)
    path = write_recipe(recipe, site.folder)
    job = site.sbatch(
        "--parsable", "--array=0-1", SEARCH, "--python", sys.executable, "--data-dir", str(site.data_dir), path
    )
    folder = site.folder / "runs/tiny-search"

    def training() -> str | None:
        found = [path.parent for path in folder.glob("*/metrics.jsonl")]
        return next((run.name for run in found if any(line["step"] >= 5 for line in lines(run))), None)

    site.lab.until(training, "no trial has begun")
    site.lab.run("scontrol", "requeue", f"{job}_0")
    for task in (0, 1):
        site.lab.wait(f"{job}_{task}", "COMPLETED", "FAILED", "CANCELLED", timeout=500)
        assert site.lab.job(f"{job}_{task}")["JobState"] == "COMPLETED", site.lab.state()
    states, runs = outcomes(site, recipe)
    assert states == {"COMPLETE": 4}
    assert len(set(runs)) == 4
    for run_id in runs:  # each trained every step once, whoever did
        steps = [line["step"] for line in lines(folder / run_id) if "grad_norm" in line]
        assert steps == list(range(1, 21))
