"""The manifest: the files of a checkpoint directory, and their checksums."""

from __future__ import annotations

import hashlib
import os
import re
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from llmrecipes.untrusted import open_file

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
    recipe: dict[str, Any] | None = None
    """The resolved recipe as JSON, for a run that has lost its recipe.yaml; None if written by an older version."""


class Manifest(CheckpointInfo):
    """`manifest.json`: written last, so a directory that has one is complete."""

    format: Literal[1, 2] = 2
    """1: without a digest of its own, and with a pickled index."""
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
    return Manifest(**info.model_dump(), created=created, versions=versions, files=files)


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
