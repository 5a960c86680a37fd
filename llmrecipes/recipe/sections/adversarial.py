"""The section `train.adversarial`: training on embeddings that are moved to where the loss is larger."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from llmrecipes.recipe.sections.section import PosFloat, Section


class Adversarial(Section):
    """Adversarial training: perturb the embeddings of each sequence so that its loss grows, and train on the result.
    The norm of the perturbation is at most `epsilon`. The loss reported for a step is the perturbed one; held-out
    losses are not perturbed."""

    type: Literal["fgm", "pgd", "freelb"]
    """`fgm`: one step along the gradient; trains on the mean of the losses without and with it (arXiv 1605.07725; 2
    passes). `pgd`: `steps` steps from a random start; trains on the loss after the last (arXiv 1706.06083; `steps` +
    1 passes). `freelb`: trains on the mean of the losses before each of these steps (arXiv 1909.11764; `steps`
    passes)."""
    epsilon: PosFloat
    """Largest norm of the perturbation of a sequence, on the scale of the embeddings (at first
    `model.init_method_std`)."""
    alpha: PosFloat | None = None
    """Length of a perturbation step; required for `pgd` and `freelb`."""
    steps: Annotated[int, Field(gt=0)] | None = None
    """Number of perturbation steps; required for `pgd` and `freelb`."""
    norm: Literal["l2", "linf"] = "l2"
    """`l2`: root of the sum of squares over all tokens and channels of a sequence; `linf`: largest value."""

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
