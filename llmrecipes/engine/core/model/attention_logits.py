"""The largest attention logit: the scaled product of a query and a key that it sees, before the softmax.

Logits that grow over training are an early sign of divergence (arXiv 2302.05442, arXiv 2309.14322).
megatron-core's `log_max_attention_logit` asks TransformerEngine for them in every step, needs version 2.9 of it, keeps
the graphs of all micro-batches alive, and reads a number a layer on the host. Here the queries and keys of a
measured step are multiplied once more, in parts, with any attention: half of the FLOPs of attention's forward pass.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from llmrecipes.engine.core.model.attention import SdpaCoreAttention, in_sequence_order

MOST_SCORES = 1 << 24
"""That are in memory together: 64 MiB in fp32."""


def softmax_scale(attention: torch.nn.Module, channels: int) -> float:
    """What the logits of megatron-core's attention layer are scaled with.

    Args:
        channels: of a head's queries.
    """
    core: Any = attention.core_attention
    config: Any = attention.config
    scale = core.scale if isinstance(core, SdpaCoreAttention) else getattr(attention, "softmax_scale", None)
    return float(scale or config.softmax_scale or 1 / math.sqrt(channels))


def largest_logit(
    query: torch.Tensor,
    key: torch.Tensor,
    scale: float,
    mask: torch.Tensor | None = None,
    group: Any = None,
    before: int | None = None,
) -> torch.Tensor:
    """As `largest_logits`, over the heads of this rank: a scalar."""
    return largest_logits(query, key, scale, mask, group, before).amax()


@torch.no_grad()
def largest_logits(
    query: torch.Tensor,
    key: torch.Tensor,
    scale: float,
    mask: torch.Tensor | None = None,
    group: Any = None,
    before: int | None = None,
) -> torch.Tensor:
    """Largest logit of each head over this rank's sequences and the keys that a query sees: [heads], fp32, on device.

    Args:
        query: [sq, b, heads, channels].
        key: [sk, b, groups, channels].
        scale: of the products.
        mask: of packed conversations (`attention.attention_mask`); None: causal over whole sequences.
        before: tokens before it that a query sees, see `attention.tokens_before`.
        group: context-parallel ranks with parts of the sequence, of which all call this; None: there is one.
    """
    parts = [(query, 0)]
    if group is not None:
        size = dist.get_world_size(group)
        rank = dist.get_rank(group)
        gathered = key.new_empty(size * key.size(0), *key.shape[1:])
        dist.all_gather_into_tensor(gathered, key.contiguous(), group=group)
        key = in_sequence_order(gathered, size)
        length = query.size(0) // 2
        parts = list(zip(query.split(length), (rank * length, (2 * size - 1 - rank) * length), strict=True))
    allowed = None if mask is None else _allowed(mask, query.size(0), query.size(1))
    return torch.stack([_largest(queries, key, first, allowed, before) for queries, first in parts]).amax(0) * scale


def _largest(
    query: torch.Tensor, key: torch.Tensor, first: int, allowed: torch.Tensor | None, before: int | None
) -> torch.Tensor:
    """[heads], unscaled, of queries of consecutive positions.

    Args:
        first: position of the first query among the keys.
        allowed: [b, sq, sk], whether a query sees a key; None: it sees those up to it.
        before: as in `largest_logits`.
    """
    length, batch, heads, channels = query.shape
    groups = key.size(2)
    queries = query.reshape(length, batch, groups, heads // groups, channels).permute(1, 2, 3, 0, 4)
    keys = key.permute(1, 2, 3, 0)[:, :, None]
    rows = max(1, MOST_SCORES // (batch * heads * (first + length)))
    largest = []
    for start in range(0, length, rows):
        end = min(length, start + rows)
        scores = queries[..., start:end, :] @ keys[..., : first + end]
        if allowed is not None:
            scores.masked_fill_(~allowed[:, None, None, start:end, : first + end], -torch.inf)
        else:
            later = torch.ones(end - start, end - start, dtype=torch.bool, device=query.device).triu(1)
            scores[..., first + start :].masked_fill_(later, -torch.inf)
        if before is not None:
            near = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).triu(first + start - before)
            scores.masked_fill_(~near, -torch.inf)
        largest.append(scores.amax((0, 3, 4)).flatten().float())
    return torch.stack(largest).amax(0)


def _allowed(mask: torch.Tensor, length: int, batch: int) -> torch.Tensor:
    """[b, s, s] from either form of the mask."""
    if mask.dtype == torch.bool:
        return mask[:, 0]
    places = torch.arange(length * batch, device=mask.device)
    numbers = torch.bucketize(places, mask.to(places.dtype), right=True).view(batch, length)
    causal = torch.ones(length, length, dtype=torch.bool, device=mask.device).tril()
    return (numbers[:, :, None] == numbers[:, None, :]) & causal
