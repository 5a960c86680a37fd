"""Protocol of an engine's checkpoint format."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from llmrecipes.checkpoint.manifest import FileRecord

StateDict = dict[str, Any]
"""Nested dicts of an engine's state; the leaves are opaque to everything but the engine and its format."""


class CheckpointFormat(Protocol):
    """Writes one engine's state to files. A saver calls `snapshot`, `prepare`, `write` and `finish` in this order."""

    def snapshot(self, state: StateDict) -> StateDict:
        """A copy in host memory, valid until the next call. Called in the loop's thread, so it only copies.

        Raises:
            TypeError: the state could not be loaded without unpickling; detected at the first call.
        """

    def prepare(self, taken: StateDict, directory: Path, rank: int) -> Any:
        """What this rank will write, without communication; rank 0 creates the directory."""

    def planned_bytes(self, prepared: Any) -> int:
        """Bytes of the tensors that this rank will write, without communication."""

    def write(self, prepared: Any, directory: Path, group: dist.ProcessGroup) -> dict[str, FileRecord]:
        """Write this rank's files (a collective of all ranks); returns their records by name.

        Raises:
            OSError: a disk error.
        """

    def finish(self, directory: Path) -> None:
        """Write the index of all ranks' files. Called on rank 0, after all have written."""

    def versions(self) -> dict[str, str]:
        """Versions of the libraries that determine whether the files can be read again."""
