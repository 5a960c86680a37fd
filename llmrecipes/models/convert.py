"""`llmrecipes convert`: a run's newest checkpoint becomes the start of a run with another engine or ZeRO stage.

Engines that read each other's checkpoints write the same files, so no tensor is loaded: the files are linked, or copied
to another file system, under a manifest of their own.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmrecipes.errors import ExitCode, UserError
from llmrecipes.models.create import CreatedRun, create_run
from llmrecipes.recipe.engines import ENGINES, can_read, engine_name
from llmrecipes.recipe.load import load, recipe_hash, to_yaml
from llmrecipes.recipe.schema import Recipe
from llmrecipes.rundir import Run
from llmrecipes.tracking.events import Note
from llmrecipes.tracking.jsonl import JsonlSink

if TYPE_CHECKING:
    from llmrecipes.checkpoint.store import Entry


logger = logging.getLogger(__name__)

RECORD = "converted.json"
LENGTH = ("train.train_iters", "scheduler.lr_decay_iters")
"""Keys that a resumed run may change, but a conversion may not: their effects are checked when it is resumed."""


def convert(run: Path, to: str, overrides: Sequence[str], runs_dir: Path, run_id: str) -> CreatedRun:
    """Create a run directory that `llmrecipes train <run_dir>/recipe.yaml --run-id <run_id>` resumes.

    Args:
        run: directory of the run to convert; it is not changed.
        to: name of the engine.
        overrides: `key.path=value`; keys that a resumed run may change.
        runs_dir: where runs are kept.
        run_id: run id of the new run.

    Returns:
        With the origin: `from_run`, `step` of the checkpoint, `from_engine` that wrote it, `engine` and `zero_stage` of
        the new run (None without a section `zero`), and whether all files are `linked`, which takes no space.

    Raises:
        UserError: an unknown engine, an invalid recipe, nothing to change, no valid checkpoint (`ExitCode.STOP` if all
            are corrupt), a run id in use, or a full disk. Nothing of the new run is left behind.
    """
    recipe = converted_recipe(Run(run).recipe_file, to, overrides)
    entry = _newest(run)
    _require_readable(entry, to)
    run_dir = Run.of(runs_dir, recipe.name, run_id).path

    def write(folder: Path) -> dict[str, Any]:
        linked = _publish(folder, recipe, entry, to)
        _copy_metrics(run, folder, entry)
        return {
            "from_run": str(run),
            "step": entry.step,
            "from_engine": entry.manifest.engine,
            "engine": to,
            "zero_stage": None if recipe.layout.zero is None else recipe.layout.zero.stage,
            "linked": linked,
        }

    return create_run(run_dir, recipe, write, text=to_yaml(recipe), record=RECORD, step=entry.step)


def converted_recipe(path: Path, to: str, overrides: Sequence[str]) -> Recipe:
    """The recipe of a run with another engine, checked.

    Args:
        path: the resolved recipe of the run.
        to: name of the engine.
        overrides: applied last.

    Raises:
        UserError: an unknown engine, an invalid recipe, a change of the training itself, or no change at all.
    """
    from llmrecipes.checkpoint.compatibility import compatibility, differences

    if to not in ENGINES:
        raise UserError(f"unknown engine {to!r}", where="--to", rule=f"one of {', '.join(ENGINES)}")
    then = load(str(path)).recipe
    loses_keys = ENGINES[engine_name(then)].all_of_zero and not ENGINES[to].all_of_zero
    changes = [f"layout.engine={to}", *(["layout.zero=null"] if loses_keys else []), *overrides]
    recipe = load(str(path), changes).recipe
    if engine_name(recipe) != to:
        raise UserError(
            f"{engine_name(recipe)} contradicts --to {to}", where="layout.engine", fix="leave layout.engine out"
        )
    before = then.model_dump(mode="json")
    after = recipe.model_dump(mode="json")
    different = differences(after, before)
    kept = [*compatibility(after, before), *(difference for difference in different if difference.key in LENGTH)]
    if kept:
        raise UserError(
            "a conversion cannot change these keys:\n    " + "\n    ".join(map(str, kept)),
            where=str(path.parent),
            rule="the new run keeps its model, data, batch, seed, precision, learning rate and number of steps",
            fix="leave them out; the command that resumes the new run can extend it",
        )
    if engine_name(then) == to and all(difference.key == "layout.engine" for difference in different):
        raise UserError(
            f"this run already uses engine {to}",
            where=str(path.parent),
            rule="a conversion must change the engine or another key",
            fix=f"--to {next(name for name in ENGINES if name != to)}, or a key such as layout.zero.stage=3",
        )
    return recipe


def _newest(run: Path) -> Entry:

    try:
        return Run(run).require_checkpoint()
    except UserError as error:
        if corrupt := Run(run).store().survey()[1]:
            raise UserError(
                "no checkpoint of this run is valid:\n    " + "\n    ".join(map(str, corrupt)),
                where=str(run),
                fix="restore a checkpoint from a backup",
                code=ExitCode.STOP,
            ) from error
        raise


def _require_readable(entry: Entry, to: str) -> None:
    if not can_read(to, entry.manifest.engine):
        raise UserError(
            f"{to} cannot load a checkpoint of engine {entry.manifest.engine}",
            where=str(entry.path),
            rule=f"{to} reads those of {', '.join(sorted({to, *ENGINES[to].reads}))}",
        )
    if entry.manifest.format == 1:
        raise UserError(
            "this checkpoint was written by an older version",
            where=str(entry.path),
            rule="its index is a pickle, which a conversion does not rewrite",
            fix="resume the run first: its next checkpoint has the current format",
        )


def _publish(run_dir: Path, recipe: Recipe, entry: Entry, to: str) -> bool:
    """Publish the checkpoint in the new run; returns whether all its files are hard links."""
    from llmrecipes.checkpoint.manifest import CheckpointInfo

    manifest = entry.manifest
    store = Run(run_dir).store()
    store.claim()
    try:
        temporary = store.temporary(entry.step)
        linked = {
            name: record
            for name, record in manifest.files.items()
            if _link_or_copy(entry.path / name, temporary / name)
        }
        info = CheckpointInfo(
            step=manifest.step,
            consumed_samples=manifest.consumed_samples,
            consumed_tokens=manifest.consumed_tokens,
            layout=manifest.layout,  # of the ranks that wrote it: random states belong to it
            recipe_hash=recipe_hash(recipe),
            engine=to,
            recipe=recipe.model_dump(mode="json"),
            monitored=manifest.monitored,
            sample_order=manifest.sample_order,
        )
        # A linked file has just been hashed; a copy is hashed again, and has to be the same.
        copied = store.publish(temporary, info, versions=manifest.versions, known=linked).manifest.files
    finally:
        store.release()
    if different := [name for name, record in manifest.files.items() if copied[name] != record]:
        raise OSError(5, "a copy differs from its original", str(entry.path / different[0]))
    return len(linked) == len(manifest.files)


def _link_or_copy(source: Path, target: Path) -> bool:
    """Returns whether it is a hard link, which only one file system can have, and not every one."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
        return False
    return True


def _copy_metrics(run: Path, run_dir: Path, entry: Entry) -> None:
    """The curve up to the checkpoint, and a note of where it is from."""
    Run(run_dir).logs.mkdir()
    if Run(run).metrics.exists():
        shutil.copyfile(Run(run).metrics, Run(run_dir).metrics)
    metrics = JsonlSink(Run(run_dir).metrics, entry.step)
    if metrics.problems:
        logger.warning("%s: %s", Run(run).metrics, "; ".join(metrics.problems))
    details = {"run": str(run), "engine": entry.manifest.engine}
    metrics.note(Note(step=entry.step, event="converted", details=details))
    metrics.close("KILLED")
