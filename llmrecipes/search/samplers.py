"""Samplers and pruners of Optuna, from the recipe."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING, Any

from llmrecipes.recipe.search import PRUNER_KEYS, SAMPLER_KEYS, Pruner, PrunerType, Search
from llmrecipes.search.space import distribution, plain

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler

FIRST_DECISION = 4
"""No trial is pruned in the first quarter of its evaluations. Optuna prunes from the first, during warm-up, where a
short warm-up looks best: some searches then never finish a good trial."""


def sampler(search: Search, worker: int) -> BaseSampler:
    """The sampler of a search.

    Args:
        search: the section.
        worker: number of this process among those that have worked on the study; each draws its own sequence.
    """
    from optuna import samplers

    from llmrecipes.search import views

    wanted = search.sampler
    given: dict[str, Any] = {
        key: value for key in SAMPLER_KEYS[wanted.type] if (value := getattr(wanted, key)) is not None
    }
    # Processes share the sequence of QMC; CMA-ES draws from seed and number of a trial.
    if wanted.seed is not None and wanted.type not in ("QMCSampler", "CmaEsSampler"):
        given["seed"] = _seed(wanted.seed, worker)
    match wanted.type:
        case "TPESampler":
            given.setdefault("multivariate", True)
            # Keys that depend on others are modelled in groups of keys that occur together.
            given["group"] = given["multivariate"] and any(each.when for each in search.space)
            given["constant_liar"] = True  # values of running trials are avoided: several at a time differ
        case "GridSampler":
            # Optuna's own chooses points when a trial begins, so that two processes may choose the same; and it ends
            # Optuna's loop, which is not used here. All points wait in the study instead.
            return samplers.RandomSampler(**given)
        case "CmaEsSampler":
            given |= {"warn_independent_sampling": False, "consider_pruned_trials": False}  # `views` shows them
        case "QMCSampler":
            given["warn_independent_sampling"] = False
    found: BaseSampler = getattr(views if hasattr(views, wanted.type) else samplers, wanted.type)(**given)
    return found


def _seed(seed: int, worker: int) -> int:
    import numpy

    return int(numpy.random.SeedSequence([seed, worker]).generate_state(1)[0])


def grid(search: Search) -> list[dict[str, Any]]:
    """All points of a grid, in random order; the rules have excluded spaces without end."""
    values = [_values(distribution(each)) for each in search.space]
    keys = [each.key for each in search.space]
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
        evaluations: of a trial.
    """
    from optuna import pruners

    wanted = search.pruner or Pruner(type="MedianPruner" if len(search.objectives) == 1 else "NopPruner")
    if wanted.type != "PatientPruner":
        return _plain_pruner(wanted, wanted.type, evaluations)
    inner = _plain_pruner(wanted, wanted.wrapped_pruner, evaluations) if wanted.wrapped_pruner else None
    return pruners.PatientPruner(inner, patience=wanted.patience or 0, min_delta=wanted.min_delta or 0.0)


def _plain_pruner(wanted: Pruner, kind: PrunerType, evaluations: int) -> BasePruner:
    from optuna import pruners

    from llmrecipes.search import views

    given: dict[str, Any] = {key: value for key in PRUNER_KEYS[kind] if (value := getattr(wanted, key)) is not None}
    for key in ("n_warmup_steps", "min_resource"):
        if key in PRUNER_KEYS[kind]:
            given.setdefault(key, -(-evaluations // FIRST_DECISION))
    if kind == "HyperbandPruner":
        given["max_resource"] = evaluations
    found: BasePruner = getattr(views if hasattr(views, kind) else pruners, kind)(**given)
    return found
