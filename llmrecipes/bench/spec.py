"""Spec and results of a benchmark's ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, Field

from llmrecipes.hardware.profile import Group, Measured
from llmrecipes.train.spec import RankSpec

ANSWER = "answer.json"


class BenchSpec(RankSpec):
    """One benchmark."""

    what: Literal["collectives", "step", "data", "ranks"]
    out: Path
    """Folder that receives `answer.json`."""
    sizes: tuple[int, ...] = ()
    """Bytes of collectives."""
    repeats: Annotated[int, Field(gt=0)] = 5
    """Measured repetitions of each collective or step, after warm-up."""


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
    """Of each step, on the slowest rank."""
    tokens_per_step: int
    flops_per_token: float
    peak_memory_bytes: int
    """Of the rank with the highest peak."""
    peak_tflops: float | None
    """Of one GPU; None if unknown."""


class RankSpeeds(BaseModel):
    """Matrix products of each rank by itself."""

    hosts: tuple[str, ...]
    seconds: tuple[float, ...]
    """Of one product, by rank."""
    flops: float
    """Of one product."""


class Reading(BaseModel):
    """Global batches of prepared data."""

    world_size: int
    seconds: tuple[float, ...]
    """Of each global batch, on the slowest rank."""
    tokens_per_batch: int
    first_seconds: float
    """Until the first batch, including opening the data and starting loader processes."""
