"""megatron-core's data-parallel wrappers: gradient buffers and their reduction."""

from __future__ import annotations

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

from llmrecipes.engine.core.model.gpt import BuiltModel
from llmrecipes.plan.derive import Plan
from llmrecipes.recipe.speedups.features import value, values


def data_parallel(plan: Plan, built: BuiltModel, number: int) -> DistributedDataParallel:
    """One of this rank's chunks with its gradient buffers."""
    config = data_parallel_config(plan)
    # The first chunk's gradients are computed last; the other chunks need no buckets to overlap.
    return DistributedDataParallel(built.config, config, built.modules[number], disable_bucketing=number > 0)


def data_parallel_config(plan: Plan) -> DistributedDataParallelConfig:
    """megatron-core's configuration of gradient buffers and their reduction."""
    recipe = plan.recipe
    parallelism = recipe.layout
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=recipe.train.grad_reduce_in_fp32 or recipe.train.precision == "fp32",
        overlap_grad_reduce=parallelism.overlap_grad_reduce,
        overlap_param_gather=parallelism.overlap_param_gather,
        use_distributed_optimizer=parallelism.use_distributed_optimizer,
        # Gradients of weights that come later are reduced later.
        delay_wgrad_compute=bool(value(plan.features, "delay_wgrad_compute")),
        **values(plan.features, "DistributedDataParallelConfig"),
    )
