"""A cluster profile: a site's nodes, links and schedulers. Plain data; nothing here is derived."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from llmrecipes.hardware.slurm_words import TIME
from llmrecipes.recipe.sections.section import JsonObject, NonNegInt, PosFloat, PosInt, Section

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
    """Key of the taint; unset: all taints."""
    operator: Literal["Exists", "Equal"] = "Exists"
    """Whether the taint's value must match (`Equal`) or not (`Exists`)."""
    value: str | None = None
    """Value of the taint, for `Equal`."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Effect of the taint; unset: all effects."""


class Volume(Section):
    """A volume of the pod; set exactly one of `host_path`, `claim` and `empty_dir`."""

    name: Label
    """Name of the volume in the pod."""
    mount_path: Folder | None = None
    """Mount point in the containers of the run; unset: only sidecars mount it."""
    host_path: Folder | None = None
    """Folder on the node; needs a namespace that allows `privileged` pods."""
    claim: ObjectName | None = None
    """PersistentVolumeClaim in the namespace."""
    empty_dir: Quantity | None = None
    """Size limit of an empty folder on the node's disk."""
    read_only: bool = False
    """Mount the volume read-only in the containers of the run."""


class ResourceClaim(Section):
    """A claim for dynamic resource allocation (DRA); set exactly one of `template` and `claim`."""

    name: Label
    """Name of the claim in the pod."""
    template: ObjectName | None = None
    """ResourceClaimTemplate from which every pod gets a separate claim."""
    claim: ObjectName | None = None
    """ResourceClaim that all pods share."""


class Kubernetes(Section):
    """Resources and settings of this site's pods."""

    gpu_resource: Word = "nvidia.com/gpu"
    """Resource name of GPUs."""
    rdma_resource: Word | None = None
    """Resource name of network adapters; unset: none are requested."""
    rdma_count: NonNegInt = 0
    """Number of network adapters to request for a pod with a full node."""
    hugepages: dict[Literal["2Mi", "32Mi", "1Gi"], Quantity] = Field(default_factory=dict)
    """Memory in huge pages by page size, for a pod with a full node; must be a multiple of the page size."""
    compute_domain: bool = False
    """Request an IMEX channel from NVIDIA's DRA driver, which NVLink between nodes needs."""
    resource_claims: Annotated[tuple[ResourceClaim, ...], Field(strict=False)] = ()
    """Additional claims for dynamic resource allocation."""
    node_selector: dict[QualifiedName, LabelValue] = Field(default_factory=dict)
    """Labels that nodes must have."""
    tolerations: Annotated[tuple[Toleration, ...], Field(strict=False)] = ()
    """Additional taints to tolerate."""
    priority_class: ObjectName | None = None
    """PriorityClass of the pods."""
    environment: dict[Variable, str | int | None] = Field(default_factory=dict)
    """Environment variables of pods, in addition to the profile's `environment`; null removes one."""
    annotations: dict[QualifiedName, str] = Field(default_factory=dict)
    """Annotations of pods, such as networks for Multus or GKE."""
    volumes: Annotated[tuple[Volume, ...], Field(strict=False)] = ()
    """Additional volumes."""
    sidecars: Annotated[tuple[JsonObject, ...], Field(strict=False)] = ()
    """Additional containers, which start after the node check and stop after training."""
    patch: JsonObject = Field(default_factory=dict)
    """Strategic merge patch of the pod template (`metadata`, `spec`), applied by kubectl."""


TimeLimit = Annotated[str, Field(pattern=f"^({TIME.pattern})$")]
"""In Slurm's notation."""
Line = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]+$")]
Mount = Annotated[str, Field(pattern=r"^/[^:,\n]*(:/[^:,\n]*(:(ro|rw))?)?$")]

Operation = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv"]
Group = Literal["tensor", "context", "pipeline", "data", "expert", "world"]


class Gpu(Section):
    """A GPU of a node."""

    name: str
    """Name in nvidia-smi."""
    memory_gib: PosFloat
    """Free memory of an idle GPU in GiB."""
    peak_tflops: PosFloat
    """Dense bf16 peak in TFLOP/s, without sparsity."""


