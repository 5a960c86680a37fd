"""Nothing in a checkpoint is code.

torch.distributed.checkpoint reads its `.metadata` with pickle and its byte items with `weights_only=False`, so a
checkpoint from elsewhere could run anything. Both are read here first, by readers that know only data; what they
refuse never reaches torch's.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedObject, ShardedTensor
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, BytesStorageMetadata, Metadata

from llmrecipes.errors import UserError

_METADATA = ".metadata"
_COMMON = "common.pt"

_ALLOWED = {
    ("collections", "OrderedDict"),
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"),
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
}


class _DataUnpickler(pickle.Unpickler):
    """Knows the classes of `.metadata` and torch's dtypes; none of them does anything but hold values."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _memory_format
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _memory_format(owner: object, name: str) -> _MEM_FORMAT_ENCODING:
    """Stands for `getattr`, as which Python 3.11.0 to 3.11.3 (Debian 12's) write the member of an enumeration."""
    if owner is not _MEM_FORMAT_ENCODING or name not in _MEM_FORMAT_ENCODING.__members__:
        raise pickle.UnpicklingError(f"it names builtins.getattr of {owner!r}")
    return _MEM_FORMAT_ENCODING[name]


def read_metadata(directory: Path) -> Metadata:
    """Read torch.distributed.checkpoint's index of a checkpoint without trusting it.

    Raises:
        UserError: it holds anything but the description of tensors and bytes.
    """
    path = directory / _METADATA
    with path.open("rb") as stream:
        metadata = _refusing(path, lambda: _DataUnpickler(stream).load())
    if not isinstance(metadata, Metadata):
        raise _unsafe(path, f"it is a {type(metadata).__name__}")
    return metadata


def audit(directory: Path) -> Metadata:
    """Check that everything torch and megatron-core will unpickle is plain data.

    Args:
        directory: a checkpoint.

    Returns:
        The index, as `read_metadata`.

    Raises:
        UserError: names the file that holds something else.
    """
    metadata = read_metadata(directory)
    for index, stored in metadata.state_dict_metadata.items():
        if isinstance(stored, BytesStorageMetadata):
            _check_bytes(directory, metadata, index)
    common = directory / _COMMON
    if common.exists():
        _refusing(common, partial(torch.load, common, map_location="cpu", weights_only=True))
    return metadata


def require_plain(state: dict[str, Any]) -> None:
    """Check before the first save that it could be loaded again.

    Raises:
        TypeError: names the entry that is not plain data.
    """
    for key, value in _leaves(state):
        buffer = io.BytesIO()
        torch.save(value, buffer)
        buffer.seek(0)
        try:
            torch.load(buffer, weights_only=True)
        except pickle.UnpicklingError as problem:
            raise TypeError(f"{key} of the state dict is not plain data: {problem}") from problem


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _leaves(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _leaves(inner, f"{key}.{index}")
    elif isinstance(value, ShardedObject):
        yield value.key, value.data
    elif not isinstance(value, ShardedTensor | LocalNonpersistentObject):
        yield key, value


def _check_bytes(directory: Path, metadata: Metadata, name: str) -> None:
    places = [info for index, info in metadata.storage_data.items() if index.fqn == name]
    for place in places:
        path = directory / place.relative_path
        if not path.resolve().is_relative_to(directory.resolve()):
            raise _unsafe(path, "it lies outside the checkpoint")
        with path.open("rb") as stream:
            stream.seek(place.offset)
            data = io.BytesIO(stream.read(place.length))
        _refusing(path, partial(torch.load, data, map_location="cpu", weights_only=True))


def _refusing(path: Path, read: Callable[[], Any]) -> Any:
    try:
        return read()
    except (pickle.UnpicklingError, AttributeError, EOFError, ImportError, IndexError, KeyError, TypeError) as problem:
        raise _unsafe(path, str(problem).splitlines()[0]) from problem


def _unsafe(path: Path, why: str) -> UserError:
    return UserError(
        f"this checkpoint file is not plain data: {why}",
        where=str(path),
        rule="checkpoints hold tensors, numbers, strings, lists and dicts; anything else could run code on loading",
        fix="use a checkpoint that this program wrote",
    )
