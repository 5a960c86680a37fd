"""`layout: auto`, the default: what a recipe does not say about how it is executed, chosen for the GPUs of a run."""

from __future__ import annotations

import logging
import shlex
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from llmrecipes.errors import UserError
from llmrecipes.hardware.cluster import Cluster
from llmrecipes.hardware.profile import Profile
from llmrecipes.plan.derive import derive
from llmrecipes.plan.speed.device import SpeedUnknownError
from llmrecipes.plan.speed.forecast import forecast
from llmrecipes.plan.speed.search import ZERO, Candidate, by_zero, changes, fastest, plan_of
from llmrecipes.recipe.derived.degrees import model_parallel_size
from llmrecipes.recipe.reading.layouts import CHOSEN, undecided
from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.sections.layout_section import LayoutKeys

logger = logging.getLogger(__name__)
ALIKE = 0.01
"""A third of the median error of predicted times."""
_COMPARED = 24


@dataclass(frozen=True)
class EarlierStart:
    """How a run of the recipe was last started.

    Attributes:
        layout: its keys, as the run's plan has resolved them.
        device: name of its GPU's coefficients.
    """

    run: str
    layout: LayoutKeys
    device: str


@dataclass(frozen=True)
class MeasuredStep(EarlierStart):
    """What it has measured: seconds of a step."""

    seconds: float


@dataclass(frozen=True)
class _Timed:
    """A candidate and its seconds of a step.

    Attributes:
        run: that has measured them; None: predicted, and corrected by what was measured in other layouts.
    """

    candidate: Candidate
    seconds: float
    run: str | None = None


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
    slower: float = 0.0
    """How much longer a step of `following` takes, as a fraction."""
    measured: str | None = None
    """The run that has measured the layout; None: its time is predicted."""
    again: bool = False
    """It is that of the run's last start; nothing was compared."""

    @property
    def recipe(self) -> Recipe:
        """The recipe with the layout, in which none is chosen again."""
        return self.chosen.recipe

    def __str__(self) -> str:
        """One line: what was chosen, and why."""
        if self.again:
            return f"{self.chosen.key}: as at the last start of this run"
        if self.chosen.offloads:
            return f"{self.chosen.key}: nothing fits without offload, whose time is unknown"
        fastest = f"simplest of the {self.alike} fastest" if self.alike > 1 else "fastest"
        why = f"{fastest} that fit{'' if self.alike > 1 else 's'}"
        speed = f"{self.chosen.forecast.as_dict()['mfu_full']:.0%} MFU predicted"
        if self.measured is not None:
            speed = f"measured in {self.measured}"
        text = f"{self.chosen.key}: {why}, {speed}"
        return text if self.following is None else f"{text}; next {self.following.key}, {self.slower:.1%} slower"

    def as_dict(self) -> dict[str, Any]:
        """For plan.json."""
        following = None if self.following is None else {"layout": self.following.key, "slower": self.slower}
        measured = {} if self.measured is None else {"measured": self.measured}
        return {"layout": self.chosen.key, "next": following, **measured, "text": str(self)}


def _kept(recipe: Recipe) -> Iterator[str]:
    """Names of the keys that all layouts have as the recipe has them."""
    yield from recipe.layout.model_fields_set & {*CHOSEN, "use_distributed_optimizer"}
    if recipe.layout.zero is not None:
        yield ZERO


