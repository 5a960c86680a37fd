"""The engine of a recipe."""

from __future__ import annotations

from importlib import import_module

from llmrecipes.engine.base import Backend
from llmrecipes.recipe.engines import ENGINES, engine_name
from llmrecipes.recipe.schema import Recipe


def backend(recipe: Recipe) -> Backend:
    """The backend of the engine that a recipe selects."""
    module, _, name = ENGINES[engine_name(recipe)].backend.partition(":")
    found: Backend = getattr(import_module(module), name)()
    return found
