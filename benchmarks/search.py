"""What a search costs and finds, on real trainings of a tiny model.

    python -m benchmarks.search --part steps --table DIR --seeds 20    # trains two grids: about 40 minutes of one core
    python -m benchmarks.search --part time --data-dir DIR             # 16 trials, about 7 minutes of two idle cores

`steps`: every point of a grid is trained once, and its validation losses are kept in DIR, so that the measurement can
be interrupted. Searches over the range of the grid are then replayed on this table with the program's own samplers and
pruners; a trial has the losses of the point next to its values. Counted are optimizer steps until a completed trial is
within 1 % of the grid's best loss.

`time`: `llmrecipes search` as a command, with one and with two trials at a time, one thread each: trials an hour, and
the share of the time in which a trial could run and none does.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna

from benchmarks.common import close, machine, parser, show
from benchmarks.curve import curve
from llmrecipes.data.prepare import prepare
from llmrecipes.launch import record
from llmrecipes.recipe.load import to_yaml
from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.sections.search_section import Search
from llmrecipes.runfiles import RunFiles
from llmrecipes.search.command import quiet
from llmrecipes.search.samplers import pruner, sampler
from llmrecipes.search.space import suggest, trial_recipe
from llmrecipes.search.study import require_section
from llmrecipes.tracking.jsonl import parse

STEPS, EVALUATIONS = 80, 8
"""Of a point of a grid."""
WITHIN = 1.01
PATIENCE = 200
"""Trials of a replayed search that does not get there."""

Axes = Mapping[str, Sequence[float]]
GRIDS: dict[str, Axes] = {
    "2 keys": {
        "optimizer.lr": (3e-4, 6e-4, 1.2e-3, 2.4e-3, 4.8e-3, 9.6e-3, 1.9e-2, 3.8e-2),
        "scheduler.lr_warmup_iters": (5, 10, 20, 40),
    },
    "4 keys": {
        "optimizer.lr": (1.2e-3, 2.4e-3, 4.8e-3, 9.6e-3, 1.9e-2),
        "scheduler.lr_warmup_iters": (5, 20, 40),
        "optimizer.adam_beta2": (0.9, 0.99),
        "model.init_method_std": (0.01, 0.03, 0.09),
    },
}
"""The best learning rate is inside each range."""
LOG = ("optimizer.lr", "model.init_method_std")

HYPERBAND = {"type": "HyperbandPruner"}
CONTENDERS: dict[str, dict[str, Any]] = {
    "random search": {"sampler": {"type": "RandomSampler"}, "pruner": {"type": "NopPruner"}},
    "random search, Hyperband": {"sampler": {"type": "RandomSampler"}, "pruner": HYPERBAND},
    "TPE without pruning": {"pruner": {"type": "NopPruner"}},
    "TPE, median (the default)": {},
    "TPE, Hyperband": {"pruner": HYPERBAND},
    "TPE, Hyperband, 5 random trials": {"sampler": {"n_startup_trials": 5}, "pruner": HYPERBAND},
}
"""Sections `search` of a recipe, besides the space. What is not set is the program's default."""


def recipe(axes: Axes, steps: int = STEPS, **section: Any) -> Recipe:
    """A model of 0.3M parameters on the standard library, with a search over the range of the axes."""
    space = [{"key": key, "low": values[0], "high": values[-1], "log": key in LOG} for key, values in axes.items()]
    return Recipe.model_validate(
        {
            "name": "bench",
            "model": {
                "num_layers": 2, "hidden_size": 96, "num_attention_heads": 4, "seq_length": 64, "vocab_size": 1024,
                "position_embedding_type": "rope", "normalization": "RMSNorm",
            },
            "train": {
                "train_iters": steps, "global_batch_size": 8, "precision": "fp32",
                "eval_interval": steps // EVALUATIONS, "eval_iters": 4
            },
            "data": {"num_workers": 0},
            "optimizer": {"lr": 1.2e-3},
            "scheduler": {"lr_warmup_iters": 5},
            "tracking": {"mlflow": False, "tensorboard": False},
            "search": {"space": space, "enqueue_recipe": False, "n_trials": 1000, **section},
            "layout": {"micro_batch_size": 8},
        }
    )  # fmt: skip


# -- steps ---------------------------------------------------------------------------------------------------------

Point = tuple[float, ...]
Losses = dict[Point, list[float]]
"""Validation losses of each point of a grid; shorter where the training diverged."""


