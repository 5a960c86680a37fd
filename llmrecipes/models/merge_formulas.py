"""The formulas of `llmrecipes merge`: tensors of one name from several models → the tensor of the merged model.

Pure functions of torch tensors. They compute in fp32 whatever the dtype of their inputs, and return fp32. A task vector
is the difference between a fine-tuned tensor and that of the model it was fine-tuned from, the base. Tensors may come
from an iterator: those that are only added up are then in memory one at a time.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llmrecipes.errors import UserError
from llmrecipes.hf.safetensors import TensorSource
from llmrecipes.models.merge_options import Merge

PARALLEL = 0.9995
"""Cosine of the angle beyond which `slerp` is linear: sin(angle) is too small to divide by. mergekit's value."""
TINY_NORM, TINY_SUM = 1e-8, 1e-8
"""mergekit's: a norm or a sum of weights that is smaller divides nothing."""
CHUNK = 1 << 24
"""Elements that a sum in fp64 converts at a time."""


def linear(tensors: Iterable[Tensor], weights: Sequence[float], *, normalize: bool = True) -> Tensor:
    """The weighted mean, Σ wᵢ·θᵢ / Σ wᵢ (model soups, Wortsman et al. 2022, arXiv 2203.05482).

    Args:
        tensors: tensors of equal shapes.
        weights: one for each.
        normalize: divide by the sum of the weights.
    """
    result = _sum(tensors, weights)
    return result.div_(math.fsum(weights)) if normalize else result


def slerp(first: Tensor, second: Tensor, t: float) -> Tensor:
    """Spherical interpolation between tensors as vectors (Shoemake 1985, Animating rotation with quaternion curves).

    sin((1-t)Ω)/sin Ω · θ₀ + sin(tΩ)/sin Ω · θ₁ with the angle Ω between them; (1-t)·θ₀ + t·θ₁ where they are nearly
    parallel or opposite. As in mergekit, the vectors keep their lengths, and a zero vector is at a right angle to all.

    Args:
        first: the result for t = 0.
        second: the result for t = 1.
        t: position between them.
    """
    cosine = _cosine(first, second)
    if abs(cosine) > PARALLEL:
        return _sum((first, second), (1 - t, t))
    angle = math.acos(cosine)
    return _sum((first, second), [math.sin(part * angle) / math.sin(angle) for part in (1 - t, t)])


def task_arithmetic(
    base: Tensor, tensors: Iterable[Tensor], weights: Sequence[float], *, scale: float = 1.0, normalize: bool = False
) -> Tensor:
    """θ + λ · Σ wᵢ·(θᵢ - θ): task vectors added to the base (Ilharco et al. 2022, arXiv 2212.04089).

    Args:
        base: θ.
        tensors: θᵢ, of its shape.
        weights: wᵢ; a negative one takes a task away.
        scale: λ.
        normalize: divide by the sum of the weights.
    """
    return _added(base, _sum(_task_vectors(base, tensors), weights), scale, _divisor(weights) if normalize else None)


def ties(
    base: Tensor,
    tensors: Iterable[Tensor],
    weights: Sequence[float],
    densities: Sequence[float],
    *,
    scale: float = 1.0,
    normalize: bool = True,
) -> Tensor:
    """TIES: trim, elect sign, disjoint mean (Yadav et al. 2023, arXiv 2306.01708).

    Of each task vector only the largest elements stay (`trim`); each element's sign is that of the weighted sum; the
    result is θ + λ · the weighted mean over those models whose element has that sign.

    Args:
        base: θ.
        tensors: θᵢ, of its shape.
        weights: wᵢ.
        densities: fraction of each task vector to keep.
        scale: λ.
        normalize: take the mean; otherwise the weighted sum.
    """
    vectors = [trim(vector, density) for vector, density in zip(_task_vectors(base, tensors), densities, strict=True)]
    return _added(base, _agreed(vectors, weights, normalize=normalize), scale)


