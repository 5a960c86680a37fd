"""Keys of `speed` that hide communication inside layers: what of a recipe rules each out.

`recipe.features` adds what they need of a machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from llmrecipes.recipe.engines import MEGATRON, engine_name
from llmrecipes.recipe.schema import Recipe


@dataclass(frozen=True)
class OverlapKey:
    """A key of `speed` whose value is off, or megatron-core's, unless a recipe sets it.

    Attributes:
        field: megatron-core's, as `Class.field`.
        gain: what it is expected to give.
        recipe: what of a recipe rules it out; None if nothing does.
        version: of TransformerEngine, whose layers it needs; None: none of it.
        default: the value of an unset key, and why.
    """

    field: str
    gain: str
    recipe: Callable[[Recipe], str | None]
    version: tuple[int, int] | None
    default: tuple[Any, str]


def _tensor(recipe: Recipe) -> str | None:
    """What megatron-core and TransformerEngine's user buffers need; neither says so before the first pass."""
    model, parallel = recipe.model, recipe.layout
    if engine_name(recipe) != MEGATRON:
        return "needs the engine megatron, which creates the user buffers"
    if parallel.tensor_model_parallel_size == 1:
        return "tensor_model_parallel_size is 1"
    if not parallel.sequence_parallel:
        return "needs sequence_parallel, whose gathers and scatters it hides"
    if recipe.lora is not None:
        return "adapters communicate separately from their layers (lora)"
    if recipe.train.freeze:
        return "frozen weights have no gradient GEMMs to hide communication behind (train.freeze)"
    if recipe.train.precision == "fp32":
        return "user buffers are 16-bit (precision)"
    if model.multi_latent_attention:
        return "megatron-core turns it off for all layers after the first projection of latent attention"
    if model.mtp_num_layers:
        return "megatron-core turns it off for multi-token prediction layers, on their stage only"
    if recipe.train.eval_tasks:
        return "user buffers have the shape of a micro-batch, but texts of eval_tasks have other shapes"
    if recipe.layout.deterministic_mode:
        return "ring sums are in a different order (deterministic_mode)"
    return None


def _part(recipe: Recipe) -> str | None:
    return None if recipe.layout.tp_comm_overlap else "only used with tp_comm_overlap"


def _experts(recipe: Recipe) -> str | None:
    """megatron-core's assertions, and what its schedule would bypass silently."""
    model, parallel, train = recipe.model, recipe.layout, recipe.train
    if engine_name(recipe) != MEGATRON:
        return "needs the engine megatron, which has that schedule"
    if not model.num_moe_experts or parallel.expert_model_parallel_size == 1:
        return "experts are not spread over ranks (expert_model_parallel_size)"
    if model.moe_token_dispatcher_type == "allgather":  # noqa: S105 - no password
        return "needs the dispatcher alltoall or flex"
    if train.precision == "fp32":
        return "needs bf16 or fp16"
    if parallel.pipeline_model_parallel_size > 1 and not parallel.virtual_pipeline_model_parallel_size:
        return "pipeline stages need virtual_pipeline_model_parallel_size"
    if recipe.layout.recompute_granularity == "full" or "moe" in (recipe.layout.recompute_modules or ()):
        return "a recomputed dispatch cannot be overlapped (recompute_granularity full, recompute_modules moe)"
    if recipe.layout.moe_shared_expert_overlap:
        return "moe_shared_expert_overlap hides the same communication"
    if (model.mtp_num_layers or 0) > 1 or (model.mtp_num_layers and parallel.pipeline_model_parallel_size == 1):
        return "supports at most one multi-token prediction layer, and only with pipeline stages"
    if recipe.lora is not None:
        return "does not support adapters"
    if recipe.train.freeze:
        return "does not support frozen weights (train.freeze)"
    return None


def _weight_gradients(recipe: Recipe) -> str | None:
    if not recipe.layout.overlap_moe_expert_parallel_comm:
        return "only used with overlap_moe_expert_parallel_comm"
    return None


_WITHIN = (True, "with tp_comm_overlap")

OVERLAP: Mapping[str, OverlapKey] = {
    "tp_comm_overlap": OverlapKey(
        "TransformerConfig.tp_comm_overlap",
        "hides a third of tensor-parallel communication in published runs; takes 10 user buffers the size of a "
        "micro-batch",
        _tensor, (2, 7), (False, "only if set explicitly: user buffers are untested on GPUs here"),
    ),
    "tp_comm_overlap_ag": OverlapKey(
        "TransformerConfig.tp_comm_overlap_ag", "overlaps gathers with the GEMM that needs them", _part, (2, 7),
        _WITHIN,
    ),
    "tp_comm_overlap_rs": OverlapKey(
        "TransformerConfig.tp_comm_overlap_rs", "overlaps scatters with the GEMM before them", _part, (2, 7), _WITHIN,
    ),
    "tp_comm_bulk_dgrad": OverlapKey(
        "TransformerConfig.tp_comm_bulk_dgrad", "overlaps gathering an input again with computing its gradient",
        _part, (2, 7), _WITHIN,
    ),
    "tp_comm_bulk_wgrad": OverlapKey(
        "TransformerConfig.tp_comm_bulk_wgrad", "overlaps scattering an input's gradient with the weight's",
        _part, (2, 7), _WITHIN,
    ),
    "overlap_moe_expert_parallel_comm": OverlapKey(
        "TransformerConfig.overlap_moe_expert_parallel_comm",
        "hides two fifths of the experts' all-to-all behind another micro-batch in published runs",
        _experts, None, (False,
                         "only if set explicitly: keeps one more micro-batch in memory, and is untested on GPUs here"),
    ),
    "delay_wgrad_compute": OverlapKey(
        "TransformerConfig.delay_wgrad_compute", "delays weight gradients, to hide more of the all-to-all",
        _weight_gradients, (2, 8), (False, "only if set explicitly"),
    ),
}  # fmt: skip
"""Keys by name. Shares are those of the planner's frameworks (`plan/speed/data/stacks.json`)."""
