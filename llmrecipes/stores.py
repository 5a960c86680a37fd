"""Files in stores that fsspec reads: S3 and what speaks its protocol, Google Cloud Storage, Azure, HTTP.

They are read by ranges, never copied to a disk. A store that does not answer is asked again for `PATIENCE_SECONDS`.
Credentials are those that the store's library finds: environment, profile or role of the machine. A recipe has none.
"""

from __future__ import annotations

import io
import logging
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import PurePosixPath
from typing import Any, BinaryIO, TypeVar, cast
from urllib.parse import urlsplit

from llmrecipes.errors import UserError

logger = logging.getLogger(__name__)

T = TypeVar("T")
PATIENCE_SECONDS = 300.0
PACKAGES: dict[str, tuple[str, str | None]] = {
    "s3": ("s3fs", "corpora"),
    "gs": ("gcsfs", None),
    "az": ("adlfs", None),
    "abfs": ("adlfs", None),
}
"""The package that fsspec opens a scheme with, and the extra that has it."""
_RANGE = 8 << 20
_LONGEST_PAUSE = 20.0
_CREDENTIALS = {"NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "TokenRetrievalError"}
"""Of botocore, which need not be installed."""
NO_CREDENTIALS = "recipes, and manifests of their data, must not have credentials"
PLAIN_URL = "use a plain URL, with credentials in the environment or the profile of the store's library"
_FIX = "check the URL, and the credentials and the endpoint in the environment or the profile of the store's library"


@dataclass(frozen=True)
class StoreFile:
    """A file in a store, by its URL; `size` in bytes, as the store listed it."""

    url: str
    size: int

    @property
    def name(self) -> str:
        return PurePosixPath(urlsplit(self.url).path).name

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.name).suffix

    def __str__(self) -> str:
        return self.url

    def open(self) -> BinaryIO:
        """A stream of its bytes, which can seek."""
        return cast(BinaryIO, io.BufferedReader(_Ranges(self), _RANGE))


def is_url(path: str) -> bool:
    """Whether a path names a store."""
    return re.match(r"[a-z][a-z0-9+.-]+://", path) is not None


def has_credentials(url: str) -> bool:
    """Whether a user, a password or a signature is in a URL."""
    parts = urlsplit(url)
    return bool(parts.username or parts.password) or "=" in parts.query


def find(url: str, suffixes: tuple[str, ...], where: str) -> list[StoreFile]:
    """The files of a URL, sorted by name: it names a file, or files by a glob; or ends with `/`, or is a folder.

    Args:
        url: such as `s3://bucket/folder/`.
        suffixes: suffixes of the files of a folder.
        where: the key of the recipe.

    Raises:
        UserError: the store refuses, does not answer, or is of an unknown kind; the URL has credentials in it.
    """
    from fsspec.core import has_magic  # type: ignore[import-untyped]
    from fsspec.utils import glob_translate  # type: ignore[import-untyped]

    if has_credentials(url) or (urlsplit(url).query and not has_magic(url)):
        raise UserError("a URL with credentials or a query", where=where, rule=NO_CREDENTIALS, fix=PLAIN_URL)
    fs, root = file_system(url, where)

    def listed() -> list[dict[str, Any]]:
        fs.invalidate_cache()
        if has_magic(root):
            matches = re.compile(glob_translate(root)).match
            entries = [entry for entry in _walk(fs, _without_magic(root)) if matches(entry["name"])]
        elif url.endswith("/") or (info := fs.info(root))["type"] == "directory":
            entries = [entry for entry in _walk(fs, root) if entry["name"].endswith(suffixes)]
        else:
            entries = [info]
        return [entry if entry.get("size") is not None else fs.info(entry["name"]) for entry in entries]

    entries = [entry for entry in patiently(listed, url) if entry["type"] == "file"]
    if unknown := next((entry for entry in entries if entry.get("size") is None), None):
        raise UserError(
            "the server does not report its length",
            where=str(unknown["name"]),
            fix="download the file and use its local path",
        )
    files = [StoreFile(fs.unstrip_protocol(entry["name"]), int(entry["size"])) for entry in entries]
    return sorted(files, key=lambda file: file.url)


