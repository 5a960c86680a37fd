"""Several models as one whose tensors are merged when they are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llmrecipes.errors import UserError
from llmrecipes.hf import merging
from llmrecipes.hf.merge_options import Merge
from llmrecipes.hf.safetensors import TensorSource


@dataclass(frozen=True)
class Input:
    """A model to be merged.

    Attributes:
        name: as the user gave it.
        source: its weights.
    """

    name: str
    source: TensorSource


class MergedTensors:
    """The merged weights; see `TensorSource`.

    Only tensors of one name are in memory. Measured in fp32 copies of the largest one: about four for a mean of two
    models, six with a base, eight where both vote on signs.

    Args:
        merge: the method and its numbers.
        models: those to be merged.
        base: what they were fine-tuned from, for methods that need it.

    Raises:
        UserError: names, shapes or kinds of tensors differ, with the model and the tensor.
    """

    def __init__(self, merge: Merge, models: Sequence[Input], base: Input | None = None) -> None:
        self._merge, self._models, self._base = merge, models, base
        self._everyone = [*models, *([] if base is None else [base])]
        self._first = models[0].source
        require_same_tensors(self._everyone)

    def names(self) -> Sequence[str]:
        """Those of the first model."""
        return self._first.names()

    def shape(self, name: str) -> tuple[int, ...]:
        """See `TensorSource`."""
        return self._first.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        """That of the first model."""
        return self._first.dtype(name)

    def read(self, name: str) -> Tensor:
        """A merged tensor in fp32; one of integers as it is in all models.

        Raises:
            UserError: a model has a value that is not finite, or the result has one.
        """
        if not self.dtype(name).is_floating_point:
            return self._first.read(name)
        merged = self._merged(name)
        if not bool(merged.isfinite().all()):
            for each in self._everyone:
                require_finite(each, name)
            raise UserError(f"{name} is not finite when merged", where="--weights", rule="fp32 holds it")
        return merged

    def _merged(self, name: str) -> Tensor:
        merge = self._merge
        each = (model.source.read(name) for model in self._models)
        if merge.method == "linear":
            return merging.linear(each, merge.weights, normalize=merge.normalize)
        if merge.method == "slerp":
            return merging.slerp(next(each), next(each), merge.t)
        if self._base is None:
            raise RuntimeError(f"{merge.method} without a base: hf.merge_options.resolve refuses it")
        base = self._base.source.read(name)
        options: dict[str, Any] = {"scale": merge.scale, "normalize": merge.normalize}
        if merge.method == "task-arithmetic":
            return merging.task_arithmetic(base, each, merge.weights, **options)
        if merge.method == "ties":
            return merging.ties(base, each, merge.weights, merge.densities, **options)
        kept = (
            merging.keep(base.shape, density, seed=merge.seed, name=name, model=model)
            for model, density in enumerate(merge.densities)
        )
        elect = merge.method == "dare-ties"
        return merging.dare(base, each, merge.weights, merge.densities, kept, elect=elect, **options)


def require_same_tensors(models: Sequence[Input]) -> None:
    """Check that models have tensors of the same names, shapes and kinds, and equal ones of integers.

    Raises:
        UserError: with the first model that differs from the first one, and the tensor.
    """
    first, *others = models
    names = first.source.names()
    rule = f"merged models have the same tensors as {first.name}"
    for other in others:
        there = set(other.source.names())
        for missing, owner, lacking in (
            ([name for name in names if name not in there], first, other),
            ([name for name in other.source.names() if name not in set(names)], other, first),
        ):
            if missing:
                more = f", as {len(missing) - 1} more" if len(missing) > 1 else ""
                raise UserError(f"{missing[0]} of {owner.name} is not there{more}", where=lacking.name, rule=rule)
        for name in names:
            expected, found = first.source.shape(name), other.source.shape(name)
            if expected != found:
                raise UserError(
                    f"{name} has the shape {list(found)}, and {list(expected)} in {first.name}",
                    where=other.name,
                    rule=rule,
                )
            _require_same_kind(name, first, other)


def require_finite(model: Input, name: str) -> None:
    """Check that a tensor of a model has finite values.

    Raises:
        UserError: it has others.
    """
    if not bool(model.source.read(name).isfinite().all()):
        raise UserError(f"{name} has values that are not finite", where=model.name, rule="NaN spreads to the result")


def _require_same_kind(name: str, first: Input, other: Input) -> None:
    expected, found = first.source.dtype(name), other.source.dtype(name)
    if expected.is_floating_point and found.is_floating_point:
        return
    if expected != found:
        raise UserError(f"{name} is {found}, and {expected} in {first.name}", where=other.name)
    if not torch.equal(first.source.read(name), other.source.read(name)):
        raise UserError(
            f"{name} differs from that of {first.name}",
            where=other.name,
            rule=f"{expected} cannot be averaged, so it has to be equal in all models",
        )
