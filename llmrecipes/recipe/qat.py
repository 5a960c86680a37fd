"""The section `qat`: training with the weights that `llmrecipes quantize` will make."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from llmrecipes.recipe.section import NonNegInt, Section

BITS = {"int4": 4, "int8": 8}
"""Of a weight, by `qat.scheme`."""
GROUP = 128
"""Weights that share a scale with int4, unless another number is set."""


class Qat(Section):
    """Quantisation-aware training (arXiv 1712.05877, section 3): the matrices of the layers are rounded in each forward
    pass as `llmrecipes quantize --method rtn` rounds them, and the gradient of a rounded weight is that of the weight
    itself (the straight-through estimator, arXiv 1308.3432). Experts are rounded too; embeddings, norms, routers and
    the output layer are not. Checkpoints have the weights that were not rounded."""

    scheme: Literal["int4", "int8"]
    """As `quantize --scheme`: 4 bits with a scale for each `group_size` weights of a row, or 8 bits with one a row."""
    group_size: Annotated[int, Field(ge=8)] | None = None
    """As `quantize --group-size`, with `int4`: weights that share a scale. Unset: 128."""
    start_step: NonNegInt = 0
    """Steps of the run before weights are rounded, so that they have found their range."""

    @property
    def bits(self) -> int:
        """Of a weight."""
        return BITS[self.scheme]

    @property
    def group(self) -> int | None:
        """Weights that share a scale; None: all of a row."""
        return None if self.scheme == "int8" else self.group_size or GROUP
