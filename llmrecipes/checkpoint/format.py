"""What a saver asks of an engine's checkpoint format."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from llmrecipes.checkpoint.manifest import FileRecord

StateDict = dict[str, Any]
"""Nested dicts of what an engine saves; what its leaves are is between the engine and its format."""


class CheckpointFormat(Protocol):
    """How one engine's state becomes files. A saver calls the four steps of a save in this order, on every rank."""

    def snapshot(self, state: StateDict) -> StateDict:
        """A copy in host memory, valid until the next call. Called in the loop's thread, so it only copies.

        Raises:
            TypeError: the state could not be loaded again without unpickling; found at the first call.
        """

    def prepare(self, taken: StateDict, directory: Path, rank: int) -> Any:
        """What this rank will write, without talking to other ranks; rank 0 makes the directory."""

    def write(self, prepared: Any, directory: Path, group: dist.ProcessGroup) -> dict[str, FileRecord]:
        """Write this rank's files (all ranks together); their records by name.

        Raises:
            OSError: the disk is at fault.
        """

    def finish(self, directory: Path) -> None:
        """Write what describes all ranks' files. Called on rank 0, after all have written."""

    def versions(self) -> dict[str, str]:
        """Versions of the libraries that decide whether the files can be read again."""
