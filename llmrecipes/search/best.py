"""Output of a study: the recipes of its best trials, and the checkpoints that are kept."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import optuna
from optuna.trial import FrozenTrial, TrialState

from llmrecipes.io import write_atomic
from llmrecipes.recipe.load import to_yaml
from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.variants.proxy import suffixed
from llmrecipes.runfiles import RunFiles
from llmrecipes.search.space import trial_recipe, values_of
from llmrecipes.search.study import Place, require_section
from llmrecipes.search.trials import own_trials

BEST = "-best"


def best_trials(study: optuna.Study) -> list[FrozenTrial]:
    """The best trial of this study, or the best trade-offs of several objectives; none before a trial is complete."""
    done = [trial for trial in own_trials(study) if trial.state == TrialState.COMPLETE and trial.values]
    if len(study.directions) == 1:
        return [min(done, key=lambda each: (each.values[0], each.number))] if done else []
    numbers = {trial.number for trial in done}
    return [trial for trial in study.best_trials if trial.number in numbers]


def recipe_of(recipe: Recipe, trial: FrozenTrial, name: str) -> Recipe:
    """The values of a trial as a recipe with the length of the search's recipe, whatever a trial's length."""
    search = require_section(recipe)
    full_length = trial_recipe(
        recipe, search.model_copy(update={"trial_tokens": None}), values_of(trial.params, search)
    )
    said = ", ".join(f"{each} {value:.5g}" for each, value in zip(search.objectives, trial.values, strict=True))
    about = f"{recipe.description or recipe.name}; trial {trial.number} of a search: {said}"
    return full_length.model_copy(update={"name": name, "description": about})


@dataclass
class Keeper:
    """Writes best recipes, and removes checkpoints of other trials.

    Attributes:
        recipe: that the best values are for: of the search, or that of which it tunes a proxy.
        place: place of the study.
    """

    recipe: Recipe
    place: Place
    _removed: set[int] = field(default_factory=set)

    @property
    def name(self) -> str:
        """Name of the best recipe; with several objectives, the beginning of their names."""
        return suffixed(self.recipe.name, BEST, spare=5)

    def files(self) -> list[Path]:
        """The recipes that have been written."""
        return sorted(self.place.folder.glob(f"{self.name}*.yaml"))

    def keep(self, study: optuna.Study) -> bool:
        """Bring files and checkpoints up to date; returns whether there is a new best recipe."""
        best = best_trials(study)
        several = len(study.directions) > 1
        written, changed = set(), False
        self.place.folder.mkdir(parents=True, exist_ok=True)
        for trial in best:
            name = f"{self.name}-{trial.number}" if several else self.name
            path = self.place.folder / f"{name}.yaml"
            text = to_yaml(recipe_of(self.recipe, trial, name))
            if not path.exists() or path.read_text("utf-8") != text:
                write_atomic(path, text)
                changed = True
            written.add(path)
        for path in set(self.files()) - written:
            path.unlink(missing_ok=True)
        self._remove_checkpoints(study, best)
        return changed

    def _remove_checkpoints(self, study: optuna.Study, best: Sequence[FrozenTrial]) -> None:
        keep = require_section(self.recipe).keep_checkpoints
        if keep == "all":
            return
        kept = {trial.number for trial in best} if keep == "best" else set()
        for trial in own_trials(study):
            run_id = trial.user_attrs.get("run_id")
            # A lost trial has no outcome: it is resumed from its checkpoint.
            ended = trial.state.is_finished() and "outcome" in trial.user_attrs
            if ended and trial.number not in kept | self._removed and run_id is not None:
                self._removed.add(trial.number)
                for each in self.place.run_ids(run_id, require_section(self.recipe).seeds_per_point):
                    shutil.rmtree(RunFiles(self.place.run_dir(each)).checkpoints, ignore_errors=True)
