"""`layout: auto`, the default: what a recipe does not say about how it is executed, chosen for the GPUs of a run."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from llmrecipes.errors import UserError
from llmrecipes.hardware.cluster import Cluster
from llmrecipes.hardware.profile import Profile
from llmrecipes.plan.derive import derive
from llmrecipes.plan.speed.device import SpeedUnknownError
from llmrecipes.plan.speed.search import ZERO, Candidate, by_zero, changes, fastest
from llmrecipes.recipe.derived.degrees import model_parallel_size
from llmrecipes.recipe.reading.layouts import CHOSEN, undecided
from llmrecipes.recipe.schema import Recipe

logger = logging.getLogger(__name__)
ALIKE = 0.01
"""A third of the median error of predicted times."""
_COMPARED = 24


@dataclass(frozen=True)
class Choice:
    """The layout that was chosen, and the one that would have been next.

    Predicted times that differ by less than `ALIKE` are equal; of such layouts the simplest is chosen.
    """

    chosen: Candidate
    alike: int
    """Layouts that are as fast, itself included."""
    following: Candidate | None
    """The fastest of the slower ones; None: there is none, or too many are as fast."""

    @property
    def recipe(self) -> Recipe:
        """The recipe with the layout, in which none is chosen again."""
        return self.chosen.recipe

    def __str__(self) -> str:
        """One line: what was chosen, and why."""
        if self.chosen.offloads:
            return f"{self.chosen.key}: nothing fits without offload, whose time is unknown"
        fastest = f"simplest of the {self.alike} fastest" if self.alike > 1 else "fastest"
        why = f"{fastest} that fit{'' if self.alike > 1 else 's'}"
        text = f"{self.chosen.key}: {why}, {self.chosen.forecast.as_dict()['mfu_full']:.0%} MFU predicted"
        return text if self.following is None else f"{text}; next {self.following.key}, {self._slower:.1%} slower"

    @property
    def _slower(self) -> float:
        if self.following is None:
            return 0.0
        return self.following.forecast.step.seconds / self.chosen.forecast.step.seconds - 1

    def as_dict(self) -> dict[str, Any]:
        """For plan.json."""
        following = None if self.following is None else {"layout": self.following.key, "slower": self._slower}
        return {"layout": self.chosen.key, "next": following, "text": str(self)}


def _kept(recipe: Recipe) -> Iterator[str]:
    """Names of the keys that all layouts have as the recipe has them."""
    yield from recipe.layout.model_fields_set & {*CHOSEN, "use_distributed_optimizer"}
    if recipe.layout.zero is not None:
        yield ZERO


def choose(recipe: Recipe, cluster: Cluster, ranks: int, profile: Profile | None) -> Choice | None:
    """The fastest layout that fits, of those that keep what the recipe sets.

    With ZeRO of DeepSpeed only where nothing fits without it, and with its offload only where that does not fit either.

    Args:
        ranks: ranks of the run, all of which the layout uses.
        profile: the cluster's links and coefficients; None: those of the GPU's data file.

    Returns:
        None: the recipe names another layout, sets everything, or runs on processors. Unless it asks for auto, also
        with stages or `train.elastic`, on GPUs of which nothing is known, and where no layout fits: the keys have their
        defaults.

    Raises:
        UserError: the recipe asks for auto, and has stages, or no layout fits, or nothing is known of the GPU's speed.
    """
    if not undecided(recipe) or not cluster.gpus:
        return None
    asked = "name" in recipe.layout.model_fields_set
    if (recipe.stages or recipe.train.elastic) and not asked:  # the layout decides how many ranks a replica has
        return None
    if recipe.stages:
        raise UserError(
            "auto for a recipe with stages",
            where="layout",
            rule="layouts are compared by the time of one step, which differs between stages",
            fix="layout=null, or a name of layouts",
        )
    try:
        choice = _choice(recipe, cluster.emptied(), ranks, profile)
        # All memory, so that the next run here has the same layout; but others may keep some.
        fits = derive(choice.recipe, ranks, cluster).fits
        return choice if fits else _choice(recipe, cluster, ranks, profile)
    except SpeedUnknownError as error:
        if asked:
            raise
        logger.warning("note: no layout was chosen: %s; degrees and micro-batch have their defaults", error.what)
        return None
    except UserError:
        if asked:
            raise
        return None  # the plan says what does not divide or fit


def _choice(recipe: Recipe, cluster: Cluster, ranks: int, profile: Profile | None) -> Choice:
    kept = frozenset(_kept(recipe))
    try:
        best = fastest(recipe, cluster, ranks, profile, _COMPARED, kept, ALIKE)
    except SpeedUnknownError:
        raise
    except UserError as error:
        candidate = by_zero(recipe, cluster, ranks, profile, kept)
        if candidate is None:
            raise UserError(error.what, where="layout auto", rule=error.rule, fix=error.fix) from error
        best = [candidate]
    alike = [each for each in best if each.forecast.step.seconds <= best[0].forecast.step.seconds * (1 + ALIKE)]
    return Choice(min(alike, key=_complexity), len(alike), next(iter(best[len(alike) :]), None))


def _complexity(candidate: Candidate) -> tuple[bool, int, int, int]:
    """Stages cut by hand, ranks of a replica and chunks of a stage, memory: what a person would rather have less of."""
    parallel = candidate.recipe.layout
    chunks = parallel.virtual_pipeline_model_parallel_size or 1
    cut = parallel.pipeline_model_parallel_layout is not None
    return cut, model_parallel_size(parallel), chunks, candidate.forecast.plan.memory.total


def overrides_of(before: Recipe, choice: Choice) -> list[str]:
    """Overrides that make the recipe with the layout of one with the defaults of all keys that are chosen."""
    return [word for words in changes(before, choice.recipe).values() for text in words for word in shlex.split(text)]
