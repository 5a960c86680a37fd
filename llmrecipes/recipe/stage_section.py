"""A stage of a run: how long it is, and what is different in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from llmrecipes.recipe.section import JsonObject, NonNegFloat, PosInt, Section


class StageData(Section):
    """What a stage may change of the section `data`."""

    weights: Annotated[tuple[NonNegFloat, ...], Field(min_length=1, strict=False)] | None = None
    """Weight of each source of `data.sources`, in their order; 0: nothing of it is drawn. Held-out splits keep the
    weights of the sources. Unset: as before."""


class Stage(Section):
    """A part of a run with other values of some keys; they stay until a later stage changes them again."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")]
    """Its name in messages, metrics and the plan."""
    train_iters: PosInt | None = None
    """Steps of the stage. Of the last stage unset: what is left of `train.train_iters`."""
    tokens: PosInt | None = None
    """Tokens after which the stage ends, in place of `train_iters`: with the step that has the last of them."""
    model: JsonObject = Field(default_factory=dict)
    """Keys of `model` that change: `seq_length`, how positions are rotated, `moe_router_bias_update_rate` and
    `mtp_loss_scaling_factor`."""
    train: JsonObject = Field(default_factory=dict)
    """Keys of `train` that change: batch, micro-batch, recomputation, and what is frozen."""
    parallelism: JsonObject = Field(default_factory=dict)
    """Keys of `parallelism` that change: the stage has another layout of the same ranks."""
    speed: JsonObject = Field(default_factory=dict)
    """Keys of `speed` that change, such as those that only another layout can have."""
    optimizer: JsonObject = Field(default_factory=dict)
    """`lr` and `min_lr` of the schedule that begins with the stage."""
    scheduler: JsonObject = Field(default_factory=dict)
    """Keys of `scheduler` that change: the schedule begins again with the stage, and counts its steps."""
    data: StageData = StageData()


@dataclass(frozen=True)
class Span:
    """Where a stage is in its run; steps and samples are those before it.

    `order` and `schedule` are the first step and the end of the stages that share an order of samples, and those that
    share a schedule of the learning rate.
    """

    number: int
    name: str
    first_step: int
    last_step: int
    order: tuple[int, int]
    schedule: tuple[int, int]
    weights: tuple[float, ...] | None
    batches: Any
    """`BatchSchedule` of the run."""
    whole: Any
    """`Recipe` of the run."""
