"""The part of a sequence that a context-parallel rank has.

The sequence is cut into 2·CP chunks and rank r has the chunks r and 2·CP−1−r, so that under the causal mask all ranks
have the same work (Llama 3, arXiv 2407.21783, section 3.3.2). megatron-core's embeddings and TransformerEngine's
attention rely on the same order.
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
    """Weights of a rank's losses of multi-token prediction, in place of the loss mask.

    A token predicted *k* further has no label for the last *k* tokens of a sequence. megatron-core 0.19 compensates:
    it multiplies the loss by tokens / tokens with such a label, counted on this rank. Other ranks have a different
    ratio, or none if all their tokens are masked, and a single process has that of full sequences. With a mask of ones
    and these weights, the result is the latter.

    Args:
        mask: loss mask of full sequences, [b, s].
        depths: `mtp_num_layers`.
        size: context-parallel ranks.
        rank: this one.

    Returns:
        [b, s / size] for each further token; nothing if megatron-core's ratio is correct.
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
    """Chunks gathered rank by rank (0, 2·CP−1, 1, 2·CP−2, …), in sequence order.

    Args:
        gathered: [s, …], from all `size` context-parallel ranks.
    """
    chunks = gathered.chunk(2 * size)
    return torch.cat([*chunks[0::2], *reversed(chunks[1::2])])
