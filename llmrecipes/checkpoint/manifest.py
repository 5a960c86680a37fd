"""The manifest: the files of a checkpoint directory and their checksums, and whether a directory agrees with it."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from llmrecipes.recipe.reading.former import translated
from llmrecipes.untrusted import Refused, open_file, read

MANIFEST_NAME = "manifest.json"

_DIGEST = re.compile(rb',\n "sha256": "([0-9a-f]{64})"\n}\n')
"""The last lines; the digest covers everything before them."""


def _relative(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\0" in name or name == MANIFEST_NAME:
        raise ValueError(f"{name!r} is not the name of a file inside the checkpoint")
    return name


class FileRecord(BaseModel):
    """Size in bytes and SHA-256 of one file."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    size: Annotated[int, Field(ge=0)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Monitored(BaseModel):
    """The held-out loss that a run monitors (`train.monitor`), in nats per token, and its progress."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    step: Annotated[int, Field(ge=0)] = 0
    """Step of the last evaluation; 0: there was none."""
    loss: float | None = None
    """Loss then; None: not finite."""
    best: float | None = None
    """Lowest loss so far."""
    best_step: Annotated[int, Field(ge=0)] = 0
    reference: float | None = None
    """Loss that the next one has to be below by more than `train.early_stop.min_delta` to be an improvement."""
    waited: Annotated[int, Field(ge=0)] = 0
    """Evaluations in a row without an improvement."""
    since: Annotated[int, Field(ge=0)] = 0
    """Step behind which losses are of the same held-out sequences: where a stage begins that reads others."""


class CheckpointInfo(BaseModel):
    """What the training loop provides for a checkpoint."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    step: Annotated[int, Field(ge=0)]
    """Optimizer steps done."""
    consumed_samples: Annotated[int, Field(ge=0)]
    consumed_tokens: Annotated[int, Field(ge=0)]
    layout: dict[str, int]
    """Parallel degrees it was written with, by Megatron's names, and `world_size`."""
    recipe_hash: str
    engine: str = "megatron"
    """Engine of the state; older versions had only one and did not record it."""
    recipe: Annotated[dict[str, Any] | None, AfterValidator(lambda values: values and translated(values))] = None
    """The resolved recipe as JSON, for a run that has lost its recipe.yaml; None if written by an older version."""
    monitored: Monitored | None = None
    """None: the run had not been evaluated, or it was written by an older version."""
    sample_order: int = 1
    """`data.folder.prepared.ORDER` that it was trained with; older versions did not record theirs."""


class Manifest(CheckpointInfo):
    """`manifest.json`: written last, so a directory that has one is complete."""

    format: Literal[1, 2] = 2
    """1: without a digest of itself, and with a pickled index."""
    created: str
    """UTC, ISO 8601."""
    versions: dict[str, str]
    """Versions of the libraries that wrote the files; `device` and `layers`: the kind of device, and of the layers."""
    files: Annotated[dict[Annotated[str, AfterValidator(_relative)], FileRecord], Field(min_length=1)]
    """Every other file of the directory, by relative path."""

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(record.size for record in self.files.values())


def build(info: CheckpointInfo, versions: dict[str, str], files: dict[str, FileRecord]) -> Manifest:
    """The manifest of a checkpoint whose files are all on disk."""
    created = datetime.now(UTC).isoformat(timespec="seconds")
    return Manifest(**dict(info), created=created, versions=versions, files=files)


def dump(manifest: Manifest) -> bytes:
    """`manifest.json` of a manifest, with a SHA-256 of itself."""
    body = manifest.model_dump_json(indent=1).removesuffix("\n}").encode()
    return body + b',\n "sha256": "%s"\n}\n' % hashlib.sha256(body).hexdigest().encode()


def parse(text: bytes) -> Manifest:
    """Read `manifest.json`.

    Raises:
        ValueError: a byte of it was changed, or it is not a manifest.
    """
    last = text.rfind(b",\n")
    protected = _DIGEST.fullmatch(text, last) if last >= 0 else None
    if protected is None:
        manifest = Manifest.model_validate_json(text)
        if manifest.format != 1:
            raise ValueError("its own SHA-256 is missing")
        return manifest
    if hashlib.sha256(text[:last]).hexdigest().encode() != protected[1]:
        raise ValueError("its own SHA-256 differs")
    return Manifest.model_validate_json(text[:last] + b"\n}")


