"""What an engine's own library is configured with, for users who know its configuration files; without torch."""

from __future__ import annotations

from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any

from llmrecipes.plan.derive import Plan
from llmrecipes.recipe.engines import ENGINES, engine_name


def configuration(plan: Plan) -> dict[str, Any] | None:
    """The configuration of the library of a plan's engine, as plain data; None: it is configured by recipes alone."""
    place = ENGINES[engine_name(plan.recipe)].configuration
    if place is None:
        return None
    function: Callable[[Plan], dict[str, Any]] = resolve_name(place)
    return function(plan)
