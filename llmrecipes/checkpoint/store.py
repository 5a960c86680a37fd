"""The directory of a run's checkpoints, on any POSIX filesystem.

    checkpoints/step-00000100/       complete and immutable
                .tmp-step-00000200-… being written
                .trash-…             being deleted
                damaged-step-…       renamed: never loaded, counted or deleted
                .writer.lock         held by the process that trains

A checkpoint is published by a single rename after all its bytes were synced, and renamed before its first file is
deleted, so a process killed at any moment never leaves a partial directory that looks valid. There is no "latest" and
no "best" file: the newest valid checkpoint, and the one of the lowest held-out loss, are found from the manifests.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from llmrecipes.checkpoint.manifest import (
    MANIFEST_NAME,
    NAME,
    OPEN_THREADS,
    CheckpointInfo,
    Compare,
    Entry,
    FileRecord,
    InvalidCheckpoint,
    build,
    digest,
    dump,
    inspect,
    read_manifest,
)
from llmrecipes.checkpoint.manifest import compare as compare_all
from llmrecipes.errors import UserError
from llmrecipes.io import sync, write_synced
from llmrecipes.untrusted import open_file

logger = logging.getLogger(__name__)

_TEMPORARY = re.compile(r"\.tmp-(step-\d{8,})-.+")
_TRASH = ".trash-"
DAMAGED = re.compile(r"damaged-step-(\d{8,})-.+")
_LOCK = ".writer.lock"


@dataclass(frozen=True)
class DamagedCheckpoint:
    """An unusable checkpoint directory, and why."""

    path: Path
    reason: str

    def __str__(self) -> str:
        return f"{self.path.name}: {self.reason}"


class CheckpointStore:
    """Checkpoints of one run.

    Reading needs no lock. The one process that writes calls `claim` first and `release` at the end.

    Args:
        directory: `<run>/checkpoints`; created by `claim` or `temporary` if missing.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._lock: int | None = None
        self.held: set[int] = set()
        """Steps that `prune` keeps because another process reads them."""
        self.copying: set[int] = set()
        """Steps that `prune` keeps because they are copied to a store."""
        self._verified: set[int] = set()  # steps whose files this process has hashed

    # -- reading ---------------------------------------------------------------------------------------------------

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step is, or would be."""
        return self.directory / f"step-{step:08d}"

    def entries(self) -> list[Entry]:
        """Checkpoints with a readable manifest and files of the right size, oldest first."""
        entries = []
        for path in self._directories():
            try:
                entries.append(inspect(path, full=False))
            except InvalidCheckpoint:
                continue
        return entries

    def valid(self, step: int, *, full: bool) -> bool:
        """Whether the checkpoint of a step is complete.

        Args:
            step: the step.
            full: compare the SHA-256 of every file, not only names and sizes.
        """
        return _is_valid(self.path(step), full=full)

    def latest_valid(self) -> Entry | None:
        """The newest checkpoint whose every file has the recorded SHA-256; damaged ones are skipped with a warning."""
        entry, damaged = self.survey()
        for skipped in damaged:
            logger.warning("checkpoint %s is skipped: %s", skipped.path, skipped.reason)
        return entry

    def survey(self, compare: Compare | None = None) -> tuple[Entry | None, list[DamagedCheckpoint]]:
        """The newest checkpoint whose every file has the recorded SHA-256, and the damaged newer ones.

        A writer may publish and delete concurrently: one of the checkpoints it keeps is found.

        Args:
            compare: instead of comparing here.
        """
        tried: list[Path] = []
        damaged: list[DamagedCheckpoint] = []
        while (directories := self._directories()) and directories != tried:
            tried, damaged = directories, []
            for path in reversed(directories):
                try:
                    entry = Entry(path, read_manifest(path))
                    (compare or compare_all)(path, entry.manifest)
                except InvalidCheckpoint as problem:
                    if path.exists():
                        damaged.append(DamagedCheckpoint(path, str(problem)))
                else:
                    self._verified.add(entry.step)
                    return entry, damaged
        return None, damaged

    def incomplete(self) -> list[DamagedCheckpoint]:
        """Checkpoints with an invalid manifest, or files that are missing or of the wrong size, newest first."""
        damaged = []
        for path in reversed(self._directories()):
            try:
                inspect(path, full=False)
            except InvalidCheckpoint as problem:
                damaged.append(DamagedCheckpoint(path, str(problem)))
        return damaged

    def _directories(self) -> list[Path]:
        if not self.directory.is_dir():
            return []
        paths = [path for path in self.directory.iterdir() if NAME.fullmatch(path.name) and path.is_dir()]
        return sorted(paths, key=_step_of)

    # -- writing ---------------------------------------------------------------------------------------------------

    def claim(self) -> None:
        """Become the writer: lock the directory, publish what a dead writer had completed, delete the rest.

        Raises:
            UserError: another live process writes here, or the directory cannot be written.
        """
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            if self._lock is None:
                self._lock = take_lock(self.directory / _LOCK)
            self._recover()
        except OSError as problem:
            raise UserError(
                f"checkpoints cannot be written: {problem.strerror}",
                where=str(self.directory),
                fix="make it writable, or choose another runs directory",
            ) from problem

    def release(self) -> None:
        """Release the lock, so that another process can become the writer."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def temporary_path(self, step: int, token: str) -> Path:
        """Name of a temporary directory; every rank of a save computes the same one from the shared token."""
        return self.directory / f".tmp-{self.path(step).name}-{token}"

    def temporary(self, step: int, token: str | None = None) -> Path:
        """Create a directory to write the checkpoint of a step into.

        Args:
            step: the step.
            token: makes the name unique; default: random.
        """
        path = self.temporary_path(step, token or secrets.token_hex(4))
        path.mkdir(parents=True)
        return path

    def publish(
        self,
        temporary: Path,
        info: CheckpointInfo,
        *,
        versions: Mapping[str, str],
        known: Mapping[str, FileRecord] | None = None,
    ) -> Entry:
        """Turn a temporary directory with all its files into the checkpoint of its step.

        Args:
            temporary: the directory.
            info: the other contents of the manifest.
            versions: versions of the libraries that wrote the files.
            known: records of files that ranks have already synced and hashed.

        Raises:
            OSError: the disk is full or fails, or a file differs from what its rank reported; the temporary
                directory is left unchanged and no published checkpoint is touched.
        """
        known = known or {}
        unlisted = [path for path in _files(temporary) if path.relative_to(temporary).as_posix() not in known]
        files = {}
        for path in unlisted:
            sync(path)
            files[path.relative_to(temporary).as_posix()] = digest(path)
        # By name: on a network file system a listing may lack what another node has just written.
        with ThreadPoolExecutor(OPEN_THREADS) as pool:
            sizes = pool.map(lambda name: _size_of(temporary / name), known)
            for (name, record), size in zip(known.items(), sizes, strict=True):
                if size != record.size:
                    raise OSError(f"{temporary / name} has {size} bytes, but {record.size} were written")
        files |= known
        manifest = build(info, dict(versions), files)
        write_synced(temporary / MANIFEST_NAME, dump(manifest))
        for folder in {(temporary / name).parent for name in files}:
            sync(folder)
        target = self.path(info.step)
        self._move_into_place(temporary, target)
        self._verified.add(info.step)
        return Entry(target, manifest)

    def adopt(self, temporary: Path, manifest: bytes, step: int) -> None:
        """Publish a temporary directory with all files of a checkpoint that was saved elsewhere.

        Raises:
            OSError: the disk is full or fails.
        """
        write_synced(temporary / MANIFEST_NAME, manifest)
        sync(temporary)
        self._move_into_place(temporary, self.path(step))

    def discard(self, temporary: Path) -> None:
        """Delete a temporary directory."""
        shutil.rmtree(temporary, ignore_errors=True)

    def set_aside(self, path: Path) -> Path:
        """Rename a damaged checkpoint, so that its step can be saved again and nothing deletes it.

        Returns:
            Its new path.

        Raises:
            OSError: it could not be renamed.
        """
        target = path.rename(self.directory / f"damaged-{path.name}-{secrets.token_hex(4)}")
        sync(self.directory)
        return target

    def withdraw(self, step: int) -> list[int]:
        """Delete the checkpoints after a step, because the run goes back to it; returns their steps, newest first.

        Raises:
            OSError: one cannot be deleted.
        """
        steps = [number for path in reversed(self._directories()) if (number := _step_of(path)) > step]
        for number in steps:
            self._delete(self.path(number))
        return steps

    def prune(self, most_recent_k: int, keep_interval: int | None = None, *, keep_best: bool = False) -> list[int]:
        """Delete checkpoints according to the retention rule.

        The newest two that this process has written or verified are always kept, and so are damaged ones: only sizes
        are compared here, not hashes, and a checkpoint that only looks complete must not replace a good one.

        Args:
            most_recent_k: newest complete checkpoints to keep, at least two.
            keep_interval: multiples of this step are kept permanently.
            keep_best: keep the one of the lowest held-out loss.

        Returns:
            Steps that were deleted.
        """
        entries = self.entries()
        steps = [entry.step for entry in entries]
        verified = [step for step in steps if step in self._verified][-LEAST_KEPT:]
        if len(verified) < LEAST_KEPT:
            return []
        keep = surviving(steps, most_recent_k, keep_interval) | set(verified)
        if keep_best and (lowest := best(entries)) is not None:
            keep.add(lowest.step)
        doomed = [step for step in steps if step < verified[-1] and step not in keep | self.held | self.copying]
        for step in doomed:
            self._delete(self.path(step))
        return doomed

    def _move_into_place(self, temporary: Path, target: Path) -> None:
        replaced = self._to_trash(target) if target.exists() else None
        temporary.rename(target)
        sync(self.directory)
        if replaced is not None:
            shutil.rmtree(replaced, ignore_errors=True)

    def _to_trash(self, path: Path) -> Path:
        return path.rename(self.directory / f"{_TRASH}{path.name}-{secrets.token_hex(4)}")

    def _delete(self, path: Path) -> None:
        trash = self._to_trash(path)
        # The rename has to be on disk before the first deletion.
        sync(self.directory)
        shutil.rmtree(trash, ignore_errors=True)

    def _recover(self) -> None:
        # A writer killed between manifest and rename leaves a complete checkpoint under its temporary name.
        for path in sorted(self.directory.iterdir()):
            if match := _TEMPORARY.fullmatch(path.name):
                target = self.directory / match[1]
                # Hashes of terabytes are compared by all ranks when they resume, not here by one.
                complete = _is_valid(path, full=False)
                if complete and target.exists():
                    complete = not _is_valid(target) and _is_valid(path)
                if complete:
                    logger.warning("finishing checkpoint %s, which an earlier process had written", target)
                    if target.exists():
                        self.set_aside(target)
                    self._move_into_place(path, target)
                else:
                    shutil.rmtree(path)
            elif path.name.startswith(_TRASH):
                shutil.rmtree(path)


