"""The learning rate over steps, by megatron-core's scheduler."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from llmrecipes.plan.derive import decay_iters
from llmrecipes.recipe.schema import Recipe


def scheduler(recipe: Recipe, optimizer: Any) -> OptimizerParamScheduler:
    """The scheduler of a recipe.

    Args:
        recipe: defines the curve.
        optimizer: its parameter groups are updated.
    """
    schedule = recipe.scheduler
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=recipe.optimizer.lr,
        min_lr=recipe.optimizer.min_lr,
        lr_warmup_steps=schedule.lr_warmup_iters,
        lr_decay_steps=decay_iters(recipe),
        lr_decay_style=schedule.lr_decay_style,
        start_wd=recipe.optimizer.weight_decay,
        end_wd=recipe.optimizer.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
        # A resumed run follows the current recipe; the checkpoint only provides the step.
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
        wsd_decay_steps=schedule.lr_wsd_decay_iters,
        lr_wsd_decay_style=schedule.lr_wsd_decay_style,
    )


def learning_rate(recipe: Recipe, step: int) -> float:
    """Learning rate of a step, counted from 1, if no step was skipped."""
    curve = scheduler(recipe, SimpleNamespace(param_groups=[]))
    curve.num_steps = step - 1
    return float(curve.get_lr({}))
