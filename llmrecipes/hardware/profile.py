"""A cluster profile: what a site's nodes, links and schedulers are. It only holds; nothing here is derived."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from llmrecipes.recipe.schema import NonNegInt, PosFloat, PosInt, Section

Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/@=,-]*$")]
"""A name of a partition, resource or constraint: no blanks, no leading dash, nothing a shell or Slurm would split."""
Variable = Annotated[str, Field(pattern=r"^[A-Z][A-Z0-9_]*$")]
Mount = Annotated[str, Field(pattern=r"^/[^:,\n]*(:/[^:,\n]*(:(ro|rw))?)?$")]

Operation = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv"]
Group = Literal["tensor", "context", "pipeline", "data", "expert", "world"]


class Gpu(Section):
    """One GPU of a node."""

    name: str
    """As nvidia-smi shows it."""
    memory_gib: PosFloat
    """GiB that are free on an idle one."""
    peak_tflops: PosFloat
    """Dense bf16 peak in TFLOP/s, without sparsity."""


class Link(Section):
    """How data gets from one GPU (of a node without GPUs: from one process) to another."""

    kind: Literal["nvlink", "pcie", "infiniband", "roce", "efa", "tcpx", "ethernet", "memory"]
    """What it is."""
    gb_per_s: PosFloat
    """Gigabytes (1e9 bytes) a second that one GPU can send while all others send as well; a data sheet's figure."""


class Slurm(Section):
    """Defaults of jobs that `llmrecipes submit --to slurm` hands to this site."""

    partition: Word | None = None
    """Partition; unset: the site's default."""
    gres: Word | None = None
    """Generic resources of each node, such as `gpu:h100:8`; unset: none are asked for by name."""
    constraint: str | None = None
    """Node features, such as `h100&nvme`; unset: none."""
    container_runtime: Literal["pyxis", "apptainer", "none"] = "none"
    """How a container image is run: the pyxis plugin of srun, Apptainer, or not at all."""
    mounts: Annotated[tuple[Mount, ...], Field(strict=False)] = ()
    """Folders that a container sees besides the working, runs and data directories: `SRC`, `SRC:DST`, `SRC:DST:ro`."""
    switches: PosInt | None = None
    """Most leaf switches that a job's nodes may hang on; unset: as many as it comes."""
    switches_wait: str = "01:00:00"
    """How long a job waits for so few switches (Slurm's time format)."""
    segment: PosInt | None = None
    """Nodes that have to lie in one block (an NVLink domain) of Slurm's block topology; unset: no blocks."""


class Kubernetes(Section):
    """Names of this site's resources in Kubernetes."""

    gpu_resource: Word = "nvidia.com/gpu"
    """Resource that counts GPUs."""
    rdma_resource: Word | None = None
    """Resource that gives a pod its network adapters; unset: plain TCP."""
    rdma_count: NonNegInt = 0
    """How many of them a pod with a whole node takes."""
    node_selector: dict[str, str] = Field(default_factory=dict)
    """Labels of the nodes."""


class Measured(Section):
    """What `llmrecipes bench collectives` measured."""

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


class Profile(Section):
    """What a site has."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")]
    """Name of the profile, that of its file."""
    description: str = ""
    """One line for `llmrecipes clusters`."""
    gpus_per_node: NonNegInt
    """GPUs of a node; 0: training on processors."""
    gpu: Gpu | None = None
    """The GPU; needed where there are any."""
    cpu_cores: PosInt
    """Processor cores of a node."""
    memory_gib: PosFloat
    """Main memory of a node in GiB."""
    nvlink_domain: PosInt | None = None
    """GPUs that reach each other at the speed of `intra_node`, over nodes; unset: those of one node."""
    intra_node: Link
    """Between GPUs of a node, or of an NVLink domain."""
    inter_node: Link
    """Between GPUs of different nodes."""
    environment: dict[Variable, str | int] = Field(default_factory=dict)
    """Variables of every rank: NCCL, UCX, GLOO, libfabric."""
    slurm: Slurm = Slurm()
    """Slurm's part."""
    kubernetes: Kubernetes = Kubernetes()
    """Kubernetes' part."""
    measured: Annotated[tuple[Measured, ...], Field(strict=False)] = ()
    """What `llmrecipes bench collectives --write` found."""

    @property
    def ranks_per_node(self) -> int:
        """Ranks that a node has where nobody says otherwise: one a GPU, or one."""
        return self.gpus_per_node or 1
