"""The engine of a recipe."""

from __future__ import annotations

from collections.abc import Callable
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from llmrecipes.hardware.builds import import_megatron
from llmrecipes.plan.derive import Plan
from llmrecipes.recipe.engines import ENGINES, engine_name
from llmrecipes.recipe.schema import Recipe

if TYPE_CHECKING:
    from llmrecipes.checkpoint.store import Entry
    from llmrecipes.engine.base import Backend
    from llmrecipes.hf.safetensors import TensorSource


def backend(recipe: Recipe) -> Backend:
    """The backend of the engine that a recipe selects."""
    import_megatron()
    create: Callable[[], Backend] = resolve_name(ENGINES[engine_name(recipe)].backend)
    return create()


def stored_weights(recipe: Recipe, entry: Entry, *, averaged: bool = False) -> TensorSource:
    """Weights of a checkpoint by the names in one process, read one at a time; without a model or other ranks.

    megatron-core is not imported for it.

    Args:
        recipe: of the run.
        entry: the checkpoint.
        averaged: their moving average (`optimizer.ema_decay`).

    Raises:
        UserError: the checkpoint is corrupt, or has no average.
    """
    create: Callable[..., TensorSource] = resolve_name(ENGINES[engine_name(recipe)].tensors)
    return create(entry, averaged=averaged)


def configuration(plan: Plan) -> dict[str, Any] | None:
    """The configuration of the library of a plan's engine, as plain data; None: it is configured only by recipes."""
    place = ENGINES[engine_name(plan.recipe)].configuration
    if place is None:
        return None
    function: Callable[[Plan], dict[str, Any]] = resolve_name(place)
    return function(plan)
