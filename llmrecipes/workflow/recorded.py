"""The recipe that a run was started with, and whether a different one may resume it."""

from __future__ import annotations

import shlex
from pathlib import Path

from pydantic import ValidationError

from llmrecipes.checkpoint.compatibility import require_compatible, require_readable
from llmrecipes.checkpoint.store import CheckpointStore, Entry
from llmrecipes.errors import UserError
from llmrecipes.recipe.engines import engine_name
from llmrecipes.recipe.load import RESOLVED_NAME, load
from llmrecipes.recipe.schema import Recipe
from llmrecipes.workflow.changes import require_accepted

PRINT_RECIPE = "import json, sys; print(json.dumps(json.load(open(sys.argv[1]))['recipe'], indent=1))"


def require_same_recipe(recipe: Recipe, run_dir: Path, data_dir: Path, *, accept: bool) -> None:
    """Refuse to resume a run with a recipe that would change its training; does nothing if there is no run.

    Args:
        recipe: the recipe of this command.
        run_dir: the run.
        data_dir: where prepared data is kept.
        accept: whether the user has accepted what a different number of steps changes.

    Raises:
        UserError: what differs; its engine cannot load the run's checkpoint; or the recipe of the run is damaged.
    """
    entries = CheckpointStore(run_dir / "checkpoints").entries()
    newest = entries[-1] if entries else None
    if newest is not None:
        require_readable(newest, engine_name(recipe))
    then = _recorded(run_dir, newest)
    if then is None:
        return
    require_compatible(recipe.model_dump(mode="json"), then.model_dump(mode="json"), where=str(run_dir))
    step = 0 if newest is None else newest.step
    require_accepted(recipe, then, step, run_dir=run_dir, data_dir=data_dir, accept=accept)


def run_recipe(run_dir: Path) -> Recipe:
    """The recipe in a run's directory.

    Raises:
        UserError: it is damaged; the fix restores it.
    """
    entries = CheckpointStore(run_dir / "checkpoints").entries()
    return _read(run_dir / RESOLVED_NAME, entries[-1] if entries else None)


def _recorded(run_dir: Path, newest: Entry | None) -> Recipe | None:
    """The recipe of a run, from its directory or else its newest checkpoint; None if neither has one."""
    path = run_dir / RESOLVED_NAME
    if path.exists():
        return _read(path, newest)
    if newest is None or newest.manifest.recipe is None:
        return None
    try:
        return Recipe.model_validate(newest.manifest.recipe)
    except ValidationError:
        return None  # of a different version; the model's architecture is compared when it is loaded


def _read(path: Path, newest: Entry | None) -> Recipe:
    try:
        return load(str(path)).recipe
    except UserError as error:
        raise UserError(
            f"the recipe of this run is damaged: {error.what}",
            where=error.where or str(path),
            rule="it says which model the checkpoints are of",
            fix=_restore(path, newest),
        ) from error


def _restore(path: Path, newest: Entry | None) -> str:
    earlier = "it is also an artifact of the run in MLflow"
    if newest is None or newest.manifest.recipe is None:
        return f"put it back from a copy; {earlier}"
    manifest, target = shlex.quote(str(newest.path / "manifest.json")), shlex.quote(str(path))
    return f'the newest checkpoint has it: python3 -c "{PRINT_RECIPE}" {manifest} > {target}; {earlier}'
