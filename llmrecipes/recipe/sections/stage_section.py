"""A stage of a run: how long it is, and what is different in it."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from llmrecipes.recipe.sections.section import JsonObject, NonNegFloat, PosInt, Section


class StageData(Section):
    """Keys of `data` that a stage may change."""

    weights: Annotated[tuple[NonNegFloat, ...], Field(min_length=1, strict=False)] | None = None
    """Weight of each source of `data.sources`, in their order; 0: the source is not used. Held-out splits keep the
    weights of the sources. Unset: as before."""


class Stage(Section):
    """A part of a run with different values of some keys, which stay until a later stage changes them again."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")]
    """Name of the stage in messages, metrics and the plan."""
    train_iters: PosInt | None = None
    """Steps of the stage. Unset, in the last stage only: the rest of `train.train_iters`."""
    tokens: PosInt | None = None
    """Tokens after which the stage ends, instead of `train_iters`; the step with the last of them is the last step."""
    model: JsonObject = Field(default_factory=dict)
    """Keys of `model` to change: `seq_length`, rotary position embedding, `moe_router_bias_update_rate` and
    `mtp_loss_scaling_factor`."""
    train: JsonObject = Field(default_factory=dict)
    """Keys of `train` to change: batch, and what is frozen."""
    layout: JsonObject = Field(default_factory=dict)
    """Keys of `layout` to change: other degrees of the same ranks, micro-batch, recomputation, and what needs them."""
    optimizer: JsonObject = Field(default_factory=dict)
    """`lr` and `min_lr` of the schedule that begins with the stage."""
    scheduler: JsonObject = Field(default_factory=dict)
    """Keys of `scheduler` to change: a new schedule begins with the stage and counts its steps."""
    data: StageData = StageData()
