"""Copies of a run's checkpoints in an object store (`checkpoint.copy_to`).

    s3://bucket/folder/gpt-1b/RUN-ID/step-00001000-5f0c…/   its files, and last of all its manifest.json

A folder without a manifest is not a copy: an upload that is killed at any moment leaves none that can be taken for one.
Its name has the hash of the manifest: a step that is saved again, after going back, never mixes with what was there.
Ranks meet in the store: each uploads its share of the files, and the first one writes the manifest when it sees all of
them. Parts are checked by the store as it receives them (s3fs sends their CRC), files by SHA-256 when they are fetched.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from llmrecipes import stores
from llmrecipes.checkpoint.manifest import (
    MANIFEST_NAME,
    Entry,
    FileRecord,
    Manifest,
    mismatch,
    parse,
    read_manifest,
)
from llmrecipes.checkpoint.store import best, surviving
from llmrecipes.errors import UserError
from llmrecipes.io import sync
from llmrecipes.untrusted import MANIFEST

KEY = "checkpoint.copy_to"
SLOWEST = 1e6
"""Bytes a second with which a rank's upload is waited for, after `stores.PATIENCE_SECONDS`."""
_FILES, _PARTS, _PART, _MOST_PARTS = 2, 4, 16 << 20, 9_000
"""Files of a rank that are moved at once; parts of each, their bytes, and how many there may be. s3fs would hold ten
parts of 50 MB: with eight ranks on a node, gigabytes of its memory."""
_LONGEST_PAUSE = 30.0
_FOLDER = re.compile(r"step-(\d{8,})-[0-9a-f]{12}")
_ASIDE = "manifest-before.json"
"""Name of the manifest of a copy that was set aside."""


