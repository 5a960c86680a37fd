"""Weights of 4 bits with one scale for 32 of them, as gpt-oss is published (OCP Microscaling Formats, MXFP4).

They are read as if they were in bf16, in which every value that such a pair can have is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from llmrecipes.errors import UserError

if TYPE_CHECKING:
    import torch

    from llmrecipes.hf.reading import Held

Raw = Callable[[Path, str, tuple[slice, ...]], "torch.Tensor"]
METHOD = "mxfp4"
"""`quant_method` in config.json."""
FAMILIES = ("gpt_oss",)
"""Types of models that have them."""
BLOCKS, SCALES = "_blocks", "_scales"
GROUP = 32
"""Weights with one scale, in 16 bytes, of which each has the first of two weights in its lower half."""
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127
"""Of the exponent that a scale is."""


def shown(tensors: Mapping[str, Held], path: Path) -> dict[str, Held]:
    """Tensors of a folder, with one of the form [expert, in, out] in place of blocks [expert, out, in / 32, 16] and
    scales [expert, out, in / 32].

    Raises:
        UserError: blocks without their scales, or of other shapes.
    """
    readable = dict(tensors)
    for name in tensors:
        if not name.endswith(BLOCKS):
            continue
        whole = name.removesuffix(BLOCKS)
        blocks, scales = readable.pop(name), readable.pop(whole + SCALES, None)
        if (
            scales is None
            or (blocks.dtype, scales.dtype) != ("U8", "U8")
            or (len(blocks.shape), blocks.shape) != (4, (*scales.shape, GROUP // 2))
        ):
            other = list(scales.shape) if scales else "missing"
            raise UserError(
                f"{name} {list(blocks.shape)} and its {SCALES} {other} do not fit",
                where=str(path),
                rule=f"blocks are bytes [expert, out, in / {GROUP}, {GROUP // 2}], with a scale for the last",
                fix="download the complete model again",
            )
        experts, rows, groups, _ = blocks.shape
        shape = (experts, groups * GROUP, rows)
        readable[whole] = replace(blocks, dtype="BF16", shape=shape, scales=scales.file, unpack=read)
    return readable


def read(name: str, held: Held, raw: Raw, place: tuple[slice, ...]) -> torch.Tensor:
    """A part of a tensor in bf16.

    Args:
        name, held: as `shown` has it.
        raw: reads a part of a tensor of a file.
        place: experts, inputs and outputs of the part.
    """
    import torch

    experts, inputs, rows = place
    first, last = inputs.start or 0, inputs.stop
    groups = slice(first // GROUP, None if last is None else -(-last // GROUP))
    blocks = raw(held.file, name + BLOCKS, (experts, rows, groups))
    scales = raw(held.files[-1], name + SCALES, (experts, rows, groups))
    values = torch.tensor([*_VALUES, *(-value for value in _VALUES)], dtype=torch.bfloat16)
    pairs = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2)
    whole = torch.ldexp(values[pairs.int()], scales.int()[..., None] - _BIAS).to(torch.bfloat16).flatten(-2)
    before = groups.start * GROUP
    return whole[..., first - before : None if last is None else last - before].transpose(1, 2)
