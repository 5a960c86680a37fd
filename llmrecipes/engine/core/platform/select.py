"""Selection of the device that a process trains on."""

from __future__ import annotations

import os
import socket

import torch

from llmrecipes.engine.base import Platform
from llmrecipes.errors import UserError
from llmrecipes.hardware import nvidia
from llmrecipes.hardware.builds import unusable
from llmrecipes.hardware.cluster import visible_gpus

NVIDIA_SMI_SECONDS = 20.0


def select(local_rank: int = 0) -> Platform:
    """The GPU of this rank if torch sees one, else the CPU.

    Args:
        local_rank: rank on this node; the index of the GPU.

    Raises:
        UserError: this machine has a GPU, and torch cannot use it, or fewer than ranks.
    """
    if torch.cuda.is_available():
        if local_rank >= torch.cuda.device_count():
            raise UserError(
                f"{torch.cuda.device_count()} GPUs for rank {local_rank} of {socket.gethostname()}, counted from 0",
                where="torch.cuda",
                rule="each rank uses one GPU, and sees all GPUs of its node",
                fix="llmrecipes doctor where a GPU is missing; fewer ranks a node; no --gpus-per-task in Slurm",
            )
        from llmrecipes.engine.core.platform.cuda import CudaPlatform

        return CudaPlatform(local_rank)
    _require_no_gpu()
    from llmrecipes.engine.core.platform.cpu import CpuPlatform

    return CpuPlatform()


def _require_no_gpu() -> None:
    gpus = visible_gpus()
    if gpus:
        what = f"{len(gpus)} × {gpus[0].name}, and torch {torch.__version__} {_why_torch_sees_none()}"
    elif os.environ.get("CUDA_VISIBLE_DEVICES") is None and (said := nvidia.driver_fault(NVIDIA_SMI_SECONDS)):
        what = f"a GPU whose driver does not answer: {said}"
    else:
        return
    raise unusable(what)


def _why_torch_sees_none() -> str:
    if torch.version.cuda is None:
        return "is a CPU build"
    try:
        torch.cuda.init()
    except Exception as error:  # of several types: RuntimeError, AssertionError, torch's own
        return f"cannot use them: {str(error).strip().splitlines()[0]}"
    return f"for CUDA {torch.version.cuda} finds none of them"
