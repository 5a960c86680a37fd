"""Flattens nested mappings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any


def leaves(
    value: Any, name: str = "", *, enter: Callable[[list[Any]], bool] = lambda _: False
) -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of all leaves of nested mappings; an empty mapping is a leaf.

    Args:
        value: a mapping, or a value inside one.
        name: of `value`.
        enter: which lists are flattened too, with items named by index; other lists are leaves.
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
