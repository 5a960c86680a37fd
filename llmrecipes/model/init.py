"""Initial weights that depend on the seed and the parameter's global name, and on nothing else.

megatron-core draws weights from random states that differ by rank and by construction order, so another layout starts
from another model. Here each parameter has a generator of its own, on the CPU, in fp32: any layout, device or precision
starts from the same numbers.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable

import torch

from llmrecipes.recipe.schema import Model

OUTPUT_PROJECTIONS = ("linear_proj.weight", "linear_fc2.weight")
EMBEDDINGS = ("word_embeddings.weight", "position_embeddings.weight")


@torch.no_grad()
def initialise(parameters: Iterable[tuple[str, torch.nn.Parameter]], model: Model, seed: int) -> None:
    """Fill every parameter in place.

    Weight matrices follow `model.init_method`: normal(0, `init_method_std`), Xavier uniform (Glorot and Bengio, 2010)
    or Kaiming normal (arXiv 1502.01852), each scaled by 1/sqrt(2 × num_layers) where it writes into the residual stream
    (GPT-2, Radford et al. 2019, section 2.3). Embeddings are normal, norms 1, biases 0.

    Args:
        parameters: (global name, parameter) pairs.
        model: the recipe's model section.
        seed: the recipe's seed.
    """
    for name, parameter in parameters:
        parameter.copy_(_values(name, parameter.shape, model, seed))


def generator(seed: int, name: str) -> torch.Generator:
    """A CPU generator for one global parameter name."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def _values(name: str, shape: torch.Size, model: Model, seed: int) -> torch.Tensor:
    if len(shape) == 1:
        # The only one-dimensional weights are those of norms; TransformerEngine calls them layer_norm_weight.
        return torch.ones(shape) if name.endswith("weight") else torch.zeros(shape)
    values = torch.empty(shape, dtype=torch.float32)
    random = generator(seed, name)
    if name.endswith(EMBEDDINGS) or model.init_method == "normal":
        values.normal_(0.0, model.init_method_std, generator=random)
    elif model.init_method == "xavier_uniform":
        torch.nn.init.xavier_uniform_(values, generator=random)
    else:
        torch.nn.init.kaiming_normal_(values, nonlinearity="relu", generator=random)
    if name.endswith(OUTPUT_PROJECTIONS):
        values.div_(math.sqrt(2.0 * model.num_layers))
    return values
