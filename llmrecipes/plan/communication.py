"""Time of a step's collectives, from bandwidths that `bench collectives` measured on the site, else from its links.

A lower bound on what a rank waits if nothing overlaps and nobody is late; none of it is an estimate of the step.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from llmrecipes.hardware.profile import LINK_BYTES, MeasuredLinks, Operation, Profile
from llmrecipes.plan.derive import Plan
from llmrecipes.plan.layout import Layout
from llmrecipes.plan.traffic import Call, GroupName, counted

Source = Literal["measured", "intra_node", "inter_node"]

MOST_RANKS_APART = 2
"""A row holds for groups with at most so many times, and at least so small a part, of its ranks."""
MOST_LARGER = 2
"""The largest row holds for buffers up to so many times its size; one of `LINK_BYTES` for all that are larger."""

OPERATIONS: dict[str, Operation] = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "reduce": "reduce_scatter",
    "all-to-all": "all_to_all",
    "message": "send_recv",
}
"""Measured operation of each kind of call; a reduction to one rank sends as much as one to all of them."""


@dataclass(frozen=True)
class Members:
    """A group of ranks at equal distances, the first of them on the first node."""

    name: GroupName
    ranks: int
    ranks_per_node: int
    reach: int
    """Its highest rank."""

    @property
    def on_one_node(self) -> bool:
        return self.ranks_per_node >= self.ranks


@dataclass(frozen=True)
class Calls:
    """Calls of one kind in one group, in a step of one rank. `bytes` is their payload, as `plan.traffic` defines it."""

    group: GroupName
    kind: str
    ranks: int
    calls: int
    bytes: int
    seconds: float
    source: Source
    """Key of the profile with the bandwidth."""


@dataclass(frozen=True)
class Communication:
    """Communication of the stage that communicates longest."""

    stage: int
    parts: tuple[Calls, ...]

    @property
    def seconds(self) -> float:
        return math.fsum(part.seconds for part in self.parts)

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"stage": self.stage, "seconds": self.seconds, "parts": [asdict(part) for part in self.parts]}


def communication(plan: Plan, profile: Profile, ranks_per_node: int) -> Communication:
    """Time of the collectives of a step."""
    stages = range(plan.layout.pipeline_model_parallel_size)
    return max(
        (_of_stage(plan, stage, profile, ranks_per_node) for stage in stages),
        key=lambda stage_traffic: stage_traffic.seconds,
    )


def _of_stage(plan: Plan, stage: int, profile: Profile, ranks_per_node: int) -> Communication:
    sums: dict[tuple[GroupName, str, int, Source], list[float]] = defaultdict(lambda: [0, 0, 0.0])
    for (name, call), number in counted(plan, stage).items():
        group = members(name, call.ranks, plan.layout, ranks_per_node)
        seconds, source = time_of(call, group, profile)
        total = sums[name, call.kind, call.ranks, source]
        for index, value in enumerate((number, number * call.payload, number * seconds)):
            total[index] += value
    parts = (
        Calls(name, kind, ranks, int(calls), int(size), seconds, source)
        for (name, kind, ranks, source), (calls, size, seconds) in sums.items()
    )
    return Communication(stage, tuple(sorted(parts, key=lambda part: -part.seconds)))


def members(name: GroupName, ranks: int, layout: Layout, ranks_per_node: int) -> Members:
    """The first rank's group of a kind, in Megatron's order of ranks."""
    tensor = layout.tensor_model_parallel_size
    context = layout.context_parallel_size
    inner = layout.expert_tensor_parallel_size
    of_stage = tensor * context * layout.data_parallel_size
    apart = {
        "tensor": 1,
        "context": tensor,
        "data": tensor,
        "pipeline": of_stage,
        "embedding": of_stage * (layout.pipeline_model_parallel_size - 1),
        "expert_tensor": 1,
        "experts": 1,
        "expert": inner,
        "expert_data": inner * layout.expert_model_parallel_size,
    }[name]
    return Members(name, ranks, min(ranks, -(-ranks_per_node // apart)), apart * (ranks - 1))


def time_of(call: Call, group: Members, profile: Profile) -> tuple[float, Source]:
    """Seconds of a call, and the key of the profile that they come from.

    Of `measured`, rows count whose operation is the same and whose group has as many ranks on each node (or is all on
    one), and at most `MOST_RANKS_APART` times as many or few in all; the nearest number of ranks, then the group of the
    same name. Between two sizes time grows linearly; below the smallest it stays; above the largest see `MOST_LARGER`.
    Otherwise the slowest link of the group counts, without latency.
    """
    rows = _nearest(OPERATIONS[call.kind], group, profile.measured)
    if rows and (seconds := _interpolated(call, rows)) is not None:
        return seconds, "measured"
    near = group.on_one_node or group.reach < (profile.nvlink_domain or 0)
    link = profile.intra_node if near else profile.inter_node
    return call.volume / (link.gb_per_s * 1e9), "intra_node" if near else "inter_node"


def _nearest(operation: Operation, group: Members, measured: Sequence[MeasuredLinks]) -> list[MeasuredLinks]:
    """Rows of one group, by size."""
    alike = [row for row in measured if row.operation == operation and _alike(row, group)]
    if not alike:
        return []
    best = min(alike, key=lambda row: _distance(row, group))
    rows = (row for row in alike if row.key[1:4] == best.key[1:4])
    return sorted(rows, key=lambda row: row.bytes)


def _distance(row: MeasuredLinks, group: Members) -> tuple[float, bool, bool, str]:
    apart = abs(math.log(row.ranks / group.ranks))
    return apart, row.group != group.name, row.ranks_per_node is None, row.group


def _alike(row: MeasuredLinks, group: Members) -> bool:
    if row.ranks_per_node is None:
        return (row.group, row.ranks) == (group.name, group.ranks)
    if not group.ranks / MOST_RANKS_APART <= row.ranks <= group.ranks * MOST_RANKS_APART:
        return False
    inside = row.ranks_per_node >= row.ranks
    return inside == group.on_one_node and (inside or row.ranks_per_node == group.ranks_per_node)


def _interpolated(call: Call, rows: Sequence[MeasuredLinks]) -> float | None:
    """Seconds according to rows of one group, by size; None: larger than all of them hold for."""
    times = [call._replace(payload=row.bytes).volume / (row.bus_gb_per_s * 1e9) for row in rows]
    size = call.payload
    largest = rows[-1].bytes
    if size > largest:
        holds = largest >= LINK_BYTES or size <= MOST_LARGER * largest
        return times[-1] * size / largest if holds else None
    if size <= rows[0].bytes:
        return times[0]
    upper = next(index for index, row in enumerate(rows) if row.bytes >= size)
    share = (size - rows[upper - 1].bytes) / (rows[upper].bytes - rows[upper - 1].bytes)
    return times[upper - 1] + share * (times[upper] - times[upper - 1])
