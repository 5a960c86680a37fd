"""Named tensors that are read one at a time, wherever they are: a checkpoint, or a folder of safetensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class TensorSource(Protocol):
    """Whole global tensors by name. One is in memory at a time: nobody holds the model."""

    def names(self) -> Sequence[str]:
        """Names, in the order of the model."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""

    def dtype(self, name: str) -> torch.dtype:
        """Type of a tensor's elements, without reading it."""

    def read(self, name: str) -> torch.Tensor:
        """A whole tensor, on the CPU, in memory of its own.

        Raises:
            UserError: it is damaged or missing.
        """
