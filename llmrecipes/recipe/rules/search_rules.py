"""Rules of the section `search`: what can be searched, and which samplers and pruners can do it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, cast
from urllib.parse import urlsplit

from pydantic import ValidationError

from llmrecipes.recipe.document import Problem
from llmrecipes.recipe.reading.explain import explain, rule_of
from llmrecipes.recipe.reading.keys import admits, hint, is_key, key_of, options_of
from llmrecipes.recipe.reading.overrides import Override, apply
from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.sections.search_section import Dimension, Patient, Search, Wilcoxon
from llmrecipes.redact import has_secret, redact

FIXED = ("name", "description", "train.train_iters", "train.eval_interval", "train.eval_iters", "data.split")
"""Keys that are the same in all trials: they name a trial, or determine what its loss is measured on."""
FIXED_SECTIONS = ("search", "tracking", "checkpoint")
STORAGES = ("sqlite", "postgresql")
MOST_POINTS = 1000
"""Of a grid, all of which wait in the study."""
_LIMITS = ("n_trials", "timeout", "max_gpu_hours", "max_tokens")


def check(recipe: Recipe) -> Iterator[Problem]:
    """All violated rules of the section."""
    search = recipe.search
    if search is None:
        return
    for number, dimension in enumerate(search.space):
        yield from _dimension(recipe, search, number, dimension)
    yield from _sampler(search)
    yield from _pruner(recipe, search)
    yield from _objectives(recipe, search)
    yield from _points(search)
    yield from _storage(search)
    if search.grace_period is not None and search.grace_period <= search.heartbeat_interval:
        yield Problem(
            "search.grace_period",
            f"{search.grace_period} s, but heartbeat_interval is {search.heartbeat_interval} s",
            "grace_period must exceed heartbeat_interval, or healthy trials are requeued",
            f"search.grace_period: {2 * search.heartbeat_interval}",
        )
    if search.sampler.type != "GridSampler" and all(getattr(search, name) is None for name in _LIMITS):
        yield Problem(
            "search.n_trials",
            "the study has no limit",
            f"a search needs at least one of {', '.join(_LIMITS)}",
            "search.n_trials: 20",
        )


def _dimension(recipe: Recipe, search: Search, number: int, dimension: Dimension) -> Iterator[Problem]:
    where = f"search.space.{number}"
    key = dimension.key
    earlier = [dimension.key for dimension in search.space[:number]]
    known = key_of(key)
    if not is_key(key) or (known is not None and known.section):
        what = "is a section" if known is not None else "is not a recipe key"
        yield Problem(f"{where}.key", f"{key!r} {what}", "only recipe keys can be searched", str(hint(key)))
        return
    if not _has_place(recipe.model_dump(mode="json"), key):
        yield Problem(
            f"{where}.key",
            f"{key} is in an item that the recipe does not have",
            "only existing list items can be searched",
            "the index of an existing item, from 0",
        )
        return
    if key in FIXED or key.partition(".")[0] in FIXED_SECTIONS:
        yield Problem(
            f"{where}.key",
            f"{key} cannot be searched",
            "it must be the same in all trials, so that they are comparable",
            "search.trial_tokens sets the length of a trial" if key == "train.train_iters" else "",
        )
    if key in earlier:
        yield Problem(f"{where}.key", f"{key} appears twice", "a key may have only one range", "remove one")
    for condition, allowed in dimension.when.items():
        if not is_key(condition):
            yield Problem(f"{where}.when", f"{condition!r} is not a recipe key", fix=str(hint(condition)))
        elif condition in [dimension.key for dimension in search.space[number:]]:
            yield Problem(
                f"{where}.when",
                f"{condition} comes after {key}",
                "a condition must be on a key that is searched earlier",
                f"move {condition} up",
            )
        else:
            for value in allowed:
                if reason := _misfit(recipe, condition, value):
                    yield Problem(f"{where}.when", f"{value!r} is not valid for {condition}", reason)
    if dimension.choices is not None:
        yield from _choices(recipe, where, dimension)
    else:
        yield from _range(where, dimension)


def _choices(recipe: Recipe, where: str, dimension: Dimension) -> Iterator[Problem]:
    choices = dimension.choices or ()
    if dimension.low is not None or dimension.high is not None or dimension.step is not None or dimension.log:
        yield Problem(
            f"{where}.choices",
            f"{dimension.key} has choices and a range",
            "a key needs either choices or a range",
            "remove one",
        )
    for position, choice in enumerate(choices):
        if choice in choices[:position]:
            yield Problem(f"{where}.choices", f"{choice!r} appears twice", "choices must be different", "remove one")
        elif reason := _misfit(recipe, dimension.key, choice):
            yield Problem(f"{where}.choices", f"{choice!r} is not valid for {dimension.key}", reason)


def _has_place(data: Any, key: str) -> bool:
    """Whether each number in a key is that of an item in plain recipe data."""
    for part in key.split("."):
        if part.isdecimal() and not (isinstance(data, list) and int(part) < len(data)):
            return False
        data = data[int(part)] if part.isdecimal() else data.get(part) if isinstance(data, dict) else None
    return True


def _misfit(recipe: Recipe, key: str, value: object) -> str:
    """Why the schema does not accept a value of a key; empty if it does."""
    data = recipe.model_dump(mode="json")
    apply(data, Override(key, value, ""))
    try:
        Recipe.model_validate(data)
    except ValidationError as error:
        known = key_of(key)
        return f"{key} is {known.takes}" if known else rule_of(error.errors()[0])
    return ""


def _range(where: str, dimension: Dimension) -> Iterator[Problem]:
    key = dimension.key
    low = dimension.low
    high = dimension.high
    step = dimension.step
    if low is None or high is None:
        yield Problem(where, f"{key} has no range", "a key needs low and high, or choices", "low: 1, high: 10")
        return
    if not is_number(key):
        yield Problem(where, f"a range for {key}", f"{key} must be {_takes(key)}", "choices: [...]")
        return
    if low >= high:
        yield Problem(
            f"{where}.low",
            f"{low:g} to {high:g} is empty",
            "low must be less than high",
            f"low: {high:g}, high: {low:g}",
        )
        return
    whole = is_integer(key)
    for name, value in (("low", low), ("high", high)):
        if whole and not value.is_integer():
            yield Problem(f"{where}.{name}", f"{value:g} for {key}", f"{key} is an integer", f"{name}: {round(value)}")
        elif not any(admits(node, int(value) if whole else value) for node in options_of(key)):
            yield Problem(f"{where}.{name}", f"{value:g} is not valid", f"{key} must be {_takes(key)}")
    if dimension.log and low <= 0:
        yield Problem(f"{where}.low", f"{low:g} with log", "a logarithmic range must start above 0", "log: false")
    if step is None:
        return
    if dimension.log:
        yield Problem(f"{where}.step", "set with log", "a logarithmic range cannot have a step", "choices, or no step")
    elif whole and not step.is_integer():
        yield Problem(f"{where}.step", f"{step:g} for {key}", f"{key} is an integer", f"step: {max(1, round(step))}")
    elif not math.isclose(round((high - low) / step) * step, high - low):
        last = low + math.floor((high - low) / step) * step
        yield Problem(
            f"{where}.high",
            f"{high:g} is not low + a multiple of step {step:g}",
            "high must be the last value",
            f"high: {last:g}",
        )


def is_number(key: str) -> bool:
    """Whether a key takes numbers."""
    return bool(_types(key) & {"integer", "number"})


def is_integer(key: str) -> bool:
    """Whether a key takes integers, and no other numbers."""
    return "integer" in _types(key) and "number" not in _types(key)


def is_finite(dimension: Dimension) -> bool:
    """Whether a dimension has a finite number of values: what a grid needs."""
    return dimension.choices is not None or dimension.step is not None or is_integer(dimension.key)


def _size(dimension: Dimension) -> int:
    """Values of a finite dimension."""
    if dimension.choices is not None or dimension.low is None or dimension.high is None:
        return len(dimension.choices or ())
    return round((dimension.high - dimension.low) / (dimension.step or 1)) + 1


def _takes(key: str) -> str:
    known = key_of(key)
    return known.takes if known else "another type"


def _types(key: str) -> set[Any]:
    return {node.get("type") for node in options_of(key)}


def _sampler(search: Search) -> Iterator[Problem]:
    kind = search.sampler.type
    cannot: list[tuple[str, str]] = []
    if kind == "GridSampler":
        cannot += [(dimension.key, "a range without step") for dimension in search.space if not is_finite(dimension)]
    if kind in ("CmaEsSampler", "QMCSampler"):
        cannot += [(dimension.key, "choices") for dimension in search.space if dimension.choices is not None]
    if kind not in ("TPESampler", "RandomSampler"):
        cannot += [(dimension.key, "a condition") for dimension in search.space if dimension.when]
    for key, what in cannot:
        yield Problem(
            "search.sampler.type",
            f"{kind}, but {key} has {what}",
            f"{kind} cannot sample {what}",
            "TPESampler" if what != "a range without step" else f"a step for {key}, or TPESampler",
        )
    if kind == "GridSampler" and not cannot and (points := math.prod(map(_size, search.space))) > MOST_POINTS:
        yield Problem(
            "search.sampler.type",
            f"a grid of {points:,} points",
            f"at most {MOST_POINTS:,}",
            "fewer values, or TPESampler",
        )
    if kind == "CmaEsSampler" and len(search.space) < 2:
        yield Problem("search.sampler.type", f"{kind} for one key", f"{kind} needs at least two", "TPESampler")
    if kind == "CmaEsSampler" and len(search.objectives) > 1:
        yield Problem(
            "search.sampler.type",
            f"{kind} with {len(search.objectives)} objectives",
            f"{kind} supports one objective only",
            "TPESampler",
        )


def _pruner(recipe: Recipe, search: Search) -> Iterator[Problem]:
    pruner = search.pruner
    if pruner is None:
        return
    if len(search.objectives) > 1 and pruner.type != "NopPruner":
        yield Problem(
            "search.pruner.type",
            f"{pruner.type} with {len(search.objectives)} objectives",
            "Optuna can only prune trials with a single objective",
            "NopPruner",
        )
    if isinstance(pruner, Patient):
        if pruner.wrapped_pruner is None:
            for key in pruner.wrapped.keys() - {"type"}:
                yield Problem(
                    f"search.pruner.{key}",
                    "set without wrapped_pruner",
                    "it is a key of a wrapped pruner",
                    f"set wrapped_pruner, or remove {key}",
                )
            return
        data = recipe.model_dump(mode="json")
        data["search"]["pruner"] = pruner.wrapped
        try:
            pruner = cast(Search, Recipe.model_validate(data).search).pruner
        except ValidationError as error:
            yield from explain(error, {})
            return
    if isinstance(pruner, Wilcoxon):
        evaluations = -(-recipe.train.train_iters // recipe.train.eval_interval)
        threshold = pruner.p_threshold
        fewest = max(2, pruner.n_startup_steps)
        needed = next((count for count in range(fewest, fewest + 64) if 0.5**count < threshold), None)
        if needed is None or evaluations <= needed:
            yield Problem(
                "search.pruner.type",
                f"WilcoxonPruner at p < {threshold:g}, with {evaluations} evaluations in a trial",
                f"the p-value of n losses is at least 2^-n, so that no trial is pruned before evaluation {needed}"
                if needed
                else "a p-value is greater than 0",
                f"train.eval_interval: {max(1, recipe.train.train_iters // (needed + 1))}, or MedianPruner"
                if needed
                else "search.pruner.p_threshold: 0.1",
            )


def _objectives(recipe: Recipe, search: Search) -> Iterator[Problem]:
    names = search.objectives
    if search.seeds_per_point > 1 and any(dimension.key == "train.seed" for dimension in search.space):
        yield Problem(
            "search.seeds_per_point",
            f"{search.seeds_per_point}, but train.seed is searched",
            "all points must be trained with the same seeds",
            "remove train.seed from search.space",
        )
    if len(set(names)) < len(names):
        yield Problem("search.objectives", f"{', '.join(names)}", "objectives must be different", "remove one")
    if recipe.data.split[1] == 0:
        yield Problem(
            "data.split",
            "no validation split",
            "trials are compared by their validation loss",
            "data.split: [98, 1, 1]",
        )
    tokens = [
        dimension.key
        for dimension in search.space
        if dimension.key == "model.vocab_size" or ".tokenizer." in dimension.key
    ]
    if tokens and "valid_loss" in names:
        yield Problem(
            "search.objectives",
            f"valid_loss, but {tokens[0]} is searched",
            "losses with different tokenizers are not comparable",
            "valid_bits_per_byte",
        )
    if search.patience is not None and len(names) > 1:
        yield Problem(
            "search.patience",
            f"set with {len(names)} objectives",
            "with several objectives there is no single best value",
            "remove it",
        )


def _points(search: Search) -> Iterator[Problem]:
    dimensions = {dimension.key: dimension for dimension in search.space}
    for number, point in enumerate(search.enqueue_trials):
        for key, value in point.items():
            where = f"search.enqueue_trials.{number}"
            if key not in dimensions:
                yield Problem(
                    where,
                    f"{key} is not searched",
                    "a point may only set searched keys",
                    f"one of {', '.join(dimensions)}",
                )
            elif not contains(dimensions[key], value):
                yield Problem(where, f"{value!r} is not in the range of {key}", "points must be inside the space")


def contains(dimension: Dimension, value: object) -> bool:
    """Whether a value is one that the search may choose."""
    if dimension.choices is not None:
        return value in dimension.choices
    low, high = dimension.low, dimension.high
    if low is None or high is None or isinstance(value, bool) or not isinstance(value, int | float):
        return False
    if not low <= value <= high:
        return False
    steps = 0.0 if dimension.step is None else (value - low) / dimension.step
    return math.isclose(steps, round(steps), abs_tol=1e-9)


def _storage(search: Search) -> Iterator[Problem]:
    addresses = [("search.storage", search.storage)]
    addresses += [(f"search.source_studies.{n}.storage", each.storage) for n, each in enumerate(search.source_studies)]
    for where, storage in addresses:
        if storage == "":
            yield Problem(where, "is empty", "storage must be a URL or a path", "remove it")
        if storage is None or "://" not in storage:
            continue
        parts = urlsplit(storage)
        if parts.scheme.partition("+")[0] not in STORAGES:
            yield Problem(
                where,
                f"scheme {parts.scheme!r}",
                "storage must be sqlite:///FILE, postgresql://... or a path",
                "the path of a journal file",
            )
        elif parts.scheme.startswith("sqlite") and parts.path in ("", "/", "/:memory:"):
            yield Problem(
                where, f"{redact(storage)} is in memory", "a study must outlive its process", "sqlite:///study.db"
            )
        elif has_secret(storage):
            yield Problem(where, "has a password", "recipes are stored with every run", "PGPASSWORD or ~/.pgpass")
