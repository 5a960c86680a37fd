"""Share of the tokens that the model predicts right: the label is the likeliest token.

A rank has the logits of its rows of the vocabulary. It compares them itself, and the ranks exchange the largest logit
of each token and where it is: 8 bytes a token, and no logits. The counts travel with the loss.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state


def likeliest(logits: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """The likeliest token of each position, [...]; of equal ones the first. A collective of tensor-parallel ranks.

    Args:
        logits: [..., padded vocabulary / tensor-parallel size].
        vocabulary: tokens without padding, which is left out.
    """
    rows = logits.size(-1)
    size = parallel_state.get_tensor_model_parallel_world_size()
    first = parallel_state.get_tensor_model_parallel_rank() * rows
    known = min(rows, vocabulary - first)
    if known > 0:
        best, place = logits[..., :known].max(-1)
    else:  # a rank with nothing but padding
        best = logits.new_full(logits.shape[:-1], -torch.inf)
        place = torch.zeros_like(best, dtype=torch.long)
    if size == 1:
        return place
    mine = torch.stack([best.float(), (place + first).float()])  # exact: a vocabulary has fewer than 2^24 tokens
    gathered = mine.new_empty(size * 2, *place.shape)
    dist.all_gather_into_tensor(gathered, mine, group=parallel_state.get_tensor_model_parallel_group())
    gathered = gathered.view(size, *mine.shape)
    winner = gathered[:, 0].argmax(0, keepdim=True)
    return gathered[:, 1].gather(0, winner)[0].long()


class TokenAccuracy:
    """Counts from `start` to `take`; no cost otherwise.

    Args:
        vocabulary: tokens without padding.
    """

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self._seen: list[torch.Tensor] = []
        self._right = self._tokens = 0.0
        self.counting = False

    def start(self) -> None:
        """Count the next step or evaluation; all ranks have to."""
        self._right = self._tokens = 0.0
        self._seen.clear()
        self.counting = True

    def take(self) -> float | None:
        """Stop counting. The share of right tokens since `start`, the same on all ranks; None: there were none."""
        counted = self.counting and self._tokens > 0
        self.counting = False
        return self._right / self._tokens if counted else None

    @torch.no_grad()
    def see(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Compare logits [..., padded vocabulary / tensor-parallel size] with labels [...], before a loss overwrites
        them."""
        if self.counting:
            self._seen.append((likeliest(logits, self._vocabulary) == labels).flatten())

    def right(self, mask: torch.Tensor) -> torch.Tensor:
        """How many of a micro-batch's tokens that the loss counts were right, on the device in fp64.

        Args:
            mask: [b, s]. What was seen is [s, b], perhaps in parts; multi-token prediction comes before the next token.
        """
        if not self._seen:
            return torch.zeros((), dtype=torch.float64, device=mask.device)
        right = torch.cat(self._seen)[-mask.numel() :]
        self._seen.clear()
        return (right.view(mask.shape[::-1]).t() * mask).sum().double()

    def add(self, right: float, tokens: float) -> None:
        """Count sums over all ranks."""
        if self.counting:
            self._right += right
            self._tokens += tokens
