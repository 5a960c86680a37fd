"""How the next token is drawn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from llmrecipes.errors import UserError
from llmrecipes.options import Option

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn; every field is an option of `generate` and of `Run.generate`."""

    temperature: Annotated[float, Option("Sample at this temperature; 0 is greedy decoding.", metavar="T")] = 0.8
    """Divides the logits."""
    top_k: Annotated[int, Option("Sample from the K most likely tokens; 0: from all.", metavar="K")] = 40
    top_p: Annotated[float, Option("Sample from the most likely tokens with total probability P.", metavar="P")] = 1.0
    """Of arXiv 1904.09751."""
    seed: Annotated[int, Option("Seed the samples.", least=0)] = 0

    def __post_init__(self) -> None:
        if not self.temperature >= 0:  # not a number either
            raise UserError(f"{self.temperature}", where="--temperature", rule="0 or more", fix="--temperature 0.8")
        if self.top_k < 0:
            raise UserError(f"{self.top_k}", where="--top-k", rule="0 or more", fix="--top-k 40")
        if not 0 < self.top_p <= 1:
            raise UserError(f"{self.top_p}", where="--top-p", rule="above 0, and 1 at most", fix="--top-p 1.0")


def draw(logits: torch.Tensor, sampling: Sampling, random: torch.Generator) -> int:
    """One token id from logits [vocabulary]."""
    import torch  # here, because the command line takes its defaults from this module and starts without torch

    if sampling.temperature == 0:
        return int(logits.argmax())
    logits = logits.float().cpu() / sampling.temperature
    if 0 < sampling.top_k < logits.numel():
        smallest = torch.topk(logits, sampling.top_k).values[-1]
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    probabilities = torch.softmax(logits, dim=-1)
    if sampling.top_p < 1:
        ordered, order = probabilities.sort(descending=True)
        beyond = ordered.cumsum(0) - ordered >= sampling.top_p
        probabilities[order[beyond]] = 0
    return int(torch.multinomial(probabilities, 1, generator=random))