class Link(Section):
    """Connection between GPUs, or between processes of nodes without GPUs."""

    kind: Literal["nvlink", "pcie", "infiniband", "roce", "efa", "tcpx", "ethernet", "memory"]
    """Type of the connection."""
    gb_per_s: PosFloat
    """Gigabytes (1e9 bytes) per second that a GPU can send while all others send too; from a data sheet."""


class Adapters(Section):
    """InfiniBand, RoCE or EFA ports of a node."""

    ports: PosInt
    """Number of ports that training uses."""
    gb_per_s: PosFloat
    """Gigabytes (1e9 bytes) per second per port."""
    names: Annotated[tuple[Word, ...], Field(strict=False)] = ()
    """Names of the ports for NCCL_IB_HCA, such as `mlx5_0` or `mlx5_0:1`; unset: all ports with the link layer of
    `inter_node`."""


class Slurm(Section):
    """Defaults for jobs submitted to this site by `llmrecipes submit --to slurm`."""

    partition: Word | None = None
    """Partition; unset: the site's default."""
    account: Word | None = None
    """Account to charge; unset: the user's default."""
    qos: Word | None = None
    """Quality of service; unset: the account's default."""
    time: TimeLimit | None = None
    """Time limit of a run's job, such as `8:00:00` or `2-00:00:00`; unset: the partition's."""
    sbatch: Annotated[tuple[Line, ...], Field(strict=False)] = ()
    """Further sbatch options of a run's job, such as `--reservation=x` or `--mail-type=FAIL`."""
    setup: Annotated[tuple[Line, ...], Field(strict=False)] = ()
    """Shell commands before anything else in jobs, such as `module load cuda`; all processes of the job get their
    environment."""
    gres: Word | None = None
    """Generic resources per node, such as `gpu:h100:8`; unset: no --gres."""
    constraint: str | None = None
    """Node features, such as `h100&nvme`; unset: none."""
    container_runtime: Literal["pyxis", "apptainer", "none"] = "none"
    """How to run a container image: with the pyxis plugin of srun, with Apptainer, or not at all."""
    mounts: Annotated[tuple[Mount, ...], Field(strict=False)] = ()
    """Folders to mount into containers besides the working, runs and data directories: `SRC`, `SRC:DST`,
    `SRC:DST:ro`."""
    cpu_partition: Word | None = None
    """Partition without GPUs, for jobs that tokenize; unset: the partition of the run."""
    switches: PosInt | None = None
    """Maximum number of leaf switches for the nodes of a job; unset: derived from `nodes_per_switch`, otherwise no
    limit."""
    nodes_per_switch: PosInt | None = None
    """Nodes per leaf switch, or per rail-optimized group of switches; a job requests as few as its nodes need."""
    switches_wait: str = "01:00:00"
    """How long a job waits for that number of switches (Slurm's time format)."""
    segment: PosInt | None = None
    """Nodes that must be in the same block (an NVLink domain) of Slurm's block topology; unset: no blocks."""


LINK_BYTES = 256 << 20
"""Smaller buffers are latency-bound, and do not measure a link."""


class Rates(Section):
    """Speed of a node without GPUs in fp32, measured by `llmrecipes bench machine --write`."""

    gflops: PosFloat
    """1e9 FLOP/s of a large GEMM on one core."""
    gflops_all: PosFloat
    """The same on all cores of the node, in one process."""
    depth: float = Field(ge=0)
    """Inner dimension at which a GEMM reaches half of `gflops`."""
    attention_gflops: PosFloat
    """1e9 FLOP/s of causal attention on one core, with 512 positions and heads of 64 channels, counting half of the
    scores."""
    memory_gb_per_s: PosFloat
    """Gigabytes (1e9 bytes) per second read and written by element-wise operations on one core."""
    launch_us: PosFloat
    """Microseconds of a small operation, including its part of the backward pass."""
    latency_us: PosFloat
    """Microseconds per step of a ring between two processes of a node."""


class Calibration(Section):
    """Ratio of measured to predicted times, from `llmrecipes plan --calibration --write`."""

    compute: PosFloat = 1
    """Factor for kernels, launches and memory traffic."""
    communication: PosFloat = 1
    """Factor for collectives and messages."""
    runs: PosInt
    """Number of runs used for the fit."""


