"""What the ranks of a verification are told, and what they answer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from llmrecipes.train.spec import RankSpec

RECORD = "record.json"


class VerifySpec(RankSpec):
    """One training to observe: as the reference, or in the layout that is compared with it."""

    folder: Path
    """Where the record goes."""
    iters: Annotated[int, Field(gt=0)]
    tolerance: Annotated[float, Field(gt=0)]
    reference: Path | None = None
    """Record to compare with while training: the weights and gradients of the first step that differs are kept."""
    keep_step: int | None = None
    """Step, from 1, whose weights and gradients are kept in any case."""


class Step(BaseModel):
    """What one optimizer step came to."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")

    loss: float
    """Mean loss per token of the global batch."""
    grad_norm: float
    """Global gradient norm before clipping."""


class ReplicaDifference(BaseModel):
    """The first copy of a weight that is not the one on the lowest rank that holds it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: int
    """Optimizer steps before it was seen; 0: the ranks started with it."""
    tensor: str
    """As megatron-core's modules are called, with layer and expert."""
    layer: int | None
    """Decoder layer, from 0; None for what is outside of the layers."""
    rank: int
    """The rank whose copy differs."""
    main_rank: int
    """The lowest rank with the same part of the tensor."""
    differing: int
    """Copies that differ, of all tensors and ranks."""
    copies: int
    """Copies that were compared with a lower rank's."""


class Record(BaseModel):
    """A training as it was observed."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")

    layout: dict[str, int]
    """Degrees by name, and `world_size`."""
    steps: tuple[Step, ...]
    kept_step: int | None
    """Step, from 1, whose weights and gradients were kept."""
    replicas: ReplicaDifference | None
    """First copy of a weight that differs from that of another rank."""

    def write(self, folder: Path) -> None:
        """Write it as JSON."""
        (folder / RECORD).write_text(self.model_dump_json() + "\n", "utf-8")

    @classmethod
    def read(cls, folder: Path) -> Record:
        """Read what `write` wrote."""
        return cls.model_validate_json((folder / RECORD).read_text("utf-8"))
