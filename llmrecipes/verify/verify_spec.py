"""Spec and record of a verification's ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from llmrecipes.train.spec import RankSpec

RECORD = "record.json"


class VerifySpec(RankSpec):
    """One training to record: the reference, or the layout that is compared with it."""

    folder: Path
    """Output directory of the record."""
    iters: Annotated[int, Field(gt=0)]
    tolerance: Annotated[float, Field(gt=0)]
    reference: Path | None = None
    """Record to compare with while training: the weights and gradients of the first step that differs are kept."""
    keep_step: int | None = None
    """Step, from 1, whose weights and gradients are kept in any case."""


class StepRecord(BaseModel):
    """Result of one optimizer step."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")

    loss: float
    """Mean loss per token of the global batch."""
    grad_norm: float
    """Global gradient norm before clipping."""


class ReplicaDifference(BaseModel):
    """The first replica of a weight that differs from the one on the lowest rank that holds it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: int
    """Optimizer steps before it was detected; 0: from the start."""
    tensor: str
    """Named like megatron-core's modules, with layer and expert."""
    layer: int | None
    """Decoder layer, from 0; None outside of the layers."""
    rank: int
    """The rank whose replica differs."""
    main_rank: int
    """The lowest rank with the same part of the tensor."""
    differing: int
    """Replicas that differ, over all tensors and ranks."""
    copies: int
    """Replicas that were compared with a lower rank's."""


class TrainingRecord(BaseModel):
    """A recorded training."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")

    layout: dict[str, int]
    """Degrees by name, and `world_size`."""
    steps: tuple[StepRecord, ...]
    kept_step: int | None
    """Step, from 1, whose weights and gradients were kept."""
    replicas: ReplicaDifference | None
    """First replica of a weight that differs from another rank's."""

    def write(self, folder: Path) -> None:
        """Write it as JSON."""
        (folder / RECORD).write_text(self.model_dump_json() + "\n", "utf-8")

    @classmethod
    def read(cls, folder: Path) -> TrainingRecord:
        """Read what `write` wrote."""
        return cls.model_validate_json((folder / RECORD).read_text("utf-8"))
