"""One NVIDIA GPU per process. megatron-core is patched only by `substitutes`, and permutes tokens without waiting.

To put tokens in the order of their experts, megatron-core 0.16 selects by a mask, and a GPU tells the host how many
that is, for tokens and for scores. Their number is known where no token is dropped; 0.19 sorts by it. The result is the
same, in the same order.
"""

from __future__ import annotations

from datetime import timedelta
from functools import wraps
from typing import Any

import torch

from llmrecipes.engine.core.platform.patching import replace, resolve
from llmrecipes.engine.core.platform.rendezvous import connect
from llmrecipes.engine.core.platform.substitutes import install_substitutes
from llmrecipes.engine.core.versions import PERMUTES_BY_MASK


class CudaPlatform:
    """A rank that owns `cuda:<local_rank>`."""

    name = "cuda"
    backend = "nccl"

    def __init__(self, local_rank: int) -> None:
        self._device = torch.device("cuda", local_rank)

    @property
    def device(self) -> torch.device:
        return self._device

    def install(self) -> None:
        torch.cuda.set_device(self._device)
        install_substitutes()
        install_permutation()

    def connect(self, timeout: timedelta) -> None:
        connect(self, timeout)

    def peak_memory(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)


DISPATCHER = "megatron.core.transformer.moe.token_dispatcher"
PLAIN_PERMUTE = resolve(DISPATCHER).permute


def install_permutation() -> None:
    """Replace the permutation of the version that waits."""
    replace(DISPATCHER, "permute", permute if PERMUTES_BY_MASK else PLAIN_PERMUTE)


@wraps(PLAIN_PERMUTE)
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
        return PLAIN_PERMUTE(tokens, routing_map, probs, num_out_tokens, fused, drop_and_pad)
    chosen = routing_map.T.reshape(-1).argsort(descending=True, stable=True)[:num_out_tokens]
    places = chosen % tokens.size(0)
    scores = None if probs is None else probs.T.reshape(-1).index_select(0, chosen)
    return tokens.index_select(0, places), scores, places
