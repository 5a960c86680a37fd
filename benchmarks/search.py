"""What a search costs and finds, on real trainings of a tiny model.

    make bench BENCH=search                    # all figures; about half an hour on two idle cores
    make bench BENCH=search ARGS="--seeds 20 --table FILE"

1. Every point of a grid (learning rate × warm-up) is trained once, with its validation losses.
2. Samplers are replayed on this table: optimizer steps until a completed trial is within 1 % of the grid's best loss,
   for the full grid, for random search and for TPE with Hyperband, over several seeds.
3. Trials an hour with one and with two workers, and the time of a search outside of its trials.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import optuna

from benchmarks.common import close, machine, parser, show
from llmrecipes.launch.registry import launcher
from llmrecipes.recipe.schema import Recipe
from llmrecipes.search.command import quiet, search
from llmrecipes.search.samplers import pruner, sampler
from llmrecipes.search.study import require_section
from llmrecipes.search.target import here
from llmrecipes.workflow.run import Paths

RATES = [3e-4, 6e-4, 1.2e-3, 2.4e-3, 4.8e-3, 9.6e-3, 1.9e-2, 3.8e-2]
WARMUPS = [1, 5, 10, 20]
STEPS, EVALUATIONS = 80, 8
WITHIN = 1.01
CONTENDERS: dict[str, dict[str, Any]] = {
    "random search": {"sampler": {"type": "RandomSampler"}, "pruner": {"type": "NopPruner"}},
    "TPE, Hyperband": {
        "sampler": {"type": "TPESampler", "n_startup_trials": 5},
        "pruner": {"type": "HyperbandPruner", "reduction_factor": 2},
    },
}


def recipe(**section: Any) -> Recipe:
    """A model of 0.4M parameters on the standard library."""
    space = [{"key": "optimizer.lr", "choices": RATES}, {"key": "scheduler.lr_warmup_iters", "choices": WARMUPS}]
    return Recipe.model_validate(
        {
            "name": "bench",
            "model": {
                "num_layers": 2, "hidden_size": 96, "num_attention_heads": 4, "seq_length": 64, "vocab_size": 1024,
                "position_embedding_type": "rope", "normalization": "RMSNorm",
            },
            "train": {
                "train_iters": STEPS, "micro_batch_size": 8, "global_batch_size": 8, "precision": "fp32",
                "eval_interval": STEPS // EVALUATIONS, "eval_iters": 4,
            },
            "optimizer": {"lr": RATES[2]},
            "scheduler": {"lr_warmup_iters": WARMUPS[1]},
            "tracking": {"mlflow": False, "tensorboard": False},
            "search": {"space": space, "enqueue_recipe": False, "n_trials": 10**6, **section},
        }
    )  # fmt: skip


def train_grid(folder: Path, data: Path, workers: int) -> tuple[list[dict[str, Any]], float]:
    """Train every point; returns the trials, and the seconds that it took."""
    grid = recipe(sampler={"type": "GridSampler"}, pruner={"type": "NopPruner"}, n_trials=None, keep_checkpoints="none")
    paths = Paths(folder, data)
    started = time.perf_counter()
    result = search(grid, lambda: here(launcher("local"), {}, paths, workers, None), resume=True, log=print)
    seconds = time.perf_counter() - started
    backend = optuna.storages.journal.JournalFileBackend(str(result.folder / "journal.log"))
    study = optuna.load_study(study_name="bench", storage=optuna.storages.JournalStorage(backend))
    return [_row(trial) for trial in study.trials if trial.state.is_finished()], seconds


def _row(trial: optuna.trial.FrozenTrial) -> dict[str, Any]:
    began, ended = trial.datetime_start, trial.datetime_complete
    return {
        "params": trial.params,
        "losses": [trial.intermediate_values.get(n) for n in range(1, EVALUATIONS + 1)],
        "seconds": (ended - began).total_seconds() if began and ended else 0.0,
    }


def replay(table: list[dict[str, Any]], section: dict[str, Any], seed: int) -> int | None:
    """Steps until a completed trial is good enough; None if the study does not get there."""
    settings = {**section, "sampler": {**section["sampler"], "seed": seed}}
    found = require_section(recipe(**settings))
    study = optuna.create_study(sampler=sampler(found, 0), pruner=pruner(found, EVALUATIONS))
    curves = {tuple(row["params"].values()): row["losses"] for row in table}
    goal = WITHIN * min(losses[-1] for losses in curves.values() if losses[-1] is not None)
    steps = 0
    for _ in range(10 * len(table)):
        trial = study.ask()
        losses = curves[trial.suggest_categorical("optimizer.lr", RATES),
                        trial.suggest_categorical("scheduler.lr_warmup_iters", WARMUPS)]  # fmt: skip
        for number, loss in enumerate(losses, 1):
            if loss is None:  # it diverged
                study.tell(trial, state=optuna.trial.TrialState.PRUNED)
                break
            steps += STEPS // EVALUATIONS
            trial.report(loss, number)
            if number < EVALUATIONS and trial.should_prune():
                study.tell(trial, state=optuna.trial.TrialState.PRUNED)
                break
        else:
            study.tell(trial, losses[-1])
            if losses[-1] <= goal:
                return steps
    return None


def summary(table: list[dict[str, Any]], seeds: int) -> Iterator[tuple[str, list[int | None]]]:
    """Name of a contender, and its steps for each seed."""
    yield "full grid", [STEPS * len(table)]
    for name, section in CONTENDERS.items():
        yield name, [replay(table, section, seed) for seed in range(seeds)]


def main() -> None:
    """Measure and print."""
    options = parser(__doc__)
    options.add_argument("--seeds", type=int, default=10)
    options.add_argument("--table", type=Path, help="trained points, read if the file exists, else written")
    options.add_argument("--skip-workers", action="store_true", help="leave out the comparison of one and two workers")
    given = options.parse_args()
    quiet()
    where, figures = machine(), dict[str, Any]()
    with tempfile.TemporaryDirectory() as name:
        data = Path(name) / "data"
        table = None
        if given.table is not None:
            with suppress(FileNotFoundError):
                table = json.loads(given.table.read_text("utf-8"))
        for workers in (1, 2) if table is None or not given.skip_workers else ():
            rows, seconds = train_grid(Path(name) / f"runs-{workers}", data, workers)
            trials = sum(row["seconds"] for row in rows)
            figures[f"workers_{workers}"] = {"seconds": seconds, "trials": len(rows), "seconds_in_trials": trials}
            table = table or rows
            if given.skip_workers:
                break
        if table is None:
            raise SystemExit("no table")
        if given.table is not None and not given.table.exists():
            given.table.write_text(json.dumps(table, indent=1) + "\n", "utf-8")
    found = dict(summary(table, given.seeds))
    whole = STEPS * len(table)
    lines = []
    for name, steps in found.items():
        reached = sorted(each for each in steps if each is not None)
        middle, ends = statistics.median(reached), f"{reached[0]:,} to {reached[-1]:,}"
        lines.append((name, f"{middle:,.0f}", f"{middle / whole:.2f}", ends, f"{len(reached)}/{len(steps)}"))
    columns = ("", "median", "of the grid", "range", "seeds that get there")
    show(f"Steps until within 1 % of the best of {len(table)} points of {STEPS} steps", columns, lines)
    speeds = []
    for workers in (1, 2):
        if measured := figures.get(f"workers_{workers}"):
            outside = 1 - measured["seconds_in_trials"] / workers / measured["seconds"]
            speeds.append((workers, f"{3600 * measured['trials'] / measured['seconds']:.0f}", f"{outside:.1%}"))
    if speeds:
        show("Trials an hour", ("workers", "trials", "time outside of trials"), speeds)
    close({**figures, "steps": found, "points": table}, where, given.json)


if __name__ == "__main__":
    main()
