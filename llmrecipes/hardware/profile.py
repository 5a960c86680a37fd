"""A cluster profile: a site's nodes, links and schedulers. Plain data; nothing here is derived."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from llmrecipes.recipe.section import JsonObject, NonNegInt, PosFloat, PosInt, Section

Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/@=,-]*$")]
"""A name of a partition, resource or constraint: no blanks, no leading dash, nothing a shell or Slurm would split."""
Variable = Annotated[str, Field(pattern=r"^[A-Z][A-Z0-9_]*$")]


Label = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")]
ObjectName = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$")]
QualifiedName = Annotated[
    str, Field(pattern=r"^([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$")
]
Quantity = Annotated[str, Field(pattern=r"^[1-9][0-9]*(Ki|Mi|Gi|Ti)$")]
LabelValue = Annotated[str, Field(pattern=r"^([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?$")]
Folder = Annotated[str, Field(pattern=r"^/[^:\n]*$")]


PAGES = {"2Mi": 2, "32Mi": 32, "1Gi": 1024}
"""Sizes of huge pages, in MiB."""
UNITS = {"Ki": 1 / 1024, "Mi": 1, "Gi": 1024, "Ti": 1024**2}


def mebibytes(amount: Quantity) -> float:
    """An amount of memory in MiB."""
    return int(amount[:-2]) * UNITS[amount[-2:]]


class Toleration(Section):
    """A taint of the nodes that pods tolerate, besides the one named like `gpu_resource`."""

    key: Word | None = None
    """Its key; unset: all taints."""
    operator: Literal["Exists", "Equal"] = "Exists"
    """Whether the value matters."""
    value: str | None = None
    """Its value, for `Equal`."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Its effect; unset: all."""


class Volume(Section):
    """A volume of the pod, from one of `host_path`, `claim` and `empty_dir`."""

    name: Label
    """Its name in the pod."""
    mount_path: Folder | None = None
    """Folder in the containers of the run; unset: only sidecars mount it."""
    host_path: Folder | None = None
    """Folder of the node; needs a namespace that allows `privileged` pods."""
    claim: ObjectName | None = None
    """PersistentVolumeClaim in the namespace."""
    empty_dir: Quantity | None = None
    """Size limit of an empty folder on the node's disk."""
    read_only: bool = False
    """Whether the run only reads it."""


class ResourceClaim(Section):
    """A claim of dynamic resource allocation (DRA), from one of `template` and `claim`."""

    name: Label
    """Its name in the pod."""
    template: ObjectName | None = None
    """ResourceClaimTemplate: each pod gets its own claim."""
    claim: ObjectName | None = None
    """ResourceClaim that all pods share."""


class Kubernetes(Section):
    """Resources and settings of this site's pods."""

    gpu_resource: Word = "nvidia.com/gpu"
    """Resource that counts GPUs."""
    rdma_resource: Word | None = None
    """Resource of network adapters; unset: none is asked for."""
    rdma_count: NonNegInt = 0
    """Number of them for a pod with a full node."""
    hugepages: dict[Literal["2Mi", "32Mi", "1Gi"], Quantity] = Field(default_factory=dict)
    """Memory in huge pages of a size, for a pod with a full node; a multiple of the size."""
    compute_domain: bool = False
    """Whether pods get a channel of IMEX, which NVLink between nodes needs, from NVIDIA's DRA driver."""
    resource_claims: Annotated[tuple[ResourceClaim, ...], Field(strict=False)] = ()
    """Further claims of dynamic resource allocation."""
    node_selector: dict[QualifiedName, LabelValue] = Field(default_factory=dict)
    """Labels of the nodes."""
    tolerations: Annotated[tuple[Toleration, ...], Field(strict=False)] = ()
    """Further taints of the nodes."""
    priority_class: ObjectName | None = None
    """PriorityClass of the pods."""
    environment: dict[Variable, str | int | None] = Field(default_factory=dict)
    """Variables of pods, over the profile's `environment`; null removes one."""
    annotations: dict[QualifiedName, str] = Field(default_factory=dict)
    """Annotations of pods, such as the networks of Multus or GKE."""
    volumes: Annotated[tuple[Volume, ...], Field(strict=False)] = ()
    """Further volumes."""
    sidecars: Annotated[tuple[JsonObject, ...], Field(strict=False)] = ()
    """Containers as in a pod, which start after the check of the node and stop after the training."""
    patch: JsonObject = Field(default_factory=dict)
    """Strategic merge patch of the pod template (`metadata`, `spec`), applied by kubectl."""


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