def dare(
    base: Tensor,
    tensors: Iterable[Tensor],
    weights: Sequence[float],
    densities: Sequence[float],
    kept: Iterable[Tensor],
    *,
    scale: float = 1.0,
    normalize: bool = False,
    elect: bool = False,
) -> Tensor:
    """DARE: drop elements of the task vectors at random and rescale the others (Yu et al. 2023, arXiv 2311.03099).

    A kept element is divided by the density, so that its expected value does not change. (mergekit scales by the
    ratio of the L1 norms before and after instead.) Then the task vectors are added as in `task_arithmetic`
    (mergekit's `dare_linear`), or as in `ties` (`dare_ties`).

    Args:
        base: θ.
        tensors: θᵢ, of its shape.
        weights: wᵢ.
        densities: the probability with which an element of each task vector is kept, above 0.
        kept: which elements of each are, as from `keep`.
        scale: λ.
        normalize: divide by the sum of the weights.
        elect: elect a sign, and add the elements that have it.
    """
    vectors = (
        vector.mul_(mask).div_(density)
        for vector, density, mask in zip(_task_vectors(base, tensors), densities, kept, strict=True)
    )
    if elect:
        return _added(base, _agreed(list(vectors), weights, normalize=normalize), scale)
    return _added(base, _sum(vectors, weights), scale, _divisor(weights) if normalize else None)


def trim(vector: Tensor, density: float) -> Tensor:
    """A task vector with its largest elements by magnitude, and zeros elsewhere.

    At least one element of a non-empty tensor is kept. Of equal magnitudes the first are kept.

    Args:
        vector: fp32.
        density: fraction of its elements to keep.
    """
    size = vector.numel()
    if density >= 1 or not size:
        return vector
    wanted = max(1, int(density * size))
    magnitudes = vector.abs().flatten()
    threshold = magnitudes.kthvalue(size - wanted + 1).values
    stays = magnitudes > threshold
    if threshold > 0:  # otherwise the rest of them is zero anyway
        equal = (magnitudes == threshold).nonzero().flatten()
        stays[equal[: wanted - int(stays.sum())]] = True
    return vector * stays.view_as(vector)


