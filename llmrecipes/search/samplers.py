"""Samplers and pruners of Optuna, from the recipe, and what they see of a study.

Optuna's own learn only from some of the trials. The storage has each trial as it ended; a penalty is in no record, so
that pruners, reports and best trials never see one.
"""

from __future__ import annotations

import copy
import itertools
import math
import random
import statistics
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import optuna
from optuna import pruners, samplers
from optuna._transform import _SearchSpaceTransform
from optuna.trial import FrozenTrial, TrialState
from pydantic import TypeAdapter

from llmrecipes.recipe.sections.search_section import Median, NoPruning, Patient, PlainPruner, Search
from llmrecipes.search.space import distribution, plain
from llmrecipes.search.trial import TrialOutcome
from llmrecipes.search.trials import FITS, OUTCOME, continues, own_trials

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler


FINITE = "finite"
"""Name of the constraint that a diverged trial violates; only samplers see it."""
CONSTRAINT = "constraints:{}"
"""Optuna's attribute of a trial with the value of a constraint."""
_ENDED = (TrialState.COMPLETE, TrialState.PRUNED)


class _View(optuna.Study):
    """A study some of whose trials look different; all else is the study's."""

    def __init__(self, study: optuna.Study) -> None:
        self._study = study

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_study"], name)


# -- samplers --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Scale:
    """Values of one objective, of the completed trials."""

    best: float
    median: float
    worst: float

    @classmethod
    def of(cls, values: Sequence[float]) -> _Scale:
        return cls(min(values), statistics.median(values), max(values)) if values else cls(0.0, 0.0, 0.0)

    def penalty(self, violation: float) -> float:
        """Worse than every completed trial, and the more so the larger the violation, at most by their spread.

        A Gaussian process would see no difference between completed trials next to a penalty of another order.
        """
        spread = self.worst - self.best or abs(self.worst) or 1.0
        return self.worst + spread * violation / (1 + violation)

    def pruned(self, value: float) -> float:
        """The loss that a trial had when it was pruned, which says more than no value, within what can be.

        Early losses are high because they are early; a low one, of a curve that rises, would make it the best trial.
        """
        return min(max(value, self.median), self.worst) if math.isfinite(value) else self.worst


class Learnt(_View):
    """A study for a sampler that learns: what diverged or cannot run violates a constraint.

    Args:
        study: the study.
        completed: show these trials, and pruned ones, as completed with a penalty, for a sampler that uses no others.
    """

    def __init__(self, study: optuna.Study, *, completed: bool) -> None:
        super().__init__(study)
        self._completed = completed

    def _get_trials(
        self, deepcopy: bool = True, states: Container[TrialState] | None = None, use_cache: bool = False
    ) -> list[FrozenTrial]:
        trials = self._study._get_trials(deepcopy=False, use_cache=use_cache)
        done = [trial.values for trial in trials if trial.state == TrialState.COMPLETE and trial.values]
        if not done:  # the order of what was pruned says something already
            done = [[trial.value] for trial in trials if trial.state == TrialState.PRUNED and trial.value is not None]
        count = len(self._study.directions)
        scales = [_Scale.of([values[number] for values in done if len(values) == count]) for number in range(count)]
        shown = [self._shown(trial, scales) if trial.state in _ENDED else trial for trial in trials]
        selected = [trial for trial in shown if states is None or trial.state in states]
        return copy.deepcopy(selected) if deepcopy else selected

    def _shown(self, trial: FrozenTrial, scales: Sequence[_Scale]) -> FrozenTrial:
        constraints = violations(trial)
        violation = sum(value for value in constraints.values() if value > 0)
        shown = copy.copy(trial)
        shown.system_attrs = {
            **trial.system_attrs,
            **{CONSTRAINT.format(name): value for name, value in constraints.items()},
        }
        if trial.state == TrialState.COMPLETE or not self._completed:
            return shown
        last = math.nan if trial.last_step is None else trial.intermediate_values[trial.last_step]
        shown.values = [scale.penalty(violation) if violation else scale.pruned(last) for scale in scales]
        shown.state = TrialState.COMPLETE
        return shown


def violations(trial: FrozenTrial) -> dict[str, float]:
    """The constraints of an ended trial, the same ones for all of them; a value above 0 is a violation."""
    outcome = trial.user_attrs.get(OUTCOME)
    fits = trial.constraints.get(FITS, -1.0)
    if outcome == TrialOutcome.INFEASIBLE and fits <= 0:  # the plan was wrong: it ran out of memory
        fits = 1.0
    # The earlier a trial diverged, the further it was from one that does not.
    return {FITS: fits, FINITE: 1 / (1 + len(trial.intermediate_values)) if outcome == TrialOutcome.DIVERGED else -1.0}


