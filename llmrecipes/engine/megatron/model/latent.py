"""Multi-head latent attention whose shared key gets gradients from the heads of all tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention


class LatentAttention(MLASelfAttention):
    """megatron-core's, for layers without TransformerEngine.

    Every rank uses the rotated key that all heads share (arXiv 2405.04434, section 2.1) for its own heads.
    megatron-core gathers it from the ranks' parts of the down-projection, and in the backward pass only slices each
    rank's part of the gradient: contributions of other ranks' heads are lost. Here they are summed.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.config.tensor_model_parallel_size > 1:
            self.linear_kv_down_proj.register_forward_hook(self._whole)

    def _whole(self, _module: torch.nn.Module, _inputs: Any, output: tuple[torch.Tensor, Any]) -> tuple[Any, Any]:
        """The down-projection as of an unsplit layer: [s / TP under sequence parallelism, b, full width].

        megatron-core accepts that, and under sequence parallelism gathers the shared key over the sequence, where it
        does sum the gradient.
        """
        share, bias = output
        whole = gather_from_tensor_model_parallel_region(share)
        if self.config.sequence_parallel:
            return scatter_to_sequence_parallel_region(whole), bias
        latent, key = whole.split([self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim], dim=-1)
        if key.requires_grad:
            key.register_hook(_summed)
        return torch.cat([latent, key], dim=-1), bias


def _summed(gradient: torch.Tensor) -> torch.Tensor:
    # megatron-core's copy_to_tensor_model_parallel_region returns a non-contiguous gradient unreduced.
    total = gradient.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=parallel_state.get_tensor_model_parallel_group())
    return total
