"""Rank of this process, and its variables for torch.distributed; only set here."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass

from llmrecipes.errors import UserError

FIRST_PORT, PORTS = 12000, 16000
"""Rendezvous ports are below Linux' ephemeral ports (32768 and up)."""
LOOPBACK = "127.0.0.1"
LAUNCHER = "LLMRECIPES_LAUNCHER"
"""Variable with the process id of the launcher; a rank exits with it."""
SPARE = "--spare"
"""Last argument of a process that waits until it is needed as a rank (`launch.local.spares`)."""
SPARE_RANK = "LLMRECIPES_SPARE"
"""Variable of such a process: the rank that it may become."""
SPARE_READY, SPARE_TAKEN = b"r", b"t"
"""What it sends when it has imported everything, and when it goes on as a rank."""
FIRST_STEP = "LLMRECIPES_FIRST_STEP"
"""Variable with the descriptor to which the first rank of a node writes after its first step."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""Signals that stop a run: schedulers send SIGTERM, terminals SIGINT, `sbatch --signal` SIGUSR1."""


@dataclass(frozen=True)
class Rank:
    """One process of a run: its ranks, from 0, and the address of the first rank."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int

    def variables(self) -> dict[str, str]:
        """Variables of torch.distributed; on a single machine nothing listens to other ones."""
        one_node = self.world_size == self.local_world_size
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": LOOPBACK if one_node else self.master_addr,
            "MASTER_PORT": str(self.master_port),
            **({"GLOO_SOCKET_IFNAME": "lo"} if one_node else {}),
        }


@dataclass(frozen=True)
class Node:
    """One machine of a run: its index, from 0, and the address of the first rank."""

    number: int
    nodes: int
    master_addr: str
    master_port: int

    def ranks(self, ranks_per_node: int) -> list[Rank]:
        """The ranks of this node.

        Args:
            ranks_per_node: the same on all nodes.
        """
        first = self.number * ranks_per_node
        all_of_them = self.nodes * ranks_per_node
        return [
            Rank(first + local, all_of_them, local, ranks_per_node, self.master_addr, self.master_port)
            for local in range(ranks_per_node)
        ]


def node(nodes: int, number: int | None, rendezvous: str | None, environment: Mapping[str, str]) -> Node:
    """This node among all.

    Args:
        nodes: number of nodes.
        number: from 0; None: from a pod's environment (`PET_NODE_RANK` of Kubeflow's Trainer, or
            `JOB_COMPLETION_INDEX` of an Indexed Job or a JobSet).
        rendezvous: `HOST:PORT` of the first node; None: `PET_MASTER_ADDR` and `PET_MASTER_PORT`, or `MASTER_ADDR` and
            `MASTER_PORT`.
        environment: with those variables.

    Raises:
        UserError: it is unknown or invalid.
    """
    if number is None:
        index = environment.get("PET_NODE_RANK") or environment.get("JOB_COMPLETION_INDEX") or ""
        if not index.isdecimal():
            raise UserError(
                "not set",
                where="--node-rank",
                rule=f"--node-rank is required when --nnodes is {nodes}",
                fix="--node-rank 0 on the first node, 1 on the next",
            )
        number = int(index)
    if not 0 <= number < nodes:
        raise UserError(
            f"{number} with --nnodes {nodes}",
            where="--node-rank",
            rule=f"a number from 0 to {nodes - 1}, different on every node",
        )
    if rendezvous is None:
        for prefix in ("PET_MASTER", "MASTER"):
            host = environment.get(f"{prefix}_ADDR")
            port = environment.get(f"{prefix}_PORT")
            if host and port:
                rendezvous = f"{host}:{port}"
                break
        else:
            raise UserError(
                "not set",
                where="--rdzv",
                rule="--rdzv is required when --nnodes > 1",
                fix="--rdzv HOST:29500, the same on all nodes",
            )
    host, _, port = rendezvous.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UserError(
            f"{rendezvous!r} is not HOST:PORT",
            where="--rdzv",
            rule="--rdzv is the address of the first node",
            fix="--rdzv node-0:29500",
        )
    return Node(number, nodes, host.strip("[]"), int(port))


def from_slurm(environment: Mapping[str, str]) -> Rank:
    """The rank of a task that srun started, one task per rank.

    Args:
        environment: with Slurm's variables and `MASTER_ADDR`, which the batch script sets to the first host.

    Raises:
        UserError: it is not a task of srun.
    """
    try:
        job = int(environment["SLURM_JOB_ID"])
        world_size = int(environment["SLURM_NTASKS"])
        return Rank(
            rank=int(environment["SLURM_PROCID"]),
            world_size=world_size,
            local_rank=int(environment["SLURM_LOCALID"]),
            # `2(x3)` is Slurm's notation for three nodes with two tasks each.
            local_world_size=int(environment["SLURM_STEP_TASKS_PER_NODE"].partition("(")[0].partition(",")[0]),
            master_addr=environment["MASTER_ADDR"],
            master_port=port_of(f"{job}"),
        )
    except (KeyError, ValueError) as error:
        raise UserError(
            f"not a task of srun: {error} is missing or not a number",
            where="srun",
            rule="ranks of a Slurm job are started by slurm/train.sbatch",
            fix="llmrecipes submit, or sbatch slurm/train.sbatch RECIPE",
        ) from error


def port_of(job: str) -> int:
    """A port that a job's ranks agree on without communication, and other jobs on the node probably do not use.

    Args:
        job: any name of the job, for Slurm its id.
    """
    number = int(job) if job.isdecimal() else sum(job.encode())
    return FIRST_PORT + number % PORTS
