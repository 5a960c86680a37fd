"""Keys that are only used with another key of their section, which their type names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pydantic import BaseModel

from llmrecipes.recipe.document import Problem
from llmrecipes.recipe.sections.plugins import declared


@dataclass(frozen=True)
class OnlyWith:
    """In the type of a key: the other key, without which, or with which false or 0, it has no effect."""

    key: str


def only_with(section: BaseModel, place: str = "") -> Iterator[Problem]:
    """Keys of a section, and of those inside, that are set without the other key.

    Args:
        place: what comes before the names of its keys: `optimizer.`.
    """
    kind = type(section)
    for name, other in declared(kind, OnlyWith).items():
        value = getattr(section, name)
        if value != kind.model_fields[name].default and getattr(section, other.key) in (None, False, ()):
            yield Problem(
                f"{place}{name}",
                f"{value} without {other.key}",
                f"{name} is only used with {other.key}",
                f"set {place}{other.key}, or remove {name}",
            )
    for name, value in section:
        if isinstance(value, BaseModel):
            yield from only_with(value, f"{place}{name}.")
        for number, item in enumerate(value if isinstance(value, tuple) else ()):
            if isinstance(item, BaseModel):
                yield from only_with(item, f"{place}{name}.{number}.")
