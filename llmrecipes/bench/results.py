"""Spec and results of a benchmark's ranks, and their comparison with a cluster profile."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from llmrecipes.hardware.profile import LINK_BYTES, Group, MeasuredLinks, Profile
from llmrecipes.train.spec import RankSpec

ANSWER = "answer.json"


class BenchSpec(RankSpec):
    """One benchmark."""

    what: Literal["collectives", "step", "data", "ranks", "machine"]
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
    rows: tuple[MeasuredLinks, ...]


class StepTimes(BaseModel):
    """Optimizer steps on random tokens."""

    world_size: int
    layout: dict[str, int]
    seconds: tuple[float, ...]
    """Of each step, on the slowest rank."""
    processor_seconds: tuple[float, ...]
    """Processor time of each step in all threads of a rank, of the rank with the most; waiting is not counted."""
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


class MachineRates(BaseModel):
    """Rates of a node without GPUs; units as in `hardware.profile.Rates`."""

    gflops: float
    gflops_all: float
    depth: float
    attention_gflops: float
    memory_gb_per_s: float
    launch_us: float
    latency_us: float
    link_gb_per_s: float
    """Bytes that a process sends to another of the node."""


class LoaderReading(BaseModel):
    """Global batches of prepared data."""

    world_size: int
    seconds: tuple[float, ...]
    """Of each global batch, on the slowest rank."""
    tokens_per_batch: int
    first_seconds: float
    """Until the first batch, including opening the data and starting loader processes."""


LEAST = 0.8
"""Fraction of the expected bandwidth below which something is wrong."""
LEAST_OF_MEDIAN = 0.9
"""Share of the median rank's speed below which a rank slows the others down."""


@dataclass(frozen=True)
class CollectiveComparison:
    """One collective compared with the profile."""

    measured: MeasuredLinks
    expected_gb_per_s: float
    source: Literal["measured", "intra_node", "inter_node"]
    """Key of the profile with the expected value."""

    @property
    def share(self) -> float:
        """Measured over expected bandwidth."""
        return self.measured.bus_gb_per_s / self.expected_gb_per_s

    @property
    def ok(self) -> bool:
        """Whether it is at least `LEAST`."""
        return self.share >= LEAST

    def as_dict(self) -> dict[str, Any]:
        """JSON values."""
        values = {key: value for key, value in asdict(self).items() if key != "measured"}
        return {**self.measured.model_dump(mode="json"), **values, "share": self.share, "ok": self.ok}

    def as_text(self) -> str:
        """One line of text."""
        row = self.measured
        expected = f"{self.expected_gb_per_s:.3g} GB/s ({self.source})"
        what = f"{row.operation} in groups {row.group} of {row.ranks}, {row.bytes} bytes"
        return f"{what}: {row.bus_gb_per_s:.3g} GB/s, {self.share:.0%} of {expected}"


def slow_ranks(speeds: RankSpeeds) -> dict[int, float]:
    """Speed relative to the median, of the ranks that are slower than `LEAST_OF_MEDIAN` of it."""
    middle = statistics.median(speeds.seconds)
    shares = {rank: middle / seconds for rank, seconds in enumerate(speeds.seconds)}
    return {rank: share for rank, share in shares.items() if share < LEAST_OF_MEDIAN}


def compare(measured: Collectives, profile: Profile) -> list[CollectiveComparison]:
    """Compare with an earlier measurement, or else, from `LINK_BYTES` on, with the slowest link that a group uses.

    Args:
        profile: of the site; a `measured` row applies if operation, group, ranks and bytes are the same, and the
            ranks on a node, where the row has them.
    """
    before = {row.key: row.bus_gb_per_s for row in profile.measured}
    compared = []
    for row in measured.rows:
        if (known := before.get(row.key, before.get(row.unplaced.key))) is not None:
            compared.append(CollectiveComparison(row, known, "measured"))
        elif row.bytes >= LINK_BYTES:
            near = profile.nvlink_domain or measured.ranks_per_node
            if measured.reach[row.group] < near:
                compared.append(CollectiveComparison(row, profile.intra_node.gb_per_s, "intra_node"))
            else:
                compared.append(CollectiveComparison(row, profile.inter_node.gb_per_s, "inter_node"))
    return compared
