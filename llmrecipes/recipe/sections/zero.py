"""The section `zero`: sharding and offload by DeepSpeed, and the keys of DeepSpeed that its `extra` may have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticKnownError

from llmrecipes.recipe.document import Problem, clip
from llmrecipes.recipe.sections.extra_keys import ExtraKeys
from llmrecipes.recipe.sections.section import EXECUTION, JsonObject, NonNegInt, PosInt, Section

STAGE_3 = (
    "sub_group_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold", "stage3_max_live_parameters",
    "stage3_max_reuse_distance", "zero_hpz_partition_size",
)  # fmt: skip
"""Keys that have an effect at stage 3 only."""
QUANTIZED = ("zero_quantized_weights", "zero_quantized_gradients")
"""Those of `train`, which change numbers."""


def _integer(value: object) -> object:
    """Python's `Literal[1]` accepts what equals 1: `true` and 1.0."""
    if type(value) is int:
        return value
    raise PydanticKnownError("literal_error", {"expected": "0, 1, 2 or 3"})


class Zero(Section):
    """ZeRO data parallelism (arXiv 1910.02054). Key names are DeepSpeed's; sizes are in elements.

    Stage 1 is megatron-core's distributed optimizer; stages 2 and 3 and offload need the engine `deepspeed`.
    """

    half = EXECUTION

    stage: Annotated[Literal[0, 1, 2, 3], BeforeValidator(_integer)]
    """What is sharded over data-parallel ranks: nothing (0), optimizer state (1), also gradients (2), also parameters
    (3). From stage 1 on, `layout.use_distributed_optimizer` is true."""
    offload_optimizer: Literal["none", "cpu", "nvme"] = "none"
    """Where optimizer state is kept: `cpu`, in host memory, where parameters are then updated too (ZeRO-Offload,
    arXiv 2101.06840), or `nvme`, on a disk (ZeRO-Infinity, arXiv 2104.07857; stage 3)."""
    offload_param: Literal["none", "cpu"] = "none"
    """Keep partitioned parameters in host memory while they are not in use; stage 3."""
    nvme_path: str | None = None
    """Folder on a local NVMe disk, for `offload_optimizer: nvme`."""
    reduce_bucket_size: PosInt = 500_000_000
    """Gradient elements reduced at a time; a buffer of this size is allocated."""
    allgather_bucket_size: PosInt = 500_000_000
    """Parameter elements gathered at a time after an update; stages 1 and 2."""
    overlap_comm: bool = False
    """Reduce gradients during the backward pass; needs a second buffer of `reduce_bucket_size`."""
    sub_group_size: PosInt = 1_000_000_000
    """Elements updated at a time, whose state with offload is in device memory. Stage 3."""
    stage3_prefetch_bucket_size: NonNegInt = 50_000_000
    """Parameter elements gathered ahead of their use; stage 3."""
    stage3_param_persistence_threshold: NonNegInt = 100_000
    """Parameters with fewer elements than this are never partitioned; stage 3."""
    stage3_max_live_parameters: NonNegInt = 1_000_000_000
    """Maximum number of gathered parameter elements at a time; stage 3."""
    stage3_max_reuse_distance: NonNegInt = 1_000_000_000
    """Parameters used again within this many elements stay gathered; stage 3."""
    zero_hpz_partition_size: PosInt = 1
    """Ranks of a node that share a second copy of the parameters for the backward pass (ZeRO++ hpZ, arXiv
    2306.10209); 1: no copy. Stage 3."""
    extra: JsonObject = Field({})
    """Further keys of DeepSpeed's configuration, as in `ds_config.json`; keys that the recipe already determines are
    refused."""


SECTION = "zero_optimization"
_OFFLOAD = ("offload_optimizer", "offload_param")
_BATCH = "train.global_batch_size"
_MICRO = "layout.micro_batch_size"
_SAVING = "checkpoint"
_TRACKING = "tracking"

