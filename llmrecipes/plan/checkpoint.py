"""Bytes of a checkpoint on disk."""

from __future__ import annotations

from llmrecipes.recipe.schema import Recipe

# Master weight and Adam's two moments in fp32, per parameter; a checkpoint has the master weight in fp32 runs too.
_STATE = 12
# The moving average of the weights.
_AVERAGE = 4


def checkpoint_bytes(recipe: Recipe, parameters: int) -> int:
    """Bytes of one checkpoint: weights in their training precision, and the optimizer state.

    Every tensor is written once, whatever the layout. Random states and metadata (20 KiB a rank or less) are left out.

    Args:
        recipe: for the precision of the weights.
        parameters: of the full model, or of the adapters if these alone are trained.
    """
    average = _AVERAGE if recipe.optimizer.ema_decay is not None else 0
    return parameters * (_STATE + average + (4 if recipe.train.precision == "fp32" else 2))
