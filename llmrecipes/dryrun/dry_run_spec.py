"""Request and report of a dry run. No torch."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from llmrecipes.hardware.cluster import Cluster
from llmrecipes.recipe.schema import Recipe
from llmrecipes.units import GIB

PARTS = ("weights", "gradients", "optimizer", "activations", "communication", "temporary")
"""Parts of a rank's memory, in the order of every table."""

Bytes = dict[str, int]


class DryRunSpec(BaseModel):
    """Ranks of one world."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    recipe: Recipe
    cluster: Cluster
    world_size: int
    ranks: tuple[int, ...]
    skew: Annotated[float, Field(ge=1.0)] = 1.0
    """Times its even share of tokens that one expert of each layer on the rank gets."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True)


class Pass(_Frozen):
    """A forward or backward pass of one micro-batch through one chunk."""

    kind: str
    """`forward` or `backward`."""
    chunk: int
    micro_batch: int
    begin: int
    """Operations before it."""


class Traffic(_Frozen):
    """Calls of one collective in one group, in a step."""

    group: str
    op: str
    calls: int
    bytes: int
    """Payload of this rank: the tensor of an all-reduce, broadcast or message, the input of a reduce-scatter or
    all-to-all, and of an all-gather what comes out."""
    ranks: int
    node_local: bool
    """Whether all ranks of the group are on this rank's node."""


class Share(_Frozen):
    """Memory of one kind of module at the peak."""

    module: str
    part: str
    bytes: int


class Moment(_Frozen):
    """Memory after one operation."""

    when: int
    parts: Bytes


class Save(_Frozen):
    """A checkpoint, on this rank."""

    held_bytes: int
    """Host memory of the snapshot."""
    written_bytes: int


class Resume(_Frozen):
    """Loading a checkpoint that the same layout has saved, on this rank."""

    held_bytes: int
    """Host memory of the largest part; they are read one after the other."""
    read_bytes: int
    traffic: tuple[Traffic, ...]
    """Collectives after reading."""


class RankReport(_Frozen):
    """One rank's step."""

    recipe: str
    world_size: int
    rank: int
    stage: int
    memory: Bytes
    """At the peak, by part."""
    planned: Bytes
    """The plan's, of this rank's stage."""
    most_activations: int
    """Most activations at a time. The peak of all memory may be another moment: with few layers, the gradients of a
    layer's activations outweigh what its backward pass has already freed."""
    planned_most_activations: int
    modules: tuple[Share, ...]
    """At the peak, largest first; without model states."""
    timeline: tuple[Moment, ...]
    traffic: tuple[Traffic, ...]
    waits: dict[str, int]
    """Host waits for the device in a step, by the line of code."""
    passes: tuple[Pass, ...]
    operations: int
    save: Save
    resume: Resume
    build_seconds: float
    seconds: float
    """Of everything, building included, but not imports."""

    def contract(self) -> dict[str, Any]:
        """The output of `--json`."""
        return {
            "recipe": self.recipe,
            "world_size": self.world_size,
            "rank": self.rank,
            "stage": self.stage,
            "memory_gib": in_gib(self.memory),
            "planned_gib": in_gib(self.planned),
            "collectives": [
                collective.model_dump(include={"group", "op", "calls", "bytes"}) for collective in self.traffic
            ],
            "syncs_per_step": sum(self.waits.values()),
            "save": {"held_gib": self.save.held_bytes / GIB, "written_gib": self.save.written_bytes / GIB},
            "seconds": round(self.seconds, 1),
        }


def in_gib(memory: Bytes) -> dict[str, float]:
    """By part and in total; buffers of communication are temporary."""
    parts = {name: memory.get(name, 0) / GIB for name in PARTS}
    parts["temporary"] += parts.pop("communication")
    return {**parts, "total": sum(parts.values())}


def report_name(rank: int) -> str:
    """File of a rank's report."""
    return f"rank-{rank}.json"
