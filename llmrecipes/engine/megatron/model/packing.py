"""Block-diagonal attention: the conversations that share a sequence do not see each other.

Where each begins is read from the positions, which begin at 0 there. Learned positions follow them; rotary ones need
not, because a rotation by position makes attention depend on distances alone (arXiv 2104.09864, section 3.2).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from llmrecipes.recipe.schema import Recipe


def packs(recipe: Recipe) -> bool:
    """Whether several conversations share a sequence."""
    return recipe.data.chat is not None and recipe.data.chat.packing


def masks(recipe: Recipe, device: torch.device) -> Callable[[torch.Tensor], torch.Tensor | None]:
    """The attention mask of a micro-batch from its positions [b, s]; None if it is causal over whole sequences."""
    if not packs(recipe):
        return lambda _positions: None
    dense = recipe.train.torch_compile or device.type != "cpu"
    return lambda positions: attention_mask(positions, dense=dense)


def attention_mask(position_ids: torch.Tensor, *, dense: bool) -> torch.Tensor:
    """What `SdpaCoreAttention` takes as the attention mask of packed sequences; all layers share it.

    Args:
        position_ids: [b, s], 0 at the beginning of each conversation.
        dense: as one mask, for devices that must not wait for the host to read lengths, and for compiled layers;
            it takes a byte for each pair of tokens of a sequence. Else the number of the conversation of each token.

    Returns:
        [b, 1, s, s] bool, true where a query sees a key; or [b, s] int64.
    """
    numbers = (position_ids == 0).cumsum(1)
    if not dense:
        return numbers
    length = position_ids.size(1)
    causal = torch.ones(length, length, dtype=torch.bool, device=position_ids.device).tril()
    return ((numbers[:, :, None] == numbers[:, None, :]) & causal)[:, None]


def lengths(numbers: torch.Tensor) -> list[list[int]]:
    """Tokens of each conversation of each row, in order; waits for the device.

    Args:
        numbers: [b, s] from `attention_mask`.
    """
    return [torch.unique_consecutive(row, return_counts=True)[1].tolist() for row in numbers]