def digest(path: Path, root: Path | None = None) -> FileRecord:
    """Size and SHA-256 of a file (reads all of it, with the GIL released).

    Args:
        path: the file.
        root: folder that it must lie in, after all links; None: any.

    Raises:
        UserError: it is not a regular file, or lies outside the root.
        OSError: the file does not exist or cannot be read.
    """
    with open_file(path, root=root) as stream:
        sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
        return FileRecord(size=os.fstat(stream.fileno()).st_size, sha256=sha256)


NAME = re.compile(r"step-(\d{8,})")
"""Name of a checkpoint's directory."""
OPEN_THREADS = 16
"""A network file system takes about a millisecond to open a file, and a checkpoint has one of each rank."""
_HASH_THREADS = 4

Compare = Callable[[Path, Manifest], None]
"""Compares the files of a directory with its manifest, or raises `InvalidCheckpoint`."""


class InvalidCheckpoint(Exception):
    """A directory that is not a complete, unmodified checkpoint; the message names the file and the reason."""


@dataclass(frozen=True)
class Entry:
    """One checkpoint on disk."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def held_out_loss(self) -> float | None:
        """The monitored loss after this step; None: it was not evaluated, or is not finite."""
        monitored = self.manifest.monitored
        return monitored.loss if monitored is not None and monitored.step == self.step else None


def inspect(path: Path, *, full: bool) -> Entry:
    """Read a checkpoint directory's manifest and check its files.

    Args:
        path: the directory.
        full: compare the SHA-256 of every file, not only names and sizes.

    Raises:
        InvalidCheckpoint: with the first bad file and the reason.
    """
    manifest = read_manifest(path)
    if full:
        compare(path, manifest)
    elif problem := _first(path, manifest.files, _wrong_size, OPEN_THREADS):
        raise InvalidCheckpoint(problem)
    return Entry(path, manifest)


def mismatch(path: Path, files: Mapping[str, FileRecord]) -> str:
    """Compare size and SHA-256 of files; returns the first that differs and why, or nothing.

    Args:
        path: their directory.
        files: their records by name.
    """
    return _first(path, files, _wrong_content, _HASH_THREADS)


def compare(path: Path, manifest: Manifest) -> None:
    """Compare the SHA-256 of every file.

    Raises:
        InvalidCheckpoint: with the first bad file and the reason.
    """
    if problem := mismatch(path, manifest.files):
        raise InvalidCheckpoint(problem)


def _first(
    path: Path, files: Mapping[str, FileRecord], wrong: Callable[[Path, str, FileRecord], str], threads: int
) -> str:
    def check(item: tuple[str, FileRecord]) -> str:
        name, record = item
        try:
            problem = wrong(path, name, record)
        except OSError as error:
            problem = str(error.strerror)
        except Refused as error:
            problem = error.what
        return f"{name}: {problem}" if problem else ""

    with ThreadPoolExecutor(threads) as pool:
        for problem in pool.map(check, files.items()):
            if problem:
                pool.shutdown(cancel_futures=True)
                return problem
    return ""


def _wrong_size(path: Path, name: str, record: FileRecord) -> str:
    # Not opened, which would take a message to the server for each of thousands of files; loading does.
    status = (path / name).stat()
    if not stat.S_ISREG(status.st_mode):
        return "is not a regular file"
    return "" if status.st_size == record.size else f"{status.st_size} bytes, expected {record.size}"


def _wrong_content(path: Path, name: str, record: FileRecord) -> str:
    if problem := _wrong_size(path, name, record):
        return problem
    return "" if digest(path / name, path) == record else "SHA-256 differs from the manifest's"


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of a directory.

    Raises:
        InvalidCheckpoint: it is missing, damaged, or of another step.
    """
    try:
        manifest = parse(read(path / MANIFEST_NAME, root=path))
    except Refused as problem:
        raise InvalidCheckpoint(f"{MANIFEST_NAME}: {problem.what}") from problem
    except OSError as problem:
        raise InvalidCheckpoint(f"{MANIFEST_NAME}: {problem.strerror}") from problem
    except ValidationError as problem:
        first = problem.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise InvalidCheckpoint(f"{MANIFEST_NAME}: {where + ': ' if where else ''}{first['msg']}") from problem
    except ValueError as problem:
        raise InvalidCheckpoint(f"{MANIFEST_NAME}: {problem}") from problem
    match = NAME.search(path.name)
    if match is None or int(match[1]) != manifest.step:
        raise InvalidCheckpoint(f"{MANIFEST_NAME}: belongs to step {manifest.step}")
    return manifest
