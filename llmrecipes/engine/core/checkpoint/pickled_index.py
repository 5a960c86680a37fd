"""The index of checkpoints that older versions wrote: torch.distributed.checkpoint's `.metadata`, a pickle.

It is read once, into records that only hold values, which are checked like any other index. No torch class is imported
or instantiated, and torch never reads the file.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Callable
from typing import IO, Any, NoReturn

from llmrecipes.engine.core.checkpoint.index import DTYPES, Described, ObjectRecord, Span, Table, make_table

_CHECKPOINT = "torch.distributed.checkpoint"
MOST_BYTES = 1 << 28
"""Bytes of the largest pickle that is read: that of a training on 16,384 ranks has fewer."""
_LINE = -1
_LINES = -2
_UNKNOWN = -3
_WIDTHS = {
    pickletools.TAKEN_FROM_ARGUMENT1: -10,
    pickletools.TAKEN_FROM_ARGUMENT4: -40,
    pickletools.TAKEN_FROM_ARGUMENT4U: -40,
    pickletools.TAKEN_FROM_ARGUMENT8U: -80,
    pickletools.UP_TO_NEWLINE: _LINE,
}


def _lengths() -> list[int]:
    """By operation: bytes of its argument; one of the above; or -10 times the bytes of the argument's length."""
    lengths = [_UNKNOWN] * 256
    for operation in pickletools.opcodes:
        length = 0 if operation.arg is None else operation.arg.n
        lengths[ord(operation.code)] = _WIDTHS.get(length, length)
    lengths[ord(pickle.GLOBAL)] = lengths[ord(pickle.INST)] = _LINES
    return lengths


_LENGTHS = _lengths()
_BOUNDED = frozenset(map(ord, (pickle.PUT, pickle.BINPUT, pickle.LONG_BINPUT, pickle.FRAME)))


class _Sealed(type):
    """A class that a pickle cannot alter."""

    def __setattr__(cls, name: str, value: object) -> None:
        raise pickle.UnpicklingError(f"it sets {cls.__name__}.{name}")

    @property
    def __setstate__(cls) -> NoReturn:
        # A property of the metaclass is found before the method that records have.
        raise pickle.UnpicklingError(f"it alters the class {cls.__name__}")


class InertRecord(metaclass=_Sealed):
    """Replaces every object: holds its arguments and its state, without behaviour."""

    __slots__ = ("arguments", "state")
    arguments: tuple[Any, ...]
    state: Any

    def __new__(cls, *arguments: Any) -> InertRecord:
        instance = super().__new__(cls)
        instance.arguments = arguments
        instance.state = None
        return instance

    def __setstate__(self, state: Any) -> None:
        self.state = state


def record_kind(name: str, base: type[InertRecord] = InertRecord) -> _Sealed:
    """A class of records, in place of one that a pickle names."""
    return _Sealed(name, (base,), {"__slots__": ()})


_GETATTR = record_kind("getattr")
"""Python 3.11.0 to 3.11.3 (Debian 12's) write the member of an enumeration as a call of it."""

_KINDS: dict[tuple[str, str], _Sealed] = {
    (module, name): record_kind(name)
    for module, names in {
        "pathlib": ("Path", "PosixPath"),
        "pathlib._local": ("PosixPath",),
        "torch": ("Size",),
        "torch.serialization": ("_get_layout",),
        f"{_CHECKPOINT}.filesystem": ("_StorageInfo", "_StoragePrefix"),
        f"{_CHECKPOINT}.metadata": (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        ),
    }.items()
    for name in names
} | {("builtins", "getattr"): _GETATTR}


Find = Callable[[str, str], Any]
"""What stands for a class, by module and name."""