def file_system(url: str, where: str, *, fresh: bool = False) -> tuple[Any, str]:
    """The store of a URL, of fsspec, and the path in it; some connect here already.

    Args:
        fresh: with a new client, which reads the credentials again.

    Raises:
        UserError: as `find`.
    """
    import fsspec  # type: ignore[import-untyped]

    scheme = urlsplit(url).scheme

    def ask() -> tuple[Any, str]:
        try:
            opened: tuple[Any, str] = fsspec.core.url_to_fs(url, skip_instance_cache=fresh)
        except (ImportError, ValueError) as error:
            package, extra = PACKAGES.get(scheme, (f"the fsspec package for {scheme}://", None))
            # Releases of s3fs and gcsfs go with the release of fsspec that has their version.
            exact = f"=={fsspec.__version__}" if package in ("s3fs", "gcsfs") else ""
            fix = f"pip install 'llmrecipes[{extra}]'" if extra else f"pip install {package}{exact}"
            raise UserError(f"cannot open {scheme}://: {error}", where=where, fix=fix) from error
        except (TypeError, AttributeError) as error:  # it has no place of its own, or needs more than a URL
            raise UserError(
                f"cannot open {scheme}:// by a URL alone: {error}",
                where=f"{where}: {url}",
                rule="a URL names a store such as s3://, gs://, az://, hf:// or https://",
                fix="use such a URL, or a local path",
            ) from error
        return opened

    return patiently(ask, url)


def _walk(fs: Any, folder: str) -> Iterator[dict[str, Any]]:
    """The files below a folder but hidden ones. fsspec's own walk leaves out what it cannot list."""
    for entry in fs.ls(folder, detail=True):
        name = PurePosixPath(entry["name"]).name
        if name.startswith("."):
            continue
        if entry["type"] != "directory":
            yield entry
        elif entry["name"].rstrip("/") != folder.rstrip("/"):
            yield from _walk(fs, entry["name"])


def _without_magic(root: str) -> str:
    first = re.search(r"[*?\[]", root)
    return root[: root.rindex("/", 0, first.start() if first else None) + 1]


class _Ranges(io.RawIOBase):
    """The bytes of a file of a store, range by range."""

    def __init__(self, file: StoreFile) -> None:
        self._file, self._at = file, 0
        self._fs, self._path = file_system(file.url, file.url)
        # The Hub's files would read 5 MiB ahead with each range, and forget them.
        self._options = {"cache_type": "none"} if file.url.startswith("hf://") else {}

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._file.size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        end = min(self._at + len(buffer), self._file.size)
        if end <= self._at:
            return 0
        ask = partial(self._fs.cat_file, self._path, start=self._at, end=end, **self._options)
        content = patiently(ask, self._file.url)
        if len(content) != end - self._at:
            raise UserError(
                f"{len(content):,} bytes instead of {end - self._at:,}",
                where=self._file.url,
                rule="a store must support range requests, and files must not change meanwhile",
                fix="download the files, or run it again if they were replaced",
            )
        buffer[: len(content)] = content
        self._at = end
        return len(content)


def is_final(error: Exception) -> bool:
    """Whether asking again would not help: no such file or bucket, no rights, no credentials."""
    status = getattr(error, "status", None) or getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(status, int):
        return 400 <= status < 500 and status not in (408, 425, 429)
    kinds = (FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError, ImportError, ValueError)
    return isinstance(error, kinds) or type(error).__name__ in _CREDENTIALS


def patiently(ask: Callable[[], T], url: str, final: Callable[[Exception], bool] = is_final) -> T:
    """Ask a store until it answers.

    Args:
        ask: the question.
        url: for messages.
        final: whether asking again after an error would not help.

    Raises:
        UserError: it refuses, or has not answered for `PATIENCE_SECONDS`.
    """
    began, pause = time.monotonic(), 0.5
    while True:
        try:
            return ask()
        except UserError:
            raise
        except Exception as error:  # each library below has errors of its own
            reason = next(iter(str(error).splitlines()), "") or type(error).__name__
            if final(error):
                what = f"the store refused the request: {reason}"
                raise UserError(what, where=url, fix=_FIX, again=True) from error
            away = time.monotonic() - began
            if away + pause > PATIENCE_SECONDS:
                what = f"the store has not answered for {away:.0f} s: {reason}"
                raise UserError(what, where=url, fix=_FIX, again=True) from error
            logger.warning("%s: %s; retrying in %.1f s", url, reason, pause)
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
