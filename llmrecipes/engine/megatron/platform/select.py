"""Which device a process trains on, and what differs by it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class Platform(Protocol):
    """What the rest of the package may ask of the device."""

    name: str
    """`cpu` or `cuda`."""
    backend: str
    """torch.distributed backend."""

    @property
    def device(self) -> torch.device:
        """Device of this process's tensors."""

    def install(self) -> None:
        """Make megatron-core usable here; call it once, before megatron-core builds anything."""

    def peak_memory(self) -> int:
        """Largest memory this process has held, in bytes: resident on a CPU, allocated on a GPU."""

    def synchronize(self) -> None:
        """Wait for the device's queued work."""


def select(local_rank: int = 0) -> Platform:
    """The GPU of this rank where torch sees one, else the CPU.

    Args:
        local_rank: rank on this node; the index of the GPU.
    """
    import torch

    if torch.cuda.is_available():
        from llmrecipes.engine.megatron.platform.cuda import CudaPlatform

        return CudaPlatform(local_rank)
    from llmrecipes.engine.megatron.platform.cpu import CpuPlatform

    return CpuPlatform()
