"""`llmrecipes train`: check, prepare, start the ranks."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from llmrecipes.cluster import Cluster, detect
from llmrecipes.errors import ExitCode, UserError
from llmrecipes.launch.local import run_ranks
from llmrecipes.plan.check import check
from llmrecipes.plan.derive import default_world_size, derive
from llmrecipes.recipe.load import load
from llmrecipes.recipe.schema import Recipe
from llmrecipes.train.spec import RunSpec
from llmrecipes.workflow.overfit import one_batch_recipe

RUN_ID = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-"


@dataclass(frozen=True)
class Places:
    """Where things are kept."""

    runs_dir: Path
    data_dir: Path


@dataclass(frozen=True)
class Wishes:
    """What the command line asks for beside the recipe."""

    nproc: int | None = None
    run_id: str | None = None
    overfit_batch: bool = False
    anomaly: bool = False
    profile_steps: int = 0
    sample: bool = True


def train(recipe: Recipe, places: Places, wishes: Wishes, say: Callable[[str], None]) -> int:
    """Run a recipe on this machine, or go on with a run.

    Args:
        recipe: the resolved recipe.
        places: where runs and data are kept.
        wishes: ranks, run id and debugging.
        say: receives one line for each thing that takes time.

    Returns:
        The exit code.

    Raises:
        UserError: nothing was started.
    """
    if wishes.overfit_batch:
        recipe = one_batch_recipe(recipe)
    cluster = detect()
    ranks = default_world_size(recipe, cluster) if wishes.nproc is None else wishes.nproc
    check(recipe, derive(recipe, ranks, cluster), cluster)
    run_id = new_run_id() if wishes.run_id is None else checked_run_id(wishes.run_id)
    run_dir = places.runs_dir / recipe.name / run_id
    _require_same_recipe(recipe, run_dir)
    _require_writable(run_dir)
    spec = RunSpec(
        recipe=recipe,
        run_dir=run_dir,
        runs_dir=places.runs_dir,
        data_dir=places.data_dir,
        overfit_batch=wishes.overfit_batch,
        anomaly=wishes.anomaly,
        profile_steps=wishes.profile_steps,
        sample=wishes.sample,
    )
    from llmrecipes.data.prepare import prepare

    prepare(recipe, places.data_dir, progress=say)
    return start(spec, ranks, cluster)


def start(spec: RunSpec, ranks: int, cluster: Cluster) -> int:
    """Run all ranks to their end; returns the exit code."""
    threads = max(1, int(cluster.cpu_cores) // ranks)
    if ranks == 1:
        # The variable only counts before torch is loaded, which data preparation may have done.
        import torch

        from llmrecipes.train.worker import guarded

        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", threads)))
        return guarded(spec)
    path = spec.run_dir / "logs" / "spec.json"
    path.write_text(spec.model_dump_json(indent=2) + "\n", "utf-8")
    return run_ranks(
        "llmrecipes.train.worker", [str(path)], world_size=ranks, threads=threads, logs=spec.run_dir / "logs"
    )


def new_run_id() -> str:
    """UTC time and four random characters, so that ids sort by age and do not meet."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(2)}"


def checked_run_id(run_id: str) -> str:
    """A run id that is safe as the name of a directory.

    Raises:
        UserError: it is not.
    """
    if not 0 < len(run_id) <= 64 or run_id[0] in "._-" or set(run_id) - set(RUN_ID):
        raise UserError(
            f"run id {run_id!r}",
            where="--run-id",
            rule="at most 64 letters, digits, dots, dashes and underscores; a letter or digit first",
            fix="--run-id my-run-1",
        )
    return run_id


def _require_same_recipe(recipe: Recipe, run_dir: Path) -> None:
    path = run_dir / "recipe.yaml"
    if not path.exists():
        return
    from llmrecipes.checkpoint.compatibility import require_compatible

    then = load(str(path)).recipe
    require_compatible(recipe.model_dump(mode="json"), then.model_dump(mode="json"), where=str(run_dir))


def _require_writable(run_dir: Path) -> None:
    try:
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)
        if not os.access(run_dir, os.W_OK):
            raise PermissionError(13, "Permission denied", str(run_dir))
    except OSError as error:
        raise UserError(
            f"the run directory cannot be written: {error.strerror}",
            where=str(error.filename or run_dir),
            rule="a run keeps its recipe, metrics and checkpoints in its directory",
            fix="--runs-dir DIR, or LLMRECIPES_RUNS",
            code=ExitCode.BAD_INPUT,
        ) from error
