"""The weight of the routers' losses in a step some of whose tokens are masked.

megatron-core multiplies such a loss by all tokens of its micro-batch, masked ones too, and divides all gradients by the
tokens that the loss counts: where these are an eighth, a router's loss would have eight times its coefficient. Its
gradient gets the factor counted / all tokens of the global batch here, so that it does not depend on any mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from llmrecipes.engine.base import Batch
from llmrecipes.engine.parts.base import Part, Step


class RouterLosses(Part):
    """Gives their gradients this factor, through megatron-core's configuration."""

    def __init__(self, step: Step) -> None:
        device = step.platform.device
        model = step.plan.recipe.model
        self._optimizer = step.optimizer
        self._number: dict[str, Any] = {"dtype": torch.float64, "device": device}
        self._share = torch.ones(1, device=device)
        self._exist = bool(model.num_moe_experts and (model.moe_aux_loss_coeff or model.moe_z_loss_coeff))
        if self._exist:
            step.modules[0].config.moe_grad_scale_func = self._scale

    def batches(self, batches: Iterator[Batch], number: int, *, training: bool) -> Iterator[Batch]:
        """See `Part.batches`; of a step, after the tokens of all ranks were counted.

        Nothing waits for the device: the masks are in host memory, and the sum stays on the device.
        """
        if not (self._exist and training):
            return batches
        of_step = list(islice(batches, number))
        counted = torch.full((1,), sum(float(batch["loss_mask"].sum()) for batch in of_step), **self._number)
        # Context-parallel ranks have the same batch; the group without them would be one more communicator.
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        if group.size() > 1:
            dist.all_reduce(counted, group=group)
        every = sum(batch["loss_mask"].numel() for batch in of_step) * group.size()
        # At least 1, as where gradients are divided by it.
        self._share = (counted.clamp(min=1.0) / every).float()
        return iter(of_step)

    def _scale(self) -> torch.Tensor:
        """What megatron-core multiplies the gradients of the routers' losses with, [1]."""
        scale: torch.Tensor = self._optimizer.scale_loss(self._share)
        return scale
