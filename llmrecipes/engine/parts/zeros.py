"""Weights that were pruned stay zero (`train.keep_zeros`).

A weight of a layer's matrix that is exactly zero has neither gradient nor momentum before an update. Adam, SGD and Lion
then add nothing to it, and weight decay scales a zero. The weights themselves say which these are: a checkpoint,
another layout and a restart need no mask.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer

from llmrecipes.engine.core.masters import updated
from llmrecipes.engine.core.model.gpt import RecipeModel
from llmrecipes.engine.core.update import gradient, parts

MATRIX = re.compile(r"decoder\.layers\.\d+\..*(\.linear_\w+\.weight\d*|\.experts\.weight\d+)")
MOMENTA = ("exp_avg", "momentum_buffer")
"""States whose zeros make an update of zero, with Adam and Lion, and with SGD."""


class KeptZeros:
    """Keeps them; this rank's part of the master weights is read once a step, and nothing is kept.

    Args:
        modules: this rank's chunks of the model; none: nothing is kept, at no cost.
    """

    def __init__(self, modules: Sequence[RecipeModel]) -> None:
        named = (pair for module in modules for pair in module.named_parameters())
        self._matrices = {parameter for name, parameter in named if MATRIX.fullmatch(name)}

    @torch.no_grad()
    def before_update(self, optimizer: MegatronOptimizer) -> None:
        """Clear gradients and momenta of weights that are zero, so that these gradients do not count in the norm.

        Args:
            optimizer: after `prepare_grads`, before the gradient norm is computed.
        """
        for part in parts(optimizer) if self._matrices else ():
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
