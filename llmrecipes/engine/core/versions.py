"""What the supported versions of megatron-core do differently: the only place that compares them."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.package_info import MAJOR, MINOR
from megatron.core.transformer.moe import moe_utils

_VERSION = (MAJOR, MINOR)

ROUTER_LOSSES_COUNT_LAYOUT = _VERSION >= (0, 19)
"""A router's losses are scaled by the tokens of the tensor- and context-parallel ranks, and of all sequences of a
micro-batch; before, by those of one rank, and of one sequence where the loss is per sequence."""

PREDICTION_LOSSES_ARE_SCALED = _VERSION >= (0, 19)
"""Losses of multi-token prediction are scaled up for the tokens that have no label, counted on each rank."""

MUP_IS_BUILT_IN = _VERSION >= (0, 19)
"""megatron-core has the maximal-update parametrisation, except for our initialisation; before, `model.mup` has it."""

PERMUTES_BY_MASK = _VERSION < (0, 19)
"""Tokens are sorted by expert with masked selections, for whose size the host waits."""

SENDS_BEFORE_FREEING = _VERSION >= (0, 19)
"""With virtual pipeline stages, whose messages overlap with computation, an output is freed after it was sent; before,
while it was being sent."""

GRAPH_MODULES = "cuda_graph_modules" if _VERSION >= (0, 19) else "cuda_graph_scope"
"""Field with the parts of layers of which CUDA graphs are recorded."""


def gradients_for_norm(optimizer: Any) -> list[torch.Tensor]:
    """Gradients of an optimizer's parameters, each on one of the ranks that have the same."""
    gradients: list[torch.Tensor] = (
        optimizer.get_grads_for_grad_norm() if _VERSION >= (0, 19) else optimizer.get_main_grads_for_grad_norm()
    )
    return gradients


def auxiliary_losses() -> dict[str, Any]:
    """megatron-core's sums of the routers' losses, which it keeps for a process and never clears by itself."""
    if _VERSION >= (0, 19):
        metrics: dict[str, Any] = moe_utils.get_moe_metrics_tracker().metrics
        return metrics
    tracker: dict[str, Any] = moe_utils.get_moe_layer_wise_logging_tracker()
    return tracker


def auxiliary_values(entry: Any) -> Any:
    """Sum over micro-batches for each layer, of one entry of `auxiliary_losses`."""
    return entry.values if _VERSION >= (0, 19) else entry["values"]