class MeasuredLinks(Section):
    """A result of `llmrecipes bench collectives`."""

    operation: Operation
    """Collective operation."""
    group: Group
    """Kind of group in the layout; all groups of a kind ran at the same time."""
    ranks: PosInt
    """Ranks per group."""
    bytes: PosInt
    """Buffer size, as nccl-tests counts it."""
    seconds: PosFloat
    """Median time of the slowest rank."""
    bus_gb_per_s: PosFloat
    """Bus bandwidth in 1e9 bytes per second (nccl-tests, doc/PERFORMANCE.md)."""
    ranks_per_node: PosInt | None = None
    """Ranks of a group on the same node; unset: unknown."""

    @property
    def key(self) -> tuple[str, str, int, int | None, int]:
        """What was measured."""
        return self.operation, self.group, self.ranks, self.ranks_per_node, self.bytes

    @property
    def unplaced(self) -> MeasuredLinks:
        """The row without `ranks_per_node`, as older versions have written it."""
        return self.model_copy(update={"ranks_per_node": None})


class Costs(Section):
    """Costs of GPUs, for `llmrecipes plan` and the energy of runs."""

    usd_per_gpu_hour: PosFloat | None = None
    """Price of a GPU-hour in US dollars."""
    watts_per_gpu: PosFloat | None = None
    """Power of a node during training, divided by its GPUs, in watts."""
    pue: Annotated[float, Field(ge=1)] = 1.0
    """Power usage effectiveness: power of the building divided by that of its machines."""
    kg_co2_per_kwh: PosFloat | None = None
    """Carbon intensity of the electricity, in kg CO2 per kWh."""


COSTS = "LLMRECIPES_COSTS"
"""Variable of the environment with `Costs` as JSON, of a start without a profile: pods get their site's."""


class Failures(Section):
    """Failure rate of GPUs, for `llmrecipes plan`."""

    gpu_hours_per_failure: PosFloat
    """Training GPU-hours per failure that ends a run."""
    restart_minutes: PosFloat
    """Minutes from a failure to the next step."""


class Profile(Section):
    """A cluster profile."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")]
    """Name of the profile; must match its file name."""
    description: str = ""
    """One-line description for `llmrecipes clusters`."""
    gpus_per_node: NonNegInt
    """GPUs per node; 0: train on CPUs."""
    gpu: Gpu | None = None
    """GPU type; required if there are GPUs."""
    cpu_cores: PosInt
    """CPU cores per node."""
    memory_gib: PosFloat
    """Main memory per node in GiB."""
    nvlink_domain: PosInt | None = None
    """GPUs that communicate at the speed of `intra_node`, across nodes; unset: those of a node."""
    intra_node: Link
    """Link between GPUs of a node, or of an NVLink domain."""
    inter_node: Link
    """Link between GPUs of different nodes."""
    adapters: Adapters | None = None
    """Network ports of `inter_node`; unset: one per GPU."""
    storage_gb_per_s: PosFloat = 5
    """Gigabytes (1e9 bytes) per second that all nodes of a job together can write to the file system of runs."""
    costs: Costs | None = None
    """Prices and power; unset: `llmrecipes plan` omits cost, energy and carbon."""
    failures: Failures | None = None
    """Failure rate of the GPUs; unset: checkpoint intervals are not compared."""
    rates: Rates | None = None
    """Speed of a node without GPUs, from `llmrecipes bench machine --write`; unset: no times are predicted."""
    calibration: Calibration | None = None
    """Corrections from runs on this cluster; unset: predictions use the GPU's data file."""
    environment: dict[Variable, str | int] = Field(default_factory=dict)
    """Environment variables of every rank: NCCL, UCX, GLOO, libfabric. Names of network interfaces are not passed to
    pods."""
    slurm: Slurm = Slurm()
    """Settings for Slurm."""
    kubernetes: Kubernetes = Kubernetes()
    """Settings for Kubernetes."""
    measured: Annotated[tuple[MeasuredLinks, ...], Field(strict=False)] = ()
    """Results of `llmrecipes bench collectives --write`."""

    @property
    def ranks_per_node(self) -> int:
        """Default ranks per node: one per GPU, or one."""
        return self.gpus_per_node or 1