DETERMINED: Mapping[str, str] = {
    "train_batch_size": _BATCH,
    "train_micro_batch_size_per_gpu": _MICRO,
    "gradient_accumulation_steps": f"{_BATCH} and {_MICRO}",
    "managed_gradient_accumulation": f"{_BATCH} and {_MICRO}",
    "gradient_allreduce_op": _BATCH,
    "optimizer": "optimizer",
    "scheduler": "scheduler",
    "gradient_clipping": "optimizer.clip_grad",
    "fp16": "train.precision",
    "bf16": "train.precision",
    "bfloat16": "train.precision",
    "torch_autocast": "train.precision",
    "compile": "layout.torch_compile",
    "communication_data_type": "train.grad_reduce_in_fp32",
    "data_types.grad_accum_dtype": "train.grad_reduce_in_fp32",
    "data_types.param_dtype": "train.precision",
    "activation_checkpointing": "layout.recompute_granularity",
    "pipeline": "layout.pipeline_model_parallel_size",
    "tensor_parallel": "layout.tensor_model_parallel_size",
    "expert_parallel": "layout.expert_model_parallel_size",
    "use_data_before_expert_parallelism": "layout.expert_model_parallel_size",
    "sequence_parallel_size": "layout.context_parallel_size",
    "seq_parallel_communication_data_type": "layout.context_parallel_size",
    "data_efficiency": "data",
    "dataloader_drop_last": "data",
    "vocabulary_size": "model.vocab_size",
    "checkpoint": _SAVING,
    "datastates_ckpt": _SAVING,
    "tensorboard": f"{_TRACKING}.tensorboard",
    "wandb": f"{_TRACKING}.wandb",
    "comet": _TRACKING,
    "csv_monitor": _TRACKING,
    "autotuning": "layout",
    "model_info": "model",
    "steps_per_print": "train.log_interval",
    "hybrid_engine": "layout.engine",
    "zero_allow_untested_optimizer": "optimizer",
    "zero_force_ds_cpu_optimizer": "layout.zero.offload_optimizer",
    **{
        f"{SECTION}.{name}": f"layout.zero.{name}"
        for name in Zero.model_fields
        if name not in (*_OFFLOAD, "nvme_path", "extra")
    },
    # Names that DeepSpeed accepts besides those with `stage3_`, and older ones.
    **{
        f"{SECTION}.{name.removeprefix('stage3_')}": f"layout.zero.{name}"
        for name in Zero.model_fields
        if name.startswith("stage3_")
    },
    **{f"{SECTION}.{name}": f"train.{name}" for name in QUANTIZED},
    **{f"{SECTION}.{part}.device": f"layout.zero.{part}" for part in _OFFLOAD},
    **{f"{SECTION}.{part}.nvme_path": "layout.zero.nvme_path" for part in _OFFLOAD},
    f"{SECTION}.legacy_stage1": "layout.zero.stage",
    f"{SECTION}.compute_grad_norm": "optimizer.clip_grad",
    f"{SECTION}.zero_quantized_nontrainable_weights": "train.zero_quantized_weights",
    f"{SECTION}.zenflow": "layout.zero.offload_optimizer",
    f"{SECTION}.cpu_offload": "layout.zero.offload_optimizer",
    f"{SECTION}.cpu_offload_param": "layout.zero.offload_param",
    f"{SECTION}.cpu_offload_use_pin_memory": "layout.zero.offload_optimizer",
    f"{SECTION}.elastic_checkpoint": _SAVING,
    f"{SECTION}.load_from_fp32_weights": _SAVING,
    f"{SECTION}.pipeline_loading_checkpoint": _SAVING,
    f"{SECTION}.stage3_gather_16bit_weights_on_model_save": _SAVING,
    f"{SECTION}.gather_16bit_weights_on_model_save": _SAVING,
    f"{SECTION}.stage3_gather_fp16_weights_on_model_save": _SAVING,
}  # fmt: skip
"""Key of DeepSpeed's configuration, and the recipe's key or section that determines it."""

TOP = (
    "aio", "comms_logger", "data_types", "disable_allgather", "disable_python_gc", "dump_state", "flops_profiler",
    "gradient_predivide_factor", "log_level", "memory_breakdown", "prescale_gradients", "timers",
    "wall_clock_breakdown", SECTION,
)  # fmt: skip
"""Other keys at the top: what deepspeed/runtime/config.py of 0.19.8 reads."""

