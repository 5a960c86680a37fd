"""How many ranks the parallel degrees of a recipe take."""

from __future__ import annotations

import math

from llmrecipes.recipe.schema import Parallelism


def model_parallel_size(parallel: Parallelism) -> int:
    """Ranks that work on one sequence together; the others are data-parallel."""
    return parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size * parallel.context_parallel_size


def smallest_world(parallel: Parallelism) -> int:
    """The least number of ranks that the degrees can be laid out on.

    Experts are shared by ranks of one pipeline stage that dense layers use as tensor-, context- or data-parallel ones
    (arXiv 2504.14960), so that the stage has a multiple of both products.
    """
    experts = parallel.expert_model_parallel_size * (
        parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size
    )
    dense = parallel.tensor_model_parallel_size * parallel.context_parallel_size
    return parallel.pipeline_model_parallel_size * math.lcm(dense, experts)
