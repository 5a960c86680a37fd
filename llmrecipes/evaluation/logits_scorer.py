"""A program that returns logits, as a model to evaluate: transformers, ONNX Runtime, llama.cpp."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from llmrecipes.engine.base import Scores, World
from llmrecipes.engine.sampling import Sampling, draw

ALONE = World(rank=0, size=1, data_parallel_rank=0, data_parallel_size=1, holds_whole_model=True)
"""The world of one process."""


class LogitsScorer:
    """Implements `engine.base.Scorer`, in one process.

    Args:
        forward: logits [rows, length, vocabulary] of token ids [rows, length].
        positions: tokens that the model can read at once.
    """

    def __init__(self, forward: Callable[[torch.Tensor], torch.Tensor], positions: int) -> None:
        self.positions, self._forward = positions, forward

    @torch.no_grad()
    def score(self, tokens: torch.Tensor) -> Scores:
        logits = self._forward(tokens[:, :-1]).float()
        logprobs = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
        return Scores(logprobs.double(), logits.argmax(-1))

    @torch.no_grad()
    def extend(
        self,
        prompts: Sequence[Sequence[int]],
        limits: Sequence[int],
        seeds: Sequence[int],
        sampling: Sampling,
        ended: Callable[[list[int]], bool],
    ) -> list[list[int]]:
        every = []
        for prompt, limit, seed in zip(prompts, limits, seeds, strict=True):
            random, new = torch.Generator().manual_seed(seed), list[int]()
            while len(new) < min(limit, self.positions - len(prompt)):
                logits = self._forward(torch.tensor([[*prompt, *new]]))[0, -1]
                new.append(draw(logits, replace(sampling, seed=seed), random))
                if ended(new):
                    break
            every.append(new)
        return every
