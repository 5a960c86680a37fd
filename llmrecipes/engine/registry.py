"""The engine of a recipe."""

from __future__ import annotations

from pkgutil import resolve_name

from llmrecipes.engine.base import Backend
from llmrecipes.hardware.builds import transformer_engine_obstacle
from llmrecipes.recipe.engines import ENGINES, engine_name
from llmrecipes.recipe.schema import Recipe


def backend(recipe: Recipe) -> Backend:
    """The backend of the engine that a recipe selects."""
    transformer_engine_obstacle()  # before megatron-core is imported
    found: Backend = resolve_name(ENGINES[engine_name(recipe)].backend)()
    return found
