"""Selection of the device that a process trains on."""

from __future__ import annotations

import os

import torch

from llmrecipes.engine.base import Platform
from llmrecipes.errors import UserError
from llmrecipes.hardware import nvidia
from llmrecipes.hardware.cluster import visible_gpus

NVIDIA_SMI_SECONDS = 20.0


def select(local_rank: int = 0) -> Platform:
    """The GPU of this rank if torch sees one, else the CPU.

    Args:
        local_rank: rank on this node; the index of the GPU.

    Raises:
        UserError: this machine has a GPU, and torch cannot use it.
    """
    if torch.cuda.is_available():
        from llmrecipes.engine.megatron.platform.cuda import CudaPlatform

        return CudaPlatform(local_rank)
    _require_no_gpu()
    from llmrecipes.engine.megatron.platform.cpu import CpuPlatform

    return CpuPlatform()


def _require_no_gpu() -> None:
    gpus = visible_gpus()
    if gpus:
        what = f"{len(gpus)} × {gpus[0].name}, and torch {torch.__version__} {_why_torch_sees_none()}"
    elif os.environ.get("CUDA_VISIBLE_DEVICES") is None and (said := nvidia.driver_fault(NVIDIA_SMI_SECONDS)):
        what = f"a GPU whose driver does not answer: {said}"
    else:
        return
    raise UserError(
        f"this machine has {what}",
        where="torch.cuda",
        rule="a machine with a GPU trains on the CPU only if CUDA_VISIBLE_DEVICES is empty",
        fix="llmrecipes doctor; make setup LOCK=py311-cuda where torch is a CPU build; or CUDA_VISIBLE_DEVICES= in "
        "front of the command, to train on the CPU",
    )


def _why_torch_sees_none() -> str:
    if torch.version.cuda is None:
        return "is a CPU build"
    try:
        torch.cuda.init()
    except Exception as error:  # of several types: RuntimeError, AssertionError, torch's own
        return f"cannot use them: {str(error).strip().splitlines()[0]}"
    return f"for CUDA {torch.version.cuda} finds none of them"
