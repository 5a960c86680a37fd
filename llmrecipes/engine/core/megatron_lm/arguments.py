"""The arguments of a training in a checkpoint of Megatron-LM: an `argparse.Namespace` in a pickle, read as data.

No class is imported or instantiated. What a training saves besides plain values (types, enumerations, paths, random
states, storages of tensors) becomes a record without behaviour; what it has no reason to name is refused.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Mapping
from typing import IO, Any

from llmrecipes.engine.core.checkpoint.pickled_index import MOST_BYTES, Record, record_kind, require_bounded

_PLAIN = (bool, int, float, str, type(None))
_PACKAGES = frozenset(
    {
        "_codecs", "argparse", "collections", "datetime", "enum", "functools", "megatron", "numpy",
        "nvidia_resiliency_ext", "pathlib", "signal", "torch", "transformer_engine",
    }
)  # fmt: skip
"""Packages whose objects a training may save."""
_BUILTINS = frozenset({"bytearray", "complex", "frozenset", "getattr", "range", "set", "slice"})


def read(stream: IO[bytes], start: int, length: int) -> tuple[Mapping[str, Any], int | None]:
    """Read the arguments and the iteration of what torch.save wrote.

    Args:
        stream: a file.
        start, length: first byte and bytes of the pickle's zip archive in it.

    Returns:
        Arguments with plain values, empty if it has none; the iteration, None if it has none.

    Raises:
        pickle.UnpicklingError: it names what a training does not save.
        Exception: of any kind, for malformed bytes.
    """
    if length > MOST_BYTES:
        raise pickle.UnpicklingError(f"it has {length} bytes, more than what is not sharded can have")
    stream.seek(start)
    with zipfile.ZipFile(io.BytesIO(stream.read(length))) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith("/data.pkl"))
        member = archive.getinfo(name)
        if member.compress_type != zipfile.ZIP_STORED or member.file_size > MOST_BYTES:
            raise pickle.UnpicklingError("its pickle is compressed, which torch.save does not do")
        content = archive.read(member)
    require_bounded(content)
    common = _Reader(io.BytesIO(content)).load()
    if isinstance(common, list) and len(common) == 1:
        (common,) = common  # as an object of megatron-core 0.19
    if not isinstance(common, dict):
        raise pickle.UnpicklingError(f"the common (unsharded) state is a {type(common).__name__}, expected a dict")
    iteration = common.get("iteration")
    return _arguments(common.get("args")), iteration if type(iteration) is int else None


def _arguments(value: object) -> dict[str, Any]:
    state = value.state if isinstance(value, Record) and type(value).__name__ == "Namespace" else value
    if not isinstance(state, dict):
        return {}
    return {name: each for name, each in state.items() if isinstance(name, str) and _is_plain(each)}


def _is_plain(value: object) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, list | tuple) and all(isinstance(e, _PLAIN) for e in value))


class _Container(Record):
    """A record whose items, if it has any, are not kept."""

    __slots__ = ()

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def append(self, value: Any) -> None: ...


def stand_in(module: str, name: str) -> Any:
    """A record in place of a class, or function, that a training saves.

    Raises:
        pickle.UnpicklingError: it does not.
    """
    if name in _BUILTINS if module == "builtins" else module.partition(".")[0] in _PACKAGES:
        return dict if name == "OrderedDict" else record_kind(name, _Container)
    raise pickle.UnpicklingError(f"it names {module}.{name}")


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return stand_in(module, name)

    def persistent_load(self, _: Any) -> None:
        """Storages of tensors are not read."""
