"""A cluster profile: a site's nodes, links and schedulers. Plain data; nothing here is derived."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from llmrecipes.hardware.pods import Kubernetes
from llmrecipes.hardware.words import Variable, Word
from llmrecipes.recipe.section import NonNegInt, PosFloat, PosInt, Section

Mount = Annotated[str, Field(pattern=r"^/[^:,\n]*(:/[^:,\n]*(:(ro|rw))?)?$")]

Operation = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv"]
Group = Literal["tensor", "context", "pipeline", "data", "expert", "world"]


class Gpu(Section):
    """One GPU of a node."""

    name: str
    """Name in nvidia-smi."""
    memory_gib: PosFloat
    """Free GiB of an idle GPU."""
    peak_tflops: PosFloat
    """Dense bf16 peak in TFLOP/s, without sparsity."""


class Link(Section):
    """Connection between GPUs, or between processes of nodes without GPUs."""

    kind: Literal["nvlink", "pcie", "infiniband", "roce", "efa", "tcpx", "ethernet", "memory"]
    """Its type."""
    gb_per_s: PosFloat
    """Gigabytes (1e9 bytes) per second that one GPU can send while all others send as well; from a data sheet."""


class Adapters(Section):
    """InfiniBand, RoCE or EFA ports of a node."""

    ports: PosInt
    """Ports that training uses."""
    gb_per_s: PosFloat
    """Gigabytes (1e9 bytes) per second of one port."""
    names: Annotated[tuple[Word, ...], Field(strict=False)] = ()
    """Such as `mlx5_0` or `mlx5_0:1`, for NCCL_IB_HCA; unset: all ports with the link layer of `inter_node`."""


class Slurm(Section):
    """Defaults of jobs that `llmrecipes submit --to slurm` submits to this site."""

    partition: Word | None = None
    """Partition; unset: the site's default."""
    gres: Word | None = None
    """Generic resources of each node, such as `gpu:h100:8`; unset: no --gres."""
    constraint: str | None = None
    """Node features, such as `h100&nvme`; unset: none."""
    container_runtime: Literal["pyxis", "apptainer", "none"] = "none"
    """How a container image is run: the pyxis plugin of srun, Apptainer, or not at all."""
    mounts: Annotated[tuple[Mount, ...], Field(strict=False)] = ()
    """Folders that a container sees besides the working, runs and data directories: `SRC`, `SRC:DST`, `SRC:DST:ro`."""
    cpu_partition: Word | None = None
    """Partition without GPUs, for jobs that tokenize; unset: the partition of the run."""
    switches: PosInt | None = None
    """Maximum leaf switches of a job's nodes; unset: from `nodes_per_switch`, else no limit."""
    nodes_per_switch: PosInt | None = None
    """Nodes of a leaf switch, or of a rail-optimized group of them: a job asks for as few as its nodes need."""
    switches_wait: str = "01:00:00"
    """How long a job waits for this number of switches (Slurm's time format)."""
    segment: PosInt | None = None
    """Nodes that must be in one block (an NVLink domain) of Slurm's block topology; unset: no blocks."""


LINK_BYTES = 256 << 20
"""Smaller buffers are latency-bound, and do not measure a link."""


class Measured(Section):
    """A result of `llmrecipes bench collectives`."""

    operation: Operation
    """The collective."""
    group: Group
    """Ranks of the layout that took part; all groups of a kind at the same time."""
    ranks: PosInt
    """Ranks of one such group."""
    bytes: PosInt
    """Size of the buffer as nccl-tests counts it."""
    seconds: PosFloat
    """Median of the slowest rank's times."""
    bus_gb_per_s: PosFloat
    """Bus bandwidth in 1e9 bytes a second (nccl-tests, doc/PERFORMANCE.md)."""
    ranks_per_node: PosInt | None = None
    """Ranks of such a group on one node; unset: unknown."""

    @property
    def key(self) -> tuple[str, str, int, int | None, int]:
        """What was measured."""
        return self.operation, self.group, self.ranks, self.ranks_per_node, self.bytes

    @property
    def unplaced(self) -> Measured:
        """The row without `ranks_per_node`, as older versions have written it."""
        return self.model_copy(update={"ranks_per_node": None})


class Profile(Section):
    """A site."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")]
    """Name of the profile; matches its file name."""
    description: str = ""
    """One line for `llmrecipes clusters`."""
    gpus_per_node: NonNegInt
    """GPUs of a node; 0: training on CPUs."""
    gpu: Gpu | None = None
    """The GPU; required if there are any."""
    cpu_cores: PosInt
    """CPU cores of a node."""
    memory_gib: PosFloat
    """Main memory of a node in GiB."""
    nvlink_domain: PosInt | None = None
    """GPUs that reach each other at the speed of `intra_node`, over nodes; unset: those of one node."""
    intra_node: Link
    """Between GPUs of a node, or of an NVLink domain."""
    inter_node: Link
    """Between GPUs of different nodes."""
    adapters: Adapters | None = None
    """Ports behind `inter_node`; unset: one for each GPU."""
    storage_gb_per_s: PosFloat = 5
    """Gigabytes (1e9 bytes) per second that all nodes of a job together write to the file system of runs."""
    environment: dict[Variable, str | int] = Field(default_factory=dict)
    """Variables of every rank: NCCL, UCX, GLOO, libfabric. Pods take no names of network interfaces from it."""
    slurm: Slurm = Slurm()
    """Slurm's part."""
    kubernetes: Kubernetes = Kubernetes()
    """Kubernetes' part."""
    measured: Annotated[tuple[Measured, ...], Field(strict=False)] = ()
    """Results of `llmrecipes bench collectives --write`."""

    @property
    def ranks_per_node(self) -> int:
        """Default ranks per node: one per GPU, or one."""
        return self.gpus_per_node or 1
