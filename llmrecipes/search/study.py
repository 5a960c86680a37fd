"""The study of a search: created, continued, and filled with known points and earlier studies."""

from __future__ import annotations

import logging
import os
import re
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.exceptions import DuplicatedStudyError
from optuna.storages import BaseStorage
from optuna.trial import TrialState, create_trial
from pydantic import ValidationError

from llmrecipes.checkpoint.compatibility import Difference, differences
from llmrecipes.errors import UserError
from llmrecipes.recipe.halves import learned
from llmrecipes.recipe.reading.former import translated
from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.sections.search_section import Search
from llmrecipes.recipe.variants.proxy import suffixed
from llmrecipes.redact import redacted
from llmrecipes.runfiles import RunFiles
from llmrecipes.search.samplers import grid, pruner, sampler
from llmrecipes.search.space import (
    SUFFIX,
    applies,
    distribution,
    evaluations,
    own_point,
    parameters,
    trial_tokens,
    value_at,
    values_of,
)
from llmrecipes.search.storage import (
    address,
    file_of,
    open_storage,
    with_retries,
)
from llmrecipes.search.trials import OUTCOME, SOURCE, is_infeasible

logger = logging.getLogger(__name__)

BASIS = "llmrecipes:basis"
WORKERS = "llmrecipes:worker:"
STARTED = "llmrecipes:started"
RECIPE, OVERRIDES = "llmrecipes:recipe", "llmrecipes:overrides"
"""The resolved recipe of the newest search of a study, and the overrides of its command line."""
FILLED_WITHIN = 60.0
"""Seconds that another process may take for each known point that it adds to a study it has created."""
SEED = "-seed"
"""In the id of a run, before the number of its seed; not of the first one."""
UNUSED = ("description", "tracking", "checkpoint", "search")
"""Sections that do not change what a study measures."""


@dataclass(frozen=True)
class Place:
    """Where a study and its trials are.

    Attributes:
        runs_dir: runs directory of all runs.
        group: name of the trials' recipes; `<recipe>-search`.
        name: name of the study.
    """

    runs_dir: Path
    group: str
    name: str

    @property
    def folder(self) -> Path:
        """Journal, report and best recipe."""
        return RunFiles.of(self.runs_dir, self.group, self.name).path

    def run_id(self, number: int) -> str:
        """Id of a trial's run."""
        return f"{self.name}-{number:04d}"

    def run_ids(self, run_id: str, seeds: int) -> list[str]:
        """Ids of the runs of a trial, one for each seed.

        Args:
            run_id: run id of any of them.
            seeds: seeds of a trial.
        """
        first = re.sub(rf"{SEED}\d+$", "", run_id)
        return [first, *(f"{first}{SEED}{number}" for number in range(1, seeds))]

    def run_dir(self, run_id: str) -> Path:
        """Directory of a trial's run."""
        return RunFiles.of(self.runs_dir, self.group, run_id).path


def place_of(recipe: Recipe, search: Search, runs_dir: Path) -> Place:
    """Where the study of a recipe is."""
    group = suffixed(recipe.name, SUFFIX)
    return Place(runs_dir, group, search.study_name or recipe.name[:40])


def require_section(recipe: Recipe) -> Search:
    """The section `search`.

    Raises:
        UserError: the recipe has none.
    """
    if recipe.search is None:
        raise UserError(
            "missing",
            where=f"recipe {recipe.name}: search",
            rule="a search needs search.space",
            fix="search: {space: [{key: optimizer.lr, low: 1e-4, high: 1e-2, log: true}], n_trials: 20}",
        )
    return recipe.search


