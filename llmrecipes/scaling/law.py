"""The parametric scaling law of Hoffmann et al. (arXiv 2203.15556, section 3.3), and what it says about a budget."""

from __future__ import annotations

import math
from dataclasses import dataclass

FLOPS_PER_PARAMETER_AND_TOKEN = 6
"""Training FLOPs of a parameter for each token, forward and backward (arXiv 2001.08361, section 2.1)."""

MOST_LOG = 100.0


@dataclass(frozen=True)
class Point:
    """A finished training: N parameters, D tokens, and its validation loss in nats per token."""

    parameters: float
    tokens: float
    loss: float

    @property
    def flops(self) -> float:
        """C = 6ND."""
        return FLOPS_PER_PARAMETER_AND_TOKEN * self.parameters * self.tokens


@dataclass(frozen=True)
class Law:
    """L(N, D) = E + A / N^alpha + B / D^beta."""

    E: float
    A: float
    B: float
    alpha: float
    beta: float

    def loss(self, parameters: float, tokens: float) -> float:
        """Loss of a model of N parameters after D tokens."""
        return self.E + self.A / parameters**self.alpha + self.B / tokens**self.beta

    def optimum(self, flops: float) -> Point:
        """The model and tokens with the lowest loss for a budget of C = 6ND FLOPs (equation 4 of the paper)."""
        total = self.alpha + self.beta
        budget = math.log(flops / FLOPS_PER_PARAMETER_AND_TOKEN)
        ratio = (math.log(self.alpha * self.A) - math.log(self.beta * self.B)) / total
        # A bootstrap sample may leave a term undetermined; its optimum is then far away, but a number.
        size = min(max(ratio + budget * self.parameter_exponent, -MOST_LOG), MOST_LOG)
        parameters = math.exp(size)
        tokens = math.exp(min(max(budget - size, -MOST_LOG), MOST_LOG))
        return Point(parameters, tokens, self.loss(parameters, tokens))

    @property
    def parameter_exponent(self) -> float:
        """a of N_opt ∝ C^a; D_opt grows with 1 - a."""
        return self.beta / (self.alpha + self.beta)
