"""The space of a search as Optuna's distributions, and the recipes of its trials, of equal tokens and evaluations."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import JsonValue, ValidationError

from llmrecipes.errors import UserError
from llmrecipes.recipe.reading.explain import explain
from llmrecipes.recipe.reading.layouts import left_out
from llmrecipes.recipe.reading.overrides import Override, apply
from llmrecipes.recipe.rules import recipe_rules
from llmrecipes.recipe.rules.search_rules import contains, is_integer
from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.sections.search_section import Dimension, Search
from llmrecipes.recipe.variants.proxy import suffixed

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.trial import Trial

    from llmrecipes.recipe.sections.search_section import Search


Values = dict[str, JsonValue]
"""Values of searched keys."""
SUFFIX = "-search"

Plain = None | bool | int | float | str
"""What Optuna stores as a choice."""


def distribution(dimension: Dimension) -> BaseDistribution:
    """Optuna's distribution of one key."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    low, high, step = dimension.low, dimension.high, dimension.step
    if dimension.choices is not None:
        return CategoricalDistribution([plain(choice) for choice in dimension.choices])
    if low is None or high is None:
        raise ValueError(f"{dimension.key} has no range, which the recipe's rules exclude")
    if is_integer(dimension.key):
        return IntDistribution(int(low), int(high), log=dimension.log, step=int(step or 1))
    return FloatDistribution(low, high, log=dimension.log, step=step)


def plain(choice: JsonValue) -> Plain:
    """A choice as Optuna stores it; lists and mappings as JSON."""
    return json.dumps(choice, sort_keys=True) if isinstance(choice, list | dict) else choice


def parameters(values: Mapping[str, JsonValue]) -> dict[str, Plain]:
    """Values of keys as Optuna stores them."""
    return {key: plain(value) for key, value in values.items()}


def suggest(trial: Trial, recipe: Recipe, search: Search) -> Values:
    """Values that the sampler chooses for a trial; keys whose condition does not hold are left out."""
    data = recipe.model_dump(mode="json")
    values = Values()
    for dimension in search.space:
        if not applies(dimension, values, data):
            continue
        values[dimension.key] = value_of(dimension, _suggest(trial, dimension))
    return values


def _suggest(trial: Trial, dimension: Dimension) -> Any:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    match distribution(dimension):
        case CategoricalDistribution(choices=choices):
            return trial.suggest_categorical(dimension.key, choices)
        case IntDistribution(low=low, high=high, step=step, log=log):
            return trial.suggest_int(dimension.key, low, high, step=step, log=log)
        case FloatDistribution(low=low, high=high, step=step, log=log):
            return trial.suggest_float(dimension.key, low, high, step=step, log=log)
        case other:
            raise TypeError(f"no suggestion from {other}")


def value_of(dimension: Dimension, stored: Any) -> JsonValue:
    """The value of a key, from the one that Optuna stores."""
    if dimension.choices is None:
        return int(stored) if is_integer(dimension.key) else float(stored)
    return next(choice for choice in dimension.choices if plain(choice) == stored and _same_type(choice, stored))


def _same_type(choice: JsonValue, stored: object) -> bool:
    """1 and true are equal in Python."""
    return isinstance(choice, bool) == isinstance(stored, bool)


def values_of(params: Mapping[str, Any], search: Search) -> Values:
    """Values of keys, from the parameters of a trial in Optuna."""
    return {
        dimension.key: value_of(dimension, params[dimension.key])
        for dimension in search.space
        if dimension.key in params
    }


def applies(dimension: Dimension, chosen: Mapping[str, JsonValue], data: Mapping[str, Any]) -> bool:
    """Whether a key is searched with these values of earlier keys and this recipe as plain data."""
    return all(
        (chosen[key] if key in chosen else value_at(data, key)) in allowed for key, allowed in dimension.when.items()
    )


