"""What the ranks of a measurement are told, and what they answer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, Field

from llmrecipes.hardware.profile import Group, Measured
from llmrecipes.train.spec import RankSpec

ANSWER = "answer.json"


class BenchSpec(RankSpec):
    """One measurement."""

    what: Literal["collectives", "step", "data"]
    out: Path
    """Folder that receives `answer.json`."""
    sizes: tuple[int, ...] = ()
    """Bytes of collectives."""
    repeats: Annotated[int, Field(gt=0)] = 5
    """Times that each collective or step is measured, after some that are not."""


class Collectives(BaseModel):
    """Bandwidth of every operation, group and size."""

    backend: str
    world_size: int
    ranks_per_node: int
    reach: dict[Group, int]
    """Highest rank of the first rank's group of each kind."""
    rows: tuple[Measured, ...]


class StepTimes(BaseModel):
    """Optimizer steps on random tokens."""

    world_size: int
    layout: dict[str, int]
    seconds: tuple[float, ...]
    """Of each step, of the slowest rank."""
    tokens_per_step: int
    flops_per_token: float
    peak_memory_bytes: int
    """Of the rank that has most."""
    peak_tflops: float | None
    """Of one GPU; None where it is not known."""


class Reading(BaseModel):
    """Global batches of prepared data."""

    world_size: int
    seconds: tuple[float, ...]
    """Of each global batch, of the slowest rank."""
    tokens_per_batch: int
    first_seconds: float
    """Until the first batch: opening, and starting loader processes."""
