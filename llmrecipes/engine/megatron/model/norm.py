"""torch's LayerNorm and RMSNorm with the constructor that megatron-core expects."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig


class TorchNorm:
    """Builds the norm of `config.normalization`.

    megatron-core's own wrapper refuses sequence parallelism; here the weights are marked for it, so that their
    gradients are reduced over the tensor-parallel group like those of the fused norms.
    """

    # A class, because megatron-core passes functions of a specification on instead of calling them.
    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_unused: Any) -> Any:
        kinds = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}
        norm = kinds[config.normalization](hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm
