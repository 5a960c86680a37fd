"""Weights that were pruned stay zero (`train.keep_zeros`).

A weight of a layer's matrix that is exactly zero has neither gradient nor momentum before an update. Adam, SGD and Lion
then add nothing to it, and weight decay scales a zero. The weights themselves say which these are: a checkpoint,
another layout and a restart need no mask.
"""

from __future__ import annotations

import re

import torch

from llmrecipes.engine.core.masters import updated
from llmrecipes.engine.core.update import gradient, parts
from llmrecipes.engine.parts.base import Part, Step

MATRIX = re.compile(r"decoder\.layers\.\d+\..*(\.linear_\w+\.weight\d*|\.experts\.weight\d+)")
MOMENTA = ("exp_avg", "momentum_buffer")
"""States whose zeros make an update of zero, with Adam and Lion, and with SGD."""


class KeptZeros(Part):
    """Keeps them; this rank's part of the master weights is read once a step, and nothing is kept."""

    def __init__(self, step: Step) -> None:
        self._optimizer = step.optimizer
        named = (pair for module in step.modules for pair in module.named_parameters())
        self._matrices = {parameter for name, parameter in named if MATRIX.fullmatch(name)}

    @torch.no_grad()
    def before_norm(self) -> None:
        """Clear gradients and momenta of weights that are zero, so that these gradients do not count in the norm."""
        for part in parts(self._optimizer):
            for parameter, master, weight in updated(part):
                slope = gradient(master)
                if parameter not in self._matrices or slope is None:
                    continue
                zero = weight == 0
                slope.masked_fill_(zero.view_as(slope), 0)
                state = part.optimizer.state[master]
                for name in MOMENTA:
                    if name in state:
                        state[name].masked_fill_(zero.view_as(state[name]), 0)
