"""Parts of megatron-core's optimizer step that would wait for the device, without the waiting."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads as reduce_model_grads
from megatron.core.optimizer.optimizer import MegatronOptimizer

from llmrecipes.engine.megatron.versions import gradients_for_norm


def finalize_model_grads(chunks: list[Any], num_tokens: torch.Tensor, **options: Any) -> None:
    """Reduce all gradients, and divide them by the tokens of the global batch; see megatron-core's function.

    Its own division (0.16) reads the number of tokens on the host, once for each chunk.

    Args:
        chunks: of this rank.
        num_tokens: of this rank's micro-batches, on the last stage.
        options: passed on.
    """
    reduce_model_grads(chunks, None, **options)
    stages = parallel_state.get_pipeline_model_parallel_group()
    dist.broadcast(num_tokens, src=dist.get_process_group_ranks(stages)[-1], group=stages)
    dist.all_reduce(num_tokens, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    factor = 1.0 / num_tokens.clamp(min=1)
    for chunk in chunks:
        chunk.scale_gradients(factor)


def squared_norm(optimizer: MegatronOptimizer, device: torch.device) -> torch.Tensor:
    """Squared norm of the gradients of all ranks; a collective, without waiting for the device.

    Without TransformerEngine or Apex, megatron-core reads the norm of each tensor on the host.

    Returns:
        [1] in fp32.
    """
    by_group: dict[dist.ProcessGroup, list[torch.Tensor]] = {}
    for part in _parts(optimizer):
        gradients = gradients_for_norm(part)
        by_group.setdefault(part.get_grad_stats_parallel_group(), []).extend(gradients)
    total = torch.zeros(1, device=device)
    for group, gradients in by_group.items():
        squared = torch.zeros(1, device=device)
        if gradients:
            norms = torch.stack(torch._foreach_norm(gradients))
            squared += torch.linalg.vector_norm(norms).square()
        dist.all_reduce(squared, group=group)
        total += squared
    return total


@torch.no_grad()
def clip(optimizer: MegatronOptimizer, max_norm: float, norm: float) -> None:
    """Scale all gradients so that their norm is at most `max_norm`; a norm that is not finite changes nothing.

    Args:
        optimizer: with complete gradients.
        max_norm: 0 for no bound.
        norm: of the gradients of all ranks.
    """
    factor = max_norm / (norm + 1.0e-6)
    if not 0 < factor < 1:
        return
    for part in _parts(optimizer):
        gradients = [parameter.grad for parameter in part.get_parameters() if parameter.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, factor)


def _parts(optimizer: Any) -> Iterator[Any]:
    yield from getattr(optimizer, "chained_optimizers", [optimizer])