def open_study(
    recipe: Recipe,
    place: Place,
    *,
    resume: bool,
    overrides: Sequence[str] = (),
    log: Callable[[str], None] = logger.info,
) -> optuna.Study:
    """Create the study, or continue it.

    Args:
        recipe: with the section `search`.
        place: place of the study.
        resume: continue a study that exists, or join those who work on it.
        overrides: with which the recipe was loaded, for commands that read the study later.
        log: receives what has changed since the study was started, and may.

    Raises:
        UserError: it exists and is not to be resumed, is of another recipe, or its storage does not respond.
    """
    search = require_section(recipe)
    where = address(search, place.folder)
    storage = open_storage(where, search)
    if place.name not in with_retries(lambda: optuna.get_all_study_names(storage), where):
        for source in search.source_studies:  # refused before there is a study
            with_retries(lambda source=source: _earlier(recipe, source.study_name, source.storage or where), where)  # type: ignore[misc]
    try:
        study = with_retries(lambda: _create(storage, place, search), where)
    except DuplicatedStudyError:
        study = with_retries(lambda: optuna.load_study(study_name=place.name, storage=storage), where)
        if not resume:
            raise UserError(
                f"the study {place.name} exists, with {len(study.get_trials(deepcopy=False))} trials",
                where=where,
                rule="an existing study is resumed only with --resume",
                fix="--resume, or search.study_name=NAME for a new one",
            ) from None
        if not with_retries(lambda: _is_filled(study), where):  # by a process that was killed
            with_retries(lambda: _fill(study, recipe, search, where), where)
        with_retries(lambda: _require_same(study, recipe, where), where)
        for difference in with_retries(lambda: _changed_section(study, search), where):
            log(f"{difference.key} is now {difference.now!r}, was {difference.then!r}")
        with_retries(lambda: _remember(study, recipe, overrides), where)
    else:
        with_retries(lambda: _remember(study, recipe, overrides), where)
        with_retries(lambda: _fill(study, recipe, search, where), where)
    number = with_retries(lambda: _register(study), where)
    study.sampler = sampler(search, number)
    study.pruner = pruner(search, evaluations(recipe))
    return study


def _remember(study: optuna.Study, recipe: Recipe, overrides: Sequence[str]) -> None:
    study.set_user_attr(RECIPE, recipe.model_dump(mode="json"))
    study.set_user_attr(OVERRIDES, list(overrides))


def recipe_of_study(study: optuna.Study) -> Recipe | None:
    """The recipe that a study was last searched with, its overrides and limits included.

    None if the study was never started, or its recipe is not one of this version.
    """
    try:
        return Recipe.model_validate(translated(study.user_attrs.get(RECIPE, {})))
    except ValidationError:
        return None


def _changed_section(study: optuna.Study, search: Search) -> list[Difference]:
    """Limits, sampler and whatever else of the section has changed since the newest search of a study."""
    earlier = recipe_of_study(study)
    if earlier is None or earlier.search is None:
        return []
    sections = [
        redacted({"search": section.model_dump(mode="json", exclude={"space"})}) for section in (search, earlier.search)
    ]
    return differences(*sections)


def load(recipe: Recipe, place: Place) -> optuna.Study:
    """An existing study, only to be read.

    Raises:
        UserError: there is none.
    """
    search = require_section(recipe)
    where = address(search, place.folder)
    if (file := file_of(where)) is not None and not file.is_file():  # opened, it would be created
        raise _no_study(place.name, where)
    storage = open_storage(where, search)
    try:
        return with_retries(lambda: optuna.load_study(study_name=place.name, storage=storage), where)
    except KeyError as error:
        raise _no_study(place.name, where) from error


def _no_study(name: str, where: str) -> UserError:
    return UserError(f"no study {name}", where=where, fix="llmrecipes search RECIPE starts one")


def _create(storage: BaseStorage, place: Place, search: Search) -> optuna.Study:
    return optuna.create_study(storage=storage, study_name=place.name, directions=["minimize"] * len(search.objectives))


