"""The layout, recomputation and batch with which a recipe fits a machine, for recipes that are made for users."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from llmrecipes.errors import UserError
from llmrecipes.hardware.cluster import Cluster
from llmrecipes.plan.derive import LEAST_HEADROOM, derive
from llmrecipes.recipe import rules
from llmrecipes.recipe.degrees import model_parallel_size
from llmrecipes.recipe.schema import Recipe

MOST_MICRO_BATCH = 8
_RECOMPUTE: dict[str, Any] = {
    "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1,
}  # fmt: skip


def fitted(recipe: Recipe, cluster: Cluster) -> tuple[Recipe, int]:
    """The first of these that fits with `LEAST_HEADROOM`, in the order of their cost to speed.

    Tensor parallelism, as far as NVLink reaches, then pipeline parallelism are increased only as needed; at each
    degree layers are recomputed only as needed, with the largest micro-batch that fits. The global batch is rounded to
    a multiple of the data-parallel size.

    Args:
        recipe: a dense one; its tensor and pipeline degrees, stages, recomputation and micro-batch are replaced.
        cluster: all GPUs are used; without one, one rank.

    Returns:
        The recipe, and its number of ranks. If nothing fits, the last recipe that was tried.

    Raises:
        UserError: no degrees divide the model.
    """
    ranks = len(cluster.gpus) or 1
    last = refused = None
    for candidate in _candidates(recipe, cluster, ranks):
        if problems := rules.check(candidate):
            refused = refused or UserError(problems[0].what, where=problems[0].key, rule=problems[0].rule)
            continue
        try:
            plan = derive(candidate, ranks, cluster)
        except UserError as error:
            refused = refused or error
            continue
        last = candidate
        if plan.fits and plan.memory_headroom >= LEAST_HEADROOM:
            return candidate, ranks
    if last is None:
        raise refused or UserError(
            f"no layout of {ranks} ranks",
            where="parallelism",
            rule="the ranks are a multiple of the other degrees of the recipe",
        )
    return last, ranks


def _candidates(recipe: Recipe, cluster: Cluster, ranks: int) -> Iterator[Recipe]:
    domain = cluster.gpus_per_domain if cluster.gpus else 1
    for pipeline in _powers(min(ranks, recipe.model.num_layers)):
        # Pipelines are for what tensor parallelism cannot hold, so they come with all of it.
        for tensor in _powers(min(domain, ranks)) if pipeline == 1 else [_powers(min(domain, ranks))[-1]]:
            # Where the layers do not divide over the stages, they may with embedding and output layer.
            whole = bool(recipe.model.num_layers % pipeline)
            degrees = {
                "account_for_embedding_in_pipeline_split": whole,
                "account_for_loss_in_pipeline_split": whole,
                "tensor_model_parallel_size": tensor,
                "pipeline_model_parallel_size": pipeline,
                "virtual_pipeline_model_parallel_size": None,
                "sequence_parallel": tensor > 1,
            }
            parallelism = recipe.parallelism.model_copy(update=degrees)
            if ranks % model_parallel_size(parallelism):
                continue
            replicas = ranks // model_parallel_size(parallelism)
            each = max(1, round(recipe.train.global_batch_size / replicas))
            for recompute in (dict.fromkeys(_RECOMPUTE), _RECOMPUTE):
                for micro in reversed(_powers(min(each, MOST_MICRO_BATCH))):
                    if each % micro == 0:
                        batch = {"micro_batch_size": micro, "global_batch_size": each * replicas}
                        train = recipe.train.model_copy(update={**recompute, **batch})
                        yield recipe.model_copy(update={"parallelism": parallelism, "train": train})


def _powers(most: int) -> list[int]:
    """Powers of two up to a number."""
    return [1 << exponent for exponent in range(most.bit_length())]
