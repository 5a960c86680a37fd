"""The two halves of a recipe: what is learned, and how it is executed.

A recipe is the same experiment in every layout: its hash, and whether a run may be resumed with it, depend on the first
half. The marks are in the schema: `half` of a section, and `EXECUTION` or `LEARNED` in the type of a key.

The second half changes numbers by rounding only. Models that compute something of a micro-batch by definition are an
exception: experts with `aux_loss` or a capacity, and `layer_drop`.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from typing import Any, get_args, get_origin

from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.sections.section import EXECUTION, LEARNED, Half, Section

_ITEM = "N"


def learned_half(recipe: Recipe) -> dict[str, Any]:
    """What is learned, as nested plain values: equal for recipes that differ only in how they are executed."""
    return learned(recipe.model_dump(mode="json"))


def learned(values: Mapping[str, Any], without: Collection[str] = (), place: str = "") -> dict[str, Any]:
    """The learned half of nested plain values, without empty mappings.

    Sections of the other half may be absent, so that their learned keys count only if they are not the default.

    Args:
        values: a recipe, also one that an earlier version has written.
        without: keys to leave out too, also where a stage changes them.
        place: what comes before the names of the keys, with `N` for an index.
    """
    kept: dict[str, Any] = {}
    for name, value in values.items():
        key = recipe_key(f"{place}{name}")
        if key in without:
            continue
        if isinstance(value, Mapping):
            if inside := learned(value, without, f"{place}{name}."):
                kept[name] = inside
        elif half_of(key) is LEARNED and (f"{place}{name}" not in _defaults() or value != _defaults()[key]):
            items = list(value) if isinstance(value, list | tuple) else value
            kept[name] = (
                [learned(item, without, f"{place}{name}.{_ITEM}.") for item in items]
                if isinstance(items, list) and items and all(isinstance(item, Mapping) for item in items)
                else items
            )
    return kept


def half_of(name: str) -> Half:
    """The half of a dotted key or section; of one that no longer exists, that of its section."""
    known = halves()
    key = recipe_key(name)
    while key not in known and key:
        key = key.rpartition(".")[0]
    return known.get(key, LEARNED)


def recipe_key(name: str) -> str:
    """A key with `N` for an index; of a stage or a teacher the recipe's key that it changes."""
    parts = [_ITEM if part.isdecimal() else part for part in name.split(".")]
    known = halves()
    for depth in range(2, len(parts)):
        is_mapping = ".".join(parts[:depth]) in known and ".".join(parts[: depth + 1]) not in known
        if is_mapping and parts[depth - 1] in Recipe.model_fields:
            return ".".join(parts[depth - 1 :])
    return ".".join(parts)


@cache
def halves() -> dict[str, Half]:
    """The half of each key and section by dotted name, in the order of the schema; list items are written `N`."""
    return {name: half for name, half, _, _ in _walk(Recipe, "", LEARNED)}


@cache
def _defaults() -> dict[str, Any]:
    """Learned keys in sections of the other half, and their defaults."""
    marked = _walk(Recipe, "", LEARNED)
    return {name: default for name, half, around, default in marked if half is LEARNED and around is EXECUTION}


def _walk(section: type[Section], prefix: str, around: Half) -> Iterator[tuple[str, Half, Half, Any]]:
    """Name, half, half of the section around, and default of each key."""
    for name, field in section.model_fields.items():
        half = next((mark for mark in field.metadata if isinstance(mark, Half)), around)
        inside = list(_sections(field.annotation))
        half = next((inner.half for _, inner in inside if inner.half), half)
        yield f"{prefix}{name}", half, around, field.default
        for item, inner in inside:
            yield from _walk(inner, f"{prefix}{name}{item}.", half)


def _sections(annotation: Any, item: str = "") -> Iterator[tuple[str, type[Section]]]:
    """The sections in the type of a key, with `.N` for those in a list."""
    if inspect.isclass(annotation) and issubclass(annotation, Section):
        yield item, annotation
    if get_origin(annotation) is dict:  # whose keys are those of another section
        return
    inner = f"{item}.{_ITEM}" if get_origin(annotation) is tuple else item
    for argument in get_args(annotation):
        yield from _sections(argument, inner)
