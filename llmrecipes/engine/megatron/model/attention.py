"""Core attention on torch's scaled_dot_product_attention.

It replaces megatron-core's `DotProductAttention`, which materializes the score matrix and does not support context
parallelism, if TransformerEngine is not used: torch selects a flash kernel on CPU and GPU.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, get_cuda_rng_tracker
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.attention.bias import causal_lower_right

from llmrecipes.engine.megatron.model.context import in_sequence_order
from llmrecipes.engine.megatron.model.packing import lengths


class SdpaCoreAttention(MegatronModule):
    """Causal attention of the heads of one tensor-parallel rank.

    With context parallelism a rank has the queries of two chunks of the sequence (`model.context`). Keys and values of
    the full sequence are gathered over the context-parallel group, and their gradients reduce-scattered.

    Args:
        config: megatron-core's configuration.
        layer_number: position of the layer, from 1.
        attn_mask_type: causal, or none for a query that sees every key.
        attention_type: self-attention only; kept for megatron-core's signature.
        attention_dropout: overrides `config.attention_dropout`.
        softmax_scale: overrides 1/sqrt(channels of a head).
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **_unused: Any,
    ) -> None:
        super().__init__(config=config)
        self.layer_number = layer_number
        self.attn_mask_type = attn_mask_type
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.scale = softmax_scale
        self.context_group: Any = None
        if config.context_parallel_size > 1:
            self.context_group = parallel_state.get_context_parallel_group()

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """Attend.

        Args:
            query: [sq, b, heads, channels].
            key, value: [sk, b, groups, channels]; sk > sq when keys of earlier tokens come from a cache.
            attention_mask: of packed conversations, see `packing.attention_mask`; else None, and the mask follows
                from `attn_mask_type`.

        Returns:
            [sq, b, heads × channels of a value].
        """
        if attention_bias is not None or packed_seq_params is not None:
            raise NotImplementedError("only causal attention is built, over whole sequences or packed conversations")
        # megatron-core disables the mask for a token whose predecessors are in a cache.
        causal = (attn_mask_type or self.attn_mask_type) == AttnMaskType.causal
        dropout = self.dropout if self.training else 0.0
        # Tensor-parallel ranks hold different heads, so they must not use the same dropout mask.
        with get_cuda_rng_tracker().fork() if dropout else nullcontext():
            if attention_mask is not None:
                out = self._attend_to_own(query, key, value, dropout, attention_mask)
            elif self.context_group is None:
                out = self._attend(query, key, value, dropout, is_causal=causal)
            else:
                out = self._attend_over_context(query, key, value, dropout)
        return out.reshape(query.size(0), query.size(1), -1)

    def _attend_to_own(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float, mask: torch.Tensor
    ) -> torch.Tensor:
        """Each conversation of a sequence by itself."""
        if self.context_group is not None:
            raise NotImplementedError("packed conversations are not split over context-parallel ranks")
        if mask.dtype == torch.bool:
            # With a mask and fewer keys than queries, torch has no fused kernel on a GPU.
            copies = query.size(2) // key.size(2)
            if copies > 1:
                key, value = (each.repeat_interleave(copies, dim=2) for each in (key, value))
            return self._attend(query, key, value, dropout, is_causal=False, mask=mask)
        rows = []
        for number, sizes in enumerate(lengths(mask)):
            parts = zip(*(each[:, number : number + 1].split(sizes) for each in (query, key, value)), strict=True)
            rows.append(torch.cat([self._attend(q, k, v, dropout, is_causal=True) for q, k, v in parts]))
        return torch.cat(rows, dim=1)

    def _attend_over_context(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float
    ) -> torch.Tensor:
        size, rank = self.context_group.size(), self.context_group.rank()
        key, value = (in_sequence_order(_gather(part, self.context_group), size) for part in (key, value))
        length = query.size(0) // 2
        parts = []
        for half, chunk in zip(query.split(length), (rank, 2 * size - 1 - rank), strict=True):
            seen = (chunk + 1) * length
            # The chunk's queries are the last of the visible positions: the diagonal ends at the bottom right.
            mask = causal_lower_right(length, seen) if chunk else None
            parts.append(self._attend(half, key[:seen], value[:seen], dropout, is_causal=mask is None, mask=mask))
        return torch.cat(parts)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        dropout: float,
        *,
        is_causal: bool,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        # [s, b, h, d] -> [b, h, s, d] and back, as views.
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=is_causal,
            scale=1.0 / math.sqrt(q.size(-1)) if self.scale is None else self.scale,
            enable_gqa=q.size(1) != k.size(1),
        )
        return out.permute(2, 0, 1, 3)

    def sharded_state_dict(self, *_args: Any, **_kwargs: Any) -> dict[str, Any]:
        """No parameters, nothing to save."""
        return {}


def _gather(part: torch.Tensor, group: Any) -> torch.Tensor:
    return gather_from_sequence_parallel_region(part.contiguous(), tensor_parallel_output_grad=True, group=group)