def train_grid(axes: Axes, file: Path | None, data_dir: Path) -> Losses:
    """Train the points of a grid that the file lacks."""
    kept: dict[str, list[float]] = {}
    if file is not None and file.exists():
        kept = json.loads(file.read_text("utf-8"))
    base = recipe(axes)
    found: Losses = {}
    for point in itertools.product(*axes.values()):
        name = json.dumps(point)
        if name not in kept:
            job = trial_recipe(base, require_section(base), dict(zip(axes, point, strict=True)))
            kept[name] = curve(job, data_dir)
            print(f"{name}: {kept[name][-1] if len(kept[name]) == EVALUATIONS else 'diverged'}", flush=True)
            if file is not None:
                file.write_text(json.dumps(kept, indent=0) + "\n", "utf-8")
        found[point] = kept[name]
    return found


def goal(table: Losses) -> float:
    """A loss that is good enough."""
    return WITHIN * min(losses[-1] for losses in table.values() if len(losses) == EVALUATIONS)


def is_good(losses: Sequence[float], wanted: float) -> bool:
    """Whether a training got there at its end."""
    return len(losses) == EVALUATIONS and losses[-1] <= wanted


def nearest(axes: Axes, values: Mapping[str, Any]) -> Point:
    """The point of the grid next to values of its keys."""

    def place(key: str, value: float) -> float:
        return math.log(value) if key in LOG else value

    return tuple(
        min(points, key=lambda each: abs(place(key, each) - place(key, values[key]))) for key, points in axes.items()
    )


def in_random_order(table: Losses, seed: int) -> int:
    """Steps until the grid gets there if its points are trained in random order, as `GridSampler` does."""
    order = list(table.values())
    random.Random(seed).shuffle(order)
    wanted, steps = goal(table), 0
    for losses in order:
        steps += len(losses) * STEPS // EVALUATIONS
        if is_good(losses, wanted):
            break
    return steps


def replay(axes: Axes, table: Losses, section: dict[str, Any], seed: int) -> int | None:
    """Steps until a completed trial is good enough; None if the search does not get there."""
    job = recipe(axes, **section)
    settings: Search = require_section(job)
    settings = settings.model_copy(update={"sampler": settings.sampler.model_copy(update={"seed": seed})})
    study = optuna.create_study(
        study_name=f"seed {seed}",  # from which Hyperband draws the bracket of a trial
        sampler=sampler(settings, 0), pruner=pruner(settings, EVALUATIONS),
    )  # fmt: skip
    wanted, steps = goal(table), 0
    for _ in range(PATIENCE):
        trial = study.ask()
        losses = table[nearest(axes, suggest(trial, job, settings))]
        for number, loss in enumerate(losses, 1):
            steps += STEPS // EVALUATIONS
            trial.report(loss, number)
            if number < EVALUATIONS and trial.should_prune():
                break
        else:
            if is_good(losses, wanted):
                return steps
            if len(losses) == EVALUATIONS:
                study.tell(trial, losses[-1])
                continue
        study.tell(trial, state=optuna.trial.TrialState.PRUNED)  # or it diverged, which counts as that
    return None


def compare(axes: Axes, table: Losses, seeds: int) -> dict[str, list[int | None]]:
    """Steps of each contender, for each seed."""
    whole = sum(len(losses) for losses in table.values()) * STEPS // EVALUATIONS
    return {
        "full grid": [whole],
        "grid in random order": [in_random_order(table, seed) for seed in range(seeds)],
        **{name: [replay(axes, table, section, seed) for seed in range(seeds)] for name, section in CONTENDERS.items()},
    }


def show_steps(name: str, table: Losses, found: dict[str, list[int | None]]) -> None:
    """Median, quartiles and range over seeds."""
    whole = found["full grid"][0] or 0
    lines = []
    for contender, steps in found.items():
        reached = sorted(math.inf if step is None else step for step in steps)
        low, middle, high = statistics.quantiles(reached, n=4) if len(reached) > 1 else reached * 3
        share = f"{middle / whole:.2f}" if math.isfinite(middle) else ""
        lines.append(
            (contender, _number(middle), share, f"{_number(low)} to {_number(high)}",
             f"{_number(reached[0])} to {_number(reached[-1])}", f"{sum(map(math.isfinite, reached))}/{len(reached)}")
        )  # fmt: skip
    good = sum(is_good(losses, goal(table)) for losses in table.values())
    show(
        f"{name}: steps until within 1 % of the grid's best, which {good} of {len(table)} points of {STEPS} steps are",
        ("", "median", "of the grid", "middle half", "range", "seeds that get there"), lines,
    )  # fmt: skip


def _number(steps: float) -> str:
    return f"{steps:,.0f}" if math.isfinite(steps) else "never"


# -- time ----------------------------------------------------------------------------------------------------------

TRIALS, TRIAL_STEPS = 8, 480


@dataclass(frozen=True)
class Job:
    """When a trial's process was started, when its first step ended, and when it had ended; seconds since the epoch."""

    started: float
    training: float
    ended: float