def _is_valid(path: Path, *, full: bool = True) -> bool:
    try:
        inspect(path, full=full)
    except InvalidCheckpoint:
        return False
    return True


def _size_of(path: Path) -> int:
    # Opened, because an open shows what another node has closed; attributes may be cached.
    with open_file(path) as stream:
        return os.fstat(stream.fileno()).st_size


def _step_of(path: Path) -> int:
    match = NAME.fullmatch(path.name)
    if match is None:
        raise ValueError(f"{path} is not named like a checkpoint")
    return int(match[1])


def _files(directory: Path) -> Iterator[Path]:
    return (path for path in sorted(directory.rglob("*")) if path.is_file() and path.name != MANIFEST_NAME)


def take_lock(path: Path) -> int:
    """Lock a file, created if missing; returns the descriptor, which holds the lock until it is closed.

    Raises:
        UserError: another live process holds it.
        OSError: the file cannot be created.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        # A POSIX record lock: unlike flock's it is not inherited by forked data loader workers, which may
        # outlive a killed trainer by seconds.
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as problem:
        os.close(descriptor)
        raise UserError(
            "another process is training this run",
            where=str(path.parent),
            fix="wait until it has finished, or use another --run-id",
        ) from problem
    except OSError as problem:
        logger.warning("%s: this file system does not support locks (%s)", path.parent, problem.strerror)
    return descriptor


LEAST_KEPT = 2
"""Checkpoints that are always kept: if one turns out to be damaged, there is another."""


def surviving(steps: list[int], most_recent_k: int, keep_interval: int | None) -> set[int]:
    """Which of the complete steps a retention rule keeps."""
    recent = sorted(steps)[-max(most_recent_k, LEAST_KEPT) :]
    return set(recent) | {step for step in steps if keep_interval and step % keep_interval == 0}


def best(entries: Sequence[Entry]) -> Entry | None:
    """The checkpoint of the lowest held-out loss, of equal ones the first; None: no step of theirs was evaluated.

    Of those whose losses can be compared with the newest, if there are some.
    """
    losses = [(loss, entry.step, entry) for entry in entries if (loss := entry.held_out_loss) is not None]
    newest = entries[-1].manifest.monitored if entries else None
    comparable = [item for item in losses if newest is None or item[1] > newest.since] or losses
    return min(comparable, key=lambda item: item[:2])[2] if comparable else None


def require_best(store: CheckpointStore) -> Entry:
    """The complete checkpoint of the lowest held-out loss; warns if there was a lower one at a step that is not kept.

    Raises:
        UserError: no step of a checkpoint was evaluated.
    """
    entries = store.entries()
    if (lowest := best(entries)) is None:
        raise UserError(
            "no checkpoint has a held-out loss",
            where=str(store.directory),
            rule="the best checkpoint is chosen among those whose step was evaluated",
            fix="set train.eval_interval to a divisor of checkpoint.save_interval, with held-out text; or name a step",
        )
    last = entries[-1].manifest.monitored
    if last is not None and last.best is not None and last.best < (lowest.held_out_loss or last.best):
        logger.warning(
            "the lowest held-out loss, %.4f, was after step %d, which has no checkpoint (checkpoint.keep_best, "
            "checkpoint.save_interval); step %d has %.4f",
            last.best,
            last.best_step,
            lowest.step,
            lowest.held_out_loss,
        )
    return lowest