def basis(recipe: Recipe) -> dict[str, Any]:
    """What makes the trials of a study comparable: recipe, space and objectives, redacted as they are stored."""
    search = require_section(recipe)
    data = {key: value for key, value in recipe.model_dump(mode="json").items() if key not in UNUSED}
    space = {dimension.pop("key"): dimension for dimension in search.model_dump(mode="json")["space"]}
    measured = {"objectives": list(search.objectives), "trial_tokens": trial_tokens(recipe, search)}
    if search.seeds_per_point > 1:
        measured["seeds_per_point"] = search.seeds_per_point
    return redacted({**data, "search": {**measured, "space": space}})


def _measured(basis: Mapping[str, Any]) -> dict[str, Any]:
    """What trials are compared by. How they are executed only counts where their time is measured."""
    if "train_seconds" in basis["search"].get("objectives", ()):
        return {key: value for key, value in basis.items() if key != "name"}
    return {**learned(basis), "search": basis["search"]}


def _is_filled(study: optuna.Study) -> bool:
    """Whether a study that exists has its known points; one that has just been created gets them in a moment.

    Not if none was added for `FILLED_WITHIN` seconds: the process that created the study was killed.
    """
    known = 0
    deadline = time.monotonic() + FILLED_WITHIN
    while BASIS not in study.user_attrs:
        if (number := len(study.get_trials(deepcopy=False))) > known:
            known = number
            deadline = time.monotonic() + FILLED_WITHIN
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def changes(study: optuna.Study, recipe: Recipe) -> list[Difference]:
    """Keys of the recipe, the space and the objectives that have changed since a study was created.

    Not keys of which each trial has a value of its own, so that the recipe may take over the best trial's.
    """
    now = basis(recipe)
    searched = {dimension.key for dimension in require_section(recipe).space if not dimension.when}
    changed = differences(_measured(now), _measured(_with_defaults(study.user_attrs.get(BASIS, now))))
    return [change for change in changed if change.key not in searched]


def _require_same(study: optuna.Study, recipe: Recipe, where: str) -> None:
    if changed := changes(study, recipe):
        raise UserError(
            f"the study {study.study_name} belongs to a different recipe: {'; '.join(map(str, changed))}",
            where=where,
            rule="the trials of a study differ only in the keys that are searched",
            fix="search.study_name=NAME for a new study; search.source_studies takes over its trials if only the "
            "space differs",
        )


def _with_defaults(then: dict[str, Any]) -> dict[str, Any]:
    """The basis of a study from an older version, with the keys that have been added since."""
    then = translated(then)
    try:
        recipe = Recipe.model_validate({**then, "search": None})
    except ValidationError:
        return then
    data = {key: value for key, value in recipe.model_dump(mode="json").items() if key not in UNUSED}
    return {**data, "search": then["search"]}


def _fill(study: optuna.Study, recipe: Recipe, search: Search, where: str) -> None:
    """Known points and the trials of earlier studies; may be called again after an interruption."""
    study.set_metric_names(list(search.objectives))
    for source in search.source_studies:
        _add_earlier(study, recipe, source.study_name, source.storage or where)
    points = [dict(point) for point in search.enqueue_trials]
    recipe_point = own_point(recipe, search) if search.enqueue_recipe else None
    if search.enqueue_recipe and recipe_point is None:
        logger.warning("the recipe's values are outside the space, so they are not tried first")
    for point in ([recipe_point] if recipe_point is not None else []) + points:
        study.enqueue_trial(parameters(point), skip_if_exists=True)
    if search.sampler.type == "GridSampler":
        waiting = [trial.system_attrs.get("fixed_params") for trial in study.get_trials(deepcopy=False)]
        for params in grid(search):
            if params not in waiting:
                study.enqueue_trial(params)
    study.set_user_attr(STARTED, time.time())
    study.set_user_attr(BASIS, basis(recipe))


def _earlier(recipe: Recipe, name: str, where: str) -> tuple[optuna.Study, dict[str, Any]]:
    """An earlier study and its basis.

    Raises:
        UserError: there is no such study, or it measures something else.
    """
    if (file := file_of(where)) is not None and not file.is_file():
        raise UserError("no such file", where=f"search.source_studies: {where}")
    try:
        study = optuna.load_study(study_name=name, storage=open_storage(where, require_section(recipe)))
    except KeyError as error:
        raise UserError(f"no study {name}", where=f"search.source_studies: {where}") from error
    return study, _require_comparable(study, recipe)


