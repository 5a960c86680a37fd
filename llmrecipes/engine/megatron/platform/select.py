"""Selection of the device that a process trains on."""

from __future__ import annotations

import torch

from llmrecipes.engine.base import Platform


def select(local_rank: int = 0) -> Platform:
    """The GPU of this rank if torch sees one, else the CPU.

    Args:
        local_rank: rank on this node; the index of the GPU.
    """
    if torch.cuda.is_available():
        from llmrecipes.engine.megatron.platform.cuda import CudaPlatform

        return CudaPlatform(local_rank)
    from llmrecipes.engine.megatron.platform.cpu import CpuPlatform

    return CpuPlatform()
