"""Initial weights that depend only on the seed and the parameter's global name.

megatron-core draws weights from random states that differ by rank and construction order, so a different layout starts
from a different model. Here every element of a global tensor is a function of the seed, the tensor's name and the
element's place in it, so a rank draws only its part: any layout, device or precision starts from the same numbers.
They are drawn on the CPU in fp32. megatron-core's sharded state dict, which is also used to reshard checkpoints, tells
which part a rank holds.

Weights of another model take the place of initial values in the same way: each rank reads only its slices.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice
from math import prod
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from llmrecipes.engine.base import Slice, WeightSource
from llmrecipes.engine.core.model import lora, philox
from llmrecipes.recipe.derived.shape import mup
from llmrecipes.recipe.derived.weight_names import unfused
from llmrecipes.recipe.schema import Model

OUTPUT_PROJECTIONS = ("linear_proj.weight", "linear_fc2.weight")
EMBEDDINGS = ("word_embeddings.weight", "position_embeddings.weight")
OUTPUT_LAYER = "output_layer.weight"
SINKS = "softmax_offset"

DRAWN_AT_ONCE = 1 << 20
"""Elements that a thread draws at a time: a rank holds few besides its weights."""


def initialise(state: dict[str, Any], model: Model, seed: int, *, only: str = "") -> None:
    """Fill every parameter of a sharded state dict in place, but not buffers.

    Weight matrices follow `model.init_method`: normal(0, `init_method_std`), Xavier uniform (Glorot and Bengio, 2010)
    or Kaiming normal (arXiv 1502.01852), scaled by 1/sqrt(2 × num_layers) if they write into the residual stream
    (GPT-2, Radford et al. 2019, section 2.3). Of an adapter A is uniform up to 1/sqrt(its columns), as PEFT's, and B 0:
    training starts from the base model. Embeddings and sinks are normal, norms 1, biases 0. With `model.use_mup` all
    but these and the output layer are divided by the root of the width multiplier.

    Args:
        state: sharded state dict of a model, whose tensors are its parameters.
        model: the recipe's model section.
        seed: the recipe's seed.
        only: fill parameters with this in their global name.
    """
    draw((part for part in parameter_slices(state) if only in part.name), model, seed)


def global_name(shard: ShardedTensor) -> str:
    """Name of one global tensor: its key, and its index if layers and experts are stacked under one key."""
    place = ",".join(str(index) for index in shard.global_offset[: shard.prepend_axis_num])
    return f"{shard.key}[{place}]"


def slice_of(shard: ShardedTensor, values: torch.Tensor) -> Slice:
    """What a rank has of one global tensor, without the axes along which layers and experts are stacked."""
    depth = shard.prepend_axis_num
    return Slice(global_name(shard), shard.global_offset[depth:], shard.global_shape[depth:], values)


def parameter_slices(state: dict[str, Any]) -> Iterator[Slice]:
    """The parameters of a sharded state dict; a gated MLP yields its two halves."""
    for value in nested_values(state):
        if not isinstance(value.data, torch.nn.Parameter):
            continue
        for shard in nested_values(value.build()) if isinstance(value, ShardedTensorFactory) else (value,):
            yield slice_of(shard, shard.data)


@torch.no_grad()
def draw(wanted: Iterable[Slice], model: Model, seed: int) -> None:
    """Fill slices with initial values, on as many threads as torch has; arguments as `initialise`."""

    def drawn(part: Slice) -> torch.Tensor:
        return values(part.name, part.shape, model, seed, part.offset, part.tensor.shape)

    threads = torch.get_num_threads()
    drawing = chain.from_iterable(split_rows(part, DRAWN_AT_ONCE) for part in wanted)
    with ThreadPoolExecutor(threads) as pool:
        while held := list(islice(drawing, 4 * threads)):
            # Copied here, because each thread that uses torch's operators has as many threads again.
            for part, numbers in zip(held, pool.map(drawn, held), strict=True):
                part.tensor.copy_(numbers)


def split_rows(whole: Slice, elements: int) -> Iterator[Slice]:
    """A slice in parts of whole rows, of at most `elements` elements where a row has fewer."""
    first, *rest = whole.offset
    rows = max(1, elements // max(prod(whole.tensor.shape[1:]), 1))
    for number, values in enumerate(whole.tensor.split(rows)):
        yield whole._replace(tensor=values, offset=(first + number * rows, *rest))


def values(
    name: str, shape: Sequence[int], model: Model, seed: int, offset: Sequence[int], size: Sequence[int]
) -> torch.Tensor:
    """Initial values of a slice of a global tensor, in fp32; nothing else of the tensor is drawn.

    Args:
        name, shape, offset: see `Slice`.
        model, seed: as `initialise`.
        size: of the slice.
    """
    key = name.partition("[")[0]
    if len(shape) == 1 and not key.endswith(SINKS):
        # The only one-dimensional weights are those of norms; fused ones are called layer_norm_weight.
        return torch.ones(*size) if key.endswith("weight") else torch.zeros(*size)
    if key.endswith(lora.B):
        return torch.zeros(*size)
    # Rows that pad the vocabulary do not count.
    fan_out = model.vocab_size if key.endswith(OUTPUT_LAYER) else shape[0]
    fan_in = prod(shape[1:])
    distribution = philox.normal
    if key.endswith(lora.A):
        distribution = philox.uniform
        scale = 1 / math.sqrt(fan_in)
    elif key.endswith((*EMBEDDINGS, SINKS)) or model.init_method == "normal":
        scale = model.init_method_std
    elif model.init_method == "xavier_uniform":
        distribution = philox.uniform
        scale = math.sqrt(6 / (fan_in + fan_out))
    else:
        scale = math.sqrt(2 / fan_in)
    if key.endswith(OUTPUT_PROJECTIONS):
        scale /= math.sqrt(2.0 * model.num_layers)
    factors = mup(model)
    if factors and not key.endswith((*EMBEDDINGS, OUTPUT_LAYER, SINKS)):
        scale /= math.sqrt(factors.width_mult)
    drawn = distribution(_key(seed, name), shape, offset, size)
    drawn *= scale
    return torch.from_numpy(drawn).view(*size)


def _key(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:16], "big")


READ_AT_ONCE = 1 << 24
"""Elements that are read at a time: 64 MiB in fp32."""
_LAYER = re.compile(r"decoder\.layers\.(?:(\d+)\.)?(.+)\[(.*)\]")
_PREDICTION = re.compile(r"(mtp\.layers\.\d+\.transformer_layer\.)(.+)\[(.*)\]")
_EXPERTS = "mlp.experts.experts."


@torch.no_grad()
def fill(wanted: Iterable[Slice], source: WeightSource) -> None:
    """Fill slices with the values of a source, `READ_AT_ONCE` elements at a time.

    Raises:
        UserError: as `WeightSource.read`.
    """
    for whole in wanted:
        name = whole_name(whole.name)
        for part in split_rows(whole, READ_AT_ONCE):
            part.tensor.copy_(source.read(name, part.offset, tuple(part.tensor.shape)))


def buffers(others: Iterable[Any]) -> Iterator[Slice]:
    """The buffers among what a sharded state dict has besides parameters: the biases of experts."""
    for value in nested_values(list(others)):
        if isinstance(value, ShardedTensor) and value.data.is_floating_point():
            yield slice_of(value, value.data)


def whole_name(name: str) -> str:
    """Name of a weight in a model that one process holds, of megatron-core's local layers.

    Args:
        name: as `init.global_name`, where layers and experts may be stacked under one key.
    """
    match = _LAYER.fullmatch(name) or _PREDICTION.fullmatch(name)
    if match is None:
        return name.partition("[")[0]
    front, rest = match[1], match[2]
    place = [index for index in match[3].split(",") if index]
    if match.re is _LAYER:
        front = f"decoder.layers.{place.pop(0) if front is None else front}."
    if rest.startswith(_EXPERTS):
        rest = f"mlp.experts.local_experts.{place.pop(0)}.{rest.removeprefix(_EXPERTS)}"
    return f"{front}{unfused(rest)}"
