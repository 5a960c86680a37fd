"""Checks prepared files against their hashes, when they are first used on a machine.

Results are cached by size, times and inode: beside the data if that is writable, so that all nodes of a shared file
system need one check; else in the user's cache or in a temporary folder of this machine. A copy has a different inode
and change time, so it is checked again.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import TypeAdapter

from llmrecipes.console import duration
from llmrecipes.data.folder.data_manifest import File, Record, document_of
from llmrecipes.errors import UserError
from llmrecipes.io import sync
from llmrecipes.untrusted import open_file, read

REMEMBERED = ".verified.json"
_CHUNK = 8 << 20
SECONDS_BETWEEN_LINES = 10.0
_THREADS = 8  # hashing releases the GIL; more threads than this outrun most file systems


class Content(Record):
    """Content of a file: size, SHA-256 and, for tokens, the smallest and largest id."""

    bytes: int
    sha256: str
    smallest: int | None = None
    largest: int | None = None


class CheckedFile(Record):
    """A file when it was checked, and its content then."""

    mtime_ns: int
    ctime_ns: int
    inode: int
    content: Content

    def is_of(self, stat: os.stat_result, expected: File) -> bool:
        """Whether the file is still the one that was checked, and is the expected one."""
        return self.is_same(stat) and self.content.sha256 == expected.sha256

    def is_same(self, stat: os.stat_result) -> bool:
        """Whether the file is still the one that was checked."""
        now = (stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)
        return now == (self.content.bytes, self.mtime_ns, self.ctime_ns, self.inode)


_SEEN = TypeAdapter(dict[str, CheckedFile])


@dataclass(frozen=True)
class Ids:
    """Valid token ids: the NumPy name of their type, and one more than the largest."""

    dtype: str
    vocab_size: int


def describe(folder: Path, ids: Ids) -> dict[str, Content]:
    """Content of every file of a folder; each is synced to disk when this returns."""
    files = sorted(folder.iterdir())
    stop = threading.Event()
    for file in files:
        if not file.is_symlink():  # to tokens that were there before
            sync(file)
    first = _first_names({file.name: file for file in files})
    with ThreadPoolExecutor(_THREADS) as pool:
        try:
            once = sorted(set(first.values()))
            read = dict(zip(once, pool.map(lambda name: _examine(folder / name, ids, stop).content, once), strict=True))
            return {name: read[same] for name, same in first.items()}
        finally:
            stop.set()  # a signal need not wait for terabytes


def _first_names(files: Mapping[str, Path]) -> dict[str, str]:
    """For each name the first one of the same file: the splits of a source of tokens are links to one file."""
    first: dict[tuple[int, int], str] = {}
    stats = {name: _stat(file) for name, file in files.items()}
    return {name: first.setdefault((stat.st_dev, stat.st_ino), name) for name, stat in stats.items()}


def remember(folder: Path, contents: Mapping[str, Content]) -> None:
    """Record files that were just written as checked.

    Args:
        folder: a prepared folder.
        contents: by path in it.
    """
    _write(_places(folder), {name: _seen(_stat(folder / name), content) for name, content in contents.items()})


def require(
    folder: Path, files: Mapping[str, File], ids: Ids, log: Callable[[str], None], *, again: bool = False
) -> None:
    """Check files that were not checked on this machine yet: one process reads, the others wait.

    Args:
        folder: a prepared folder.
        files: expected files, by path in the folder; `.bin` files hold ids.
        ids: the valid ids.
        log: called when files are read.
        again: read all of them, ignoring the cache.

    Raises:
        UserError: the first file that is missing, differs, or has ids outside the vocabulary.
    """
    contents = {} if again else _known(folder, files)
    if missing := {name: file for name, file in files.items() if name not in contents}:
        with _one_process(folder):
            if not again:
                contents = _known(folder, files)  # another process may have checked them
                missing = {name: file for name, file in files.items() if name not in contents}
            if missing:
                size = sum(file.bytes for file in missing.values())
                log(f"checking {_size(size)} of prepared data in {folder}")
                contents |= _read(folder, missing, ids, log)
    for name, content in contents.items():
        if not 0 <= (content.smallest or 0) <= (content.largest or 0) < ids.vocab_size:
            raise _outside(folder / name, ids)


def hashes(folder: Path, files: Mapping[str, Path], log: Callable[[str], None]) -> dict[str, str]:
    """SHA-256 of files that are not prepared data, such as a model's: read once by this user, several at a time.

    The results are never kept in the folder, which may be untrusted or belong to others.

    Args:
        folder: which files; names the record of results.
        files: where they lie, by name.
        log: receives a line when files are read.

    Raises:
        UserError: a file cannot be read.
    """
    places = _places(folder)[1:]
    known = _hashed(places, files)
    if len(known) == len(files):
        return known
    with _one_process(folder):
        known = _hashed(places, files)  # another process may have read them
        missing = {name: file for name, file in files.items() if name not in known}
        if not missing:
            return known
        size = sum(_stat(file).st_size for file in missing.values())
        log(f"hashing {_size(size)} in {folder}")
        progress = _ReadBytes(size, log)
        stop = threading.Event()
        with ThreadPoolExecutor(min(_THREADS, len(missing))) as pool:
            try:
                seen = dict(
                    zip(missing, pool.map(lambda f: _examine(f, None, stop, progress), missing.values()), strict=True)
                )
            finally:
                stop.set()  # a signal need not wait for a large model
                pool.shutdown(cancel_futures=True)
        _write(places, seen)
        return known | {name: entry.content.sha256 for name, entry in seen.items()}


class _ReadBytes:
    """Bytes that threads have read of files; logs them every `SECONDS_BETWEEN_LINES`, with rate and time left."""

    def __init__(self, total: int, log: Callable[[str], None]) -> None:
        self._total, self._log, self._lock = total, log, threading.Lock()
        self._done = 0
        self._began = self._logged = time.monotonic()

    def add(self, count: int) -> None:
        """Count bytes."""
        with self._lock:
            self._done += count
            now = time.monotonic()
            if now - self._logged < SECONDS_BETWEEN_LINES:
                return
            self._logged = now
            rate = self._done / (now - self._began)
            left = duration(max(self._total - self._done, 0) / rate)
            self._log(f"{_size(self._done)} of {_size(self._total)} read, {_size(int(rate))}/s; about {left} left")


def _hashed(places: Sequence[Path], files: Mapping[str, Path]) -> dict[str, str]:
    """Hashes of the files that have not changed since they were read."""
    hashed: dict[str, str] = {}
    for note in map(_load, places):
        same = (name for name, file in files.items() if name in note and note[name].is_same(_stat(file)))
        hashed |= {name: note[name].content.sha256 for name in same}
    return hashed


def _known(folder: Path, files: Mapping[str, File]) -> dict[str, Content]:
    notes = [_load(place) for place in _places(folder)]
    known = {}
    for name, expected in files.items():
        stat = _stat(folder / name)
        for note in notes:
            if name in note and note[name].is_of(stat, expected):
                known[name] = note[name].content
    return known


def _read(folder: Path, files: Mapping[str, File], ids: Ids, log: Callable[[str], None]) -> dict[str, Content]:
    """Read files and compare them with the expected ones; those that match are cached even if another fails."""
    right: dict[str, CheckedFile] = {}
    first = _first_names({name: folder / name for name in sorted(files, key=lambda name: files[name].bytes)})
    once = list(dict.fromkeys(first.values()))
    stop = threading.Event()
    progress = _ReadBytes(sum(files[name].bytes for name in once), log)
    with ThreadPoolExecutor(min(_THREADS, len(once))) as pool:
        try:
            for read, seen in zip(
                once, pool.map(lambda n: _examine(folder / n, ids, stop, progress), once), strict=True
            ):
                content = seen.content
                for name in (name for name, same in first.items() if same == read):
                    expected = files[name]
                    if (content.bytes, content.sha256) != (expected.bytes, expected.sha256):
                        raise _another(folder / name, content, expected)
                    right[name] = seen
        finally:
            stop.set()  # a signal need not wait for terabytes
            pool.shutdown(cancel_futures=True)
            if not _write(_places(folder), right):
                log("note: no cache directory for this result (XDG_CACHE_HOME, TMPDIR): the next start checks again")
    return {name: seen.content for name, seen in right.items()}


def _examine(file: Path, ids: Ids | None, stop: threading.Event, progress: _ReadBytes | None = None) -> CheckedFile:
    """Hash and ids of a file in one pass; `ids` is None for files that are not prepared."""
    digest, size = hashlib.sha256(), 0
    smallest: int | None = None
    largest: int | None = None
    with _readable(file), open_file(file) as stream:
        stat = os.fstat(stream.fileno())
        buffer = memoryview(bytearray(min(_CHUNK, max(stat.st_size, 1))))
        while not stop.is_set() and (count := _fill(stream.readinto, buffer)):
            size += count
            if progress is not None:
                progress.add(count)
            digest.update(buffer[:count])
            if ids is not None and file.suffix == ".bin":
                itemsize = np.dtype(ids.dtype).itemsize
                part = np.frombuffer(buffer[: count - count % itemsize], ids.dtype)
                if len(part):
                    low, high = int(part.min()), int(part.max())
                    smallest = low if smallest is None else min(low, smallest)
                    largest = high if largest is None else max(high, largest)
    return _seen(stat, Content(bytes=size, sha256=digest.hexdigest(), smallest=smallest, largest=largest))


def _fill(readinto: Callable[[memoryview], int | None], buffer: memoryview) -> int:
    """Bytes read into the buffer; fewer than its size only at the end of the file."""
    filled = 0
    while filled < len(buffer) and (count := readinto(buffer[filled:])):
        filled += count
    return filled


def _seen(stat: os.stat_result, content: Content) -> CheckedFile:
    return CheckedFile(mtime_ns=stat.st_mtime_ns, ctime_ns=stat.st_ctime_ns, inode=stat.st_ino, content=content)


def _another(file: Path, content: Content, expected: File) -> UserError:
    what = f"SHA-256 is {content.sha256[:16]}…, expected {expected.sha256[:16]}…"
    if content.bytes != expected.bytes:
        what = f"has {content.bytes:,} bytes, expected {expected.bytes:,}"
    return UserError(
        what,
        where=str(file),
        rule="prepared files must not change after `prepare` wrote them",
        fix="copy the file again from where it was prepared, or delete the folder and prepare again",
    )


def _outside(file: Path, ids: Ids) -> UserError:
    """The first id outside the vocabulary, found by reading the file again."""
    tokens = np.memmap(file, ids.dtype, mode="r")
    position, token = next(
        (start + int(bad[0]), int(part[bad[0]]))
        for start in range(0, len(tokens), _CHUNK)
        if len(bad := np.flatnonzero(((part := tokens[start : start + _CHUNK]) < 0) | (part >= ids.vocab_size)))
    )
    document, offset = document_of(file.with_suffix(".idx"), position * tokens.itemsize)
    return UserError(
        f"token {offset // tokens.itemsize:,} of document {document:,} has id {token}",
        where=str(file),
        rule=f"ids must be 0 to {ids.vocab_size - 1:,}, the vocabulary of tokenizer.json",
        fix="delete the folder and prepare again",
    )


# -- the cache of results, and its location ----------------------------------------------------------------------------


def _places(folder: Path) -> list[Path]:
    """Possible locations of the cache, the best one first."""
    name = f"verified-{_key(folder)}.json"
    places = [folder / REMEMBERED]
    with suppress(RuntimeError):  # a user without a home, as in a container
        places.append(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "llmrecipes", name))
    if private := _private():
        places.append(private / name)
    return places


def _key(folder: Path) -> str:
    return hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:16]


def _private() -> Path | None:
    """A folder private to this user and machine; None if there is none."""
    folder = Path(tempfile.gettempdir(), f"llmrecipes-{os.geteuid()}")
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        stat = folder.lstat()
    except OSError:
        return None
    ours = stat.st_uid == os.geteuid() and not stat.st_mode & 0o022  # else others could write to it
    return folder if ours and folder.is_dir() and not folder.is_symlink() else None


def _load(place: Path) -> dict[str, CheckedFile]:
    try:
        return _SEEN.validate_json(read(place))
    except (OSError, ValueError):
        return {}  # damaged or missing: the files are read


def _write(places: Sequence[Path], seen: Mapping[str, CheckedFile]) -> bool:
    """Add to the cache in the first writable location; False if there is none."""
    if not seen:
        return True
    for place in places:
        part = place.with_name(f"{place.name}.{os.uname().nodename}.{os.getpid()}")
        with suppress(OSError):
            place.parent.mkdir(parents=True, exist_ok=True)
            try:
                part.write_bytes(_SEEN.dump_json({**_load(place), **seen}))
                part.replace(place)
            finally:
                part.unlink(missing_ok=True)
            return True
    return False


@contextmanager
def _one_process(folder: Path) -> Iterator[None]:
    """Only one process of this machine reads a folder at a time."""
    from filelock import FileLock

    private = _private()
    if private is None:
        yield
        return
    with FileLock(private / f"verified-{_key(folder)}.lock"):
        yield


def _stat(file: Path) -> os.stat_result:
    with _readable(file):
        return file.stat()


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot read: {error.strerror or error}",
            where=str(file),
            rule="prepared files must not change after `prepare` wrote them",
            fix="copy the file again from where it was prepared, or delete the folder and prepare again",
        ) from error


def _size(count: int) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:,.0f} {unit}"
        count //= 1024
    return f"{count:,.0f} TiB"
