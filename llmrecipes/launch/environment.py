"""The environment of a rank, from the cluster profile and the plan: the only module that chooses such variables.

Variables that the user has set take precedence, so that one can be tried out without editing a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from llmrecipes.hardware.profile import Profile
from llmrecipes.plan.derive import Plan

FLIGHT_RECORDER_ENTRIES = 2000
"""Collectives that each rank records for the dump after a timeout (the size that PyTorch's tools assume)."""
MOST_THREADS = 16
"""Maximum OpenMP threads of a rank with a GPU, where the CPU only prepares work."""


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
    threads = max(1, profile.cpu_cores // ranks_per_node)
    values = {"OMP_NUM_THREADS": str(min(threads, MOST_THREADS) if profile.gpus_per_node else threads)}
    if profile.gpus_per_node:
        values |= _for_gpus(plan, logs)
    return {**values, **{name: str(value) for name, value in profile.environment.items()}}


def missing(wanted: Mapping[str, str], there: Mapping[str, str]) -> dict[str, str]:
    """The variables to set: those that the user has not set."""
    return {name: value for name, value in wanted.items() if name not in there}


def _for_gpus(plan: Plan, logs: Path | None) -> dict[str, str]:
    values = {
        "NCCL_DEBUG": "WARN",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "TORCH_FR_BUFFER_SIZE": str(FLIGHT_RECORDER_ENTRIES),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    }
    if logs is not None:
        values["TORCH_FR_DUMP_TEMP_FILE"] = str(logs / "collectives-rank-")
    degrees = plan.layout
    if degrees.tensor_model_parallel_size > 1 or degrees.context_parallel_size > 1:
        # One queue to the GPU runs kernels in launch order, which megatron-core's overlap of communication and
        # computation relies on (tensor_parallel/layers.py).
        values["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    return values
