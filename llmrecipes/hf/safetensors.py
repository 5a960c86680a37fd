"""A folder of safetensors as Hugging Face has it: read one tensor at a time, written one tensor at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from llmrecipes.errors import UserError
from llmrecipes.hf.reading import open_folder

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
"""Element types by their names in a safetensors header."""


class SafetensorsFolder:
    """The weights in a folder; see `TensorSource`. Headers are read when it is opened, values when asked for.

    Args:
        path: the folder, which is untrusted: see `open_folder`.

    Raises:
        UserError: as `open_folder`; or a tensor has an element type that torch does not have.
    """

    def __init__(self, path: Path) -> None:
        folder = open_folder(path)
        self.config = folder.config
        self._held = folder.tensors
        for name, held in folder.tensors.items():
            if held.dtype not in DTYPES:
                raise UserError(
                    f"{name} has type {held.dtype}", where=str(held.file), rule=f"one of {', '.join(DTYPES)}"
                )

    def names(self) -> Sequence[str]:
        """See `TensorSource`."""
        return list(self._held)

    def shape(self, name: str) -> tuple[int, ...]:
        """See `TensorSource`."""
        return self._held[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """See `TensorSource`."""
        return DTYPES[self._held[name].dtype]

    def read(self, name: str) -> torch.Tensor:
        """See `TensorSource`."""
        from safetensors import SafetensorError, safe_open

        path = self._held[name].file
        try:
            # Opened for each tensor: pages of a file that stays mapped count as memory of this process.
            with safe_open(path, framework="pt", device="cpu") as file:
                found: torch.Tensor = file.get_tensor(name)
                return found.clone()
        except (OSError, SafetensorError) as problem:
            raise UserError(f"{name} cannot be read: {problem}", where=str(path), fix="copy it again") from problem
