"""Comparison of the weights or gradients of a layout's ranks with those of the reference."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from llmrecipes.engine.base import Shard
from llmrecipes.verify import shards


@dataclass(frozen=True)
class TensorDifference:
    """Difference of a global tensor from the reference's."""

    name: str
    """Named like megatron-core's modules, with layer and expert."""
    layer: int | None
    """Decoder layer, from 0; None outside of the layers."""
    relative: float
    """‖a - b‖ / ‖b‖ (Frobenius), the maximum over replicas. Infinity if not finite."""
    norm: float
    """‖a‖ in the layout."""
    reference_norm: float
    """‖b‖ in the reference."""


def differences(reference: Path, layout: Path) -> list[TensorDifference]:
    """Differences of all tensors, in model order: embedding, layers, final norm, output.

    Args:
        reference: folder with the file of the single rank.
        layout: folder with a file for every rank.

    Raises:
        RuntimeError: the ranks together do not hold exactly the reference's tensors.
    """
    whole = _whole(reference)
    # name -> offset -> the largest (squared difference, squared norm) of the ranks that hold this part
    parts: dict[str, dict[tuple[int, ...], tuple[float, float]]] = {name: {} for name in whole}
    held = dict.fromkeys(whole, 0)
    for file in sorted(layout.glob("*.pt")):
        for shard in shards.read(file):
            if shard.name not in whole or whole[shard.name].shape != shard.shape:
                raise RuntimeError(f"{shard.name} {shard.shape} is not a tensor of the reference")
            expected = whole[shard.name][_place(shard)]
            squares = (_square(shard.tensor - expected), _square(shard.tensor))
            known = parts[shard.name].get(shard.offset)
            held[shard.name] += 0 if known else expected.numel()
            parts[shard.name][shard.offset] = max(known or squares, squares, key=lambda pair: pair[0])
    partial = [name for name, tensor in whole.items() if held[name] != tensor.numel()]
    if partial:
        raise RuntimeError(f"the ranks do not hold all of {', '.join(partial)}")
    return [_difference(name, tensor, list(parts[name].values())) for name, tensor in whole.items()]


def readable(name: str) -> tuple[str, int | None]:
    """Name of a global tensor with its layer and expert, if any, and the decoder layer.

    Args:
        name: see `model.init.global_name`: `decoder.layers.mlp.experts.experts.linear_fc1.weight[2,5]`.
    """
    key, _, place = name.rstrip("]").partition("[")
    indices = place.split(",") if place else []
    if indices and re.search(r"\.layers\.(?!\d)", key):
        key = re.sub(r"\.layers\.", f".layers.{indices.pop(0)}.", key, count=1)
    if indices and ".experts.experts." in key:
        key = key.replace(".experts.experts.", f".experts.{indices.pop(0)}.")
    found = re.match(r"decoder\.layers\.(\d+)\.", key)
    return key + (f"[{','.join(indices)}]" if indices else ""), int(found[1]) if found else None


def _whole(folder: Path) -> dict[str, torch.Tensor]:
    (file,) = folder.glob("*.pt")
    whole: dict[str, torch.Tensor] = {}
    for shard in shards.read(file):
        whole.setdefault(shard.name, torch.zeros(shard.shape))[_place(shard)] = shard.tensor
    return whole


def _place(shard: Shard) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(shard.offset, shard.tensor.shape, strict=True))


def _square(tensor: torch.Tensor) -> float:
    square = float(tensor.double().square().sum())
    return square if math.isfinite(square) else math.inf


def _difference(name: str, expected: torch.Tensor, squares: Sequence[tuple[float, float]]) -> TensorDifference:
    difference, norm = (math.sqrt(math.fsum(column)) for column in zip(*squares, strict=True))
    reference_norm = math.sqrt(_square(expected))
    # For a tensor that is zero in the reference, the absolute difference.
    return TensorDifference(*readable(name), difference / (reference_norm or 1.0), norm, reference_norm)