def job_of(run_dir: Path) -> Job:
    """From the files that the search and the trial wrote."""
    run = RunFiles(run_dir)
    with run.metrics.open("rb") as file:
        first = parse(file.readline())
    assert first is not None
    return Job(
        run.submission.stat().st_mtime, first["time"] - first["step_seconds"],
        run.exit_code.stat().st_mtime,
    )  # fmt: skip


def idle_seconds(jobs: Sequence[Job], workers: int, began: float, ended: float) -> tuple[float, float]:
    """Seconds in which a place for a trial is empty because of the search, and those of all places.

    A place that stays empty because the last trials are running is not counted; before the first trial and after the
    last there is one.
    """
    moments = sorted({began, ended, *(job.started for job in jobs), *(job.ended for job in jobs)})
    idle = whole = 0.0
    for since, until in itertools.pairwise(moments):
        running = sum(job.started <= since < job.ended for job in jobs)
        left = sum(job.ended > since for job in jobs)
        places = max(1, min(workers, left)) if any(job.started <= since for job in jobs) else 1
        idle += max(0, places - running) * (until - since)
        whole += places * (until - since)
    return idle, whole


def search_once(workers: int, folder: Path, data_dir: Path) -> dict[str, Any]:
    """Run `llmrecipes search` and read what its trials recorded."""
    job = recipe(GRIDS["2 keys"], TRIAL_STEPS, n_trials=TRIALS, sampler={"seed": 0}, pruner={"type": "NopPruner"})
    file, runs_dir = folder / f"{job.name}.yaml", folder / f"runs-{workers}"
    file.write_text(to_yaml(job), "utf-8")
    command = [sys.executable, "-m", "llmrecipes.cli", "search", str(file), "--workers", str(workers)]
    began = time.time()
    subprocess.run(
        [*command, "--runs-dir", str(runs_dir), "--data-dir", str(data_dir)],
        check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    ended = time.time()
    jobs = [job_of(run_dir) for run_dir in record.submitted(runs_dir)]
    assert len(jobs) == TRIALS, f"{len(jobs)} of {TRIALS} trials ran"
    idle, whole = idle_seconds(jobs, workers, began, ended)
    first, last = min(job.started for job in jobs), max(job.ended for job in jobs)
    return {
        "workers": workers, "seconds": ended - began, "before_first": first - began, "after_last": ended - last,
        "idle": idle, "places": whole,
        "start_of_trial": statistics.median(job.training - job.started for job in jobs),
        "training": statistics.median(job.ended - job.training for job in jobs),
    }  # fmt: skip


def show_time(measured: Sequence[dict[str, Any]]) -> None:
    """Trials an hour, and the time without a trial."""
    lines = []
    for each in measured:
        outer = each["before_first"] + each["after_last"]
        lines.append(
            (each["workers"], f"{each['seconds']:.1f}", f"{3600 * TRIALS / each['seconds']:.0f}",
             f"{measured[0]['seconds'] / each['seconds']:.2f}",
             *(f"{seconds:.1f} s, {seconds / each['places']:.1%}" for seconds in (each["idle"], each["idle"] - outer)),
             f"{each['start_of_trial']:.1f} s", f"{each['training']:.1f} s")
        )  # fmt: skip
    columns = (
        "workers",
        "seconds",
        "trials an hour",
        "× one",
        "no trial runs",
        "between trials",
        "process start",
        "training",
    )
    show(f"{TRIALS} trials of {TRIAL_STEPS} steps", columns, lines)


def main() -> None:
    """Measure and print."""
    options = parser(__doc__)
    options.add_argument("--part", choices=("steps", "time"), help="default: both")
    options.add_argument("--seeds", type=int, default=20)
    options.add_argument("--grids", nargs="+", choices=GRIDS, default=list(GRIDS))
    options.add_argument("--table", type=Path, metavar="DIR", help="losses of the grids, kept from run to run")
    options.add_argument("--data-dir", type=Path, help="prepared data, kept from run to run")
    given = options.parse_args()
    quiet()
    where, figures = machine(), dict[str, Any]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data_dir = given.data_dir or folder / "data"
        prepare(recipe(GRIDS["2 keys"]), data_dir)
        if given.part != "steps":
            measured = [search_once(workers, folder, data_dir) for workers in (1, 2)]
            show_time(measured)
            figures["time"] = measured
        for grid in given.grids if given.part != "time" else ():
            file = None if given.table is None else given.table / f"{grid.replace(' ', '-')}.json"
            table = train_grid(GRIDS[grid], file, data_dir)
            found = compare(GRIDS[grid], table, given.seeds)
            show_steps(grid, table, found)
            figures[grid] = found
    close(figures, where, given.json)


if __name__ == "__main__":
    main()
