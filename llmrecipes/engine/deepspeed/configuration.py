"""The configuration for `deepspeed.initialize`, as in a `ds_config.json`; no import of DeepSpeed."""

from __future__ import annotations

import math
from copy import deepcopy
from typing import Any, cast

from llmrecipes.plan.derive import Plan
from llmrecipes.plan.sharding import OWNERS
from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.sections.zero import QUANTIZED, STAGE_3, Zero


def deepspeed_config(plan: Plan) -> dict[str, Any]:
    """The configuration of a plan whose recipe has a section `zero`: plain data, `layout.zero.extra` merged in last.

    Sizes are in elements. Optimizer and scheduler are not in it: the engine builds them.
    """
    recipe = plan.recipe
    zero = cast(Zero, recipe.layout.zero)  # a rule: this engine needs the section
    config: dict[str, Any] = {
        "train_batch_size": recipe.train.global_batch_size,
        "train_micro_batch_size_per_gpu": recipe.layout.micro_batch_size,
        "gradient_accumulation_steps": plan.num_microbatches,
        "gradient_clipping": recipe.optimizer.clip_grad,  # also 0, because the default clips at 1
        **_precision(recipe),
        "zero_optimization": _zero_optimization(recipe, zero, plan.layout.data_parallel_size, plan.device),
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": zero.offload_optimizer != "none",
        "steps_per_print": None,
        "wall_clock_breakdown": False,
    }
    return _merged(config, zero.extra)


def _zero_optimization(recipe: Recipe, zero: Zero, ranks: int, device: str) -> dict[str, Any]:
    if zero.stage == 0:
        return {"stage": 0}
    config: dict[str, Any] = {
        "stage": zero.stage,
        "contiguous_gradients": True,
        "reduce_scatter": True,
        "overlap_comm": zero.overlap_comm,
        "reduce_bucket_size": zero.reduce_bucket_size,
    }
    if zero.stage < 3:
        config["allgather_bucket_size"] = zero.allgather_bucket_size
        config["use_multi_rank_bucket_allreduce"] = ranks > OWNERS
    else:
        config |= {name: getattr(zero, name) for name in STAGE_3}
        config |= {name: getattr(recipe.train, name) for name in QUANTIZED}
    for name in ("offload_optimizer", "offload_param"):
        place = getattr(zero, name)
        if place != "none":
            path = {"nvme_path": zero.nvme_path} if place == "nvme" else {}
            config[name] = {"device": place, **path, "pin_memory": device == "cuda"}
    return config


def _precision(recipe: Recipe) -> dict[str, Any]:
    """Types of weights, of accumulated and of reduced gradients; dynamic loss scaling."""
    train = recipe.train
    reduced = "fp32" if recipe.train.grad_reduce_in_fp32 else train.precision
    config: dict[str, Any] = {"communication_data_type": reduced}
    if reduced != train.precision:
        config["data_types"] = {"grad_accum_dtype": reduced}
    if train.precision == "bf16":
        # Without it, stage 1 with fp32 gradients keeps the bf16 ones beside their sum: 2 bytes a parameter more.
        config["bf16"] = {"enabled": True, "immediate_grad_update": True}
    if train.precision == "fp16":
        config["fp16"] = {
            "enabled": True,
            "loss_scale": 0,
            "initial_scale_power": round(math.log2(train.initial_loss_scale)),
            "loss_scale_window": train.loss_scale_window,
            "hysteresis": train.hysteresis,
            "consecutive_hysteresis": False,
            "min_loss_scale": round(train.min_loss_scale),
        }
    return config


def _merged(config: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    """A copy of both; mappings are merged, other values of `extra` take precedence."""
    result = deepcopy(config)
    for name, value in extra.items():
        both = isinstance(value, dict) and isinstance(result.get(name), dict)
        result[name] = _merged(result[name], value) if both else deepcopy(value)
    return result
