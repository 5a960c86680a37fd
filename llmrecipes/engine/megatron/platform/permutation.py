"""Tokens in the order of their experts, without waiting for the device.

megatron-core 0.16 selects by a mask, and a GPU tells the host how much that is, for tokens and for scores. Their number
is known where no token is dropped; 0.19 sorts by it. The result is the same, in the same order.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch

from llmrecipes.engine.megatron.platform.patching import replace, resolve
from llmrecipes.engine.megatron.versions import PERMUTES_BY_MASK

DISPATCHER = "megatron.core.transformer.moe.token_dispatcher"
PLAIN = resolve(DISPATCHER).permute


def install_permutation() -> None:
    """Replace the permutation of the version that waits."""
    replace(DISPATCHER, "permute", permute if PERMUTES_BY_MASK else PLAIN)


@wraps(PLAIN)
def permute(
    tokens: torch.Tensor,
    routing_map: torch.Tensor,
    probs: torch.Tensor | None = None,
    num_out_tokens: Any = None,
    fused: bool = False,
    drop_and_pad: bool = False,
) -> Any:
    """megatron-core's, of [tokens, h], a mask and scores [tokens, experts]; tokens, scores, and their old places."""
    if fused or drop_and_pad or not isinstance(num_out_tokens, int):
        return PLAIN(tokens, routing_map, probs, num_out_tokens, fused, drop_and_pad)
    chosen = routing_map.T.reshape(-1).argsort(descending=True, stable=True)[:num_out_tokens]
    places = chosen % tokens.size(0)
    scores = None if probs is None else probs.T.reshape(-1).index_select(0, chosen)
    return tokens.index_select(0, places), scores, places
