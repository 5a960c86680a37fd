"""Matrices in fp8 with a scale for each block, as DeepSeek-V3 and Kimi K2 are published (arXiv 2412.19437, 3.3.2).

They are read as if they were in bf16, to which DeepSeek's own program converts them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmrecipes.errors import UserError

if TYPE_CHECKING:
    import torch

    from llmrecipes.hf.mxfp4 import Raw
    from llmrecipes.hf.reading import Held

METHOD = "fp8"
"""`quant_method` in config.json."""
SCALES = "_scale_inv"
_STORED = "F8_E4M3"


def blocks(section: Any) -> tuple[int, int] | None:
    """Rows and columns with one scale, of `quantization_config`; None: another form of fp8."""
    size = section.get("weight_block_size") if isinstance(section, dict) else None
    known = isinstance(size, list) and len(size) == 2 and all(type(side) is int and side > 0 for side in size)
    return (size[0], size[1]) if known and isinstance(size, list) else None


def shown(tensors: Mapping[str, Held], path: Path, *, block: tuple[int, int]) -> dict[str, Held]:
    """Tensors of a folder, with matrices in bf16 in place of those in fp8 and their scales.

    Raises:
        UserError: a matrix without its scales, or with others than its blocks need.
    """
    readable = dict(tensors)
    for name, held in tensors.items():
        if held.dtype != _STORED:
            continue
        scales = readable.pop(name + SCALES, None)
        needed = tuple(-(-length // side) for length, side in zip(held.shape, block, strict=False))
        if scales is None or len(held.shape) != len(block) or (scales.dtype, scales.shape) != ("F32", needed):
            shape = f"{scales.dtype} {list(scales.shape)}" if scales else "missing"
            raise UserError(
                f"{name} {list(held.shape)} and its scales {shape} do not fit",
                where=str(path),
                rule=f"a matrix in fp8 needs a scale in F32 for each block of {block[0]} × {block[1]}",
                fix="download the complete model again",
            )
        readable[name] = replace(held, dtype="BF16", scales=scales.file, unpack=partial(read, block=block))
    return readable


def read(name: str, held: Held, raw: Raw, place: tuple[slice, ...], *, block: tuple[int, int]) -> torch.Tensor:
    """A part of a matrix in bf16; arguments as `mxfp4.read`, but for the size of a block."""
    import torch

    ends = [slice(*part.indices(length)) for part, length in zip(place, held.shape, strict=True)]
    firsts = [part.start // side for part, side in zip(ends, block, strict=True)]
    needed = (slice(first, -(-part.stop // side)) for first, part, side in zip(firsts, ends, block, strict=True))
    scales = raw(held.files[-1], name + SCALES, tuple(needed))
    rows, columns = (
        torch.arange(part.start, part.stop) // side - first
        for part, side, first in zip(ends, block, firsts, strict=True)
    )
    return (raw(held.file, name, tuple(ends)).float() * scales[rows][:, columns]).to(torch.bfloat16)
