"""`layout`: the keys that say how a recipe is executed, replaced by those of a named layout.

One that is named on the command line replaces the keys of the file; one that the file names sets only those that the
file does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from llmrecipes.recipe.derived.degrees import DEGREES
from llmrecipes.recipe.document import Problem, clip
from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.sections.layout_section import AUTO, LayoutKeys
from llmrecipes.recipe.speedups.recompute import ALL_LAYERS

CHOSEN = (*DEGREES, "micro_batch_size", *ALL_LAYERS)
"""Keys that `layout: auto` chooses; `zero` is the other one. A layout replaces all of them."""

UNDECIDED = "degrees, micro-batch and recomputation that are not set are chosen for the GPUs of a run"


def undecided(recipe: Recipe) -> list[str]:
    """Keys of `CHOSEN` that `layout: auto` is to choose: those that neither the recipe nor an override has set."""
    if recipe.layout.name != AUTO:
        return []
    return [name for name in CHOSEN if name not in recipe.layout.model_fields_set]


def left_out(recipe: Recipe) -> dict[str, Any]:
    """Plain data of a recipe without the keys of `undecided`, so that they are chosen for what is read from it.

    Nor has it `auto` itself, unless it was asked for: where nothing can be chosen, only those who asked are refused.
    """
    values = recipe.model_dump(mode="json")
    left = undecided(recipe)
    for name in (*left, *(["name"] if left and "name" not in recipe.layout.model_fields_set else [])):
        values["layout"].pop(name)
    return values


def chosen_keys(recipe: Recipe) -> dict[str, Any]:
    """Values of the keys of `CHOSEN`, as plain data."""
    return recipe.layout.model_dump(mode="json", include=set(CHOSEN))


def is_name(value: object) -> bool:
    """Whether a value of `layout` is the name of one, or null: a recipe without what is chosen."""
    return value is None or isinstance(value, str)


def replace(data: dict[str, Any], name: str | None) -> None:
    """Set `layout` in plain recipe data, without the keys that it replaces: those of `CHOSEN`, and its own."""
    keys = _keys(data)
    for key in (*_named(data, name), *CHOSEN, "zero"):
        keys.pop(key, None)
    data["layout"] = {**keys, "name": name}


def take(data: dict[str, Any], lines: dict[str, int]) -> list[Problem]:
    """Set the keys of the layout that the data names, where the data does not.

    Args:
        data: plain recipe data, changed in place.
        lines: line of each dotted key in the file; those of the layout become those of the keys that it sets.
    """
    if not isinstance(data.get("layout", {}), dict | str | None):
        return []  # which the schema reports
    layouts = data.get("layouts")
    known = list(layouts) if isinstance(layouts, dict) else []
    keys = _keys(data)
    name = keys.get("name", LayoutKeys.model_fields["name"].default)
    data["layout"] = keys
    if AUTO in known:
        return [Problem(f"layouts.{AUTO}", "auto is not a name", "auto is the layout that is chosen for the machine")]
    if isinstance(name, str) and name not in (*known, AUTO):
        return [_unknown(name, known)]
    for key, value in _named(data, name).items():
        present = keys.get(key)
        if key in keys and not (isinstance(value, dict) and isinstance(present, dict)):
            continue
        keys[key] = {**value, **present} if isinstance(present, dict) else value
        of = f"layouts.{name}.{key}"
        for line in [line for line in lines if line == of or line.startswith(f"{of}.")]:
            lines[line.replace(of, f"layout.{key}", 1)] = lines[line]
    return []


def once(problems: Sequence[Problem], data: Mapping[str, Any]) -> list[Problem]:
    """Without those of the layout that the data names, where they are also those of `layout`."""
    known = {problem.key for problem in problems}
    layout = data.get("layout")
    of = f"layouts.{layout.get('name') if isinstance(layout, dict) else ''}."
    return [each for each in problems if not each.key.startswith(of) or each.key.replace(of, "layout.", 1) not in known]


def _keys(data: dict[str, Any]) -> dict[str, Any]:
    """The section `layout`, of which a recipe may write only the name."""
    written = data.get("layout", {})
    return dict(written) if isinstance(written, dict) else {"name": written}


def _named(data: dict[str, Any], name: object) -> dict[str, Any]:
    layouts = data.get("layouts")
    layout = layouts.get(name) if isinstance(layouts, dict) and isinstance(name, str) else None
    return layout if isinstance(layout, dict) else {}


def _unknown(name: str, known: list[str]) -> Problem:
    rule = f"layout is {', '.join([*known, AUTO])}" if known else "the recipe has no layouts; layout is auto or null"
    close = get_close_matches(name, [*known, AUTO], n=1)
    return Problem("layout.name", f"{clip(name)!r} is unknown", rule, f"layout={close[0]}" if close else "")
