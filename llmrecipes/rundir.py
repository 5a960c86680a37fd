"""A run, as its directory says: recipe, status, checkpoints. Every command and the Python API read a run through it."""

from __future__ import annotations

import difflib
import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError

from llmrecipes.checkpoint.store import CheckpointStore, Entry
from llmrecipes.commandline import resume_command
from llmrecipes.errors import ExitCode, UserError
from llmrecipes.recipe.derived.stage_runs import stage_of
from llmrecipes.recipe.load import load
from llmrecipes.recipe.schema import Recipe, Train
from llmrecipes.runfiles import RunFiles
from llmrecipes.tracking import run_list, status

_PRINT_RECIPE = "import json, sys; print(json.dumps(json.load(open(sys.argv[1]))['recipe'], indent=1))"


@dataclass(frozen=True)
class Run(RunFiles):
    """A run, read from its directory on each call, so that it may still be training."""

    @classmethod
    def find(cls, name: str, runs_dir: Path) -> Self:
        """A run by its path, `recipe/run-id`, its run id, or a recipe's name for the newest run.

        Raises:
            UserError: no run matches, or several do.
        """
        if run := cls.named(name, runs_dir):
            return run
        near = difflib.get_close_matches(name, [run.name for run in cls.all(runs_dir)], n=3, cutoff=0.3)
        raise UserError(
            f"no run {name}",
            where=str(runs_dir),
            rule="a run is given by its path, recipe/run-id, run id, or recipe (its newest run)",
            fix=f"one of {', '.join(near)}" if near else "llmrecipes runs lists all runs",
        )

    @classmethod
    def named(cls, name: str, runs_dir: Path) -> Self | None:
        """As `find`; None: no run matches.

        Raises:
            UserError: several do.
        """
        for path in (Path(name), runs_dir / name):
            if (run := cls(path)).exists():
                return run
        known = cls.all(runs_dir)
        named = [run for run in known if run.run_id == name]
        if len(named) == 1:
            return named[0]
        if len(named) > 1:
            paths = ", ".join(str(run.path) for run in named)
            raise UserError(f"several runs have this id: {paths}", where=name, fix="use recipe/run-id")
        if of_recipe := [run for run in known if run.recipe_name == name]:
            return max(of_recipe, key=lambda run: run.recipe_file.stat().st_mtime)
        return None

    def create(self) -> None:
        """Create the directory, with that of the logs.

        Raises:
            UserError: it cannot be written.
        """
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            if not os.access(self.path, os.W_OK):
                raise PermissionError(13, "Permission denied", str(self.path))
        except OSError as error:
            raise UserError(
                f"the run directory is not writable: {error.strerror}",
                where=str(error.filename or self.path),
                rule="a run writes its recipe, metrics and checkpoints to its directory",
                fix="--runs-dir DIR, or LLMRECIPES_RUNS",
                code=ExitCode.BAD_INPUT,
            ) from error

    def status(self) -> dict[str, Any]:
        """The values of status.json; empty if it cannot be read."""
        return status.read(self.path)

    def summary(self) -> run_list.RunSummary:
        """State, steps and last losses."""
        return run_list.summary(self.path)

    def is_finished(self, train: Train) -> bool:
        """Whether the run has done all its steps, or ended by the held-out losses that a recipe names.

        A restarted part of it has nothing to do then.
        """
        values = self.status()
        step = values.get("step")
        done = isinstance(step, int) and step >= train.train_iters
        return values.get("state") == "finished" and (done or values.get("ended_by") == train.stop_rules)

    def store(self) -> CheckpointStore:
        """Its checkpoints."""
        return CheckpointStore(self.checkpoints)

    def is_exported(self, step: int) -> bool:
        """Whether `checkpoint.also_export` has written the checkpoint of a step since it was last saved."""
        try:
            return self.exported(step).stat().st_mtime >= self.store().path(step).stat().st_mtime
        except OSError:
            return False

    def newest(self) -> Entry | None:
        """The newest checkpoint that is complete by names and sizes."""
        entries = self.store().entries()
        return entries[-1] if entries else None

    def newest_step(self) -> int:
        """Its step; 0 without a checkpoint."""
        newest = self.newest()
        return 0 if newest is None else newest.step

    def require_checkpoint(self, data_dir: Path | None = None) -> Entry:
        """The newest checkpoint whose every file has the recorded hash.

        Args:
            data_dir: where its prepared data is, for the command that the error suggests; None: the default.

        Raises:
            UserError: there is none.
        """
        store = self.store()
        entry = store.latest_valid()
        if entry is None:
            raise UserError(
                "no valid checkpoint",
                where=str(store.directory),
                fix=f"train it first: {resume_command(self.path, data_dir=data_dir)}",
            )
        return entry

    def recipe(self) -> Recipe:
        """The resolved recipe of the run.

        Raises:
            UserError: it is corrupt; the fix restores it.
        """
        try:
            return load(str(self.recipe_file)).recipe
        except UserError as error:
            raise UserError(
                f"the recipe of this run is corrupt: {error.what}",
                where=error.where or str(self.recipe_file),
                rule="the recipe defines the model of the checkpoints",
                fix=self._how_to_restore(self.newest()),
            ) from error

    def recipe_of(self, step: int) -> Recipe:
        """The recipe of the stage that ended with a step or has it: the model whose weights its checkpoint has.

        Raises:
            UserError: as `recipe`.
        """
        return stage_of(self.recipe(), step, ending=True)

    def started_recipe(self) -> Recipe | None:
        """The recipe from the directory, or else from the newest checkpoint; None if neither has one.

        Raises:
            UserError: as `recipe`.
        """
        if self.recipe_file.exists():
            return self.recipe()
        newest = self.newest()
        if newest is None or newest.manifest.recipe is None:
            return None
        try:
            return Recipe.model_validate(newest.manifest.recipe)
        except ValidationError:
            return None  # of a different version; the model's architecture is compared when it is loaded

    def _how_to_restore(self, newest: Entry | None) -> str:
        earlier = "it is also an artifact of the run in MLflow"
        if newest is None or newest.manifest.recipe is None:
            return f"restore it from a copy; {earlier}"
        manifest = shlex.quote(str(newest.path / "manifest.json"))
        target = shlex.quote(str(self.recipe_file))
        return f'the newest checkpoint has it: python3 -c "{_PRINT_RECIPE}" {manifest} > {target}; {earlier}'
