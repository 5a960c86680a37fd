"""Number of ranks for the parallel degrees of a recipe."""

from __future__ import annotations

import math

from llmrecipes.recipe.schema import Parallelism


def model_parallel_size(parallel: Parallelism) -> int:
    """Ranks that work on one sequence together; the others are data-parallel."""
    return parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size * parallel.context_parallel_size


def smallest_world(parallel: Parallelism) -> int:
    """The smallest number of ranks that fits the degrees.

    Experts are distributed over the ranks of one pipeline stage that dense layers use for tensor, context and data
    parallelism (arXiv 2504.14960), so that the size of a stage is a multiple of both products.
    """
    experts = parallel.expert_model_parallel_size * (
        parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size
    )
    dense = parallel.tensor_model_parallel_size * parallel.context_parallel_size
    return parallel.pipeline_model_parallel_size * math.lcm(dense, experts)
