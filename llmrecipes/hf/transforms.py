"""How one tensor of megatron-core becomes tensors of transformers: by moving rows and transposing, without arithmetic.

So the way back is exact too: an import finds the place of each row by splitting the numbers of the rows.
"""

from __future__ import annotations

from typing import Protocol

import torch

from llmrecipes.recipe.schema import Model
from llmrecipes.recipe.shape import shape


class Transform(Protocol):
    """A reversible change of form; also of tensors on the `meta` device, for shapes, and of numbers of rows."""

    def __hash__(self) -> int: ...

    def split(self, tensor: torch.Tensor, model: Model) -> list[torch.Tensor]:
        """Tensors of transformers made from one of megatron-core; views of it where possible."""


class _Same:
    def split(self, tensor: torch.Tensor, model: Model) -> list[torch.Tensor]:
        return [tensor]


class _Transposed:
    """GPT-2's Conv1D holds its matrices as [in, out]."""

    def split(self, tensor: torch.Tensor, model: Model) -> list[torch.Tensor]:
        return [tensor.t()]  # of a vector: itself


class _Vocabulary:
    """Rows of the vocabulary; megatron-core's matrices have rows of padding, which no token uses, after them."""

    def split(self, tensor: torch.Tensor, model: Model) -> list[torch.Tensor]:
        return [tensor[: model.vocab_size]]


class _GateUp:
    """A gated MLP's first projection: the rows of the gate, then those of what is gated."""

    def split(self, tensor: torch.Tensor, model: Model) -> list[torch.Tensor]:
        return list(tensor.chunk(2))


class _QueryKeyValue:
    """One projection, which holds for each group of query heads their rows, then those of their key and value head."""

    def split(self, tensor: torch.Tensor, model: Model) -> list[torch.Tensor]:
        groups, each, width = _heads(model)
        rows = tensor.reshape(groups, each + 2, width, *tensor.shape[1:])
        parts = (rows[:, :each], rows[:, each : each + 1], rows[:, each + 1 :])
        return [part.reshape(-1, *tensor.shape[1:]) for part in parts]


class _FusedQueryKeyValue:
    """GPT-2's one projection of [in, all queries, all keys, all values]."""

    def split(self, tensor: torch.Tensor, model: Model) -> list[torch.Tensor]:
        return [torch.cat(QKV.split(tensor, model)).t()]


def _heads(model: Model) -> tuple[int, int, int]:
    """Groups of query heads, query heads of a group, and channels of a head."""
    sizes = shape(model)
    return sizes.num_query_groups, sizes.num_attention_heads // sizes.num_query_groups, sizes.kv_channels


SAME: Transform = _Same()
TRANSPOSED: Transform = _Transposed()
VOCABULARY: Transform = _Vocabulary()
GATE_UP: Transform = _GateUp()
QKV: Transform = _QueryKeyValue()
FUSED_QKV: Transform = _FusedQueryKeyValue()