INSIDE = (
    "allgather_partitions", "contiguous_gradients", "enable_sanity_checks", "ignore_unused_parameters",
    "leaf_module", "log_trace_cache_warnings", "memory_efficient_linear", "offload_optimizer", "offload_param",
    "override_module_apply", "parameter_alignment", "reduce_scatter",
    "save_muon_momentum_buffer_in_memory", "stage3_allgather_sequential", "stage3_model_persistence_threshold",
    "stage3_module_granularity_threshold", "stage3_use_all_reduce_for_fetch_params",
    "use_multi_rank_bucket_allreduce",
)  # fmt: skip
"""Other keys of `zero_optimization`: `DeepSpeedZeroConfig` in deepspeed/runtime/zero/config.py of 0.19.8."""


UNSUPPORTED: Mapping[str, str] = {
    "weight_quantization": "weights are always initialised and saved in train.precision",
    f"{SECTION}.offload_optimizer.ratio": "a checkpoint would lack the state that a ratio below 1 leaves on the GPU",
    f"{SECTION}.offload_optimizer.super_offload": "checkpoints of its optimizer are not supported",
    f"{SECTION}.round_robin_gradients": "DeepSpeed 0.19.8 then finds other gradients than those of a parameter",
}
"""Keys that DeepSpeed has and this engine cannot pass on, and why."""


INNER: Mapping[str, Mapping[str, type]] = {
    "aio": {
        "block_size": int, "queue_depth": int, "intra_op_parallelism": int, "single_submit": bool,
        "overlap_events": bool, "use_gds": bool,
    },
    "flops_profiler": {
        "enabled": bool, "recompute_fwd_factor": float, "profile_step": int, "module_depth": int, "top_modules": int,
        "detailed": bool, "output_file": str,
    },
    "data_types": {},
}  # fmt: skip
"""Sections at the top that DeepSpeed does not check, and their keys; it checks the others when it reads them."""

_EXTRA = ExtraKeys("layout.zero.extra", "keys of DeepSpeed's configuration", DETERMINED, UNSUPPORTED)
_TYPES = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}


def check_extra(zero: Zero) -> Iterator[Problem]:
    """Keys that the recipe determines, that DeepSpeed does not have, or that would have no effect."""
    extra = zero.extra
    yield from _EXTRA.problems(extra, TOP)
    section = extra.get(SECTION, {})
    if not isinstance(section, dict):
        yield Problem(
            f"layout.zero.extra.{SECTION}",
            clip(repr(section)),
            f"{SECTION} must be a mapping",
            "remove it, and set layout.zero.stage",
        )
        return
    yield from _EXTRA.problems(section, INSIDE, f"{SECTION}.")
    for name in INNER:
        if name in extra:
            yield from _inner(name, extra[name])
    for part in _OFFLOAD:
        inside = section.get(part)
        if isinstance(inside, dict):
            yield from _EXTRA.refused(inside, f"{SECTION}.{part}.")
        if part in section and getattr(zero, part) == "none":
            yield Problem(
                f"layout.zero.extra.{SECTION}.{part}",
                f"set with layout.zero.{part} none",
                "its keys are only used with offload",
                f"layout.zero.{part} cpu, or remove it",
            )
        elif part in section and not isinstance(inside, dict):
            yield Problem(
                f"layout.zero.extra.{SECTION}.{part}", clip(repr(inside)), f"{part} must be a mapping", "remove it"
            )


def _inner(section: str, values: object) -> Iterator[Problem]:
    if not isinstance(values, dict):
        yield Problem(f"layout.zero.extra.{section}", clip(repr(values)), f"{section} must be a mapping", "remove it")
        return
    yield from _EXTRA.problems(values, INNER[section], f"{section}.")
    for name, kind in INNER[section].items():
        fits = type(values.get(name)) in ((int, float) if kind is float else (kind,))
        if name in values and not fits:
            key = f"layout.zero.extra.{section}.{name}"
            yield Problem(
                key, clip(repr(values[name])), f"{name} must be {_TYPES[kind]}", "remove it to use the default"
            )
