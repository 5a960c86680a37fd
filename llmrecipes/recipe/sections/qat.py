"""The section `qat`: training with the weights that `llmrecipes quantize` will make."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from llmrecipes.recipe.sections.section import NonNegInt, Section

BITS = {"int4": 4, "int8": 8}
"""Of a weight, by `qat.scheme`."""
GROUP = 128
"""Weights that share a scale with int4, unless another number is set."""


class Qat(Section):
    """Quantisation-aware training (arXiv 1712.05877, section 3): every forward pass rounds the matrices of the layers
    as `llmrecipes quantize --method rtn` does, and the gradient ignores the rounding (straight-through estimator, arXiv
    1308.3432). Experts are rounded too; embeddings, norms, routers and the output layer are not. Checkpoints contain
    the unrounded weights."""

    scheme: Literal["int4", "int8"]
    """Format of the weights, as in `quantize --scheme`: 4 bits with one scale per `group_size` weights of a row, or 8
    bits with one scale per row."""
    group_size: Annotated[int, Field(ge=8)] | None = None
    """Weights that share a scale, as in `quantize --group-size`; only with `int4`. Unset: 128."""
    start_step: NonNegInt = 0
    """Number of steps before rounding starts, so that the weights can find their range."""

    @property
    def bits(self) -> int:
        """Bits of a weight."""
        return BITS[self.scheme]

    @property
    def group(self) -> int | None:
        """Weights that share a scale; None: all of a row."""
        return None if self.scheme == "int8" else self.group_size or GROUP
