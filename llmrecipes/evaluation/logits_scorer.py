"""A program that returns logits, as a model to evaluate: transformers, ONNX Runtime, llama.cpp."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from llmrecipes.engine.base import Scores, World
from llmrecipes.engine.sampling import Sampling, draw
from llmrecipes.errors import UserError
from llmrecipes.packages import find_spec

ALONE = World(rank=0, size=1, data_parallel_rank=0, data_parallel_size=1, holds_whole_model=True)
"""The world of one process."""


class LogitsScorer:
    """Implements `engine.base.Scorer`, in one process.

    Args:
        forward: logits [rows, length, vocabulary] of token ids [rows, length].
        positions: tokens that the model can read at once.
    """

    def __init__(self, forward: Callable[[torch.Tensor], torch.Tensor], positions: int) -> None:
        self.positions = positions
        self._forward = forward

    @classmethod
    def of_folder(cls, folder: Path) -> LogitsScorer:
        """A model as transformers computes it, such as one whose weights are quantised.

        Args:
            folder: in Hugging Face's form; it has been checked (`hf.reading.open_folder`).

        Raises:
            UserError: transformers cannot load it, or a package that it needs is missing.
        """
        import transformers

        if find_spec("compressed_tensors") is None:
            raise UserError(
                "the package compressed-tensors is not installed",
                where=str(folder),
                rule="it unpacks quantised weights",
                fix="pip install 'llmrecipes[quantize]'",
            )
        transformers.utils.logging.disable_progress_bar()
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype="auto", trust_remote_code=False, local_files_only=True
            ).eval()
        except Exception as error:  # transformers and compressed-tensors raise several kinds
            said = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
            raise UserError(
                f"transformers cannot load it: {said[:300]}",
                where=str(folder),
                rule="it must be a quantised model for transformers, without custom code",
            ) from error
        return cls(lambda ids: model(input_ids=ids, use_cache=False).logits, int(model.config.max_position_embeddings))

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
        continued = []
        for prompt, limit, seed in zip(prompts, limits, seeds, strict=True):
            random = torch.Generator().manual_seed(seed)
            new = list[int]()
            while len(new) < min(limit, self.positions - len(prompt)):
                logits = self._forward(torch.tensor([[*prompt, *new]]))[0, -1]
                new.append(draw(logits, replace(sampling, seed=seed), random))
                if ended(new):
                    break
            continued.append(new)
        return continued
