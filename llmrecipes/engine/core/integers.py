"""Rounding of matrices to symmetric integers, for `llmrecipes quantize` and for training with `qat`.

The numbers are those of the package compressed-tensors, which packs them, bit for bit. It is not used here: it makes
constants on the device for each matrix, which the host waits for.
"""

from __future__ import annotations

import torch

PIECE = 1 << 22
"""Weights that are rounded at once, in fp32."""


@torch.no_grad()
def largest(weight: torch.Tensor, group: int | None) -> torch.Tensor:
    """Largest absolute value of each group of a matrix.

    Args:
        weight: [out, in].
        group: columns that share a scale; None: all.

    Returns:
        [out, groups] in fp32.
    """
    values = weight.unflatten(-1, (-1, group or weight.size(-1)))
    return torch.maximum(values.amax(-1), -values.amin(-1)).float()


@torch.no_grad()
def scales(most: torch.Tensor, bits: int, dtype: torch.dtype) -> torch.Tensor:
    """Scales of groups; their largest value is halfway between the last integer and the one that is missing.

    Args:
        most: [out, groups], as `largest`.
        bits: of an integer.
        dtype: that a scale has in the file.

    Returns:
        [out, groups] of that type; of a group of zeros the least that is not zero.
    """
    # By a tensor: CUDA divides by a number by multiplying with its inverse, whose last bit is another.
    scale = (most / torch.full_like(most, (2**bits - 1) / 2)).to(dtype)
    return scale.masked_fill_(scale == 0, torch.finfo(torch.float32).eps)


def bounds(bits: int) -> tuple[int, int]:
    """The least and the largest integer."""
    return -(2 ** (bits - 1)), 2 ** (bits - 1) - 1


@torch.no_grad()
def round_into(target: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bits: int) -> None:
    """Write the multiples of its scales that a matrix is rounded to.

    Args:
        target: [out, in], of any type.
        weight: [out, in], unchanged.
        scale: [out, groups], as `scales`.
        bits: of an integer.
    """
    rows = max(1, PIECE // weight.size(-1))
    for out, part, each in zip(target.split(rows), weight.split(rows), scale.split(rows), strict=True):
        values = part.to(torch.float32, copy=True)
        factor = each.float().unsqueeze(-1)
        values.unflatten(-1, (scale.size(-1), -1)).div_(factor).round_().clamp_(*bounds(bits)).mul_(factor)
        out.copy_(values)
