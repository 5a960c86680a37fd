"""The weights of a pruned model, made tensor by tensor from those of the whole one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property

import torch

from llmrecipes.engine.core.importance import LINEAR
from llmrecipes.engine.core.sparsegpt import smallest
from llmrecipes.engine.meters import Importance
from llmrecipes.hf.safetensors import TensorSource
from llmrecipes.recipe.derived.shape import shape
from llmrecipes.recipe.derived.weight_names import weights
from llmrecipes.recipe.schema import Model
from llmrecipes.recipe.variants.pruned_models import PATTERNS, PruneOptions

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")
NO_CALIBRATION = "magnitude"
"""The method that reads no text."""


class SmallerWeights:
    """Rows and columns of a model's tensors; a `TensorSource` by the names in one process.

    Args:
        source: source of the whole model.
        before, after: sections `model` of the whole model and of the result.
        importance: importance of the whole model's parts.
    """

    def __init__(self, source: TensorSource, before: Model, after: Model, importance: Importance) -> None:
        self._source, self._old, self._new, self._importance = source, shape(before), shape(after), importance
        self._shapes = weights(after)
        self._gated = before.gated_linear_unit

    @cached_property
    def layers(self) -> list[int]:
        """Layers that stay, from 0."""
        return largest(self._importance.layers, self._new.num_layers)

    def names(self) -> Sequence[str]:
        """See `TensorSource`."""
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        """See `TensorSource`."""
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        """See `TensorSource`."""
        return self._source.dtype(self._place(name)[0])

    def read(self, name: str) -> torch.Tensor:
        """See `TensorSource`."""
        old_name, layer = self._place(name)
        tensor = self._source.read(old_name)
        for dimension, kept in enumerate(self._kept(old_name, layer, tensor.dim())):
            if kept is not None and len(kept) != tensor.size(dimension):
                tensor = tensor.index_select(dimension, torch.tensor(kept))
        if tuple(tensor.shape) != self._shapes[name]:
            raise RuntimeError(f"{name} is {list(tensor.shape)} after pruning, expected {list(self._shapes[name])}")
        return tensor

    def _place(self, name: str) -> tuple[str, int]:
        """The whole model's name of a weight, and its layer there (-1: outside)."""
        match = _LAYER.fullmatch(name)
        if match is None:
            return name, -1
        layer = self.layers[int(match[1])]
        rest = match[2]
        if expert := _EXPERT.fullmatch(rest):
            rest = f"mlp.experts.local_experts.{self._experts(layer)[int(expert[1])]}.{expert[2]}"
        return f"decoder.layers.{layer}.{rest}", layer

    def _kept(self, name: str, layer: int, dimensions: int) -> list[list[int] | None]:
        """Rows and columns that stay; None: all."""
        owner, _, kind = name.rpartition(".")
        part = owner.rpartition(".")[2]
        if part in ("word_embeddings", "position_embeddings", "output_layer"):
            return [None, self._hidden]
        if part in ("input_layernorm", "pre_mlp_layernorm", "final_layernorm"):
            return [self._hidden]
        if part == "router":
            return [self._experts(layer), self._hidden][:dimensions]
        if part == "linear_qkv":
            return [self._heads(layer, self._qkv_rows), self._hidden][:dimensions]
        if part == "linear_proj":
            rows = self._old.context_size // self._old.num_query_groups
            return [self._hidden] if kind == "bias" else [self._hidden, self._heads(layer, rows)]
        if part == "linear_fc1":
            kept = self._neurons(owner.removesuffix(".linear_fc1"))
            if self._gated and kept is not None:
                width = self._width(owner)[0]
                kept = [*kept, *(width + row for row in kept)]
            return [kept, self._hidden][:dimensions]
        if part == "linear_fc2":
            neurons = self._neurons(owner.removesuffix(".linear_fc2"))
            return [self._hidden] if kind == "bias" else [self._hidden, neurons]
        return [None] * dimensions  # norms of queries and keys, and latent attention, whose sizes stay

    @cached_property
    def _hidden(self) -> list[int] | None:
        if self._old.hidden_size == self._new.hidden_size:
            return None
        return largest(self._importance.hidden, self._new.hidden_size)

    @property
    def _qkv_rows(self) -> int:
        return (self._old.query_size + self._old.key_size + self._old.value_size) // self._old.num_query_groups

    def _heads(self, layer: int, rows: int) -> list[int] | None:
        """Rows of the groups of heads that stay, `rows` of each."""
        if self._old.num_query_groups == self._new.num_query_groups:
            return None
        groups = largest(self._importance.groups[layer], self._new.num_query_groups)
        return [group * rows + row for group in groups for row in range(rows)]

    def _experts(self, layer: int) -> list[int]:
        if self._old.num_moe_experts == self._new.num_moe_experts:
            return list(range(self._old.num_moe_experts))
        return largest(self._importance.experts[layer], self._new.num_moe_experts)

    def _width(self, owner: str) -> tuple[int, int]:
        """Width of an MLP before and after."""
        old, new = self._old, self._new
        if ".local_experts." in owner:
            return old.moe_ffn_hidden_size, new.moe_ffn_hidden_size
        if ".shared_experts" in owner:
            return old.moe_shared_ffn_hidden_size, new.moe_shared_ffn_hidden_size
        return old.ffn_hidden_size, new.ffn_hidden_size

    def _neurons(self, mlp: str) -> list[int] | None:
        old, new = self._width(mlp)
        if old == new:
            return None
        activations = self._importance.neurons.get(mlp)  # an expert that no token was routed to has no activations
        return list(range(new)) if activations is None else largest(activations, new)