def own_point(recipe: Recipe, search: Search) -> Values | None:
    """The recipe's values of the searched keys; None if the space does not contain them."""
    data = recipe.model_dump(mode="json")
    values = Values()
    for dimension in search.space:
        if not applies(dimension, values, data):
            continue
        value = value_at(data, dimension.key)
        if not contains(dimension, value):
            return None
        values[dimension.key] = value
    return values


def value_at(data: Any, key: str) -> Any:
    """The value of a dotted key in plain data; None where a section on the way is None."""
    for part in key.split("."):
        if data is None:
            return None
        data = data[int(part)] if isinstance(data, list) else data.get(part)
    return data


def trial_recipe(recipe: Recipe, search: Search, values: Mapping[str, JsonValue]) -> Recipe:
    """The recipe of a trial: with its values, scaled to the tokens of a trial, and without the search.

    Raises:
        UserError: the values do not go together; all broken rules are in it.
    """
    data = left_out(recipe)
    for key, value in values.items():
        if problem := apply(data, Override(key, value, "")):
            raise UserError(problem.what, where=problem.key, rule=problem.rule, fix=problem.fix)
    data |= {"name": suffixed(recipe.name, SUFFIX), "search": None}
    data["checkpoint"]["copy_to"] = None  # most trials are thrown away
    try:
        candidate = Recipe.model_validate(data)
    except ValidationError as error:
        raise _refused(explain(error, {})) from error
    candidate = scale(candidate, recipe, search, values)
    if problems := recipe_rules.check(candidate):
        raise _refused(problems)
    return candidate


def _refused(problems: list[Any]) -> UserError:
    parts = [UserError(problem.what, where=problem.key, rule=problem.rule, fix=problem.fix) for problem in problems]
    return parts[0] if len(parts) == 1 else UserError("; ".join(f"{p.where}: {p.what}" for p in parts), parts=parts)


SCALED = {
    "scheduler": ("lr_warmup_iters", "lr_decay_iters", "lr_wsd_decay_iters"),
    "checkpoint": ("save_interval", "keep_interval"),
}
"""Keys in steps that keep their share of the trial, besides those of `train`."""


def tokens_per_step(recipe: Recipe) -> int:
    """Tokens of one optimizer step."""
    return recipe.train.global_batch_size * recipe.model.seq_length


def trial_tokens(recipe: Recipe, search: Search) -> int:
    """Tokens that each trial trains on."""
    return search.trial_tokens or recipe.train.train_iters * tokens_per_step(recipe)


def tokens_of_point(recipe: Recipe, search: Search) -> int:
    """Tokens of a trial that is not pruned: of all its seeds."""
    return trial_tokens(recipe, search) * search.seeds_per_point


def evaluations(recipe: Recipe) -> int:
    """Evaluations of a run: at each multiple of `eval_interval`, and after the last step."""
    return -(-recipe.train.train_iters // recipe.train.eval_interval)


def evaluation(recipe: Recipe, step: int) -> int:
    """Number of the evaluation after a step, from 1; the same share of the tokens in all trials."""
    return -(-step // recipe.train.eval_interval)


def scale(trial: Recipe, base: Recipe, search: Search, searched: Collection[str]) -> Recipe:
    """The recipe of a trial with the number of steps that its tokens take.

    Evaluations, schedule and checkpoints keep their share of the run; searched keys keep their values.

    Args:
        trial: the recipe with the values of the trial.
        base: the recipe of the search.
        search: its section.
        searched: keys that the trial has values for.
    """
    before = base.train.train_iters
    steps = max(1, round(trial_tokens(base, search) / tokens_per_step(trial)))
    if steps == before:
        return trial

    def scaled(value: int | None) -> int | None:
        return None if value is None else (max(1, round(value * steps / before)) if value else 0)

    train = trial.train.model_copy(
        update={"train_iters": steps, "eval_interval": min(steps, -(-steps // evaluations(base)))}
    )
    sections = {
        section: getattr(trial, section).model_copy(
            update={
                key: scaled(getattr(getattr(trial, section), key)) for key in keys if f"{section}.{key}" not in searched
            }
        )
        for section, keys in SCALED.items()
    }
    return trial.model_copy(update={"train": train, **sections})
