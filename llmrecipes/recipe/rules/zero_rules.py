"""Rules between the section `zero`, the engine, and the rest of a recipe."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator

from llmrecipes.recipe.document import Problem
from llmrecipes.recipe.engines import DEEPSPEED, MEGATRON, engine_name
from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.sections.zero import QUANTIZED, STAGE_3, Zero, check_extra

_OFFLOAD = ("offload_optimizer", "offload_param")


def engine(recipe: Recipe) -> Iterator[Problem]:
    """Which stages and keys each engine has."""
    zero = recipe.layout.zero
    name = engine_name(recipe)
    if name == DEEPSPEED and zero is None:
        yield Problem(
            "layout.zero",
            "missing with engine deepspeed",
            "the engine deepspeed needs the section layout.zero with at least layout.zero.stage",
            "layout.zero.stage=2, or engine megatron",
        )
    if name != MEGATRON or zero is None:
        return
    needed = [f"{key} {getattr(zero, key)}" for key in _OFFLOAD if getattr(zero, key) != "none"]
    needed = [f"stage {zero.stage}", *needed] if zero.stage >= 2 else needed
    if needed:
        # `auto` selects it with offload_param at stages 0 and 1 only, and `offload` refuses that.
        if recipe.layout.engine == MEGATRON:
            yield Problem(
                "layout.engine",
                f"megatron with zero {', '.join(needed)}",
                "the engine megatron supports layout.zero.stage 0 and 1, without offload",
                "engine auto or deepspeed, or layout.zero.stage 1 without offload",
            )
        return
    for key in _changed(zero):
        if key not in ("stage", "nvme_path"):
            yield Problem(
                f"layout.zero.{key}",
                "set with engine megatron",
                f"at stages 0 and 1, {key} is only used by the engine deepspeed",
                f"engine deepspeed, or {_left_out(key)}",
            )


def selected(recipe: Recipe, overridden: Collection[str]) -> tuple[Recipe, list[str]]:
    """The recipe with the defaults of the keys that belong to a stage or an engine other than its own, and their names.

    A file says how to train at its stage; with another one on the command line these keys have no effect. A key that is
    itself on the command line stays, for the rules to refuse.

    Args:
        overridden: keys of the command line.
    """
    zero = recipe.layout.zero
    if zero is None or "layout.zero" in overridden:
        return recipe, []
    other = {key for key in _changed(zero) if key in _STAGES and str(zero.stage) not in _EACH[_STAGES[key]]}
    # Without stage and offload there is nothing that needs the engine deepspeed.
    if engine_name(recipe) == MEGATRON and zero.stage < 2 and zero.offload_optimizer == "none":
        other |= {key for key in _changed(zero) if key not in ("stage", "nvme_path")}
    ignored = sorted(
        key
        for key in other
        if not any(
            override == f"layout.zero.{key}" or override.startswith(f"layout.zero.{key}.") for override in overridden
        )
    )
    defaults = {key: Zero.model_fields[key].get_default(call_default_factory=True) for key in ignored}
    return recipe.with_layout(zero=zero.model_copy(update=defaults)), ignored


def optimizer_sharding(recipe: Recipe) -> Iterator[Problem]:
    """`use_distributed_optimizer` and `layout.zero.stage` say the same."""
    if recipe.layout.zero is None:
        return
    stage = recipe.layout.zero.stage
    sharded = recipe.layout.use_distributed_optimizer
    if sharded != (stage >= 1):
        yield Problem(
            "layout.use_distributed_optimizer",
            f"{str(sharded).lower()} with layout.zero.stage {stage}",
            "use_distributed_optimizer must be true with layout.zero.stage 1 to 3 and false with 0: optimizer state is "
            "sharded "
            "from stage 1 on",
            f"use_distributed_optimizer {str(not sharded).lower()}, or layout.zero.stage {int(sharded)}",
        )


def pipeline(recipe: Recipe) -> Iterator[Problem]:
    """Gradients and parameters are sharded without a pipeline only."""
    stages = recipe.layout.pipeline_model_parallel_size
    if recipe.layout.zero is not None and recipe.layout.zero.stage >= 2 and stages > 1:
        yield Problem(
            "layout.zero.stage",
            f"{recipe.layout.zero.stage} with pipeline_model_parallel_size {stages}",
            "a pipeline accumulates full gradients over its micro-batches, but stages 2 and 3 would reduce and shard "
            "them after every one (DeepSpeed rejects this too)",
            "layout.zero.stage 1, or pipeline_model_parallel_size 1 with more data-parallel ranks",
        )


def unsupported(recipe: Recipe) -> Iterator[Problem]:
    """Parts of a recipe that the engine deepspeed does not have."""
    if engine_name(recipe) != DEEPSPEED:
        return
    parallel, model, _train = recipe.layout, recipe.model, recipe.train
    virtual = "virtual_pipeline_model_parallel_size"
    experts = "expert_model_parallel_size"
    bias = "moe_router_enable_expert_bias"
    tensor = "expert_tensor_parallel_size"
    without_pipeline = recipe.layout.zero is None or recipe.layout.zero.stage < 2  # above that `pipeline` reports it
    obstacles = {
        "layout.pipeline_model_parallel_size": (
            without_pipeline and parallel.pipeline_model_parallel_size > 1,
            parallel.pipeline_model_parallel_size,
            "the engine deepspeed does not support pipeline parallelism",
            "pipeline_model_parallel_size 1",
        ),
        f"layout.{virtual}": (
            parallel.virtual_pipeline_model_parallel_size is not None,
            parallel.virtual_pipeline_model_parallel_size,
            "the engine deepspeed does not support pipeline parallelism",
            f"remove {virtual}",
        ),
        "layout.context_parallel_size": (
            parallel.context_parallel_size > 1,
            parallel.context_parallel_size,
            "the engine deepspeed does not support context parallelism",
            "context_parallel_size 1",
        ),
        f"layout.{experts}": (
            parallel.expert_model_parallel_size > 1
            and (recipe.layout.zero is None or recipe.layout.zero.stage not in (1, 2)),
            parallel.expert_model_parallel_size,
            "the engine deepspeed supports expert parallelism at stages 1 and 2 only: stage 3 would shard experts "
            "over ranks that hold different experts",
            f"layout.zero.stage 2, or {experts} 1, so that every rank has all experts",
        ),
        f"layout.{tensor}": (
            model.num_moe_experts is not None
            and parallel.expert_tensor_parallel_size not in (None, parallel.tensor_model_parallel_size),
            parallel.expert_tensor_parallel_size,
            "tensor-parallel ranks that do not share an expert's matrices hold replicas of it, and DeepSpeed does not "
            "average over them",
            f"{tensor} {parallel.tensor_model_parallel_size}, or tensor_model_parallel_size 1",
        ),
        "model.mtp_num_layers": (
            model.mtp_num_layers is not None,
            model.mtp_num_layers,
            "the engine deepspeed does not support multi-token prediction",
            "remove mtp_num_layers",
        ),
        f"model.{bias}": (
            model.num_moe_experts is not None and model.moe_router_enable_expert_bias,
            "true",
            "the engine deepspeed does not support updating the expert bias",
            f"{bias} false with moe_router_load_balancing_type aux_loss",
        ),
        "faults.rerun_mode": (
            recipe.faults.rerun_mode == "validate_results",
            "validate_results",
            "the engine deepspeed cannot recompute a step; it stops at non-finite numbers",
            "remove rerun_mode",
        ),
        "faults.check_weight_hash_across_dp_replicas_interval": (
            recipe.faults.check_weight_hash_across_dp_replicas_interval is not None,
            recipe.faults.check_weight_hash_across_dp_replicas_interval,
            "the engine deepspeed does not support comparing replicas",
            "remove check_weight_hash_across_dp_replicas_interval",
        ),
        "faults.check_results_across_dp_replicas_interval": (
            recipe.faults.check_results_across_dp_replicas_interval is not None,
            recipe.faults.check_results_across_dp_replicas_interval,
            "the engine deepspeed does not support comparing replicas",
            "remove check_results_across_dp_replicas_interval",
        ),
        "checkpoint.non_persistent_save_interval": (
            recipe.checkpoint.non_persistent_save_interval is not None,
            recipe.checkpoint.non_persistent_save_interval,
            "the engine deepspeed does not support local checkpoints",
            "remove it and non_persistent_local_ckpt_dir",
        ),
        "layout.torch_compile": (
            recipe.layout.torch_compile,
            "true",
            "the engine deepspeed does not support torch.compile",
            "torch_compile false",
        ),
    }
    for key, (wrong, value, rule, fix) in obstacles.items():
        if wrong:
            yield Problem(
                key, f"{value} with engine deepspeed", rule, f"{fix}, or engine megatron with layout.zero.stage 1"
            )
    for name in ("overlap_grad_reduce", "overlap_param_gather"):
        if getattr(parallel, name):
            yield Problem(
                f"layout.{name}",
                "true with engine deepspeed",
                f"{name} is only used by the engine megatron; DeepSpeed uses layout.zero.overlap_comm",
                f"{name} false, and layout.zero.overlap_comm true",
            )


def offload(recipe: Recipe) -> Iterator[Problem]:
    """What can be offloaded at which stage (deepspeed/runtime/zero/offload_config.py), and where to."""
    zero = recipe.layout.zero
    if zero is None:
        return
    if zero.offload_optimizer != "none" and zero.stage == 0:
        yield Problem(
            "layout.zero.offload_optimizer",
            f"{zero.offload_optimizer} with layout.zero.stage 0",
            "offload_optimizer moves a rank's shard of the optimizer state: stage 1 to 3 with cpu, 3 with nvme",
            "layout.zero.stage 2, or offload_optimizer none",
        )
    elif zero.offload_optimizer == "nvme" and zero.stage < 3:
        yield Problem(
            "layout.zero.offload_optimizer",
            f"nvme with layout.zero.stage {zero.stage}",
            "DeepSpeed supports optimizer state on NVMe only at layout.zero.stage 3",
            "offload_optimizer cpu, or layout.zero.stage 3",
        )
    if zero.offload_param != "none" and zero.stage < 3:
        yield Problem(
            "layout.zero.offload_param",
            f"{zero.offload_param} with layout.zero.stage {zero.stage}",
            "parameters are sharded, and so can be offloaded, only at layout.zero.stage 3",
            "layout.zero.stage 3, or offload_param none",
        )
    on_disk = zero.offload_optimizer == "nvme"
    if on_disk and not (zero.nvme_path or "").strip():
        yield Problem(
            "layout.zero.nvme_path",
            "not set" if zero.nvme_path is None else "empty",
            "offload_optimizer nvme needs nvme_path, a folder on a disk of each node",
            "layout.zero.nvme_path /local_nvme",
        )
    if not on_disk and zero.nvme_path is not None:
        yield Problem(
            "layout.zero.nvme_path",
            f"{zero.nvme_path!r} without nvme",
            "nvme_path is only used with offload_optimizer nvme",
            "remove nvme_path",
        )


def stages(recipe: Recipe) -> Iterator[Problem]:
    """Keys that have an effect only at other stages; sizes that DeepSpeed accepts."""
    zero = recipe.layout.zero
    if zero is None or engine_name(recipe) == MEGATRON:
        return
    changed = _changed(zero)
    for key in changed:
        allowed = "0 to 3" if key in _OFFLOAD else _STAGES.get(key, "0 to 3")  # `offload` has their rules
        if str(zero.stage) not in _EACH[allowed]:
            yield Problem(
                f"layout.zero.{key}",
                f"{_shown(getattr(zero, key))} with layout.zero.stage {zero.stage}",
                f"{key} is only used at layout.zero.stage {allowed}",
                _left_out(key),
            )
        elif key == "allgather_bucket_size" and zero.allgather_bucket_size % 2:
            yield Problem(
                f"layout.zero.{key}",
                f"{zero.allgather_bucket_size}",
                "allgather_bucket_size must be even: DeepSpeed gathers in units of two elements",
                f"{key} {zero.allgather_bucket_size + 1}",
            )


_STAGES = {
    "allgather_bucket_size": "1 and 2",
    "reduce_bucket_size": "1 to 3",
    "overlap_comm": "1 to 3",
    **dict.fromkeys((*STAGE_3, "offload_param"), "3"),
}
"""Stages at which a key has an effect; the others have one at each."""
_EACH = {"0 to 3": "0123", "1 to 3": "123", "1 and 2": "12", "3": "3"}


def zeropp(recipe: Recipe) -> Iterator[Problem]:
    """What DeepSpeed 0.19.8 would compute wrongly with ZeRO++, silently; `plan.sharding` has the rules on ranks."""
    zero = recipe.layout.zero
    tensor = recipe.layout.tensor_model_parallel_size
    quantized = recipe.train.zero_quantized_gradients
    if zero is None or engine_name(recipe) != DEEPSPEED:
        return
    over_all_ranks = {
        "layout.zero.zero_hpz_partition_size": (zero.zero_hpz_partition_size > 1, zero.zero_hpz_partition_size),
        "train.zero_quantized_gradients": (quantized, "true"),
    }
    for key, (enabled, value) in over_all_ranks.items():
        if enabled and tensor > 1:
            yield Problem(
                key,
                f"{value} with tensor_model_parallel_size {tensor}",
                "DeepSpeed groups adjacent ranks, but tensor-parallel ranks hold different parameters",
                f"remove {key.rpartition('.')[2]}, or tensor_model_parallel_size 1",
            )
    if quantized and not _reduces_in_fp16(recipe):
        yield Problem(
            "train.zero_quantized_gradients",
            f"true with train.precision {recipe.train.precision} and "
            f"grad_reduce_in_fp32 {_shown(recipe.train.grad_reduce_in_fp32)}",
            "DeepSpeed's kernel reads all gradients as fp16, regardless of their type",
            "train.precision fp16 with train.grad_reduce_in_fp32 false, or remove zero_quantized_gradients",
        )


def quantized(recipe: Recipe) -> Iterator[Problem]:
    """ZeRO++ with fewer bits is of stage 3."""
    stage = None if recipe.layout.zero is None else recipe.layout.zero.stage
    for key in QUANTIZED:
        if getattr(recipe.train, key) and stage != 3:
            yield Problem(
                f"train.{key}",
                f"true with layout.zero.stage {stage}" if stage is not None else "true without layout.zero",
                f"{key} is only used at layout.zero.stage 3",
                f"layout.zero.stage 3, or remove {key}",
            )


def _reduces_in_fp16(recipe: Recipe) -> bool:
    return recipe.train.precision == "fp16" and not recipe.train.grad_reduce_in_fp32


def precision(recipe: Recipe) -> Iterator[Problem]:
    """Loss scales and types of gradients that DeepSpeed has."""
    train = recipe.train
    if engine_name(recipe) != DEEPSPEED or train.precision == "fp32":
        return
    if recipe.layout.zero is not None and recipe.layout.zero.stage == 0:
        yield Problem(
            "train.precision",
            f"{train.precision} with engine deepspeed and layout.zero.stage 0",
            "without ZeRO, the engine deepspeed supports fp32 only",
            "layout.zero.stage 1, or engine megatron",
        )
    if train.precision != "fp16":
        return
    power = math.log2(train.initial_loss_scale)
    if power != round(power):
        yield Problem(
            "train.initial_loss_scale",
            f"{train.initial_loss_scale:g}",
            "with the engine deepspeed, initial_loss_scale must be a power of two (DeepSpeed's initial_scale_power)",
            f"initial_loss_scale {2 ** math.floor(power):g} or {2 ** math.ceil(power):g}",
        )
    if train.min_loss_scale != round(train.min_loss_scale) or train.min_loss_scale < 1:
        yield Problem(
            "train.min_loss_scale",
            f"{train.min_loss_scale:g}",
            "with the engine deepspeed, min_loss_scale must be an integer, at least 1",
            f"min_loss_scale {max(1, round(train.min_loss_scale))}",
        )


def extra(recipe: Recipe) -> Iterator[Problem]:
    """Keys of `layout.zero.extra` that the recipe determines, that DeepSpeed lacks, or that would have no effect."""
    if recipe.layout.zero is not None:
        yield from check_extra(recipe.layout.zero)


def _changed(zero: Zero) -> list[str]:
    """Keys that are away from their defaults."""
    fields = type(zero).model_fields
    return [name for name, field in fields.items() if field.is_required() or getattr(zero, name) != field.default]


def _left_out(key: str) -> str:
    """The fix for a key without effect; an override cannot remove it from a file."""
    default = Zero.model_fields[key].get_default(call_default_factory=True)
    return f"remove {key}, or set its default: layout.zero.{key}={_shown(default)}"


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
