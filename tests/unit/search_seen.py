"""Everything that the section `search` determines, from what the search itself uses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from optuna.trial import TrialState

from llmrecipes.errors import UserError
from llmrecipes.recipe.schema import Recipe
from llmrecipes.search.best import Keeper
from llmrecipes.search.budget import Budget, Used, used
from llmrecipes.search.command import quiet
from llmrecipes.search.samplers import pruner, sampler
from llmrecipes.search.space import Values, suggest, trial_recipe, trial_tokens
from llmrecipes.search.storage import address, open_storage
from llmrecipes.search.study import basis, open_study, place_of, require_section
from llmrecipes.search.trials import own_trials

BASE: dict[str, Any] = {
    "search.space": [{"key": "optimizer.lr", "low": 1e-4, "high": 1e-2}],
    "search.n_trials": 9,
    "search.sampler": {"seed": 1},
}


def seen(recipe: Recipe, folder: Path, *_: Any) -> dict[str, Any]:
    """What a search does with its section: values it samples, what it enqueues, limits, and what it keeps."""
    quiet()
    search = require_section(recipe)
    folder = folder / str(len(list(folder.iterdir())))  # a study of its own
    folder.mkdir()
    place = place_of(recipe, search, folder / "runs")
    where = address(search, place.folder)
    found: dict[str, Any] = {"place": place.name, "storage": where.replace(str(folder), "")}
    if "://" in where:  # no driver is needed to see that it is another place
        return found
    budget = Budget(search, trial_tokens(recipe, search), started=0.0)
    found["left"] = budget.left(Used())
    found["spent"] = [budget.spent(Used(best=value, without_improvement=2)) for value in (1.0, 3.0)]
    found["pruner"] = plain(pruner(search, 8))
    found["sampler"] = plain(sampler(search, 0))
    try:
        study = open_study(recipe, place, resume=True)
    except UserError as error:
        return {**found, "error": error.where}
    found |= {"basis": basis(recipe), "enqueued": [trial.system_attrs for trial in study.trials]}
    kept = open_storage(where, search)
    found["storage"] = [kept._interval, kept._grace, kept._stale._max_retry]  # type: ignore[attr-defined]
    for number in range(3):
        trial = study.ask()
        values = suggest(trial, recipe, search)
        length = steps(recipe, values)
        found[f"trial {number}"] = values, length
        trial.set_user_attr("run_id", f"r{number}")
        trial.set_user_attr("outcome", "complete")
        (place.run_dir(f"r{number}") / "checkpoints").mkdir(parents=True, exist_ok=True)
        if isinstance(length, int):
            study.tell(trial, [3 - number * 0.1] * len(search.objectives))
        else:
            study.tell(trial, state=TrialState.PRUNED)
    found["used"] = used(own_trials(study), 1, search.min_improvement).without_improvement
    Keeper(recipe, place).keep(study)
    found["kept"] = sorted(str(path.parent.name) for path in (folder / "runs").glob("*/*/checkpoints"))
    return found


def steps(recipe: Recipe, values: Values) -> int | str:
    """Steps of a trial, or the key of a rule that its values break."""
    try:
        return trial_recipe(recipe, require_section(recipe), values).train.train_iters
    except UserError as error:
        return error.where


def plain(made: object) -> dict[str, str]:
    """Attributes of an object, except for those that differ each time."""
    found = {name: repr(value) for name, value in vars(made).items() if " at 0x" not in repr(value)}
    inner = getattr(made, "_wrapped_pruner", None)
    return {"type": type(made).__name__, **found, **({} if inner is None else {"wrapped": str(plain(inner))})}
