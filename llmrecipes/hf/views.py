"""The same weights by the other library's names."""

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
        found = {}
        for pair in dict.fromkeys(pair for pair, _ in self._pairs.values()):
            parts = pair.transform.split(torch.empty(sizes[pair.ours], device="meta"), self._model)
            found |= {name: tuple(part.shape) for name, part in zip(pair.theirs, parts, strict=True)}
        return found


class AsMegatron:
    """Weights of transformers by the names of megatron-core; see `TensorSource`.

    Args:
        source: weights by the names of transformers, with or without the family's prefix.
        family: of the model.
        model: of its recipe.

    Raises:
        UserError: a weight is missing, or has another shape.
    """

    def __init__(self, source: TensorSource, family: Family, model: Model) -> None:
        self._source, self._model = source, model
        there = set(source.names())
        self._pairs: dict[str, tuple[Pair, tuple[str, ...]]] = {}
        for pair in family.pairs(model):
            names = pair.theirs
            if not there.issuperset(names):
                names = tuple(name.removeprefix(family.prefix) for name in names)
            self._pairs[pair.ours] = pair, names if there.issuperset(names) else pair.theirs
        self._sizes = weights(model)
        self._require(there)

    def names(self) -> Sequence[str]:
        """See `TensorSource`."""
        return list(self._pairs)

    def shape(self, name: str) -> tuple[int, ...]:
        """See `TensorSource`."""
        return self._sizes[name]

    def dtype(self, name: str) -> torch.dtype:
        """See `TensorSource`."""
        return self._source.dtype(self._pairs[name][1][0])

    def read(self, name: str) -> torch.Tensor:
        """See `TensorSource`."""
        pair, names = self._pairs[name]
        return pair.transform.join([self._source.read(each) for each in names], self._model).contiguous()

    def unused(self) -> list[str]:
        """Tensors of the source that no weight is made of."""
        used = {name for _, names in self._pairs.values() for name in names}
        return [name for name in self._source.names() if name not in used]

    def _require(self, there: set[str]) -> None:
        missing = [name for _, names in self._pairs.values() for name in names if name not in there]
        if missing:
            raise UserError(f"{_listed(missing)} not there", rule="every weight of the model is in its files")
        wrong = []
        for pair, names in self._pairs.values():
            expected = pair.transform.split(torch.empty(self._sizes[pair.ours], device="meta"), self._model)
            for name, part in zip(names, expected, strict=True):
                if (found := self._source.shape(name)) != tuple(part.shape):
                    wrong.append(f"{name}: expected {list(part.shape)}, found {list(found)}")
        if wrong:
            raise UserError(_lines("tensors of a wrong shape", wrong), rule="shapes follow from config.json")


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


def _listed(names: list[str]) -> str:
    hidden = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (
        f" and {hidden} more are" if hidden > 0 else " is" if len(names) == 1 else " are"
    )