def keep(shape: Sequence[int], density: float, *, seed: int, name: str, model: int) -> Tensor:
    """Which elements of a task vector DARE keeps: the same on every machine and in every order of tensors.

    Args:
        shape: shape of the tensor.
        density: probability of each element.
        seed: seed of the merge.
        name: name of the tensor.
        model: index of the model: masks of different models are independent.

    Returns:
        A tensor of bool.
    """
    digest = hashlib.blake2b(f"{seed}\0{model}\0{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
    return torch.rand(tuple(shape), generator=generator, dtype=torch.float32) < density


def _sum(tensors: Iterable[Tensor], weights: Sequence[float]) -> Tensor:
    result = torch.zeros((), dtype=torch.float32)
    for number, (tensor, weight) in enumerate(zip(tensors, weights, strict=True)):
        part = tensor.to(torch.float32)
        result = part * weight if number == 0 else result.add_(part, alpha=weight)
    return result


def _task_vectors(base: Tensor, tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    start = base.to(torch.float32)
    return (tensor.to(torch.float32).sub(start) for tensor in tensors)


def _agreed(vectors: Sequence[Tensor], weights: Sequence[float], *, normalize: bool) -> Tensor:
    """The weighted sum, or mean, of the elements whose sign is that of the sum of all; plus where that is zero."""
    positive = _sum(vectors, weights) >= 0
    total = torch.zeros_like(vectors[0])
    divisor = torch.zeros_like(vectors[0])
    for vector, weight in zip(vectors, weights, strict=True):
        weighted = vector * weight
        agrees = torch.where(positive, weighted > 0, weighted < 0)
        total.add_(weighted.mul_(agrees))
        if normalize:
            divisor.add_(agrees, alpha=weight)
    return total.div_(divisor.masked_fill_(divisor == 0, 1.0)) if normalize else total


def _added(base: Tensor, vector: Tensor, scale: float, divisor: float | None = None) -> Tensor:
    if divisor is not None:
        vector = vector.div_(divisor)
    return vector.mul_(scale).add_(base.to(torch.float32))


def _divisor(weights: Sequence[float]) -> float:
    total = math.fsum(weights)
    return total if abs(total) >= TINY_SUM else 1.0


def _cosine(first: Tensor, second: Tensor) -> float:
    """Cosine of the angle between two tensors, in fp64: a sum of a billion products in fp32 is not accurate."""
    dot = square_first = square_second = 0.0
    pairs = zip(first.flatten().split(CHUNK), second.flatten().split(CHUNK), strict=True)
    for one, two in ((one.double(), two.double()) for one, two in pairs):
        dot += float(one @ two)
        square_first += float(one @ one)
        square_second += float(two @ two)
    norms = [norm if norm > TINY_NORM else 1.0 for norm in (math.sqrt(square_first), math.sqrt(square_second))]
    return max(-1.0, min(1.0, dot / norms[0] / norms[1]))


@dataclass(frozen=True)
class Input:
    """A model to be merged.

    Attributes:
        name: as the user wrote it.
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
        self._merge = merge
        self._models = models
        self._base = base
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
            for model in self._everyone:
                require_finite(model, name)
            raise UserError(f"{name} is not finite when merged", where="--weights", rule="the result must fit fp32")
        return merged

    def _merged(self, name: str) -> Tensor:
        merge = self._merge
        tensors = (model.source.read(name) for model in self._models)
        if merge.method == "linear":
            return linear(tensors, merge.weights, normalize=merge.normalize)
        if merge.method == "slerp":
            return slerp(next(tensors), next(tensors), merge.t)
        if self._base is None:
            raise RuntimeError(f"{merge.method} without a base: merge_options.resolve refuses it")
        base = self._base.source.read(name)
        options: dict[str, Any] = {"scale": merge.scale, "normalize": merge.normalize}
        if merge.method == "task-arithmetic":
            return task_arithmetic(base, tensors, merge.weights, **options)
        if merge.method == "ties":
            return ties(base, tensors, merge.weights, merge.densities, **options)
        kept = (
            keep(base.shape, density, seed=merge.seed, name=name, model=model)
            for model, density in enumerate(merge.densities)
        )
        elect = merge.method == "dare-ties"
        return dare(base, tensors, merge.weights, merge.densities, kept, elect=elect, **options)


def require_same_tensors(models: Sequence[Input]) -> None:
    """Check that models have tensors of the same names, shapes and kinds, and equal ones of integers.

    Raises:
        UserError: with the first model that differs from the first one, and the tensor.
    """
    first, *others = models
    names = first.source.names()
    rule = f"merged models must have the same tensors as {first.name}"
    for other in others:
        names_of_other = set(other.source.names())
        for missing, owner, lacking in (
            ([name for name in names if name not in names_of_other], first, other),
            ([name for name in other.source.names() if name not in set(names)], other, first),
        ):
            if missing:
                more = f", and {len(missing) - 1} more" if len(missing) > 1 else ""
                raise UserError(f"{missing[0]} of {owner.name} is missing{more}", where=lacking.name, rule=rule)
        for name in names:
            expected = first.source.shape(name)
            actual = other.source.shape(name)
            if expected != actual:
                raise UserError(
                    f"{name} has the shape {list(actual)}, but {list(expected)} in {first.name}",
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
        raise UserError(
            f"{name} has values that are not finite", where=model.name, rule="weights to merge must be finite"
        )


def _require_same_kind(name: str, first: Input, other: Input) -> None:
    expected = first.source.dtype(name)
    actual = other.source.dtype(name)
    if expected.is_floating_point and actual.is_floating_point:
        return
    if expected != actual:
        raise UserError(f"{name} is {actual}, but {expected} in {first.name}", where=other.name)
    if not torch.equal(first.source.read(name), other.source.read(name)):
        raise UserError(
            f"{name} differs from that of {first.name}",
            where=other.name,
            rule=f"{expected} cannot be averaged, so it must be equal in all models",
        )
