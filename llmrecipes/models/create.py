"""Runs and folders that are made from models: complete, or absent."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmrecipes.checkpoint.store import take_lock
from llmrecipes.errors import UserError
from llmrecipes.hardware.cluster import detect
from llmrecipes.io import sync, write_atomic
from llmrecipes.plan.derive import Plan, derive
from llmrecipes.recipe.engines import engine_name
from llmrecipes.recipe.load import recipe_hash
from llmrecipes.recipe.schema import Recipe
from llmrecipes.rundir import Run
from llmrecipes.tracking.events import Note
from llmrecipes.tracking.status import StatusSink
from llmrecipes.workflow.pretrained import IMPORTED
from llmrecipes.workflow.run import on_one_rank

if TYPE_CHECKING:
    import torch

    from llmrecipes.checkpoint.manifest import CheckpointInfo
    from llmrecipes.engine.base import WeightSource
    from llmrecipes.tracking.progress import Counted

_LOCK = ".lock"


@contextmanager
def published(out: Path, elsewhere: str = "--out DIR") -> Iterator[Path]:
    """A hidden folder beside `out` that is renamed to it when the block ends, with everything in it on the disk.

    After an exception, nothing remains. The next process removes what a killed one has left.

    Args:
        out: the final name.
        elsewhere: the option that chooses another place.

    Raises:
        UserError: it exists already, another process writes it, or the disk is full or fails.
    """
    require_absent(out, elsewhere)
    hidden = out.with_name(f".{out.name}.part")
    try:
        hidden.mkdir(parents=True, exist_ok=True)
        try:
            lock = take_lock(hidden / _LOCK)
        except UserError as busy:
            raise UserError("another process is writing it", where=str(out), fix=f"wait, or {elsewhere}") from busy
        try:
            _empty(hidden)
            yield hidden
            for path in (*sorted(hidden.rglob("*")), hidden):
                sync(path)
            require_absent(out, elsewhere)
            (hidden / _LOCK).unlink()
            hidden.rename(out)
            sync(out.parent)
        except BaseException:
            shutil.rmtree(hidden, ignore_errors=True)
            raise
        finally:
            os.close(lock)
    except OSError as error:
        raise UserError(
            f"cannot be written: {error.strerror}",
            where=str(error.filename or out),
            rule="a partial result is removed",
            fix=f"free some disk space if it is full, or write to another disk with {elsewhere}",
        ) from error


def require_absent(out: Path, elsewhere: str = "--out DIR") -> None:
    """Check that a folder to be written does not exist.

    Args:
        out: the folder.
        elsewhere: the option that chooses another place.

    Raises:
        UserError: it does, or a file has its name.
    """
    if out.exists() or out.is_symlink():
        raise UserError(
            "already exists", where=str(out), rule="nothing is overwritten", fix=f"remove it, or {elsewhere}"
        )


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.name == _LOCK:
            continue
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


@dataclass(frozen=True)
class CreatedRun:
    """A run that `llmrecipes train <run_dir>/recipe.yaml --run-id <run_id>` resumes.

    Attributes:
        run_dir: its directory, with recipe.yaml and one checkpoint.
        origin: what it was made from, which its directory records.
    """

    run_dir: str
    origin: Mapping[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"run_dir": self.run_dir, **self.origin}


def create_run(
    run_dir: Path,
    recipe: Recipe,
    write: Callable[[Path], Mapping[str, Any]],
    *,
    text: str,
    record: str = IMPORTED,
    step: int = 0,
) -> CreatedRun:
    """Create a run with one checkpoint. If that fails, nothing remains.

    Args:
        run_dir: where the run appears when all of it is on the disk.
        write: writes the checkpoint into a folder that becomes the run's directory, and returns the origin.
        text: text of recipe.yaml; training replaces it by the resolved recipe.
        record: file with the origin.
        step: step of the checkpoint.

    Raises:
        UserError: the run id is in use, or the disk is full or fails.
    """
    require_unused(run_dir)
    with published(run_dir, "--runs-dir DIR") as folder:
        created = CreatedRun(str(run_dir), write(folder))
        status = StatusSink(folder, resumed_step=step, total_steps=recipe.train.train_iters)
        status.note(Note(step=step, event="checkpoint_saved"))  # without it the run must not start from fresh weights
        status.close("KILLED")
        write_atomic(folder / record, json.dumps(created.as_dict(), indent=2) + "\n")
        write_atomic(Run(folder).recipe_file, text)
    return created


def require_unused(run_dir: Path) -> None:
    """Check that no run has this directory.

    Raises:
        UserError: one has.
    """
    if os.path.lexists(run_dir):
        raise UserError(
            f"run {run_dir.name} already exists",
            where=str(run_dir),
            rule="nothing is overwritten",
            fix="use another --run-id, leave it out, or set --runs-dir DIR",
        )


def write_checkpoint(
    recipe: Recipe,
    weights: WeightSource,
    run_dir: Path,
    progress: Counted | None = None,
    check: Callable[[Plan], None] | None = None,
) -> None:
    """Write a checkpoint of step 0 box by box, in one process that does not hold the model.

    Args:
        progress: shows how many parameters are written.
        check: called with the plan for one rank before anything is written, in a world of one that has been joined.
    """
    from llmrecipes.engine.backends import backend

    single = on_one_rank(recipe)
    plan = derive(single, 1, detect())
    engines = backend(single)
    store = Run(run_dir).store()
    store.claim()
    try:
        temporary = store.temporary_path(0, "import")
        with engines.join(single, engines.platform()):
            if check is not None:
                check(plan)
            shown = weights if progress is None else _Shown(weights, progress, plan.num_parameters.total)
            written, versions = engines.write_weights(plan, shown, temporary)
        info = first_checkpoint(recipe, plan, engine_name(single))
        store.publish(temporary, info, versions=versions, known=written.files)
    finally:
        if progress is not None:
            progress.close()
        store.release()


class _Shown:
    """Weights whose reading is shown."""

    def __init__(self, weights: WeightSource, progress: Counted, parameters: int) -> None:
        self._weights = weights
        self._progress = progress
        progress.begin("parameters", parameters)

    def read(self, name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        value = self._weights.read(name, offset, shape)
        self._progress.add(value.numel())
        return value


def first_checkpoint(recipe: Recipe, plan: Plan, engine: str) -> CheckpointInfo:
    """Manifest of a run's checkpoint of step 0."""
    from llmrecipes.checkpoint.manifest import CheckpointInfo

    return CheckpointInfo(
        step=0,
        consumed_samples=0,
        consumed_tokens=0,
        layout=plan.layout.as_dict(),
        recipe_hash=recipe_hash(recipe),
        engine=engine,
        recipe=recipe.model_dump(mode="json"),
    )
