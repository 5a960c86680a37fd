"""What evaluation asks of a model: log-probabilities and continuations of many texts at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from llmrecipes.engine.sampling import Sampling


class Scores(NamedTuple):
    """What a model thinks of rows of tokens."""

    logprobs: torch.Tensor
    """Log-probability of each token after the first, in nats, [rows, length - 1], fp64 on the CPU."""
    greedy: torch.Tensor
    """The likeliest token in the place of each of them, [rows, length - 1], int64 on the CPU."""


class Scorer(Protocol):
    """A model for evaluation: in every layout, with nothing left of what was computed.

    Both methods are collectives: all ranks call them with the same arguments, and get the same answer.
    """

    positions: int
    """Tokens that the model can read at once."""

    def score(self, tokens: torch.Tensor) -> Scores:
        """Score rows of token ids, [rows, length].

        Args:
            tokens: 2 to `positions` + 1 a row. Padding on the right has no effect on what stands before it.
        """

    def extend(
        self,
        prompts: Sequence[Sequence[int]],
        limits: Sequence[int],
        seeds: Sequence[int],
        sampling: Sampling,
        ended: Callable[[list[int]], bool],
    ) -> list[list[int]]:
        """Continue several prompts.

        Args:
            prompts: token ids, at least one and fewer than `positions`.
            limits: most new tokens of each; `positions` limits them too.
            seeds: of each prompt's draws, so that they do not depend on its neighbours; that of `sampling` is not used.
            sampling: how to draw.
            ended: whether a prompt's new tokens, the last of which has just been added, end its continuation.

        Raises:
            UserError: tokens are drawn with a temperature where ranks share texts or layers.
        """
