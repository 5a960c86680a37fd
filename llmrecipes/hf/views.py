"""The weights of a checkpoint by the names of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from llmrecipes.errors import UserError
from llmrecipes.hf.megatron import weights
from llmrecipes.hf.table import Family, Pair
from llmrecipes.hf.tensors import TensorSource
from llmrecipes.recipe.schema import Model


class AsHuggingFace:
    """Weights of megatron-core by the names of transformers; see `TensorSource`.

    A tensor that becomes several is read once if these are read one after the other, and is in memory until then.

    Args:
        source: weights named as in `hf.megatron.weights`.
        family: of the model.
        model: of its recipe.

    Raises:
        UserError: a weight of the model is missing, or has another shape.
    """

    def __init__(self, source: TensorSource, family: Family, model: Model) -> None:
        self._source, self._model = source, model
        self._pairs = {name: (pair, index) for pair in family.pairs(model) for index, name in enumerate(pair.theirs)}
        self._last: tuple[Pair, list[torch.Tensor]] | None = None
        require_weights(source, model)

    def names(self) -> Sequence[str]:
        """See `TensorSource`."""
        return list(self._pairs)

    def shape(self, name: str) -> tuple[int, ...]:
        """See `TensorSource`."""
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        """See `TensorSource`."""
        return self._source.dtype(self._pairs[name][0].ours)

    def read(self, name: str) -> torch.Tensor:
        """See `TensorSource`."""
        pair, index = self._pairs[name]
        if self._last is None or self._last[0] is not pair:
            self._last = None  # its memory first
            self._last = pair, pair.transform.split(self._source.read(pair.ours), self._model)
        part = self._last[1][index]
        if index == len(pair.theirs) - 1:
            self._last = None
        return part.contiguous()

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        sizes = weights(self._model)
        found: dict[str, tuple[int, ...]] = {}
        for pair in dict.fromkeys(pair for pair, _ in self._pairs.values()):
            parts = pair.transform.split(torch.empty(sizes[pair.ours], device="meta"), self._model)
            found |= {name: tuple(part.shape) for name, part in zip(pair.theirs, parts, strict=True)}
        return found


def require_weights(source: TensorSource, model: Model) -> None:
    """Check that a source has every weight of a model, named as in `hf.megatron.weights`.

    Raises:
        UserError: one is missing, or has another shape.
    """
    there = set(source.names())
    wrong = []
    for name, size in weights(model).items():
        if name not in there:
            wrong.append(f"{name}: not there")
        elif source.shape(name) != size:
            wrong.append(f"{name}: expected {list(size)}, found {list(source.shape(name))}")
    if wrong:
        raise UserError(
            _lines("the weights are not those of the recipe's model", wrong),
            rule="every weight of the recipe's model is there, in its shape",
            fix="use the recipe it was trained with: recipe.yaml of the run",
        )


_SHOWN = 8


def _lines(what: str, lines: list[str]) -> str:
    hidden = len(lines) - _SHOWN
    return "\n    ".join([f"{what}:", *lines[:_SHOWN], *([f"and {hidden} more"] if hidden > 0 else [])])
