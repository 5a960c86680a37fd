"""Arithmetic of parallel degrees: numbers of ranks, and the nearest valid numbers as text for a message."""

from __future__ import annotations

import math
from typing import Any

from llmrecipes.recipe.derived.batch_schedule import common
from llmrecipes.recipe.derived.stage_runs import stage_recipes
from llmrecipes.recipe.derived.stages import run_recipe
from llmrecipes.recipe.engines import without_zero
from llmrecipes.recipe.schema import LayoutKeys, Recipe

DEGREES = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size",
    "context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size", "sequence_parallel",
    "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split", "pipeline_model_parallel_layout",
)  # fmt: skip
"""Keys of `layout` that say which part of the model a rank has."""
SHARING = ("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather")
"""Keys of `layout` that say what data-parallel ranks share."""
OF_GROUPS = (
    "nccl_communicator_config_path", "high_priority_stream_groups", "hierarchical_context_parallel_sizes",
    "cuda_graph_impl",
)  # fmt: skip
"""Keys of `layout` that process groups and their random states are created with, besides degrees."""


def undivided(recipe: Recipe, **keys: Any) -> Recipe:
    """The recipe with the whole model on each rank, without ZeRO, and with other keys of `layout`."""
    defaults = {name: LayoutKeys.model_fields[name].default for name in (*DEGREES, *SHARING)}
    return without_zero(recipe).with_layout(**{**defaults, **keys})


def model_parallel_size(parallel: LayoutKeys) -> int:
    """Ranks that work on one sequence together; the others are data-parallel."""
    return parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size * parallel.context_parallel_size


def smallest_world(parallel: LayoutKeys) -> int:
    """The smallest number of ranks that fits the degrees.

    Experts are distributed over the ranks of one pipeline stage that dense layers use for tensor, context and data
    parallelism (arXiv 2504.14960), so that the size of a stage is a multiple of both products.
    """
    experts = parallel.expert_model_parallel_size * (
        parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size
    )
    dense = parallel.tensor_model_parallel_size * parallel.context_parallel_size
    return parallel.pipeline_model_parallel_size * math.lcm(dense, experts)


def least_ranks(recipe: Recipe) -> int:
    """The smallest number of ranks that fits the degrees of a recipe, in all its stages."""
    return math.lcm(*(smallest_world(stage.layout) for stage in stage_recipes(recipe)))


def replica_ranks(recipe: Recipe) -> int:
    """Ranks of what `train.elastic` counts: a replica in the layout of the recipe itself, also in its stages."""
    return model_parallel_size(run_recipe(recipe).layout)


def elastic_worlds(recipe: Recipe) -> tuple[int, ...]:
    """Numbers of ranks that `train.elastic` allows, ascending: those over which layout and global batch divide."""
    if recipe.train.elastic is None:
        raise ValueError("train.elastic is not set")
    if recipe.stages:
        by_stage = [set(elastic_worlds(stage_recipe)) for stage_recipe in stage_recipes(recipe)]
        return tuple(sorted(set.intersection(*by_stage)))
    least, most = (replicas * replica_ranks(recipe) for replicas in recipe.train.elastic)
    parallel = recipe.layout
    dense = model_parallel_size(recipe.layout)
    micro_batches = common(recipe) // recipe.layout.micro_batch_size
    interleaved = (parallel.virtual_pipeline_model_parallel_size or 1) > 1
    group = parallel.pipeline_model_parallel_size if interleaved else 1
    return tuple(
        replicas * dense
        for replicas in range(-(-least // dense), min(most // dense, micro_batches) + 1)
        if micro_batches % (replicas * group) == 0 and replicas * dense % smallest_world(parallel) == 0
    )


def elastic_nodes(recipe: Recipe, nodes: int, ranks_per_node: int) -> tuple[int, ...]:
    """Numbers of nodes up to `nodes` that the ranks of `train.elastic` fill, ascending; `nodes` only without it."""
    if recipe.train.elastic is None:
        return (nodes,)
    worlds = (ranks for ranks in elastic_worlds(recipe) if ranks % ranks_per_node == 0)
    return tuple(ranks // ranks_per_node for ranks in worlds if ranks <= nodes * ranks_per_node)


def multiples(value: int, of: int) -> str:
    """The multiples of `of` around `value`, as text: `96 or 128`."""
    below = value // of * of
    above = -(-value // of) * of
    return f"{below} or {above}" if below else str(above)


def divisors(number: int, near: int) -> str:
    """The divisors of `number` around `near`, as text."""
    reach = 10_000  # a bound, so that absurd numbers are fast too
    below = next((d for d in range(min(near, number), max(0, near - reach), -1) if number % d == 0), 1)
    above = next((d for d in range(near, min(number, near + reach) + 1) if number % d == 0), below)
    return " or ".join(str(d) for d in dict.fromkeys((below, above)))