class _IndexUnpickler(pickle.Unpickler):
    def __init__(self, stream: IO[bytes], find_other: Find | None) -> None:
        super().__init__(stream)
        self._find_other = find_other

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _KINDS:
            return _KINDS[module, name]
        if module == "torch" and name in DTYPES:
            return name
        if self._find_other is not None:
            return self._find_other(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def require_bounded(content: bytes) -> None:
    """Check that reading a pickle needs no more memory than a small multiple of its bytes.

    `pickle` reserves what a length or a number in the memo says before it looks at the next byte: nine bytes take
    gigabytes. Here the operations are passed over without carrying them out, some millions of them a second;
    `pickletools.genops`, which reads them too, takes ten times as long.

    Raises:
        pickle.UnpicklingError: a number is larger than the pickle, or it has an operation that does not exist.
    """
    size = len(content)
    position = 0
    stop = ord(pickle.STOP)
    while position < size:
        operation = content[position]
        if operation == stop:
            return
        length = _LENGTHS[operation]
        start = position = position + 1
        if length >= 0:
            position += length
            if operation in _BOUNDED and int.from_bytes(content[start:position], "little") > size:
                break
        elif length >= _LINES:  # text, to the end of the line, or of the next one
            for _ in range(-length):
                position = content.find(b"\n", position) + 1 or size + 1
            if operation in _BOUNDED and not content[start:position].strip().isdigit():
                break
            if operation in _BOUNDED and (position - start > 20 or int(content[start:position]) > size):
                break
        elif length == _UNKNOWN:
            break
        else:
            width = -length // 10
            position += width + int.from_bytes(content[start : start + width], "little")
    raise pickle.UnpicklingError(f"it is cut off, or names more than it can hold, at byte {position:,} of {size:,}")


def read(stream: IO[bytes], find_other: Find | None = None) -> Table:
    """Read `.metadata`.

    Args:
        stream: the file.
        find_other: what stands for classes that do not describe tensors, of which other programs write some; None:
            they are refused.

    Raises:
        pickle.UnpicklingError: it holds anything but the description of tensors and objects.
        Exception: of any kind, for malformed bytes.
    """
    content = stream.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise pickle.UnpicklingError(f"it has more than {MOST_BYTES:,} bytes")
    require_bounded(content)
    fields = _fields(_IndexUnpickler(io.BytesIO(content), find_other).load(), "Metadata")
    numbers: dict[str, int] = {}
    places: dict[tuple[str, tuple[int, ...] | None], list[int]] = {}
    for key, info in fields["storage_data"].items():
        where, (file, start, length) = _place(key, info)
        places[where] = [numbers.setdefault(file, len(numbers)), start, length]
    objects, tensors = [], []
    for name, stored in fields["state_dict_metadata"].items():
        if _is(stored, "BytesStorageMetadata"):
            objects.append(ObjectRecord(name=name, place=places[name, None]))
        else:
            tensors.append(_tensor(name, _fields(stored, "TensorStorageMetadata"), places))
    return make_table(list(numbers), objects, tensors)


def _tensor(
    name: str, fields: dict[str, Any], places: dict[tuple[str, tuple[int, ...] | None], list[int]]
) -> Described:
    properties = _state(fields["properties"], "TensorProperties", tuple)
    rows = []
    for chunk in fields["chunks"]:
        box = _fields(chunk, "ChunkStorageMetadata")
        offset, size = _size(box["offsets"]), _size(box["sizes"])
        rows.append([*places[name, offset], *(number for pair in zip(offset, size, strict=True) for number in pair)])
    return name, properties[0], _size(fields["size"]), rows


def _place(key: object, info: object) -> tuple[tuple[str, tuple[int, ...] | None], Span]:
    where, stored = _fields(key, "MetadataIndex"), _fields(info, "_StorageInfo")
    if stored.get("transform_descriptors"):
        raise pickle.UnpicklingError("it names transformations of the stored bytes")
    offset = where.get("offset")
    return (
        (where["fqn"], None if offset is None else _size(offset)),
        (stored["relative_path"], stored["offset"], stored["length"]),
    )


def _size(value: object) -> tuple[int, ...]:
    if not (isinstance(value, InertRecord) and _is(value, "Size") and len(value.arguments) == 1):
        raise pickle.UnpicklingError(f"it has a {type(value).__name__} in place of a Size")
    return tuple(value.arguments[0])


def _fields(value: object, kind: str) -> dict[str, Any]:
    state: dict[str, Any] = _state(value, kind, dict)
    return state


def _state(value: object, kind: str, form: type) -> Any:
    if not (isinstance(value, InertRecord) and _is(value, kind) and isinstance(value.state, form)):
        raise pickle.UnpicklingError(f"it has a {type(value).__name__} in place of a {kind}")
    return value.state


def _is(value: object, kind: str) -> bool:
    return type(value) in _KINDS.values() and type(value).__name__ == kind
