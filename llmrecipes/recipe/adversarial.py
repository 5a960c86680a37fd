"""The section `train.adversarial`: training on embeddings that are moved to where the loss is larger."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from llmrecipes.recipe.section import PosFloat, Section


class Adversarial(Section):
    """Move the embeddings of each sequence to where its loss is larger, and train on these. The movement is at most
    `epsilon` long; the loss of a step is the one that is trained on, and held-out losses are without it."""

    type: Literal["fgm", "pgd", "freelb"]
    """`fgm`: one movement along the gradient, and the mean of the losses without and with it (arXiv 1605.07725,
    equation 5; 2 passes). `pgd`: `steps` movements from a random start, and the loss after the last (arXiv 1706.06083;
    `steps` + 1 passes). `freelb`: the mean of the losses at a random start and after each movement but the last (arXiv
    1909.11764, algorithm 1; `steps` passes)."""
    epsilon: PosFloat
    """Largest norm of the movement of a sequence; its unit is that of the embeddings, whose standard deviation is
    `model.init_method_std` at first."""
    alpha: PosFloat | None = None
    """Length of each movement; `pgd` and `freelb` need it."""
    steps: Annotated[int, Field(gt=0)] | None = None
    """Movements; `pgd` and `freelb` need it."""
    norm: Literal["l2", "linf"] = "l2"
    """`l2`: the root of the sum of squares over all tokens and channels of a sequence; `linf`: the largest value."""

    @property
    def passes(self) -> int:
        """Forward and backward passes of a step."""
        moves = self.steps or 1
        return moves if self.type == "freelb" else moves + 1

    def counts(self, number: int) -> bool:
        """Whether the weights learn from a pass, counted from 0."""
        return self.type != "pgd" or number == self.passes - 1


def passes(train: Any) -> int:
    """Forward and backward passes of a step of a section `train`."""
    return 1 if train.adversarial is None else int(train.adversarial.passes)
