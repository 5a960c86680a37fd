"""Local checkpoints: what a rank needs to go on, on a disk of its node, with a copy on another node.

    <directory>/<recipe>-<token of the run>/
        step-00000100-3f2a9c01-rank-3-of-8/      a part: manifest, index, tensors; complete and immutable
        .tmp-…                                   being written

Each rank publishes its part by a rename, without asking others. Parts of one step and one start (the token in the
name) belong together; a step is complete if the part of each rank is somewhere, its own or a copy.
"""

from __future__ import annotations

import logging
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from llmrecipes.checkpoint.manifest import (
    MANIFEST_NAME,
    CheckpointInfo,
    Entry,
    FileRecord,
    InvalidCheckpoint,
    build,
    dump,
    inspect,
    read_manifest,
)
from llmrecipes.errors import UserError
from llmrecipes.io import sync, write_synced

logger = logging.getLogger(__name__)

NAME = re.compile(r"step-(\d{8,})-([0-9a-f]{8})-rank-(\d+)-of-(\d+)")
KEPT = 2
"""Steps of which parts are kept: the newer may be incomplete on another rank."""


@dataclass(frozen=True, order=True)
class LocalPart:
    """The name of a part: step, token of the start that wrote it, rank, and number of ranks."""

    step: int
    token: str
    rank: int
    ranks: int

    def __str__(self) -> str:
        return f"step-{self.step:08d}-{self.token}-rank-{self.rank}-of-{self.ranks}"


def parts_in(directory: Path) -> list[LocalPart]:
    """Published parts in a folder, which may be missing, oldest first."""
    names = (NAME.fullmatch(name) for name in _names(directory))
    return sorted(LocalPart(int(name[1]), name[2], int(name[3]), int(name[4])) for name in names if name)


class LocalParts:
    """Parts on the disk of this node, of all its ranks.

    Args:
        directory: directory of this run only; created if it is missing.

    Raises:
        UserError: it cannot be created.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            raise UserError(
                f"{directory} cannot be created: {problem.strerror}",
                where="checkpoint.non_persistent_local_ckpt_dir",
                rule="it must be a folder on a local disk that the ranks of a node may write to",
                fix="use another folder, for example on the node's NVMe disk",
            ) from problem

    def path(self, part: LocalPart) -> Path:
        """Where a part is, or would be."""
        return self.directory / str(part)

    def all(self) -> list[LocalPart]:
        """Published parts, oldest first."""
        return parts_in(self.directory)

    def temporary(self, part: LocalPart) -> Path:
        """An unused path to write a part to."""
        return self.directory / f".tmp-{part}-{secrets.token_hex(4)}"

    def publish(
        self,
        temporary: Path,
        part: LocalPart,
        info: CheckpointInfo,
        versions: Mapping[str, str],
        files: dict[str, FileRecord],
    ) -> None:
        """Make a part of a folder whose files are on disk.

        Raises:
            OSError: a disk error; nothing is published.
        """
        write_synced(temporary / MANIFEST_NAME, dump(build(info, dict(versions), files)))
        self.rename(temporary, part)

    def rename(self, temporary: Path, part: LocalPart) -> None:
        """Publish a folder that has its manifest."""
        sync(temporary)
        if self.path(part).exists():
            shutil.rmtree(self.path(part))
        temporary.rename(self.path(part))
        sync(self.directory)

    def valid(self, part: LocalPart, layout: Mapping[str, int]) -> Entry | None:
        """The part as a checkpoint, if every byte is as it was written, with the layout; it is read for that."""
        try:
            entry = inspect(self.path(part), full=True)
        except InvalidCheckpoint as problem:
            if self.path(part).exists():
                logger.warning("local checkpoint %s is not used: %s", self.path(part), problem)
            return None
        return entry if entry.manifest.layout == dict(layout) else None

    def files(self, part: LocalPart) -> list[Path]:
        """Files of a part, the manifest last.

        Raises:
            OSError: it is not there.
        """
        try:
            names = read_manifest(self.path(part)).files
        except InvalidCheckpoint as problem:
            raise OSError(str(problem)) from problem
        return [self.path(part) / name for name in (*sorted(names), MANIFEST_NAME)]

    def prune(self, rank: int) -> None:
        """Delete the parts of a rank but those of the newest steps, and what a start that was killed left."""
        of_rank = [part for part in self.all() if part.rank == rank]
        steps = sorted({part.step for part in of_rank})[-KEPT:]
        self.delete(part for part in of_rank if part.step not in steps)

    def forget(self, ranks: Iterable[int]) -> None:
        """Delete all parts of some ranks, and what was being written; the folder too when it is empty."""
        wanted = set(ranks)
        self.delete(part for part in self.all() if part.rank in wanted)
        for path in self._unfinished(wanted):
            shutil.rmtree(path, ignore_errors=True)
        try:
            self.directory.rmdir()
        except OSError:
            return

    def discard_unfinished(self, ranks: Iterable[int]) -> None:
        """Delete what a start that was killed had not published."""
        for path in self._unfinished(set(ranks)):
            shutil.rmtree(path, ignore_errors=True)

    def _unfinished(self, ranks: set[int]) -> Iterator[Path]:
        for unfinished in _names(self.directory):
            name = NAME.match(unfinished.removeprefix(".tmp-")) if unfinished.startswith(".tmp-") else None
            if name and int(name[3]) in ranks:
                yield self.directory / unfinished

    def delete(self, parts: Iterable[LocalPart]) -> None:
        """Delete parts."""
        for part in list(parts):
            # A manifest first: without it nothing is a part.
            (self.path(part) / MANIFEST_NAME).unlink(missing_ok=True)
            shutil.rmtree(self.path(part), ignore_errors=True)


def folder_of(directory: str, recipe: str, token: str, node: int) -> Path:
    """Where a node has the parts of a run.

    Args:
        directory: `checkpoint.non_persistent_local_ckpt_dir`.
        recipe: name of the recipe.
        token: token of the run.
        node: its number.
    """
    return Path(directory.replace("{node}", str(node))) / f"{recipe}-{token}"


def _names(directory: Path) -> list[str]:
    try:
        return [path.name for path in directory.iterdir()]
    except FileNotFoundError:  # the last rank of the node that forgets its parts deletes it
        return []


def newest_complete(parts: Iterable[LocalPart]) -> Iterator[tuple[int, str]]:
    """Step and token of those of which the part of each rank is there, newest first."""
    ranks: dict[tuple[int, str, int], set[int]] = {}
    for part in parts:
        ranks.setdefault((part.step, part.token, part.ranks), set()).add(part.rank)
    for (step, token, number), there in sorted(ranks.items(), reverse=True):
        if there >= set(range(number)):
            yield step, token
