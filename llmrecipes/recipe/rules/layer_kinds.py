"""Layers of several kinds, which a list says layer by layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from llmrecipes.recipe.derived.degrees import divisors
from llmrecipes.recipe.derived.shape import unrotated
from llmrecipes.recipe.document import Problem
from llmrecipes.recipe.schema import Model, Recipe


def rules(recipe: Recipe) -> Iterator[Problem]:
    """Lists of layers have all of them, and some that differ; what is left out is there in other layers."""
    model = recipe.model
    for name in ("window_attn_skip_freq", "no_rope_freq"):
        layers = getattr(model, name)
        if isinstance(layers, list) and (len(layers) != model.num_layers or 1 not in layers):
            yield Problem(
                f"model.{name}",
                f"a list of {len(layers)} with {layers.count(1)} times 1, for {model.num_layers} layers",
                f"a {name} list needs one entry per layer, and 1 for some",
                f"{model.num_layers} entries, or {name} null",
            )
    layers = model.no_rope_freq
    if layers is None:
        return
    if isinstance(layers, int) and model.num_layers % layers:
        yield Problem(
            "model.no_rope_freq",
            f"{layers} for {model.num_layers} layers",
            "a number of no_rope_freq must divide num_layers",
            f"no_rope_freq {divisors(model.num_layers, layers)}, or a list",
        )
    if model.position_embedding_type == "learned_absolute" or model.multi_latent_attention:
        yield Problem(
            "model.no_rope_freq",
            "set with multi_latent_attention" if model.multi_latent_attention else "set without rotary embedding",
            "it leaves out the rotary embedding of attention that is not latent",
            "position_embedding_type rope, multi_latent_attention false; or remove no_rope_freq",
        )


def small_windows(model: Model, layers: int, length: int) -> dict[str, Any]:
    """Keys of a rehearsal's windows: they hide as large a part of its sequences, at least a token."""
    if model.window_size is None:
        return {}
    before = max(0, min(model.window_size[0] * length // model.seq_length, length - 2))
    skipped = model.window_attn_skip_freq
    small = min(skipped, max(2, layers)) if isinstance(skipped, int) else skipped and small_pattern(skipped, layers)
    return {"window_size": (before, 0), "window_attn_skip_freq": small}


def small_no_rope(model: Model, layers: int) -> int | list[Any] | None:
    """`no_rope_freq` of a rehearsal."""
    left_out = model.no_rope_freq
    return [int(entry) for entry in small_pattern(unrotated(model), layers)] if left_out else None


def small_pattern(pattern: list[Any], layers: int) -> list[Any]:
    """Every n-th entry of a list, including both ends and both kinds of layers."""
    small = [pattern[index * (len(pattern) - 1) // max(layers - 1, 1)] for index in range(layers)]
    if 0 in pattern and 0 not in small:
        small[0] = 0
    if 1 in pattern and 1 not in small:
        small[-1] = 1
    return small
