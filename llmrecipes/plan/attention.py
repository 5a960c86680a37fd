"""What core attention keeps for the backward pass."""

from __future__ import annotations

from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.shape import Shape


def has_fused_kernel(s: Shape, device: str) -> bool:
    """Whether core attention has a fused kernel; on a CPU torch has none if keys and values differ in width."""
    return device == "cuda" or s.query_channels == s.value_channels


def keeps_scores(recipe: Recipe, s: Shape, device: str) -> bool:
    """Whether core attention keeps the score matrix of each head, so that recomputing it saves memory.

    Fused kernels (torch's, TransformerEngine's) keep the log-sum-exp of each row and recompute the scores themselves.
    On a CPU torch has none with dropout.
    """
    return (recipe.model.attention_dropout > 0 and device == "cpu") or not has_fused_kernel(s, device)


def mask_per_token(recipe: Recipe, device: str) -> int:
    """Bytes per token of the mask that keeps packed conversations apart, which all layers share: one for each token of
    the sequence. 0 on a CPU, where each conversation is attended to by itself, and where there is none."""
    chat = recipe.data.chat
    packed = chat is not None and chat.packing
    return recipe.model.seq_length if packed and (device == "cuda" or recipe.train.torch_compile) else 0


def copies_keys(recipe: Recipe, s: Shape, device: str) -> bool:
    """Whether keys and values of groups are copied for each query, because there is such a mask."""
    return mask_per_token(recipe, device) > 0 and s.num_query_groups < s.num_attention_heads


def recompute_granularity(recipe: Recipe, s: Shape, device: str) -> str | None:
    """What is recomputed: as in the recipe, but core attention only where that saves memory."""
    wanted = recipe.train.recompute_granularity
    return None if wanted == "selective" and not keeps_scores(recipe, s, device) else wanted
