"""The recipes of a run's stages, each with the values that hold in it: a pure function of the recipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import Field, InstanceOf

from llmrecipes.recipe.schema import LayoutKeys, Recipe, Scheduler
from llmrecipes.recipe.sections.stage_section import Stage

if TYPE_CHECKING:
    from llmrecipes.recipe.derived.batch_schedule import BatchSchedule

BATCH = ("global_batch_size", "rampup_batch_size", "step_batch_size_schedule")
POSITIONS = (
    "seq_length", "max_position_embeddings", "position_embedding_type", "rotary_base", "rope_scaling",
    "rope_scaling_factor", "rotary_seq_len_interpolation_factor", "yarn_rotary_scaling_factor",
    "yarn_original_max_position_embeddings", "yarn_beta_fast", "yarn_beta_slow", "yarn_mscale", "yarn_mscale_all_dim",
    "yarn_correction_range_round_to_int", "rope_type", "rotary_scaling_factor", "original_max_position_embeddings",
    "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
)  # fmt: skip
LOSSES = ("moe_router_bias_update_rate", "mtp_loss_scaling_factor")
"""What else of `model` a published schedule changes (DeepSeek-V3, arXiv 2412.19437, section 4.2)."""
OF_PROCESS = ("attention_backend", "deterministic_mode")
"""Keys of `layout` that become variables of the process, which libraries read once."""
OF_RUN = ("name", "engine", "zero", "torch_compile", *OF_PROCESS)
"""Keys of `layout` that a stage cannot change."""
CHANGES = {
    "model": (*POSITIONS, *LOSSES),
    "train": (
        *BATCH, "freeze", "grad_reduce_in_fp32", "reduce_scatter_with_fp32_accumulation", "fp8", "fp8_recipe",
        "first_last_layers_bf16", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16",
    ),
    "layout": tuple(name for name in LayoutKeys.model_fields if name not in OF_RUN),
    "optimizer": ("lr", "min_lr"),
    "scheduler": tuple(Scheduler.model_fields),
}  # fmt: skip
"""Keys that a stage may change: checkpoints have the same form with them, and what was not frozen its state."""


@dataclass(frozen=True)
class Span:
    """Where a stage is in its run; steps and samples are those before it.

    `order` and `schedule` are the first step and the end of the stages that share an order of samples, and those that
    share a schedule of the learning rate. `batches` and `run_recipe` are the batch schedule and the recipe of the run.
    """

    number: int
    name: str
    first_step: int
    last_step: int
    order: tuple[int, int]
    schedule: tuple[int, int]
    weights: tuple[float, ...] | None
    batches: BatchSchedule
    run_recipe: Recipe


class StageRecipe(Recipe):
    """The recipe of a stage: the values that hold in it, without `stages`, and where it is in its run.

    Written to a file it is the recipe of a run that has these values throughout.
    """

    span: InstanceOf[Span] = Field(exclude=True)


def span_of(recipe: Recipe) -> Span | None:
    """Where the recipe of a stage is in its run; None: it is that of a run."""
    return recipe.span if isinstance(recipe, StageRecipe) else None


def run_recipe(recipe: Recipe) -> Recipe:
    """The recipe of the run that a stage's recipe belongs to."""
    return recipe.span.run_recipe if isinstance(recipe, StageRecipe) else recipe


def merged(recipe: Recipe) -> tuple[Recipe, ...]:
    """A recipe for each stage, with all that earlier stages changed; as long as the run, and without a span.

    Raises:
        ValidationError: a value is not one of its key.
    """
    current = recipe.model_copy(update={"stages": ()})
    recipes = []
    for stage in recipe.stages:
        values = changed(current.model_dump(mode="json"), stage)
        current = Recipe.model_validate(values)
        recipes.append(current)
    return tuple(recipes)


def schedule_iters(recipe: Recipe) -> int:
    """Steps with the schedule of a run, or of a stage and those that continue it."""
    span = span_of(recipe)
    return recipe.train.train_iters if span is None else span.schedule[1] - span.schedule[0]


def decay_iters(recipe: Recipe) -> int:
    """Step at which the learning rate reaches its minimum, in a stage counted from where its schedule begins."""
    return recipe.scheduler.lr_decay_iters or schedule_iters(recipe)


def begins(stage: Stage) -> tuple[bool, bool, bool]:
    """Whether a stage begins another order of samples, another global batch, and another schedule."""
    order = "seq_length" in stage.model or stage.data.weights is not None
    return order, any(name in stage.train for name in BATCH), bool(stage.scheduler or stage.optimizer)


def changed(values: dict[str, Any], stage: Stage) -> dict[str, Any]:
    for section in CHANGES:
        values[section] |= getattr(stage, section)
    if any(name in stage.train for name in BATCH):  # another batch is constant, unless the stage says how it grows
        values["train"] |= {name: stage.train.get(name) for name in BATCH[1:]}
    if stage.scheduler or stage.optimizer:
        values["scheduler"] |= {name: stage.scheduler.get(name) for name in ("lr_decay_iters", "lr_wsd_decay_iters")}
        values["scheduler"]["lr_warmup_iters"] = stage.scheduler.get("lr_warmup_iters", 0)
    return values
