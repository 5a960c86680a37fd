"""Which part of a sequence a context-parallel rank has.

The sequence is cut into 2·CP chunks and rank r has the chunks r and 2·CP−1−r, so that under the causal mask all ranks
have the same work (Llama 3, arXiv 2407.21783, section 3.3.2). megatron-core's embeddings and TransformerEngine's
attention count on the same order.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from llmrecipes.engine.megatron.versions import PREDICTION_LOSSES_ARE_SCALED


def own_chunks(batch: dict[str, torch.Tensor], size: int, rank: int) -> dict[str, torch.Tensor]:
    """A rank's part of each tensor [b, s]: [b, s / size]."""
    if size == 1:
        return batch
    pieces = {name: tensor.chunk(2 * size, dim=1) for name, tensor in batch.items()}
    return {name: torch.cat([chunks[rank], chunks[-1 - rank]], dim=1) for name, chunks in pieces.items()}


def prediction_weights(mask: torch.Tensor, depths: int, size: int, rank: int) -> list[torch.Tensor]:
    """What a rank multiplies its losses of multi-token prediction by, in place of the loss mask.

    A token predicted *k* further has no label for the last *k* tokens of a sequence. megatron-core 0.19 makes up for
    them: it multiplies the loss by tokens / tokens with such a label, counted on this rank, where other ranks have
    another ratio, and none where their tokens are masked, and one process has that of whole sequences. Given a mask of
    ones and these weights, it comes to the latter.

    Args:
        mask: loss mask of whole sequences, [b, s].
        depths: `mtp_num_layers`.
        size: context-parallel ranks.
        rank: this one.

    Returns:
        [b, s / size] for each further token; nothing where megatron-core's own ratio is right.
    """
    if size == 1 or not PREDICTION_LOSSES_ARE_SCALED:
        return []
    weights = []
    for depth in range(1, depths + 1):
        further, labels = (F.pad(each[:, depth:], (0, depth)) for each in (mask, torch.ones_like(mask)))
        own = own_chunks({"mask": further, "labels": labels}, size, rank)
        theirs = own["labels"].numel() / own["labels"].sum()
        weights.append(own["mask"] * (mask.sum() / further.sum().clamp(min=1.0) / theirs))
    return weights


def in_sequence_order(gathered: torch.Tensor, size: int) -> torch.Tensor:
    """Chunks gathered rank by rank (0, 2·CP−1, 1, 2·CP−2, …) as the sequence has them.

    Args:
        gathered: [s, …], from all `size` context-parallel ranks.
    """
    chunks = gathered.chunk(2 * size)
    return torch.cat([*chunks[0::2], *reversed(chunks[1::2])])
