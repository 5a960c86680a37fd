"""Quantisation-aware training (`qat`): products with rounded weights, whose gradients go to the weights themselves.

A matrix is rounded when a layer first needs it in a step, and kept in the type of the weights until the next update:
all micro-batches, recomputed passes and backward passes of a step have the same one. Ranks that share the rows of an
int8 matrix have one scale for each: they exchange its largest value, a number a row. Groups of int4 are never split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

from llmrecipes.engine.core import integers
from llmrecipes.recipe.sections.qat import Qat


class FakeQuantizer:
    """The rounded matrices of a chunk of a model: those of its layers, experts among them.

    Args:
        module: of megatron-core's own layers; how they multiply is changed.
        qat: the recipe's section.
    """

    def __init__(self, module: HybridModel, qat: Qat) -> None:
        self._qat, self._on = qat, True
        self._layers = [
            layer
            for layer in module.decoder.modules()
            if isinstance(layer, ColumnParallelLinear | RowParallelLinear) and layer.weight is not None
        ]
        self._rounded: dict[torch.nn.Module, torch.Tensor] = {}
        self._valid: set[torch.nn.Module] = set()
        for layer in self._layers:
            layer._forward_impl = partial(self._multiply, layer, layer._forward_impl)

    def allocate(self) -> None:
        """Make room for the rounded matrices; the weights are on their device, in their type."""
        self._rounded = {layer: torch.empty_like(layer.weight.detach()) for layer in self._layers}

    def tensors(self) -> list[torch.Tensor]:
        """The rounded matrices."""
        return list(self._rounded.values())

    def begin(self, completed: int) -> None:
        """Take weights that may have changed.

        Args:
            completed: steps of the run before the next pass.
        """
        self._on = completed >= self._qat.start_step
        self.forget()

    def forget(self) -> None:
        """As `begin`, after as many steps."""
        self._valid.clear()

    def _multiply(
        self, layer: Any, multiply: Callable[..., torch.Tensor], *args: Any, weight: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        """megatron-core's product of a layer, by its rounded matrix."""
        if self._on:
            weight = _StraightThrough.apply(weight, self._rounded_matrix(layer))
        return multiply(*args, weight=weight, **options)

    @torch.no_grad()
    def _rounded_matrix(self, layer: Any) -> torch.Tensor:
        target = self._rounded[layer]
        if layer not in self._valid:
            weight = layer.weight.detach()
            most = integers.largest(weight, self._qat.group)
            if self._qat.group is None and isinstance(layer, RowParallelLinear) and layer.tp_group.size() > 1:
                dist.all_reduce(most, op=dist.ReduceOp.MAX, group=layer.tp_group)
            scale = integers.scales(most, self._qat.bits, weight.dtype)
            integers.round_into(target, weight, scale, self._qat.bits)
            self._valid.add(layer)
        return target


class _StraightThrough(torch.autograd.Function):
    """Rounded weights, whose gradient is that of the weights (arXiv 1308.3432)."""

    @staticmethod
    def forward(_ctx: Any, _weight: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
        """The rounded matrix; both are [out, in]."""
        return rounded.view_as(rounded)

    @staticmethod
    def backward(_ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        """The gradient of the weights is the one of the rounded matrix."""
        return gradients[0], None


def renew_rounded(modules: Iterable[Any], completed: int) -> None:
    """`FakeQuantizer.begin` of the chunks of a model that have one."""
    for module in modules:
        if module.fake_quantizer is not None:
            module.fake_quantizer.begin(completed)


def rounded(modules: Iterable[Any]) -> list[torch.Tensor]:
    """The rounded matrices of these chunks."""
    quantizers = (module.fake_quantizer for module in modules)
    return [tensor for each in quantizers if each is not None for tensor in each.tensors()]