class RemoteCheckpoints:
    """The copies of one run.

    Args:
        url: `checkpoint.copy_to`.
        run: `recipe/run-id`.

    Raises:
        UserError: the store is of an unknown kind, or cannot be opened.
    """

    def __init__(self, url: str, run: str) -> None:
        self.url = f"{url.rstrip('/')}/{run}"
        self._fs, self._root = stores.file_system(self.url, KEY, fresh=True)

    # -- reading ---------------------------------------------------------------------------------------------------

    def copies(self) -> dict[int, str]:
        """Folders of the complete copies by step, in order.

        Raises:
            UserError: as `stores.patiently`.
        """
        return {step: folder for step, folder in self._folders() if self._has(folder, MANIFEST_NAME)}

    def manifest(self, folder: str) -> tuple[Manifest, bytes]:
        """The manifest of a copy, and its bytes.

        Raises:
            UserError: it is damaged, or another one; or as `stores.patiently`.
        """
        content = self._ask(self._fs.cat_file, self._path(folder, MANIFEST_NAME), start=0, end=MANIFEST)
        try:
            manifest = parse(content)
        except ValueError as problem:
            raise self._damaged(folder, f"{MANIFEST_NAME}: {problem}") from problem
        if _name(manifest.step, content) != folder:
            raise self._damaged(folder, f"{MANIFEST_NAME} is another one than was written")
        return manifest, content

    def fetch(self, folder: str, files: Mapping[str, FileRecord], target: Path) -> None:
        """Copy files to a disk, and compare their hashes.

        Args:
            folder: of the copy.
            files: which, with their records, of its manifest.
            target: a temporary folder of the run's checkpoints.

        Raises:
            UserError: a file differs from its record; or as `stores.patiently`.
            OSError: it cannot be written.
        """
        for name, record in files.items():  # before a byte of it is on the disk
            size = self._size(self._path(folder, name))
            if size != record.size:
                raise self._damaged(folder, f"{name} has {size or 0:,} bytes, expected {record.size:,}")

        def get(name: str) -> None:
            path = target / name
            path.parent.mkdir(parents=True, exist_ok=True)
            self._ask(self._fs.get_file, self._path(folder, name), str(path), **self._in_parts(files[name].size))
            sync(path)

        with ThreadPoolExecutor(_FILES) as pool:
            list(pool.map(get, files))
        if problem := mismatch(target, files):
            raise self._damaged(folder, problem)

    def fetch_beside(self, path: Path) -> None:
        """Copy a file that `put_beside` has uploaded to its place in the run, if there is one.

        Raises:
            UserError: as `stores.patiently`.
            OSError: it cannot be written.
        """
        if self._has(path.name):
            temporary = path.with_name(f".{path.name}.tmp")
            self._ask(self._fs.get_file, self._path(path.name), str(temporary))
            sync(temporary)
            temporary.replace(path)

    # -- writing ---------------------------------------------------------------------------------------------------

    def put_beside(self, path: Path) -> None:
        """Upload a file of the run beside its copies.

        Raises:
            UserError: as `stores.patiently`.
        """
        self._put(path, self._path(path.name))

    def upload(self, checkpoint: Path, names: Iterable[str]) -> None:
        """Upload files of a published checkpoint; what an earlier attempt has uploaded is left.

        Raises:
            UserError: as `stores.patiently`.
            OSError: a file is gone.
        """
        folder = folder_of(checkpoint)

        def put(name: str) -> None:
            target = self._path(folder, name)
            if self._size(target) != (checkpoint / name).stat().st_size:
                self._put(checkpoint / name, target)

        with ThreadPoolExecutor(_FILES) as pool:
            list(pool.map(put, names))

    def announce(self, checkpoint: Path, is_ended: Callable[[], bool]) -> None:
        """Write the manifest of a copy when all its files are there; it replaces an earlier copy of its step.

        Args:
            checkpoint: folder of the checkpoint.
            is_ended: whether to give up.

        Raises:
            UserError: a rank has not uploaded its files in time; or as `stores.patiently`.
            InvalidCheckpoint: the checkpoint is gone.
        """
        manifest = read_manifest(checkpoint)
        folder = folder_of(checkpoint)
        largest = max(record.size for record in manifest.files.values())
        longest = stores.PATIENCE_SECONDS + largest / SLOWEST
        began = time.monotonic()
        pause = 0.1
        while missing := self._missing(folder, manifest.files):
            waited = time.monotonic() - began
            if is_ended() or waited + pause > longest:
                why = "the run has ended" if is_ended() else f"not uploaded within {waited:.0f} s"
                more = f" and {len(missing) - 1} more files" if len(missing) > 1 else ""
                raise UserError(
                    f"{missing[0]}{more}: {why}",
                    where=f"{self.url}/{folder}",
                    fix="see the logs of the other ranks; the next checkpoint will be copied",
                )
            time.sleep(pause)
            pause = min(1.5 * pause, _LONGEST_PAUSE)
        earlier = self.copies().get(manifest.step, folder)
        if earlier != folder:
            self._delete(earlier)
        self._put(checkpoint / MANIFEST_NAME, self._path(folder, MANIFEST_NAME))

    def prune(self, most_recent_k: int, keep_interval: int | None, *, keep_best: bool, before: int) -> list[int]:
        """Delete copies by the rule of `CheckpointStore.prune`, and what is left of uploads that were killed.

        Args:
            before: only those of earlier steps.

        Returns:
            Steps whose copies were deleted.

        Raises:
            UserError: as `stores.patiently`.
        """
        copies = self.copies()
        keep = surviving(list(copies), most_recent_k, keep_interval)
        if keep_best and (lowest := best([self._entry(folder) for folder in copies.values()])) is not None:
            keep.add(lowest.step)
        doomed = [step for step in copies if step < before and step not in keep]
        for step in doomed:
            self._delete(copies[step])
        for step, folder in self._folders():
            if step < before and step not in copies and not self._has(folder, _ASIDE):
                self._delete(folder)
        return doomed

    def delete_after(self, step: int) -> None:
        """Delete the copies of later steps.

        Raises:
            UserError: as `stores.patiently`.
        """
        for later, folder in self.copies().items():
            if later > step:
                self._delete(folder)

    def set_aside(self) -> None:
        """Rename the manifests of all copies: none is used, counted or deleted from now on.

        Raises:
            UserError: as `stores.patiently`.
        """
        for folder in self.copies().values():
            self._ask(self._fs.mv, self._path(folder, MANIFEST_NAME), self._path(folder, _ASIDE))

    def _delete(self, folder: str) -> None:
        """The manifest first: what is half deleted is no copy."""
        if self._has(folder, MANIFEST_NAME):
            self._ask(self._fs.rm_file, self._path(folder, MANIFEST_NAME))
        self._ask(self._fs.rm, self._path(folder), recursive=True)

    def _put(self, path: Path, target: str) -> None:
        if "file" in self._fs.protocol:  # other stores have no folders
            self._ask(self._fs.makedirs, str(PurePosixPath(target).parent), exist_ok=True)
        self._ask(self._fs.put_file, str(path), target, **self._in_parts(path.stat().st_size))

    # -- the store -------------------------------------------------------------------------------------------------

    def _in_parts(self, size: int) -> dict[str, int]:
        if "s3" not in self._fs.protocol:
            return {}
        return {"chunksize": max(_PART, -(-size // _MOST_PARTS)), "max_concurrency": _PARTS}

    def _folders(self) -> list[tuple[int, str]]:
        """Steps and folders of all copies, complete or not, in order."""
        names = [PurePosixPath(entry["name"]).name for entry in self._if_there(self._fs.ls, self._root, detail=True)]
        return sorted((int(match[1]), name) for name in names if (match := _FOLDER.fullmatch(name)))

    def _missing(self, folder: str, files: Mapping[str, FileRecord]) -> list[str]:
        root = self._path(folder)
        listed = dict(self._if_there(self._fs.find, root, detail=True))
        sizes = {PurePosixPath(path).relative_to(root).as_posix(): entry["size"] for path, entry in listed.items()}
        return [name for name, record in files.items() if sizes.get(name) != record.size]

    def _has(self, *parts: str) -> bool:
        return self._size(self._path(*parts)) is not None

    def _size(self, path: str) -> int | None:
        # Not listed: each of thousands of ranks would list what all have uploaded.
        entry = dict(self._if_there(self._fs.info, path))
        return int(entry["size"]) if entry else None

    def _entry(self, folder: str) -> Entry:
        return Entry(Path(folder), self.manifest(folder)[0])

    def _if_there(self, call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """The answer of the store; empty if it has nothing there."""

        def asked() -> Any:
            self._fs.invalidate_cache()
            try:
                return call(*arguments, **named)
            except FileNotFoundError:
                return []

        return stores.patiently(asked, self.url)

    def _ask(self, call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        return stores.patiently(partial(call, *arguments, **named), self.url)

    def _path(self, *parts: str) -> str:
        return "/".join((self._root, *parts))

    def _damaged(self, folder: str, problem: str) -> UserError:
        return UserError(
            f"the copy is damaged: {problem}", where=f"{self.url}/{folder}", fix="delete it: the one before it is used"
        )


def _name(step: int, manifest: bytes) -> str:
    return f"step-{step:08d}-{hashlib.sha256(manifest).hexdigest()[:12]}"


def folder_of(checkpoint: Path) -> str:
    """Name of the folder of the copies of a run that has, or would have, this checkpoint."""
    manifest = read_manifest(checkpoint)
    return _name(manifest.step, (checkpoint / MANIFEST_NAME).read_bytes())
