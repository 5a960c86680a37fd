"""Rotary embeddings (arXiv 2104.09864) in three passes over queries or keys, or in one compiled kernel.

megatron-core's own function takes nine passes and keeps a sine and a cosine of each layer for the backward pass. The
backward pass is the rotation by the opposite angles, so nothing but the angles is kept here, and sines and cosines are
computed once for all layers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from llmrecipes.engine.core.platform.patching import replace, resolve
from llmrecipes.errors import UserError
from llmrecipes.hardware.builds import compiled_at_first_call

ROPE = "megatron.core.models.common.embeddings.rope_utils"
_PLAIN = "_apply_rotary_pos_emb_bshd"
_FUSED = "fused_apply_rotary_pos_emb"

Rotation = Callable[[torch.Tensor, torch.Tensor, float, bool], torch.Tensor]


def install_rope() -> None:
    """Rotate with the functions of this module: in one kernel where TransformerEngine has none, else in passes."""
    plain = resolve(f"{ROPE}.{_PLAIN}")
    if hasattr(plain, "__wrapped__"):  # already installed
        return

    @wraps(plain)
    def apply(
        values: torch.Tensor,
        angles: torch.Tensor,
        rotary_interleaved: bool = False,
        mla_rotary_interleaved: bool = False,
        mscale: float = 1.0,
        **options: Any,
    ) -> torch.Tensor:
        if rotary_interleaved or options:
            return plain(values, angles, rotary_interleaved, mla_rotary_interleaved, mscale, **options)
        if mla_rotary_interleaved:
            width = angles.size(-1)
            parts = (values[..., 0:width:2], values[..., 1:width:2], values[..., width:])
            values = torch.cat(parts, dim=-1)
        if torch.compiler.is_compiling():
            return one_pass(values, angles.cos() * mscale, angles.sin() * mscale, False)
        return _Rotation.apply(values, angles, mscale, three_passes)

    replace(ROPE, _PLAIN, apply)
    if getattr(resolve(ROPE), _FUSED) is None:
        replace(ROPE, _FUSED, in_one_kernel)


def in_one_kernel(values: torch.Tensor, angles: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """Rotate in one compiled kernel, with sines and cosines in fp32; arguments as of TransformerEngine's function.

    Args:
        values: [s, b, heads, channels].
        angles: [s, 1, 1, rotated channels], in fp32.
        interleaved: must be false.
    """
    if interleaved:
        raise UserError(
            "rotary_interleaved in the fused kernel",
            where="model.extra.rotary_interleaved",
            rule="only TransformerEngine's kernel rotates neighbouring channels",
            fix="layout.apply_rope_fusion=false",
        )
    if torch.compiler.is_compiling():
        return one_pass(values, angles.cos(), angles.sin(), False)
    return _Rotation.apply(values, angles, 1.0, kernel)


class _Rotation(torch.autograd.Function):
    """Rotation of the first channels of [s, b, heads, channels]; keeps the angles only."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, angles: torch.Tensor, mscale: float, rotate: Rotation) -> torch.Tensor:
        """As the values."""
        # Not by `save_for_backward`: megatron-core keeps the angles for all steps, also those of an evaluation.
        ctx.angles = angles
        ctx.mscale = mscale
        ctx.rotate = rotate
        return rotate(values, angles, mscale, False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradient of the values."""
        return ctx.rotate(gradients[0], ctx.angles, ctx.mscale, True), None, None, None


def three_passes(values: torch.Tensor, angles: torch.Tensor, mscale: float, back: bool) -> torch.Tensor:
    """Rotate with torch's operations.

    Args:
        values: [..., channels].
        angles: [..., rotated channels], broadcast over the heads.
        mscale: factor of sines and cosines.
        back: rotate by the opposite angles.
    """
    cosines, sines = _factors(angles, mscale, values.dtype)
    width = angles.size(-1)
    if width == values.size(-1):
        result = values * cosines
    else:
        result = torch.empty_like(values, memory_format=torch.contiguous_format)
        torch.mul(values[..., :width], cosines, out=result[..., :width])
        result[..., width:] = values[..., width:]
    first, second = values[..., :width].chunk(2, -1)
    sine, other = sines.chunk(2, -1)
    head, tail = result[..., :width].chunk(2, -1)
    if back:
        head.addcmul_(second, other)
        tail.addcmul_(first, sine, value=-1)
    else:
        head.addcmul_(second, sine, value=-1)
        tail.addcmul_(first, other)
    return result


def _factors(angles: torch.Tensor, mscale: float, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of angles, which remember them: layers and steps share the tensor of angles."""
    known: dict[Any, tuple[torch.Tensor, torch.Tensor]] = angles.__dict__.setdefault("rotations", {})
    if (mscale, dtype) not in known:
        known[mscale, dtype] = ((angles.cos() * mscale).to(dtype), (angles.sin() * mscale).to(dtype))
    return known[mscale, dtype]


def one_pass(values: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, back: bool) -> torch.Tensor:
    """As `three_passes`, in fp32 and without overwriting anything, for torch.compile to make one kernel of.

    Args:
        cosines, sines: of the angles, [..., rotated channels] in fp32.
    """
    width = cosines.size(-1)
    rotated = values[..., :width].float()
    first, second = (rotated * sines if back else rotated).chunk(2, -1)
    if back:
        result = rotated * cosines + torch.cat((second, -first), -1)
    else:
        result = rotated * cosines + torch.cat((-second, first), -1) * sines
    result = result.to(values.dtype)
    return torch.cat((result, values[..., width:]), -1) if width < values.size(-1) else result


def kernel(values: torch.Tensor, angles: torch.Tensor, mscale: float, back: bool) -> torch.Tensor:
    """As `three_passes`, in one compiled kernel."""
    rotate = _back if back else _forth
    result: torch.Tensor = rotate(values.detach(), *_factors(angles, mscale, torch.float32))
    return result


# Two functions, because torch counts how often it compiles each: once more, for all sizes, at the second one.
@partial(compiled_at_first_call, torch.compile)
def _forth(values: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    return one_pass(values, cosines, sines, False)


@partial(compiled_at_first_call, torch.compile)
def _back(values: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    return one_pass(values, cosines, sines, True)
