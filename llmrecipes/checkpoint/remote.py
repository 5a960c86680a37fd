"""Copies of a run's checkpoints in an object store (`checkpoint.copy_to`).

    s3://bucket/folder/gpt-1b/RUN-ID/step-00001000/    the files of a checkpoint, and last of all its manifest.json

A folder without a manifest is not a copy: an upload that is killed at any moment leaves none that can be taken for one.
Ranks meet in the store: each uploads its share of the files, and the first one writes the manifest when it sees all of
them. Parts are checked by the store as it receives them (s3fs sends their CRC), files by SHA-256 when they are fetched.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from llmrecipes import stores
from llmrecipes.checkpoint.manifest import (
    MANIFEST_NAME,
    NAME,
    Entry,
    FileRecord,
    InvalidCheckpoint,
    Manifest,
    mismatch,
    parse,
    read_manifest,
)
from llmrecipes.checkpoint.store import best, surviving
from llmrecipes.errors import UserError
from llmrecipes.io import sync
from llmrecipes.units import gib
from llmrecipes.untrusted import MANIFEST

KEY = "checkpoint.copy_to"
SLOWEST = 1e6
"""Bytes a second with which a rank's upload is waited for, after `stores.PATIENCE_SECONDS`."""
_FILES, _PARTS, _PART, _MOST_PARTS = 2, 4, 16 << 20, 9_000
"""Files of a rank that are moved at once; parts of each, their bytes, and how many there may be. s3fs would hold ten
parts of 50 MB: with eight ranks on a node, gigabytes of its memory."""
_LONGEST_PAUSE = 30.0


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
        self._fs, self._root = stores.file_system(self.url, KEY, anew=True)

    def steps(self) -> list[int]:
        """Steps of complete copies, in order.

        Raises:
            UserError: as `stores.patiently`.
        """
        found = sorted(int(match[1]) for name in self._beside() if (match := NAME.fullmatch(name)))
        return [step for step in found if self._size(self._path(step, MANIFEST_NAME)) is not None]

    def manifest(self, step: int) -> tuple[Manifest, bytes]:
        """The manifest of a copy, and its bytes.

        Raises:
            UserError: it is damaged; or as `stores.patiently`.
        """
        where = f"{self.url}/{_folder(step)}/{MANIFEST_NAME}"
        content = self._asked(self._fs.cat_file, self._path(step, MANIFEST_NAME), start=0, end=MANIFEST)
        try:
            manifest = parse(content)
        except ValueError as problem:
            raise UserError(
                f"the manifest of a copy is damaged: {problem}", where=where, fix="delete it: older copies are used"
            ) from problem
        if manifest.step != step:
            raise UserError(f"a manifest of step {manifest.step}", where=where, fix="delete it: older copies are used")
        return manifest, content

    def put_beside(self, path: Path) -> None:
        """Upload a file of the run beside its copies.

        Raises:
            UserError: as `stores.patiently`.
        """
        self._put(path, f"{self._root}/{path.name}")

    def upload(self, folder: Path, names: Iterable[str]) -> None:
        """Upload files of a published checkpoint; a file that is there with its size is left.

        Args:
            folder: of the checkpoint.
            names: of files in it.

        Raises:
            UserError: as `stores.patiently`.
            OSError: a file is gone.
        """

        def put(name: str) -> None:
            target = self._path(_step(folder), name)
            if self._size(target) != (folder / name).stat().st_size:
                self._put(folder / name, target)

        with ThreadPoolExecutor(_FILES) as pool:
            list(pool.map(put, names))

    def announce(self, folder: Path, is_ended: Callable[[], bool]) -> Manifest:
        """Write the manifest of a copy when all its files are there.

        Args:
            folder: of the checkpoint.
            is_ended: whether to give up.

        Raises:
            UserError: a rank has not uploaded its files in time; or as `stores.patiently`.
            InvalidCheckpoint: the checkpoint is gone.
        """
        manifest = read_manifest(folder)
        largest = max(record.size for record in manifest.files.values())
        longest = stores.PATIENCE_SECONDS + largest / SLOWEST
        began, pause = time.monotonic(), 0.1
        while missing := _missing(manifest.files, self._sizes(manifest.step)):
            if is_ended() or (away := time.monotonic() - began) + pause > longest:
                why = "the run has ended" if is_ended() else f"not uploaded within {away:.0f} s"
                more = f" and {len(missing) - 1} more files" if len(missing) > 1 else ""
                raise UserError(
                    f"{missing[0]}{more}: {why}",
                    where=f"{self.url}/{folder.name}",
                    fix="see the logs of the ranks that upload them; the next checkpoint is copied again",
                )
            time.sleep(pause)
            pause = min(1.5 * pause, _LONGEST_PAUSE)
        self._put(folder / MANIFEST_NAME, self._path(manifest.step, MANIFEST_NAME))
        return manifest

    def prune(self, most_recent_k: int, keep_interval: int | None, *, keep_best: bool, before: int) -> list[int]:
        """Delete copies by the rule of `CheckpointStore.prune`.

        Args:
            before: only copies of earlier steps.

        Returns:
            Steps that were deleted.

        Raises:
            UserError: as `stores.patiently`.
        """
        steps = self.steps()
        keep = surviving(steps, most_recent_k, keep_interval)
        if keep_best:
            entries = [Entry(Path(_folder(step)), self.manifest(step)[0]) for step in steps]
            keep |= {entry.step for entry in [best(entries)] if entry is not None}
        doomed = [step for step in steps if step < before and step not in keep]
        for step in doomed:
            self.withdraw(step)
            self._asked(self._fs.rm, self._path(step), recursive=True)
        return doomed

    def withdraw(self, step: int) -> None:
        """Delete the manifest of a copy, which is none from now on.

        Raises:
            UserError: as `stores.patiently`.
        """
        self._asked(self._fs.rm_file, self._path(step, MANIFEST_NAME))

    def fetch(self, step: int, names: Sequence[str], files: Mapping[str, FileRecord], folder: Path) -> None:
        """Copy files into a folder on a disk, and compare their hashes.

        Args:
            names: of the files that are copied.
            files: records of all files of the copy, by name.
            folder: a temporary folder of the run's checkpoints.

        Raises:
            UserError: a file differs from its record, or does not fit; or as `stores.patiently`.
            OSError: it cannot be written.
        """
        wanted = {name: files[name] for name in names}
        where = f"{self.url}/{_folder(step)}"
        there = self._sizes(step)  # before a byte of it is on the disk
        for name, record in wanted.items():
            if there.get(name) != record.size:
                what = f"{name} has {there.get(name, 0):,} bytes, and its manifest says {record.size:,}"
                raise UserError(what, where=where, fix="delete the copy: older ones are used")
        needed, free = sum(record.size for record in wanted.values()), shutil.disk_usage(folder).free
        if needed > free:
            raise UserError(f"a copy needs {gib(needed)}, {gib(free)} free", where=str(folder), fix="free some space")

        def get(name: str) -> None:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            self._asked(self._fs.get_file, self._path(step, name), str(path), **self._in_parts(files[name].size))
            sync(path)

        with ThreadPoolExecutor(_FILES) as pool:
            list(pool.map(get, wanted))
        if problem := mismatch(folder, wanted):
            raise UserError(problem, where=where, fix="delete the copy: older ones are used")

    def fetch_beside(self, name: str, path: Path) -> bool:
        """Copy a file that `announce` has put beside the copies; False if there is none.

        Raises:
            UserError: as `stores.patiently`.
            OSError: it cannot be written.
        """
        if name not in self._beside():
            return False
        temporary = path.with_name(f".{path.name}.tmp")
        self._asked(self._fs.get_file, f"{self._root}/{name}", str(temporary))
        sync(temporary)
        temporary.replace(path)
        return True

    def _beside(self) -> list[str]:
        """Names of the copies, and of the files beside them."""

        def ask() -> dict[str, Any]:
            return {entry["name"]: entry for entry in self._fs.ls(self._root, detail=True)}

        return [PurePosixPath(name).name for name in self._listed(ask)]

    def _put(self, path: Path, target: str) -> None:
        if "file" in self._fs.protocol:  # other stores have no folders
            self._asked(self._fs.makedirs, str(PurePosixPath(target).parent), exist_ok=True)
        self._asked(self._fs.put_file, str(path), target, **self._in_parts(path.stat().st_size))

    def _in_parts(self, size: int) -> dict[str, int]:
        if "s3" not in self._fs.protocol:
            return {}
        return {"chunksize": max(_PART, -(-size // _MOST_PARTS)), "max_concurrency": _PARTS}

    def _sizes(self, step: int) -> dict[str, int]:
        """Bytes of the files of a copy by name, complete or not."""
        root = self._path(step)
        found = self._listed(partial(self._fs.find, root, detail=True))
        return {PurePosixPath(name).relative_to(root).as_posix(): int(entry["size"]) for name, entry in found.items()}

    def _size(self, path: str) -> int | None:
        # Not listed: each of thousands of ranks would list what all have uploaded.
        found = self._listed(partial(self._fs.info, path))
        return int(found["size"]) if found else None

    def _listed(self, ask: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        def asked() -> dict[str, Any]:
            self._fs.invalidate_cache()
            try:
                return ask()
            except FileNotFoundError:
                return {}

        return stores.patiently(asked, self.url)

    def _asked(self, call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        return stores.patiently(partial(call, *arguments, **named), self.url)

    def _path(self, step: int, name: str = "") -> str:
        return "/".join(filter(None, (self._root, _folder(step), name)))


def _folder(step: int) -> str:
    return f"step-{step:08d}"


def _step(folder: Path) -> int:
    match = NAME.fullmatch(folder.name)
    if match is None:
        raise InvalidCheckpoint(f"{folder} is not named like a checkpoint")
    return int(match[1])


def _missing(files: Mapping[str, FileRecord], there: Mapping[str, int]) -> list[str]:
    return [name for name, record in files.items() if there.get(name) != record.size]