class _Learning(samplers.BaseSampler):
    """Passes to an Optuna sampler, the other base of a class, what it does not learn by itself."""

    completed = False
    """See `Learnt`."""

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        shown = Learnt(study, completed=self.completed)
        return super().infer_relative_search_space(shown, trial)  # type: ignore[safe-super]

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        shown = Learnt(study, completed=self.completed)
        return super().sample_relative(shown, trial, search_space)  # type: ignore[safe-super]

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        shown = Learnt(study, completed=self.completed)
        return super().sample_independent(shown, trial, param_name, param_distribution)  # type: ignore[safe-super]


class TPESampler(_Learning, samplers.TPESampler):
    """Optuna's, which ranks pruned trials and violated constraints itself."""


class GPSampler(_Learning, samplers.GPSampler):
    """Optuna's, which learns only from completed trials, with a model of each constraint."""

    completed = True


class _Replayed(samplers.CmaEsSampler):
    """Optuna's, without the state that it keeps in trials as a pickle and loads when a study is resumed.

    Whoever can write to the storage could run code with it. The state follows from the trials: they are replayed in
    the order in which they ended. Random numbers follow from seed and trial, so that a resumed search proposes what an
    uninterrupted one would have.
    """

    def __init__(self, *, seed: int | None = None, **options: Any) -> None:
        super().__init__(seed=seed, **options)
        self._seed = seed

    def _reseed(self, trial: FrozenTrial, generator: np.random.RandomState, stream: int) -> None:
        if self._seed is not None:
            generator.seed(np.random.SeedSequence([self._seed, trial.number, stream]).generate_state(1)[0])

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        self._reseed(trial, self._independent_sampler._rng.rng, 1)  # type: ignore[attr-defined]
        super().before_trial(study, trial)

    def after_trial(
        self, study: optuna.Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None
    ) -> None:
        """Nothing. Optuna's method warns that it ignores the constraints, which this search turns into penalties."""

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        trials = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        if not search_space or len(trials) < self._n_startup_trials:
            return {}
        space = _SearchSpaceTransform(search_space, transform_step=not self._with_margin, transform_0_1=True)
        optimizer = self._init_optimizer(space, study.direction)
        trials.sort(key=lambda each: (each.datetime_complete.timestamp() if each.datetime_complete else 0, each.number))
        while len(replayed := self._get_solution_trials(trials, optimizer.generation)) >= optimizer.population_size:
            optimizer.tell(
                [
                    (
                        np.array(trial.system_attrs[_X]) if self._with_margin else space.transform(trial.params),
                        trial.values[0],
                    )
                    for trial in replayed[: optimizer.population_size]
                ]
            )
        self._reseed(trial, optimizer._rng, 0)
        if self._with_margin:
            values, x_for_tell = optimizer.ask()
            study._storage.set_trial_system_attr(trial._trial_id, _X, x_for_tell.tolist())
        else:
            values = optimizer.ask()
        if "fixed_params" not in trial.system_attrs:  # such a point is not the one that was asked for
            study._storage.set_trial_system_attr(trial._trial_id, self._attr_key_generation, optimizer.generation)
        return space.untransform(values)


_X = "x_for_tell"
"""Optuna's attribute of a trial: the point before it was moved to a step."""


class CmaEsSampler(_Learning, _Replayed):
    """CMA-ES that learns from all trials; only the order of their values matters to it."""

    completed = True


# -- pruners ---------------------------------------------------------------------------------------------------------


class Competitors(_View):
    """A study for a pruner that counts trials: a trial that was resumed is one, with the number that it had first.

    Args:
        study: the study.
        takes: whether a trial competes.
    """

    def __init__(self, study: optuna.Study, takes: Callable[[FrozenTrial], bool] = lambda _trial: True) -> None:
        super().__init__(study)
        self._takes = takes

    def get_trials(self, deepcopy: bool = True, states: Container[TrialState] | None = None) -> list[FrozenTrial]:
        """The trials that compete; of one that was resumed only the last part."""
        wanted: Iterable[FrozenTrial] = (trial for trial in own_trials(self._study) if self._takes(trial))
        selected = [trial for trial in wanted if states is None or trial.state in states]
        return copy.deepcopy(selected) if deepcopy else selected


class SuccessiveHalvingPruner(pruners.SuccessiveHalvingPruner):
    """Optuna's, with each trial as one competitor."""

    def prune(self, study: optuna.Study, trial: FrozenTrial) -> bool:
        """Whether a trial is not among the best of its rung."""
        return super().prune(Competitors(study), trial)


