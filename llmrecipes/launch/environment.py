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

FLIGHT_RECORDER_ENTRIES = 2000
"""Collectives that each rank records for the dump after a timeout (the size that PyTorch's tools assume)."""
MOST_THREADS = 16
"""Maximum OpenMP threads of a rank with a GPU, where the CPU only prepares work."""
BLACKWELL = frozenset({"B200", "B300", "GB200", "GB300"})
"""Words in the names of GPUs that need no single queue to overlap communication."""
FABRIC = "LLMRECIPES_FABRIC"
"""Variable with the kind of network that ranks of different nodes must use; each proves it at the start."""
OLDER_NAMES = {"PYTORCH_ALLOC_CONF": "PYTORCH_CUDA_ALLOC_CONF"}
"""Names under which a user may have set a variable, by the one that is set here."""


def environment(profile: Profile, plan: Plan, ranks_per_node: int, logs: Path | None = None) -> dict[str, str]:
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


def detected_environment(cluster: Cluster, plan: Plan, logs: Path | None = None) -> dict[str, str]:
    """Variables of every rank on the detected GPUs, without those that only a site knows; none on CPUs.

    Args:
        cluster: this machine, or several like it.
        plan, logs: as in `environment`.
    """
    return _for_gpus(plan, logs, cluster.gpus[0].name) if cluster.gpus else {}


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


def _for_fabric(profile: Profile, plan: Plan, ranks_per_node: int) -> dict[str, str]:
    """The network that NCCL must use; nothing where no network is needed."""
    ranks = plan.layout.world_size
    kind = profile.inter_node.kind
    if profile.gpu is None or kind not in RDMA or ranks <= max(ranks_per_node, profile.nvlink_domain or 0):
        return {}
    return {FABRIC: kind}


def _for_gpus(plan: Plan, logs: Path | None, gpu: str) -> dict[str, str]:
    values = {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # nvidia-smi's order, by which a rank is bound to the cores next to its GPU
        "NCCL_DEBUG": "WARN",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "TORCH_FR_BUFFER_SIZE": str(FLIGHT_RECORDER_ENTRIES),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    }
    if logs is not None:
        values["TORCH_FR_DUMP_TEMP_FILE"] = str(logs / "collectives-rank-")
    degrees = plan.layout
    if degrees.tensor_model_parallel_size > 1 or degrees.context_parallel_size > 1:
        # One queue to the GPU runs kernels in launch order, which megatron-core's overlap of communication and
        # computation relies on (tensor_parallel/layers.py).
        values["CUDA_DEVICE_MAX_CONNECTIONS"] = "32" if BLACKWELL & set(gpu.replace("-", " ").split()) else "1"
    return values