def choose(
    recipe: Recipe,
    cluster: Cluster,
    ranks: int,
    profile: Profile | None,
    measured: Sequence[MeasuredStep] = (),
    last: EarlierStart | None = None,
) -> Choice | None:
    """The fastest layout that fits, of those that keep what the recipe sets.

    With ZeRO of DeepSpeed only where nothing fits without it, and with its offload only where that does not fit either.

    Args:
        ranks: ranks of the run, all of which the layout uses.
        profile: the cluster's links and coefficients; None: those of the GPU's data file.
        measured: by earlier runs of the recipe on as many ranks, the newest first.
        last: start of the same run on as many ranks, whose layout is kept if it fits and has what the recipe sets.

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
        if last is not None and (again := _candidate(recipe, last, cluster, ranks, profile)) and _same(again, last):
            return Choice(again, 1, None, again=True)
        choice = _choice(recipe, cluster.emptied(), ranks, profile, measured)
        # All memory, so that the next run here has the same layout; but others may keep some.
        fits = derive(choice.recipe, ranks, cluster).fits
        return choice if fits else _choice(recipe, cluster, ranks, profile, measured)
    except SpeedUnknownError as error:
        if asked:
            raise
        logger.warning("note: no layout was chosen: %s; degrees and micro-batch have their defaults", error.what)
        return None
    except UserError:
        if asked:
            raise
        return None  # the plan says what does not divide or fit


def _choice(
    recipe: Recipe, cluster: Cluster, ranks: int, profile: Profile | None, measured: Sequence[MeasuredStep]
) -> Choice:
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
    timed = [_Timed(candidate, candidate.forecast.step.seconds) for candidate in best]
    if measured:
        timed = _corrected(_with_runs(recipe, best, cluster, ranks, profile, measured), measured)
    alike = [each for each in timed if each.seconds <= timed[0].seconds * (1 + ALIKE)]
    chosen = min(alike, key=lambda each: _complexity(each.candidate))
    following = next(iter(timed[len(alike) :]), None)
    slower = 0.0 if following is None else following.seconds / chosen.seconds - 1
    after = None if following is None else following.candidate
    return Choice(chosen.candidate, len(alike), after, slower, chosen.run)


def _with_runs(
    recipe: Recipe,
    best: list[Candidate],
    cluster: Cluster,
    ranks: int,
    profile: Profile | None,
    measured: Sequence[MeasuredStep],
) -> list[Candidate]:
    """The candidates, and those layouts of earlier runs that were predicted to be slower than all of them.

    Without runs whose layout has another value of a key that the recipe sets, or does not fit this machine.
    """
    candidates = list(best)
    for step in measured:
        if any(_same(candidate, step) for candidate in candidates):
            continue
        candidate = _candidate(recipe, step, cluster, ranks, profile)
        if candidate is not None:
            candidates.append(candidate)
    return candidates


def _candidate(
    recipe: Recipe, start: EarlierStart, cluster: Cluster, ranks: int, profile: Profile | None
) -> Candidate | None:
    """The layout of a start with what the recipe sets; None: it does not fit."""
    kept = set(_kept(recipe))
    names = [name for name in (*CHOSEN, "use_distributed_optimizer") if name not in kept]
    plan = plan_of(recipe.with_layout(**{name: getattr(start.layout, name) for name in names}), cluster, ranks)
    return Candidate(plan.recipe, forecast(plan, profile)) if plan is not None and plan.fits else None


def _corrected(candidates: list[Candidate], measured: Sequence[MeasuredStep]) -> list[_Timed]:
    """Candidates with what was measured, the fastest first.

    What is not measured is predicted, times the median of measured over predicted in the layouts that are: a machine
    that is slower than its coefficients is so in all of them.
    """
    runs = {
        number: step
        for number, candidate in enumerate(candidates)
        if (step := next((step for step in measured if _same(candidate, step)), None))
    }
    predicted = [candidate.forecast.step.seconds for candidate in candidates]
    factor = statistics.median([step.seconds / predicted[number] for number, step in runs.items()] or [1.0])
    timed = [
        _Timed(candidate, runs[number].seconds, runs[number].run)
        if number in runs
        else _Timed(candidate, predicted[number] * factor)
        for number, candidate in enumerate(candidates)
    ]
    return sorted(timed, key=lambda each: each.seconds)


def _same(candidate: Candidate, start: EarlierStart) -> bool:
    """Whether a run on the same GPUs had this layout, in every key."""
    layout = candidate.forecast.plan.recipe.layout
    return candidate.forecast.device.name == start.device and _keys(layout) == _keys(start.layout)


def _keys(layout: LayoutKeys) -> dict[str, Any]:
    return layout.model_dump(exclude={"name"})


def _complexity(candidate: Candidate) -> tuple[bool, int, int, int]:
    """Stages cut by hand, ranks of a replica and chunks of a stage, memory: what a person would rather have less of."""
    parallel = candidate.recipe.layout
    chunks = parallel.virtual_pipeline_model_parallel_size or 1
    cut = parallel.pipeline_model_parallel_layout is not None
    return cut, model_parallel_size(parallel), chunks, candidate.forecast.plan.memory.total


def overrides_of(before: Recipe, choice: Choice) -> list[str]:
    """Overrides that make the recipe with the layout of one with the defaults of all keys that are chosen."""
    return [word for words in changes(before, choice.recipe).values() for text in words for word in shlex.split(text)]
