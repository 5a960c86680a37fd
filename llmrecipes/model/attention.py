"""Core attention on torch's scaled_dot_product_attention.

It stands in for megatron-core's `DotProductAttention`, which builds the full matrix of scores, wherever
TransformerEngine is not used: torch picks a flash kernel on CPU and GPU.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig


class SdpaCoreAttention(MegatronModule):
    """Causal attention of the heads of one tensor-parallel rank.

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
    ) -> None:
        super().__init__(config=config)
        if config.context_parallel_size != 1:
            raise NotImplementedError("this core attention holds the whole sequence on one rank")
        self.layer_number = layer_number
        self.attn_mask_type = attn_mask_type
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.scale = 1.0 / math.sqrt(config.kv_channels) if softmax_scale is None else softmax_scale

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
            attention_mask: must be None; the mask follows from `attn_mask_type`.

        Returns:
            [sq, b, heads × channels].
        """
        if attention_mask is not None or attention_bias is not None or packed_seq_params is not None:
            raise NotImplementedError("only causal attention over whole sequences is built")
        # [s, b, h, d] -> [b, h, s, d], as views.
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        # megatron-core turns the mask off for a token that reads earlier ones from a cache.
        causal = (attn_mask_type or self.attn_mask_type) == AttnMaskType.causal
        dropout = self.dropout if self.training else 0.0
        # Tensor-parallel ranks hold different heads, so they must not drop the same pattern.
        with get_cuda_rng_tracker().fork() if dropout else nullcontext():
            out = F.scaled_dot_product_attention(
                q,
                k,
                v,
                dropout_p=dropout,
                is_causal=causal,
                scale=self.scale,
                enable_gqa=q.size(1) != k.size(1),
            )
        return out.permute(2, 0, 1, 3).reshape(query.size(0), query.size(1), -1)

    def sharded_state_dict(self, *_args: Any, **_kwargs: Any) -> dict[str, Any]:
        """No parameters, nothing to save."""
        return {}
