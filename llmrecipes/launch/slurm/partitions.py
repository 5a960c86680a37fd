"""The partitions of a Slurm cluster, and whether a job can ever start in one of them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from llmrecipes.errors import UserError
from llmrecipes.hardware.slurm_words import limit_seconds
from llmrecipes.launch.programs import SchedulerUnavailable, ask
from llmrecipes.launch.slurm.slurm_options import require_time

logger = logging.getLogger(__name__)
UNLIMITED = "UNLIMITED"


@dataclass(frozen=True)
class SlurmPartition:
    """A partition: nodes, whatever their state; limits in Slurm's notation."""

    name: str
    nodes: int
    default: bool
    most_nodes: str
    default_time: str
    longest_time: str


@dataclass(frozen=True)
class WantedResources:
    """What a job asks for.

    Attributes:
        partitions: names; empty: the default partition.
        nodes: the fewest that it can run on.
        limit: time limit in Slurm's notation; None: the partition's.
        warning: seconds before the limit at which it saves.
    """

    partitions: tuple[str, ...]
    nodes: int
    limit: str | None
    warning: int


def known(where: Sequence[str] = ()) -> list[SlurmPartition]:
    """All partitions that the user may see; none if Slurm does not answer.

    Args:
        where: options that name a cluster.
    """
    try:
        return list(parse(ask(("scontrol", *where, "--oneliner", "show", "partition"))))
    except (SchedulerUnavailable, UserError):  # sbatch says so itself
        return []


def parse(text: str) -> Iterator[SlurmPartition]:
    """Partitions in the output of `scontrol --oneliner show partition`."""
    for line in text.splitlines():
        fields = dict(word.split("=", 1) for word in line.split() if "=" in word)
        if "PartitionName" in fields and fields.get("TotalNodes", "").isdecimal():
            yield SlurmPartition(
                name=fields["PartitionName"],
                nodes=int(fields["TotalNodes"]),
                default=fields.get("Default") == "YES",
                most_nodes=fields.get("MaxNodes", UNLIMITED),
                default_time=fields.get("DefaultTime", "NONE"),
                longest_time=fields.get("MaxTime", UNLIMITED),
            )


def require_room(partitions: Sequence[SlurmPartition], wanted: WantedResources) -> None:
    """Refuse a job that could never start, and warn about one that a limit may keep waiting.

    Args:
        partitions: of the cluster.
        wanted: by the job.

    Raises:
        UserError: no named partition has enough nodes, or its own time limit leaves no time to train.
    """
    named = [
        entry for entry in partitions if entry.name in wanted.partitions or (entry.default and not wanted.partitions)
    ]
    if not named or len(named) < len(wanted.partitions):  # unknown, or hidden from this user
        return
    large = [entry for entry in named if entry.nodes >= wanted.nodes]
    if not large:
        largest = max(partitions, key=lambda entry: entry.nodes)
        fits = f", or --partition {largest.name}" if largest.nodes >= wanted.nodes else ""
        has = ", ".join(f"{entry.name} has {entry.nodes}" for entry in named)
        raise UserError(
            f"{wanted.nodes} nodes, but partition {has}",
            where="--nodes",
            rule="a job gets all its nodes from one partition; this one would wait forever",
            fix=f"at most {max(entry.nodes for entry in named)} nodes{fits}",
        )
    if wanted.limit is None and len(large) == 1:
        (only,) = large
        own = only.longest_time if only.default_time == "NONE" else only.default_time
        require_time(own, wanted.warning, f"the time limit of partition {only.name}")
    for entry in large:
        _warn_of_limits(entry, wanted)


def _warn_of_limits(partition: SlurmPartition, wanted: WantedResources) -> None:
    if partition.most_nodes.isdecimal() and wanted.nodes > int(partition.most_nodes):
        logger.warning(
            "partition %s allows %s nodes a job, %d are requested", partition.name, partition.most_nodes, wanted.nodes
        )
    longest = limit_seconds(partition.longest_time)
    limit = None if wanted.limit is None else limit_seconds(wanted.limit)
    if longest is not None and limit is not None and limit > longest:
        logger.warning(
            "partition %s allows at most %s, the time limit is %s", partition.name, partition.longest_time, wanted.limit
        )
