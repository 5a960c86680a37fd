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
    model, parallel = recipe.model, recipe.parallelism
    if engine_name(recipe) != MEGATRON:
        return "only the engine megatron creates the user buffers"
    if parallel.tensor_model_parallel_size == 1:
        return "tensor_model_parallel_size is 1"
    if not parallel.sequence_parallel:
        return "only sequence_parallel gathers and scatters, which is what hides"
    if recipe.lora is not None:
        return "adapters communicate beside their layers (lora)"
    if recipe.train.freeze:
        return "products of frozen weights are missing that messages hide behind (train.freeze)"
    if recipe.train.precision == "fp32":
        return "user buffers have 16 bits (precision)"
    if model.multi_latent_attention:
        return "megatron-core switches it off for all layers after the first projection of latent attention"
    if model.mtp_num_layers:
        return "megatron-core switches it off for layers of multi-token prediction, on their stage only"
    if recipe.train.eval_tasks:
        return "user buffers have the shape of a micro-batch, and texts of eval_tasks have others"
    if recipe.speed.deterministic_mode:
        return "sums in rings have another order than without (deterministic_mode)"
    return None


def _part(recipe: Recipe) -> str | None:
    return None if recipe.speed.tp_comm_overlap else "belongs to tp_comm_overlap"


def _experts(recipe: Recipe) -> str | None:
    """megatron-core's assertions of both versions, and what its schedule would bypass silently."""
    model, parallel, train = recipe.model, recipe.parallelism, recipe.train
    if engine_name(recipe) != MEGATRON:
        return "only the engine megatron has that schedule"
    if not model.num_moe_experts or parallel.expert_model_parallel_size == 1:
        return "ranks share no experts (expert_model_parallel_size)"
    if model.moe_token_dispatcher_type == "allgather":  # noqa: S105 - no password
        return "only the dispatchers alltoall and flex"
    if train.precision == "fp32":
        return "only in bf16 and fp16"
    if parallel.pipeline_model_parallel_size > 1 and not parallel.virtual_pipeline_model_parallel_size:
        return "pipeline stages need virtual_pipeline_model_parallel_size"
    if train.recompute_granularity == "full" or "moe" in (train.recompute_modules or ()):
        return "a recomputed dispatch is not overlapped (recompute_granularity full, recompute_modules moe)"
    if recipe.speed.moe_shared_expert_overlap:
        return "moe_shared_expert_overlap hides the same messages"
    if (model.mtp_num_layers or 0) > 1 or (model.mtp_num_layers and parallel.pipeline_model_parallel_size == 1):
        return "one layer of multi-token prediction at most, and only with pipeline stages"
    if recipe.lora is not None:
        return "not with adapters"
    if recipe.train.freeze:
        return "not with frozen weights (train.freeze)"
    return None


def _weight_gradients(recipe: Recipe) -> str | None:
    if not recipe.speed.overlap_moe_expert_parallel_comm:
        return "belongs to overlap_moe_expert_parallel_comm"
    return None


_WITHIN = (True, "with tp_comm_overlap")

OVERLAP: Mapping[str, OverlapKey] = {
    "tp_comm_overlap": OverlapKey(
        "TransformerConfig.tp_comm_overlap",
        "hides a third of tensor-parallel communication in published runs; 10 user buffers of a micro-batch's width",
        _tensor, (2, 7), (False, "only by name: no GPU has run its user buffers here"),
    ),
    "tp_comm_overlap_ag": OverlapKey(
        "TransformerConfig.tp_comm_overlap_ag", "gathers beside the product that needs them", _part, (2, 7), _WITHIN,
    ),
    "tp_comm_overlap_rs": OverlapKey(
        "TransformerConfig.tp_comm_overlap_rs", "scatters beside the product before them", _part, (2, 7), _WITHIN,
    ),
    "tp_comm_bulk_dgrad": OverlapKey(
        "TransformerConfig.tp_comm_bulk_dgrad", "gathers an input again beside the input's gradient",
        _part, (2, 7), _WITHIN,
    ),
    "tp_comm_bulk_wgrad": OverlapKey(
        "TransformerConfig.tp_comm_bulk_wgrad", "scatters an input's gradient beside the weight's",
        _part, (2, 7), _WITHIN,
    ),
    "overlap_moe_expert_parallel_comm": OverlapKey(
        "TransformerConfig.overlap_moe_expert_parallel_comm",
        "hides two fifths of the experts' all-to-all in published runs, behind another micro-batch",
        _experts, None, (False, "only by name: one micro-batch more is kept, and no GPU has run it here"),
    ),
    "delay_wgrad_compute": OverlapKey(
        "TransformerConfig.delay_wgrad_compute", "more to hide the all-to-all behind: weight gradients come later",
        _weight_gradients, (2, 8), (False, "only by name"),
    ),
}  # fmt: skip
"""Keys by name. Shares are those of the planner's frameworks (`plan/speed/data/stacks.json`)."""
