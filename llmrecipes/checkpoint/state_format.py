"""Protocol of an engine's checkpoint format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from llmrecipes.checkpoint.manifest import FileRecord

StateDict = dict[str, Any]
"""Nested dicts of an engine's state; the leaves are opaque to everything but the engine and its format."""


@dataclass(frozen=True)
class Written:
    """What a rank has written."""

    files: dict[str, FileRecord]
    """Its files, by name; synced to disk."""
    index: bytes
    """What the first rank needs to know about them."""


class CheckpointFormat(Protocol):
    """Writes one engine's state to files. A saver calls the four steps of a save in this order; none communicates."""

    def reserve(self, state: StateDict) -> Callable[[], None] | None:
        """What allocates the host memory for snapshots of states like this one; it may run in another thread.

        None: the first snapshot allocates it.
        """

    def snapshot(self, state: StateDict) -> StateDict:
        """A copy in host memory, valid until the next call. Called in the loop's thread, so it only copies.

        Raises:
            TypeError: the state could not be loaded without unpickling; detected at the first call.
        """

    def prepare(self, taken: StateDict, directory: Path, rank: int) -> Any:
        """What this rank will write; rank 0 creates the directory, and the others return before they use it."""

    def planned_bytes(self, prepared: Any) -> int:
        """Bytes of the tensors that this rank will write, without communication."""

    def write(self, prepared: Any, directory: Path, rank: int) -> Written:
        """Write this rank's files.

        Raises:
            OSError: a disk error.
        """

    def finish(self, directory: Path, indexes: list[bytes]) -> None:
        """Write the index of all ranks' files. Called on rank 0, after all have written.

        Args:
            directory: directory of the files.
            indexes: what `write` returned on each rank.
        """

    def versions(self) -> dict[str, str]:
        """What wrote the files: versions of libraries, device, implementation of the layers."""
