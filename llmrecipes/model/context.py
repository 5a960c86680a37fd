"""Which part of a sequence a context-parallel rank has.

The sequence is cut into 2·CP chunks and rank r has the chunks r and 2·CP−1−r, so that under the causal mask all ranks
have the same work (Llama 3, arXiv 2407.21783, section 3.3.2). megatron-core's embeddings and TransformerEngine's
attention count on the same order.
"""

from __future__ import annotations

import torch


def own_chunks(batch: dict[str, torch.Tensor], size: int, rank: int) -> dict[str, torch.Tensor]:
    """A rank's part of each tensor [b, s]: [b, s / size]."""
    if size == 1:
        return batch
    pieces = {name: tensor.chunk(2 * size, dim=1) for name, tensor in batch.items()}
    return {name: torch.cat([chunks[rank], chunks[-1 - rank]], dim=1) for name, chunks in pieces.items()}


def in_sequence_order(gathered: torch.Tensor, size: int) -> torch.Tensor:
    """Chunks gathered rank by rank (0, 2·CP−1, 1, 2·CP−2, …) as the sequence has them.

    Args:
        gathered: [s, …], from all `size` context-parallel ranks.
    """
    chunks = gathered.chunk(2 * size)
    return torch.cat([*chunks[0::2], *reversed(chunks[1::2])])
