"""Nested mappings as flat ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any


def leaves(
    value: Any, name: str = "", *, enter: Callable[[list[Any]], bool] = lambda _: False
) -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of everything inside nested mappings; an empty mapping is a value.

    Args:
        value: a mapping, or what is inside one.
        name: its own.
        enter: which lists are nested too, their items named by number; the others are values.
    """
    if isinstance(value, Mapping) and value:
        inside = ((str(key), inner) for key, inner in value.items())
    elif isinstance(value, list) and value and enter(value):
        inside = ((str(number), inner) for number, inner in enumerate(value))
    else:
        yield name, value
        return
    for key, inner in inside:
        yield from leaves(inner, f"{name}.{key}" if name else key, enter=enter)