class SparseWeights:
    """A model's tensors with zeros in its layers' matrices; a `TensorSource` by the names in one process.

    Magnitudes are compared over a matrix, scores of `wanda` over a row; with a pattern, over each part of a row. With
    `sparsegpt` they are pruned already.

    Args:
        source: source of the whole model.
        options: method and share, or pattern.
        inputs: by matrix [columns], sums of squares of its input; with `wanda`.
        pruned: weights by name that have their zeros; with `sparsegpt`.
    """

    def __init__(
        self,
        source: TensorSource,
        options: PruneOptions,
        inputs: Mapping[str, torch.Tensor] | None = None,
        pruned: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self._source = source
        self._options = options
        self._inputs = inputs
        self._pruned = pruned
        self.zeros = self.weights = 0

    def names(self) -> Sequence[str]:
        """See `TensorSource`."""
        return self._source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        """See `TensorSource`."""
        return self._source.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        """See `TensorSource`."""
        return self._source.dtype(name)

    def read(self, name: str) -> torch.Tensor:
        """See `TensorSource`."""
        tensor = self._source.read(name)
        owner, _, kind = name.rpartition(".")
        if kind != "weight" or not LINEAR.fullmatch(owner):
            return tensor
        if self._pruned is not None:
            return self._counted(self._pruned[name].to(tensor))
        scores = tensor.float().abs()
        # An expert that no token was routed to has no inputs: its weights are compared by their size.
        if self._inputs is not None and (squares := self._inputs.get(owner)) is not None:
            scores *= squares.sqrt()
        tensor[removed(scores, self._options)] = 0
        return self._counted(tensor)

    def _counted(self, tensor: torch.Tensor) -> torch.Tensor:
        self.zeros += int((tensor == 0).sum())
        self.weights += tensor.numel()
        return tensor


def removed(scores: torch.Tensor, options: PruneOptions) -> torch.Tensor:
    """Weights to remove, those of the smallest scores.

    Args:
        scores: [rows, columns].
        options: method and share, or pattern.

    Returns:
        A mask of the same shape. Of equal scores the first go.
    """
    if options.pattern is not None:
        zeros, size = PATTERNS[options.pattern]
        compared = scores.view(scores.size(0), -1, size)
    else:
        compared = scores.view(1, -1) if options.method == NO_CALIBRATION else scores
        zeros = round((options.ratio or 0) * compared.size(-1))
    return smallest(compared, zeros).view_as(scores)


def largest(scores: torch.Tensor, number: int) -> list[int]:
    """Places of the `number` largest scores, in order; of equal ones the first."""
    order: list[int] = scores.argsort(descending=True, stable=True)[:number].sort().values.tolist()
    return order
