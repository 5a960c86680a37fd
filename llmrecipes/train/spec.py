"""Specs that the launching process passes to the ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from llmrecipes.hardware.profile import Costs
from llmrecipes.launch.run_options import RunOptions
from llmrecipes.recipe.schema import Recipe
from llmrecipes.rundir import Run


class RankSpec(BaseModel):
    """Common part of the specs for training, verification and benchmarks."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    recipe: Recipe
    data_dir: Path


class RunSpec(RunOptions, RankSpec):
    """One start of a run, written as JSON into its directory."""

    run_dir: Path
    runs_dir: Path
    pretrained: Path | None = None
    """Folder of the weights that `train.pretrained` names, for a run that has no checkpoint yet, or adapters."""
    teacher: Path | None = None
    """Checkpoint, or folder in Hugging Face's form, that `distill.teacher` names."""
    on_gpus: bool = False
    """Whether the run was planned for GPUs, so that a rank without one must not train."""
    planned: dict[str, Any] | None = None
    """`Plan.facts` of the plan that was checked; a rank that derives others must not train. Older versions had none."""
    nvlink_domain: Annotated[int, Field(gt=0)] | None = None
    """GPUs of an NVLink domain of several nodes, which a profile knows and no rank detects."""
    predicted: dict[str, Any] | None = None
    """`Forecast.record` of that plan; None: nothing is known of the machine's speed."""
    chosen: dict[str, Any] | None = None
    """`RunPlan.chosen` of that plan."""
    costs: Costs | None = None
    """Of the profile; None: energy has no carbon, and is not estimated."""
    stop_after: Annotated[int, Field(gt=0)] | None = None
    """Save and stop after this step, as after a signal."""
    restart: Annotated[int, Field(ge=0)] = 0
    """How often a scheduler has started this job again."""
    tags: dict[str, str] = {}
    """MLflow tags about the environment of the run, such as its job id."""

    @property
    def run(self) -> Run:
        return Run(self.run_dir)
