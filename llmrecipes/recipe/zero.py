"""The section `zero`: ZeRO data parallelism, for both engines."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticKnownError

from llmrecipes.recipe.section import JsonObject, NonNegInt, PosInt, Section

STAGE_3 = (
    "sub_group_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold", "stage3_max_live_parameters",
    "stage3_max_reuse_distance", "zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_gradients",
)  # fmt: skip
"""Keys that have an effect at stage 3 alone."""


def _integer(value: object) -> object:
    """Python's `Literal[1]` accepts what equals 1: `true` and 1.0."""
    if type(value) is int:
        return value
    raise PydanticKnownError("literal_error", {"expected": "0, 1, 2 or 3"})


class Zero(Section):
    """ZeRO data parallelism (arXiv 1910.02054). Key names are DeepSpeed's; sizes are in elements.

    Stage 1 is megatron-core's distributed optimizer; stages 2 and 3 and offload need the engine `deepspeed`.
    """

    stage: Annotated[Literal[0, 1, 2, 3], BeforeValidator(_integer)]
    """What is sharded over data-parallel ranks: nothing (0), optimizer state (1), also gradients (2), also parameters
    (3). `parallelism.use_distributed_optimizer` is true from stage 1 on."""
    offload_optimizer: Literal["none", "cpu", "nvme"] = "none"
    """Keep optimizer state, and update the parameters, in host memory (ZeRO-Offload, arXiv 2101.06840), or keep it on
    an NVMe disk (ZeRO-Infinity, arXiv 2104.07857; stage 3)."""
    offload_param: Literal["none", "cpu"] = "none"
    """Keep partitioned parameters in host memory between their uses; stage 3."""
    nvme_path: str | None = None
    """Folder on a local NVMe disk, for `offload_optimizer: nvme`."""
    reduce_bucket_size: PosInt = 500_000_000
    """Gradient elements that are reduced at a time; a buffer of this size is allocated."""
    allgather_bucket_size: PosInt = 500_000_000
    """Parameter elements that are gathered at a time after an update; stages 1 and 2."""
    overlap_comm: bool = False
    """Reduce gradients while the backward pass still runs; needs a second buffer of `reduce_bucket_size`.
    DeepSpeed's default is true at stage 3."""
    sub_group_size: PosInt = 1_000_000_000
    """Elements that are updated at a time; with offload, state in device memory at a time. Stage 3."""
    stage3_prefetch_bucket_size: NonNegInt = 50_000_000
    """Parameter elements that are gathered before they are needed; stage 3."""
    stage3_param_persistence_threshold: NonNegInt = 100_000
    """Parameters with fewer elements are never partitioned; stage 3."""
    stage3_max_live_parameters: NonNegInt = 1_000_000_000
    """Gathered parameter elements at a time; stage 3."""
    stage3_max_reuse_distance: NonNegInt = 1_000_000_000
    """Parameters that are used again within so many elements stay gathered; stage 3."""
    zero_hpz_partition_size: PosInt = 1
    """Ranks of a node that share a second copy of the parameters for the backward pass (ZeRO++ hpZ, arXiv 2306.10209);
    1: none. Divides the number of ranks; stage 3."""
    zero_quantized_weights: bool = False
    """Gather parameters in int8 (ZeRO++ qwZ); stage 3 on GPUs. The result differs from an unquantized run."""
    zero_quantized_gradients: bool = False
    """Reduce gradients in int4 between nodes (ZeRO++ qgZ); stage 3 in fp16, on two or more nodes with GPUs. The result
    differs from an unquantized run."""
    extra: JsonObject = Field({})
    """Further keys of DeepSpeed's configuration, as in `ds_config.json`; a key that the recipe already determines is
    refused."""
