"""How one tensor of megatron-core becomes tensors of transformers, and back: splits and permutations, no arithmetic.

Each transform is exact in both directions, so an import of an export has the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from llmrecipes.recipe.schema import Model
from llmrecipes.recipe.shape import shape


class Transform(Protocol):
    """A reversible change of form; also of tensors on the `meta` device, for shapes."""

    def split(self, tensor: torch.Tensor, model: Model) -> list[torch.Tensor]:
        """Tensors of transformers made from one of megatron-core; views of it where possible."""

    def join(self, parts: Sequence[torch.Tensor], model: Model) -> torch.Tensor:
        """The tensor of megatron-core made from those of transformers."""


class _Same:
    def split(self, tensor: torch.Tensor, model: Model) -> list[torch.Tensor]:
        return [tensor]

    def join(self, parts: Sequence[torch.Tensor], model: Model) -> torch.Tensor:
        (part,) = parts
        return part


class _Transposed:
    """GPT-2's Conv1D holds its matrices as [in, out]."""

    def split(self, tensor: torch.Tensor, model: Model) -> list[torch.Tensor]:
        return [tensor.t()]  # of a vector: itself

    def join(self, parts: Sequence[torch.Tensor], model: Model) -> torch.Tensor:
        (part,) = parts
        return part.t()


class _Vocabulary:
    """Rows of the vocabulary; megatron-core's matrices have rows of padding, which no token uses, after them."""

    def split(self, tensor: torch.Tensor, model: Model) -> list[torch.Tensor]:
        return [tensor[: model.vocab_size]]

    def join(self, parts: Sequence[torch.Tensor], model: Model) -> torch.Tensor:
        (part,) = parts
        padding = shape(model).vocab_size - len(part)
        return part if padding <= 0 else torch.cat([part, part.new_zeros(padding, *part.shape[1:])])


class _GateUp:
    """A gated MLP's first projection: the rows of the gate, then those of what is gated."""

    def split(self, tensor: torch.Tensor, model: Model) -> list[torch.Tensor]:
        return list(tensor.chunk(2))

    def join(self, parts: Sequence[torch.Tensor], model: Model) -> torch.Tensor:
        return torch.cat(list(parts))


class _QueryKeyValue:
    """One projection, which holds for each group of query heads their rows, then those of their key and value head."""

    def split(self, tensor: torch.Tensor, model: Model) -> list[torch.Tensor]:
        groups, each, width = _heads(model)
        rows = tensor.reshape(groups, each + 2, width, *tensor.shape[1:])
        parts = (rows[:, :each], rows[:, each : each + 1], rows[:, each + 1 :])
        return [part.reshape(-1, *tensor.shape[1:]) for part in parts]

    def join(self, parts: Sequence[torch.Tensor], model: Model) -> torch.Tensor:
        groups, each, width = _heads(model)
        query, key, value = parts
        rest = query.shape[1:]
        rows = [part.reshape(groups, count, width, *rest) for part, count in ((query, each), (key, 1), (value, 1))]
        return torch.cat(rows, 1).reshape(-1, *rest)


class _FusedQueryKeyValue:
    """GPT-2's one projection of [in, all queries, all keys, all values]."""

    def split(self, tensor: torch.Tensor, model: Model) -> list[torch.Tensor]:
        return [torch.cat(QKV.split(tensor, model)).t()]

    def join(self, parts: Sequence[torch.Tensor], model: Model) -> torch.Tensor:
        (part,) = parts
        return QKV.join(part.t().chunk(3), model)


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
