"""Layers of several kinds, which a list says layer by layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from llmrecipes.recipe.document import Problem
from llmrecipes.recipe.schema import Model, Recipe


def rules(recipe: Recipe) -> Iterator[Problem]:
    """A list of the layers with a sliding window has all of them, and some with it."""
    layers = recipe.model.window_attn_skip_freq
    if isinstance(layers, list) and (len(layers) != recipe.model.num_layers or 1 not in layers):
        yield Problem(
            "model.window_attn_skip_freq",
            f"a list of {len(layers)} with {layers.count(1)} windows, for {recipe.model.num_layers} layers",
            "a window_attn_skip_freq list needs one entry per layer, 1 for those with the window",
            f"{recipe.model.num_layers} entries, or window_size null",
        )


def small_windows(model: Model, layers: int, length: int) -> dict[str, Any]:
    """Keys of a rehearsal's windows: they hide as large a part of its sequences, at least a token."""
    if model.window_size is None:
        return {}
    before = max(0, min(model.window_size[0] * length // model.seq_length, length - 2))
    skipped = model.window_attn_skip_freq
    small = min(skipped, max(2, layers)) if isinstance(skipped, int) else skipped and small_pattern(skipped, layers)
    return {"window_size": (before, 0), "window_attn_skip_freq": small}


def small_pattern(pattern: list[Any], layers: int) -> list[Any]:
    """Every n-th entry of a list, including both ends and both kinds of layers."""
    small = [pattern[index * (len(pattern) - 1) // max(layers - 1, 1)] for index in range(layers)]
    if 0 in pattern and 0 not in small:
        small[0] = 0
    if 1 in pattern and 1 not in small:
        small[-1] = 1
    return small
