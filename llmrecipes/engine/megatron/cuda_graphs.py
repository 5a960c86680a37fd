"""Record the layers of a training as CUDA graphs (`layout.cuda_graph_impl`), by megatron-core's helper."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.num_microbatches_calculator import (
    reconfigure_num_microbatches_calculator,
    unset_num_microbatches_calculator,
)
from megatron.core.transformer.cuda_graphs import TECudaGraphHelper

from llmrecipes.errors import UserError
from llmrecipes.plan.derive import Plan

ALLOCATORS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables with the allocator's settings; megatron-core looks at the older only."""


class RecordedLayers:
    """Layers whose kernels are recorded before a step, once enough steps have run without.

    Args:
        plan: of the run, with `layout.cuda_graph_impl`.
        chunks: of this rank.
        optimizer: of megatron-core, whose gradients are set to zero after the recording.

    Raises:
        UserError: NCCL registers buffers of graphs, and the allocator moves them.
    """

    def __init__(self, plan: Plan, chunks: Sequence[DistributedDataParallel], optimizer: Any) -> None:
        _require_fixed_buffers()
        recipe = plan.recipe
        config = chunks[0].config
        # What megatron-core asks for the number of micro-batches, for which Megatron-LM's loop has a global variable.
        reconfigure_num_microbatches_calculator(
            dist.get_rank(),
            None,
            recipe.train.global_batch_size,
            recipe.layout.micro_batch_size,
            plan.layout.data_parallel_size,
        )
        self._steps_left = config.cuda_graph_warmup_steps
        self._chunks = chunks
        self._hooked = chunks if recipe.layout.overlap_param_gather else []
        self._helper: Any = TECudaGraphHelper(
            model=list(chunks),
            config=config,
            seq_length=recipe.model.seq_length,
            micro_batch_size=recipe.layout.micro_batch_size,
            optimizers=[optimizer],
        )
        self.recorded = False

    def before_step(self) -> None:
        """Record the layers, if enough steps have run; as in Megatron-LM's `training/training.py`.

        TransformerEngine takes no module with hooks, so those that gather parameters are removed meanwhile. Kernels
        that are replayed call none either: the layers call them themselves.
        """
        if self.recorded:
            return
        if self._steps_left:
            self._steps_left -= 1
            return
        for chunk in self._hooked:
            chunk.disable_forward_pre_hook(param_sync=False)
        self._helper.create_cudagraphs()
        for chunk in self._hooked:
            chunk.enable_forward_pre_hook()
        if self._hooked:
            self._helper.cuda_graph_set_manual_hooks()
        self.recorded = True

    def close(self) -> None:
        """Delete what is recorded: it holds buffers, and refers to the layers."""
        if self.recorded:
            self._helper.delete_cuda_graphs()
        self._helper = None
        unset_num_microbatches_calculator()


def _require_fixed_buffers() -> None:
    moves = [name for name in ALLOCATORS if "expandable_segments:True" in os.environ.get(name, "")]
    if moves and os.environ.get("NCCL_GRAPH_REGISTER") != "0":
        raise UserError(
            f"NCCL_GRAPH_REGISTER is {os.environ.get('NCCL_GRAPH_REGISTER', 'not set')} with {moves[0]}="
            f"{os.environ[moves[0]]}",
            where="layout.cuda_graph_impl",
            rule="NCCL registers the buffers of a graph by address, and expandable segments change what is there",
            fix="NCCL_GRAPH_REGISTER=0, which a launched run has unless the environment sets another value",
        )
