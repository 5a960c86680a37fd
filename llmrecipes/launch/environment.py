"""The environment of a rank, from the plan and the cluster profile or the detected GPUs.

No other module chooses such variables.

Variables that the user has set take precedence, so that one can be tried out without editing a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from llmrecipes.hardware.cluster import Cluster
from llmrecipes.hardware.nics import RDMA, nccl_ib_hca
from llmrecipes.hardware.profile import Profile
from llmrecipes.plan.derive import Plan
from llmrecipes.plan.run_plan import RunPlan
from llmrecipes.recipe.speedups.features import value

FLIGHT_RECORDER_ENTRIES = 2000
"""Collectives that each rank records for the dump after a timeout (the size that PyTorch's tools assume)."""
MOST_THREADS = 16
"""Maximum OpenMP threads of a rank with a GPU, where the CPU only prepares work."""
BLACKWELL = frozenset({"B200", "B300", "GB200", "GB300"})
"""Words in the names of GPUs that need no single queue to overlap communication."""
HOPPER = frozenset({"H100", "H200", "GH200"})
NORM_MARGIN = "20"
DETERMINISTIC = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring"}
"""Without them TransformerEngine, cuBLAS and NCCL may add in another order each time."""
FABRIC = "LLMRECIPES_FABRIC"
"""Variable with the kind of network that ranks of different nodes must use; each proves it at the start."""
OLDER_NAMES = {"PYTORCH_ALLOC_CONF": "PYTORCH_CUDA_ALLOC_CONF"}
"""Names under which a user may have set a variable, by the one that is set here."""


def environment(profile: Profile, plan: RunPlan, ranks_per_node: int, logs: Path | None = None) -> dict[str, str]:
    """Variables of every rank of a run, the same on all of them.

    Args:
        profile: the site; its variables take precedence over derived ones.
        plan: its degrees decide what must overlap.
        ranks_per_node: ranks that share a node's CPU.
        logs: folder for dumps of collectives that timed out; None: /tmp, PyTorch's default.

    The names are NCCL's (https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html), PyTorch's, gloo's and
    libfabric's.
    """
    gpu = "" if profile.gpu is None else profile.gpu.name
    adapters = nccl_ib_hca(profile)
    return {
        "OMP_NUM_THREADS": str(threads(profile.cpu_cores, ranks_per_node, on_gpus=bool(gpu))),
        **(_for_gpus(plan, logs, gpu) if gpu else {}),
        **_for_fabric(profile, plan, ranks_per_node),
        **({} if adapters is None else {"NCCL_IB_HCA": adapters}),
        **{name: str(value) for name, value in profile.environment.items()},
    }


def detected_environment(cluster: Cluster, plan: RunPlan, logs: Path | None = None) -> dict[str, str]:
    """Variables of every rank on the detected GPUs, without those that only a site knows; none on CPUs.

    Args:
        cluster: this machine, or several like it.
        plan, logs: as in `environment`.
    """
    return _for_gpus(plan, logs, cluster.gpus[0].name) if cluster.gpus else {}


def explained(profile: Profile | None, cluster: Cluster, plan: RunPlan) -> dict[str, tuple[str, str]]:
    """Variables of ranks on GPUs that decide on their speed: value and reason; those of a profile with its name.

    Args:
        profile: the site; None: this machine.
        cluster: its nodes.
        plan: of a run on them.
    """
    if not cluster.gpus:
        return {}
    of_site = {} if profile is None else {name: str(value) for name, value in profile.environment.items()}
    reasons = {name: (value, f"profile {profile.name}") for name, value in of_site.items()} if profile else {}
    return {**gpu_variables(plan, cluster.gpus[0].name), **reasons}


def threads(cpu_cores: float, ranks: int, *, on_gpus: bool) -> int:
    """OpenMP threads of each of the ranks that share some cores."""
    share = max(1, int(cpu_cores) // ranks)
    return min(share, MOST_THREADS) if on_gpus else share


def missing(wanted: Mapping[str, str], current: Mapping[str, str]) -> dict[str, str]:
    """The wanted variables that the user has not set."""
    return {
        name: value
        for name, value in wanted.items()
        if name not in current and OLDER_NAMES.get(name, name) not in current
    }


def _for_fabric(profile: Profile, plan: RunPlan, ranks_per_node: int) -> dict[str, str]:
    """The network that NCCL must use; nothing where no network is needed."""
    ranks = plan.world_size
    kind = profile.inter_node.kind
    if profile.gpu is None or kind not in RDMA or ranks <= max(ranks_per_node, profile.nvlink_domain or 0):
        return {}
    return {FABRIC: kind}


def _for_gpus(plan: RunPlan, logs: Path | None, gpu: str) -> dict[str, str]:
    values = {name: value for name, (value, _) in gpu_variables(plan, gpu).items()}
    if logs is not None:
        values["TORCH_FR_DUMP_TEMP_FILE"] = str(logs / "collectives-rank-")
    return values


def _shares_layers(plan: Plan) -> bool:
    return plan.layout.tensor_model_parallel_size > 1 or plan.layout.context_parallel_size > 1


def gpu_variables(plan: RunPlan, gpu: str) -> dict[str, tuple[str, str]]:
    """Variables of ranks on GPUs by name: value and reason; what one stage of a run needs, all of them have.

    Args:
        plan: its layout, layers and features decide.
        gpu: name in nvidia-smi.
    """
    words = set(gpu.replace("-", " ").split())
    values = dict(_ALWAYS) | _queues(plan, blackwell=bool(BLACKWELL & words))
    if plan.world_size > 1 and not any(stage.recipe.layout.high_priority_stream_groups for stage in plan.stages):
        values["TORCH_NCCL_HIGH_PRIORITY"] = (
            "1",
            "starts NCCL's kernels before queued computation; Megatron-Bridge sets it",
        )
    if HOPPER & words and plan.largest.target.transformer_engine and any(map(_overlaps, plan.stages)):
        margin = (
            NORM_MARGIN,
            "multiprocessors that TransformerEngine's norms leave free for overlapped NCCL kernels; "
            "Megatron-Bridge sets it on H100",
        )
        values |= {f"NVTE_{direction}_LAYERNORM_SM_MARGIN": margin for direction in ("FWD", "BWD")}
    if any(value(stage.features, "cuda_graph_impl") for stage in plan.stages):
        values["NCCL_GRAPH_REGISTER"] = (
            "0",
            "otherwise NCCL registers CUDA graph buffers, which expandable segments move; megatron-core requires it",
        )
    if value(plan.largest.features, "deterministic_mode"):
        reason = "layout.deterministic_mode"
        values |= {name: (setting, reason) for name, setting in DETERMINISTIC.items()}
    return values


_ALWAYS = {
    "CUDA_DEVICE_ORDER": ("PCI_BUS_ID", "nvidia-smi's order, used to bind ranks to the cores next to their GPU"),
    "NCCL_DEBUG": ("WARN", "logs NCCL's warnings"),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": ("1", "ends a rank when a collective fails"),
    "TORCH_FR_BUFFER_SIZE": (str(FLIGHT_RECORDER_ENTRIES), "number of collectives in a dump after a timeout"),
    "TORCH_NCCL_DUMP_ON_TIMEOUT": ("1", "writes a dump after a timeout"),
    "PYTORCH_ALLOC_CONF": ("expandable_segments:True", "reduces memory fragmentation"),
}


def _queues(plan: RunPlan, *, blackwell: bool) -> dict[str, tuple[str, str]]:
    """How many queues of kernels a GPU has, where features need a number."""
    if any(value(stage.features, "overlap_moe_expert_parallel_comm") for stage in plan.stages):
        return {
            "CUDA_DEVICE_MAX_CONNECTIONS": (
                "32",
                "expert communication and another micro-batch's kernels need separate queues; Megatron-Bridge sets it",
            )
        }
    if not any(map(_shares_layers, plan.stages)):
        return {}
    return {
        "CUDA_DEVICE_MAX_CONNECTIONS": (
            "32" if blackwell else "1",
            "a single queue runs kernels in launch order, which megatron-core's overlap of tensor and context "
            "parallelism relies on (tensor_parallel/layers.py); not needed on Blackwell",
        )
    }


def _overlaps(stage: Plan) -> bool:
    """Whether kernels run beside communication."""
    layout = stage.recipe.layout
    return _shares_layers(stage) or layout.overlap_grad_reduce or layout.overlap_param_gather