class Rates(Section):
    """Speed of a node without GPUs in fp32, by `llmrecipes bench machine --write`."""

    gflops: PosFloat
    """1e9 FLOP/s of a large matrix product on one core."""
    gflops_all: PosFloat
    """The same on all cores of the node, in one process."""
    depth: float = Field(ge=0)
    """Inner dimension at which a product reaches half of `gflops`."""
    attention_gflops: PosFloat
    """1e9 FLOP/s of causal attention on one core, 512 positions, heads of 64 channels, half of the scores counted."""
    memory_gb_per_s: PosFloat
    """Gigabytes (1e9 bytes) per second, read and written, of element-wise operations on one core."""
    launch_us: PosFloat
    """Microseconds of a small operation, its part of the backward pass included."""
    latency_us: PosFloat
    """Microseconds of a step of a ring between two processes of a node."""


class Calibration(Section):
    """Measured over predicted times, by `llmrecipes plan --calibration --write`."""

    compute: PosFloat = 1
    """Factor of kernels, launches and memory traffic."""
    communication: PosFloat = 1
    """Factor of collectives and messages."""
    runs: PosInt
    """Runs it was fitted to."""


class MeasuredLinks(Section):
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
    def unplaced(self) -> MeasuredLinks:
        """The row without `ranks_per_node`, as older versions have written it."""
        return self.model_copy(update={"ranks_per_node": None})


class Costs(Section):
    """Costs of a GPU, for `llmrecipes plan` and the energy of runs."""

    usd_per_gpu_hour: PosFloat | None = None
    """Price of a GPU for an hour, in US dollars."""
    watts_per_gpu: PosFloat | None = None
    """Power of a node in training, divided by its GPUs."""
    pue: Annotated[float, Field(ge=1)] = 1.0
    """Power of the building divided by that of its machines."""
    kg_co2_per_kwh: PosFloat | None = None
    """Carbon intensity of its electricity."""


COSTS = "LLMRECIPES_COSTS"
"""Variable of the environment with `Costs` as JSON, of a start without a profile: pods get their site's."""


class Failures(Section):
    """Failure rate of GPUs, for `llmrecipes plan`."""

    gpu_hours_per_failure: PosFloat
    """Hours that GPUs train, added up, for each failure that ends a run."""
    restart_minutes: PosFloat
    """Minutes from a failure to the next step."""


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
    costs: Costs | None = None
    """Prices and power; unset: `llmrecipes plan` leaves cost, energy and carbon out."""
    failures: Failures | None = None
    """Failures of its GPUs; unset: intervals between checkpoints are not compared."""
    rates: Rates | None = None
    """Speed of a node without GPUs, by `llmrecipes bench machine --write`; unset: no times are predicted for it."""
    calibration: Calibration | None = None
    """What runs here have measured; unset: predictions are those of the GPU's data file."""
    environment: dict[Variable, str | int] = Field(default_factory=dict)
    """Variables of every rank: NCCL, UCX, GLOO, libfabric. Pods take no names of network interfaces from it."""
    slurm: Slurm = Slurm()
    """Slurm's part."""
    kubernetes: Kubernetes = Kubernetes()
    """Kubernetes' part."""
    measured: Annotated[tuple[MeasuredLinks, ...], Field(strict=False)] = ()
    """Results of `llmrecipes bench collectives --write`."""

    @property
    def ranks_per_node(self) -> int:
        """Default ranks per node: one per GPU, or one."""
        return self.gpus_per_node or 1
