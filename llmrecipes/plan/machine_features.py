"""What a plan expects of its machine for the features of `speed`: each rank decides by what it has."""

from __future__ import annotations

from llmrecipes.hardware.cluster import Cluster, compute_capability
from llmrecipes.plan.layout import Layout, expected_layers
from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.speedups.features import SpeedTarget


def expected(
    recipe: Recipe, device: str, laid_out: Layout | None = None, cluster: Cluster | None = None
) -> SpeedTarget:
    """A GPU with the software of the CUDA image, or a CPU with a compiler.

    Args:
        laid_out, cluster: of the run; without them all its ranks are on one node.
    """
    transformer_engine, reason = expected_layers(recipe, device)
    return SpeedTarget(
        device="cuda" if device == "cuda" else "cpu",
        transformer_engine=transformer_engine,
        layers_reason=reason,
        ranks=1 if laid_out is None else laid_out.world_size,
        spans_nodes=laid_out is not None and cluster is not None and spans_nodes(laid_out, cluster),
        capability=compute_capability(cluster.gpus[0].name) if cluster is not None and cluster.gpus else None,
    )


def spans_nodes(laid_out: Layout, cluster: Cluster) -> bool:
    """Whether the ranks of a data-parallel group are on several nodes."""
    near = cluster.gpus_per_domain
    inner = laid_out.tensor_model_parallel_size * laid_out.context_parallel_size
    return bool(cluster.gpus) and inner * laid_out.data_parallel_size > near