def _add_earlier(study: optuna.Study, recipe: Recipe, name: str, where: str) -> None:
    """Add the trials of an earlier study that the space contains.

    Raises:
        UserError: there is no such study, or it measures something else.
    """
    search = require_section(recipe)
    earlier, then = _earlier(recipe, name, where)
    known = {trial.user_attrs.get(SOURCE) for trial in study.get_trials(deepcopy=False)}
    space = {dimension.key: distribution(dimension) for dimension in search.space}
    added = 0
    for trial in earlier.get_trials(states=(TrialState.COMPLETE, TrialState.PRUNED)):
        source = f"{name}:{trial.number}"
        # Stored values, because ranges may differ from those of then.
        if source in known or not _inside(space, trial.params) or is_infeasible(trial):
            continue
        params = _fixed_values(search, then, trial.params) | trial.params
        if not _inside(space, params):
            continue
        kept = {key: value for key, value in trial.user_attrs.items() if key == OUTCOME}
        study.add_trial(
            create_trial(
                state=trial.state,
                values=trial.values,
                params=params,
                distributions={key: space[key] for key in params},
                intermediate_values=trial.intermediate_values,
                user_attrs={**kept, SOURCE: source},
            )
        )
        added += 1
    logger.info("added %d trials of the study %s", added, name)


def _require_comparable(earlier: optuna.Study, recipe: Recipe) -> dict[str, Any]:
    """The basis of an earlier study, which may differ from this one's in the space and in searched keys.

    Raises:
        UserError: it measures something else.
    """
    where = "search.source_studies"
    now = basis(recipe)
    if (then := earlier.user_attrs.get(BASIS)) is None:
        raise UserError(
            f"the study {earlier.study_name} does not record its recipe",
            where=where,
            rule="a source study must have been made by llmrecipes search",
            fix="leave it out",
        )
    then = _with_defaults(then)
    # Each trial has its own value of these.
    searched = {
        key for side in (now, then) for key, dimension in side["search"]["space"].items() if not dimension.get("when")
    }
    changed = [
        difference
        for difference in differences(_measured(now), _measured(then))
        if difference.key not in searched and not difference.key.startswith("search.space.")
    ]
    if changed:
        raise UserError(
            f"the study {earlier.study_name} measured something else: "
            + "; ".join(f"{change.key} {change.then!r}, now {change.now!r}" for change in changed),
            where=where,
            rule="losses can only be compared between trials of the same recipe, length and data",
            fix="leave it out, or set these keys as they were",
        )
    return then


def _fixed_values(search: Search, then: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
    """What an earlier trial had of keys that its study did not search: the value of its recipe.

    A trial without a value of a key would take the key out of what samplers model together.
    """
    fixed: dict[str, Any] = {}
    for dimension in search.space:
        if dimension.key not in params and applies(dimension, {**values_of(params, search), **fixed}, then):
            fixed[dimension.key] = value_at(then, dimension.key)
    return parameters(fixed)


def _inside(space: Mapping[str, BaseDistribution], params: Mapping[str, Any]) -> bool:
    try:
        return all(key in space and space[key]._contains(space[key].to_internal_repr(params[key])) for key in params)
    except (ValueError, TypeError):
        return False


def _register(study: optuna.Study) -> int:
    """A number that no other process that works on the study has; 0 for the first."""
    mine = f"{WORKERS}{time.time():.6f}-{socket.gethostname()}-{os.getpid()}"
    study.set_user_attr(mine, True)
    known = sorted(key for key in study.user_attrs if key.startswith(WORKERS))
    # Two that register at the same moment may both see both, or only one of them; the position would not always differ.
    return len(known) * (len(known) - 1) // 2 + known.index(mine)
