"""GELU of a sum with a bias in one compiled kernel, exact; megatron-core's own fused GELU is the tanh approximation."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from llmrecipes.engine.core.platform.patching import replace
from llmrecipes.hardware.builds import compiled_at_first_call


def install_gelu() -> None:
    """Let megatron-core's MLP call `bias_gelu` where it fuses bias and GELU (`bias_activation_fusion`)."""
    replace("megatron.core.transformer.mlp", "bias_gelu_impl", bias_gelu)


def bias_gelu(values: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """GELU (arXiv 1606.08415) of values [..., f] plus a bias [f]."""
    if torch.compiler.is_compiling():
        return forth(values, bias)
    result: torch.Tensor = _BiasGelu.apply(values, bias)
    return result


class _BiasGelu(torch.autograd.Function):
    """Keeps values and bias; their sum is never in memory."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """As the values."""
        ctx.save_for_backward(values, bias)
        result: torch.Tensor = bias_gelu_kernel(values.detach(), bias.detach())
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Gradients of the values and of the bias."""
        values, bias = ctx.saved_tensors
        slope = bias_gelu_kernel_back(gradients[0], values.detach(), bias.detach())
        return slope, slope.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None


def forth(values: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """GELU of the sum, in fp32."""
    return torch.nn.functional.gelu(values.float() + bias.float()).to(values.dtype)


def back(gradient: torch.Tensor, values: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Gradient of the sum from that of the result: Φ(x) + x φ(x) times it."""
    total = values.float() + bias.float()
    normal = 0.5 * (1 + torch.erf(total * math.sqrt(0.5)))
    density = torch.exp(-0.5 * total * total) / math.sqrt(2 * math.pi)
    return (gradient.float() * (normal + total * density)).to(gradient.dtype)


bias_gelu_kernel = compiled_at_first_call(torch.compile, forth)
bias_gelu_kernel_back = compiled_at_first_call(torch.compile, back)
