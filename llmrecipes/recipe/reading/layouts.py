"""`layout`: the keys that say how a recipe is executed, replaced by those of a named layout.

A layout of `layouts` has them without their sections. One that is named on the command line replaces the keys of the
file; one that the file names sets only those that the file does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from typing import Any

from pydantic import ValidationError

from llmrecipes.recipe.document import Problem, clip
from llmrecipes.recipe.halves import half_of
from llmrecipes.recipe.reading.explain import explain
from llmrecipes.recipe.schema import AUTO, MOST_LAYOUTS, Parallelism, Recipe
from llmrecipes.recipe.sections.section import EXECUTION
from llmrecipes.recipe.sections.speed import Speed
from llmrecipes.recipe.speedups.recompute import ALL_LAYERS

_OF_TRAIN = ("micro_batch_size", *ALL_LAYERS)
_ALSO_OF_TRAIN = ("torch_compile", "loss_chunk_tokens")
NOT_CHOSEN = ("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather", "grad_reduce_in_fp32")
"""Keys of `parallelism` that no layout replaces unless it sets them: some optimizers need them."""
CHOSEN: Mapping[str, tuple[str, ...]] = {
    "parallelism": tuple(name for name in Parallelism.model_fields if name not in NOT_CHOSEN),
    "train": _OF_TRAIN,
}
"""Keys that `layout: auto` chooses, by section; `zero` is the other one. A layout replaces all of them."""


@cache
def places() -> dict[str, str]:
    """Dotted key of a recipe for each key that a layout may have."""
    sections = {
        "parallelism": Parallelism.model_fields,
        "train": (*_OF_TRAIN, *_ALSO_OF_TRAIN),
        "speed": Speed.model_fields,
    }
    inside = {name: f"{section}.{name}" for section, names in sections.items() for name in names}
    return {name: key for name, key in inside.items() if half_of(key) is EXECUTION} | {
        "zero": "zero",
        "engine": "engine",
    }


def undecided(recipe: Recipe) -> dict[str, list[str]]:
    """Keys of `CHOSEN` that `layout: auto` is to choose: those that neither the recipe nor an override has set."""
    if recipe.layout != AUTO:
        return {}
    return {
        section: [name for name in names if name not in getattr(recipe, section).model_fields_set]
        for section, names in CHOSEN.items()
    }


def replace(data: dict[str, Any], name: object) -> None:
    """Set `layout` in plain recipe data, without the keys that it replaces: those of `CHOSEN`, and its own."""
    known = data.get("layouts")
    layout = known.get(name) if isinstance(known, dict) and isinstance(name, str) else None
    own = [places()[key] for key in layout if key in places()] if isinstance(layout, dict) else []
    chosen = [f"{section}.{key}" for section, names in CHOSEN.items() for key in names]
    for place in {*own, *chosen, "zero"}:
        section, _, key = place.rpartition(".")
        values = data.get(section) if section else data
        if isinstance(values, dict):
            values.pop(key, None)
    data["layout"] = name


def take(data: dict[str, Any], lines: dict[str, int]) -> list[Problem]:
    """Set the keys of the layout that the data names, where the data does not.

    Args:
        data: plain recipe data, changed in place.
        lines: line of each dotted key in the file; those of the layout become those of the keys that it sets.

    Returns:
        An unknown layout, and all problems in the keys of any layout.
    """
    layouts = data.get("layouts")
    layouts = layouts if isinstance(layouts, dict) else {}
    problems = [problem for name, layout in layouts.items() for problem in _misplaced(name, layout)]
    name = data.get("layout")
    if isinstance(name, str) and name != AUTO and name not in layouts:
        problems.append(_unknown(name, [*layouts]))
    if problems or len(layouts) > MOST_LAYOUTS:  # which the schema reports
        return problems
    for other, layout in layouts.items():
        if other != name:
            problems += _invalid(other, layout, data, lines)
    if isinstance(name, str) and name in layouts:
        _set(layouts[name], data, lines, f"layouts.{name}")
    return problems


def _set(layout: Mapping[str, Any], data: dict[str, Any], lines: dict[str, int], of: str) -> None:
    for key, value in layout.items():
        place = places()[key]
        section, _, leaf = place.rpartition(".")
        values = data.setdefault(section, {}) if section else data
        if not isinstance(values, dict):  # which the schema reports
            continue
        present = values.get(leaf)
        if leaf in values and not (isinstance(value, dict) and isinstance(present, dict)):
            continue
        values[leaf] = {**value, **present} if isinstance(present, dict) else value
        for inner in [line for line in lines if line == f"{of}.{key}" or line.startswith(f"{of}.{key}.")]:
            lines[inner.replace(f"{of}.{key}", place, 1)] = lines[inner]


def _misplaced(name: str, layout: object) -> Iterator[Problem]:
    if not isinstance(layout, dict):
        return
    if name == AUTO:
        yield Problem(f"layouts.{name}", "auto is not a name", "auto is the layout that is chosen for the machine")
    for key in layout:
        if key not in places():
            close = get_close_matches(key.rpartition(".")[2], places(), n=1)
            fix = f"did you mean {close[0]}?" if close else "remove it, or set it in the recipe"
            yield Problem(
                f"layouts.{clip(name)}.{clip(key)}",
                "not a key of a layout",
                "a layout has keys that say how a recipe is executed, without their sections",
                fix,
            )


def _unknown(name: str, known: list[str]) -> Problem:
    rule = f"layout is {', '.join([*known, AUTO])}" if known else "the recipe has no layouts; layout is auto or null"
    close = get_close_matches(name, [*known, AUTO], n=1)
    return Problem("layout", f"{clip(name)!r} is unknown", rule, f"layout={close[0]}" if close else "")


def _invalid(name: str, layout: object, data: dict[str, Any], lines: Mapping[str, int]) -> Iterator[Problem]:
    """Problems of a layout that is not used."""
    if not isinstance(layout, dict):
        return
    other = {section: dict(values) if isinstance(values, dict) else values for section, values in data.items()}
    replace(other, None)
    _set(layout, other, {}, "")
    own = {place: key for key, place in places().items() if key in layout}
    try:
        Recipe.model_validate({**other, "layouts": {}})
    except ValidationError as error:
        for problem in explain(error, lines):
            place = next((place for place in own if f"{problem.key}.".startswith(f"{place}.")), None)
            if place is not None:
                key = problem.key.replace(place, own[place], 1)
                yield Problem(f"layouts.{name}.{key}", problem.what, problem.rule, problem.fix)
