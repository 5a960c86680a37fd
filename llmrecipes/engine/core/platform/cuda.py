"""One NVIDIA GPU per process. megatron-core is patched only by `substitutes`."""

from __future__ import annotations

from datetime import timedelta

import torch

from llmrecipes.engine.core.platform.process_group import connect
from llmrecipes.engine.core.platform.substitutes import install_substitutes


class CudaPlatform:
    """A rank that owns `cuda:<local_rank>`."""

    name = "cuda"
    backend = "nccl"

    def __init__(self, local_rank: int) -> None:
        self._device = torch.device("cuda", local_rank)

    @property
    def device(self) -> torch.device:
        return self._device

    def install(self) -> None:
        torch.cuda.set_device(self._device)
        install_substitutes()

    def connect(self, timeout: timedelta) -> None:
        connect(self, timeout)

    def peak_memory(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)