class HyperbandPruner(pruners.HyperbandPruner):
    """Optuna's, with each trial as one competitor that stays in its bracket when it is resumed."""

    def _get_bracket_id(self, study: optuna.Study, trial: FrozenTrial) -> int:
        first = copy.copy(trial)
        first.number = min([trial.number, *continues(trial)])
        return super()._get_bracket_id(study, first)

    def _create_bracket_study(self, study: optuna.Study, bracket_id: int) -> optuna.Study:
        return Competitors(study, lambda trial: self._get_bracket_id(study, trial) == bracket_id)


OWN_SAMPLERS = {sampler.__name__: sampler for sampler in (TPESampler, GPSampler, CmaEsSampler)}
OWN_PRUNERS = {pruner.__name__: pruner for pruner in (SuccessiveHalvingPruner, HyperbandPruner)}
"""By Optuna's names, which they replace."""
FIRST_DECISION = 4
"""No trial is pruned in the first quarter of its evaluations. Optuna prunes from the first, during warm-up, where a
short warm-up looks best: some searches then never finish a good trial."""


def sampler(search: Search, worker: int) -> BaseSampler:
    """The sampler of a search.

    Args:
        search: the section.
        worker: number of this process among those that have worked on the study; each draws its own sequence.
    """
    wanted = search.sampler
    keywords = {key: value for key, value in wanted if key != "type" and value is not None}
    # Processes share the sequence of QMC; CMA-ES draws from seed and number of a trial.
    if wanted.seed is not None and wanted.type not in ("QMCSampler", "CmaEsSampler"):
        keywords["seed"] = _seed(wanted.seed, worker)
    match wanted.type:
        case "TPESampler":
            # Keys that depend on others are modelled in groups of keys that occur together.
            keywords["group"] = keywords["multivariate"] and any(dimension.when for dimension in search.space)
            keywords["constant_liar"] = True  # values of running trials are avoided: several at a time differ
        case "GridSampler":
            # Optuna's own chooses points when a trial begins, so that two processes may choose the same; and it ends
            # Optuna's loop, which is not used here. All points wait in the study instead.
            return samplers.RandomSampler(**keywords)
        case "CmaEsSampler":
            keywords |= {"warn_independent_sampling": False, "consider_pruned_trials": False}  # `views` shows them
        case "QMCSampler":
            keywords["warn_independent_sampling"] = False
    sampler_type: type[BaseSampler] = OWN_SAMPLERS.get(wanted.type) or getattr(samplers, wanted.type)
    return sampler_type(**keywords)


def _seed(seed: int, worker: int) -> int:
    import numpy

    return int(numpy.random.SeedSequence([seed, worker]).generate_state(1)[0])


def grid(search: Search) -> list[dict[str, Any]]:
    """All points of a grid, in random order; the rules have excluded spaces without end."""
    values = [_values(distribution(dimension)) for dimension in search.space]
    keys = [dimension.key for dimension in search.space]
    points = [dict(zip(keys, point, strict=True)) for point in itertools.product(*values)]
    random.Random(search.sampler.seed or 0).shuffle(points)
    return points


def _values(values: BaseDistribution) -> list[Any]:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if isinstance(values, CategoricalDistribution):
        return [plain(choice) for choice in values.choices]
    if isinstance(values, IntDistribution):
        return list(range(values.low, values.high + 1, values.step))
    if isinstance(values, FloatDistribution) and values.step is not None:
        low, high, step = values.low, values.high, values.step
        return list(
            itertools.takewhile(lambda value: value <= high + step / 2, (low + n * step for n in itertools.count()))
        )
    raise ValueError(f"{values} has no end")


def pruner(search: Search, evaluations: int) -> BasePruner:
    """The pruner of a search; its steps are evaluations.

    Args:
        search: the section.
        evaluations: evaluations of a trial.
    """
    wanted = search.pruner or (Median() if len(search.objectives) == 1 else NoPruning(type="NopPruner"))
    if not isinstance(wanted, Patient):
        return _plain_pruner(wanted, evaluations)
    wrapped: TypeAdapter[PlainPruner] = TypeAdapter(PlainPruner)
    inner = _plain_pruner(wrapped.validate_python(wanted.wrapped), evaluations) if wanted.wrapped_pruner else None
    return pruners.PatientPruner(inner, patience=wanted.patience, min_delta=wanted.min_delta)


def _plain_pruner(wanted: PlainPruner, evaluations: int) -> BasePruner:
    first = -(-evaluations // FIRST_DECISION)  # for the key of a pruner that says so
    keywords = {key: first if value is None else value for key, value in wanted if key != "type"}
    if wanted.type == "HyperbandPruner":
        keywords["max_resource"] = evaluations
    pruner_type: type[BasePruner] = OWN_PRUNERS.get(wanted.type) or getattr(pruners, wanted.type)
    return pruner_type(**keywords)
