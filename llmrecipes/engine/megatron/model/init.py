"""Initial weights that depend only on the seed and the parameter's global name.

megatron-core draws weights from random states that differ by rank and construction order, so a different layout starts
from a different model. Here every global tensor has its own generator, on the CPU, in fp32, and a rank takes its part
of it: any layout, device or precision starts from the same numbers. megatron-core's sharded state dict, which is also
used to reshard checkpoints, tells which part a rank holds.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from llmrecipes.recipe.mup import mup
from llmrecipes.recipe.schema import Model

OUTPUT_PROJECTIONS = ("linear_proj.weight", "linear_fc2.weight")
EMBEDDINGS = ("word_embeddings.weight", "position_embeddings.weight")
OUTPUT_LAYER = "output_layer.weight"


@torch.no_grad()
def initialise(state: dict[str, Any], model: Model, seed: int) -> None:
    """Fill every parameter of a sharded state dict in place, but not buffers.

    Weight matrices follow `model.init_method`: normal(0, `init_method_std`), Xavier uniform (Glorot and Bengio, 2010)
    or Kaiming normal (arXiv 1502.01852), scaled by 1/sqrt(2 × num_layers) if they write into the residual stream
    (GPT-2, Radford et al. 2019, section 2.3). Embeddings are normal, norms 1, biases 0. With `model.use_mup` all but
    embeddings and output layer are divided by the root of the width multiplier.

    Args:
        state: sharded state dict of a model, whose tensors are its parameters.
        model: the recipe's model section.
        seed: the recipe's seed.
    """
    for shard in parameters(state):
        depth = shard.prepend_axis_num
        values = global_values(global_name(shard), torch.Size(shard.global_shape[depth:]), model, seed)
        part = tuple(
            slice(start, start + size)
            for start, size in zip(shard.global_offset[depth:], shard.local_shape, strict=True)
        )
        shard.data.copy_(values[part])


def parameters(state: dict[str, Any]) -> Iterator[ShardedTensor]:
    """Shards of the parameters of a sharded state dict; a gated MLP yields its two halves."""
    for value in nested_values(state):
        if not isinstance(value.data, torch.nn.Parameter):
            continue
        yield from nested_values(value.build()) if isinstance(value, ShardedTensorFactory) else (value,)


def global_name(shard: ShardedTensor) -> str:
    """Name of one global tensor: its key, and its index if layers and experts are stacked under one key."""
    place = ",".join(str(index) for index in shard.global_offset[: shard.prepend_axis_num])
    return f"{shard.key}[{place}]"


def generator(seed: int, name: str) -> torch.Generator:
    """A CPU generator for one global tensor."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def global_values(name: str, shape: torch.Size, model: Model, seed: int) -> torch.Tensor:
    """Initial values of a full global tensor in fp32.

    Args:
        name: see `global_name`.
        shape: its global shape, without the axes along which layers and experts are stacked.
        model: the recipe's model section.
        seed: the recipe's seed.
    """
    key = name.partition("[")[0]
    if len(shape) == 1:
        # The only one-dimensional weights are those of norms; fused ones are called layer_norm_weight.
        return torch.ones(shape) if key.endswith("weight") else torch.zeros(shape)
    values = torch.empty(shape, dtype=torch.float32)
    random = generator(seed, name)
    if key.endswith(EMBEDDINGS) or model.init_method == "normal":
        values.normal_(0.0, model.init_method_std, generator=random)
    elif model.init_method == "xavier_uniform":
        torch.nn.init.xavier_uniform_(values, generator=random)
    else:
        torch.nn.init.kaiming_normal_(values, nonlinearity="relu", generator=random)
    if key.endswith(OUTPUT_PROJECTIONS):
        values.div_(math.sqrt(2.0 * model.num_layers))
    factors = mup(model)
    if factors and not key.endswith((*EMBEDDINGS, OUTPUT_LAYER)):
        values.div_(math.sqrt(factors.width_mult))
    return values
