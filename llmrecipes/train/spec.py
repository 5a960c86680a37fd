"""What the ranks of a run are told by the process that starts them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from llmrecipes.recipe.schema import Recipe


class RankSpec(BaseModel):
    """What the ranks of any world are told: to train, to verify or to measure."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    recipe: Recipe
    data_dir: Path


class RunOptions(BaseModel):
    """What the command line asks of the ranks of a training."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    overfit_batch: bool = False
    """Train on the first global batch alone, to see whether the model can learn it by heart."""
    anomaly: bool = False
    """Check every module's output and every backward function for NaN and infinity."""
    profile_steps: Annotated[int, Field(ge=0)] = 0
    """Steps to profile, after two of warm-up; 0 for none."""
    from_scratch: bool = False
    """Move what the run has recorded out of the way, and start at step 0."""
    sample: bool = True
    """End with a text sample."""


class RunSpec(RunOptions, RankSpec):
    """One start of a run, written as JSON into its directory."""

    run_dir: Path
    runs_dir: Path
    stop_after: Annotated[int, Field(gt=0)] | None = None
    """Save and stop after this step, as a signal would make it."""
    restart: Annotated[int, Field(ge=0)] = 0
    """How often a scheduler has started this job again."""
    tags: dict[str, str] = {}
    """What MLflow is told about where the run is, such as the number of its job."""
