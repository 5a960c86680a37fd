"""Reading the files of a checkpoint: its index, and what torch.save wrote, as plain data. Nothing in them is run.

megatron-core is not imported here: an export needs the weights only, and its import would take a second.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import re
from pathlib import Path
from typing import IO, Any, cast

import torch

from llmrecipes.checkpoint.store import Entry
from llmrecipes.engine.core.checkpoint.index import (
    AVERAGE,
    INDEX_NAME,
    JSON_NAME,
    Index,
    Table,
    build,
    decode,
    read_json_index,
)
from llmrecipes.engine.core.checkpoint.pickled_index import read as read_pickled
from llmrecipes.errors import UserError
from llmrecipes.untrusted import open_file

_PICKLED_INDEX = ".metadata"
INDEXES = (INDEX_NAME, JSON_NAME, _PICKLED_INDEX)
"""Files that an index may be in."""


def read_index(entry: Entry) -> Index:
    """Open and check the index of a checkpoint; of millions of parts, those that are used are read.

    Raises:
        UserError: it is missing, not plain data, or inconsistent with the files.
    """
    forms = {_PICKLED_INDEX: _unpickled} if entry.manifest.format == 1 else {INDEX_NAME: _mapped, JSON_NAME: _json}
    name = next((form for form in forms if form in entry.manifest.files), None)
    if name is None:
        raise unfit(entry.path / next(iter(forms)), "it has no index")
    path = entry.path / name
    with open_inside(entry.path, name) as stream:
        try:
            return build(forms[name](stream, path), entry.manifest.files)
        except ValueError as problem:
            raise unfit(path, str(problem)) from problem


def _mapped(stream: io.BufferedReader, path: Path) -> Table:
    if not os.fstat(stream.fileno()).st_size:
        raise ValueError("it is empty")  # which cannot be mapped
    return decode(memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)))


def _json(stream: io.BufferedReader, path: Path) -> Table:
    return read_json_index(stream.read())


def _unpickled(stream: io.BufferedReader, path: Path) -> Table:
    try:
        return read_pickled(stream)
    except (OSError, MemoryError):
        raise
    except Exception as problem:  # malformed bytes raise any kind of exception in pickle
        raise unsafe(path, str(problem) if isinstance(problem, pickle.UnpicklingError) else repr(problem)) from problem


def has_average(index: Index) -> bool:
    """Whether a checkpoint has the average."""
    return any(name.startswith(AVERAGE) for name in index.tensors)


def require_average(index: Index, entry: Entry) -> None:
    """Refuse a checkpoint without the average.

    Raises:
        UserError: it has none.
    """
    if not has_average(index):
        raise UserError(
            "this checkpoint has no moving average of the weights",
            where=str(entry.path),
            rule="a run keeps one from the step on at which optimizer.ema_decay is set",
            fix="leave --ema out, or train on with optimizer.ema_decay=0.999",
        )


def require_tensor(value: Any, dtype: torch.dtype, shape: tuple[int, ...], name: str, path: Path) -> None:
    """Check that what was read of a tensor is what the index says.

    Raises:
        UserError: it is not.
    """
    if not isinstance(value, torch.Tensor):
        raise unfit(path, f"{name!r} is a {type(value).__name__}, expected a tensor")
    if value.dtype != dtype or tuple(value.shape) != shape:
        raise unfit(path, f"{name!r} is {value.dtype} {list(value.shape)}, the index says {dtype} {list(shape)}")


def unfit(path: Path, why: str) -> UserError:
    """The error for a checkpoint whose index and files disagree."""
    return UserError(
        f"this checkpoint is inconsistent: {why}",
        where=str(path),
        rule="the index must match the files that the manifest lists",
        fix="use another checkpoint: this one was altered, or written by another program",
    )


_ADVICE = "Weights only load failed"
"""Start of torch's advice on how to load the file anyway."""


def open_inside(directory: Path, name: str) -> io.BufferedReader:
    """Open a file of a checkpoint.

    Raises:
        UserError: it is not a regular file, or a link out of the checkpoint.
        OSError: it cannot be opened.
    """
    return open_file(directory / name, root=directory)


def load_plain(stream: io.IOBase, path: Path, device: str = "cpu") -> Any:
    """Read what torch.save wrote, if it is tensors, numbers, strings, lists and dicts.

    Args:
        stream: the bytes.
        path: their file, for the message.
        device: of the tensors; `meta`: the values are not read.

    Raises:
        UserError: it contains anything else, takes more memory than its bytes, or is corrupt.
    """
    try:
        _require_bounded(stream)
        return torch.load(cast(IO[bytes], stream), map_location=device, weights_only=True)
    except (OSError, MemoryError):
        raise
    except Exception as problem:  # torch and its parsers raise many kinds of exceptions for malformed bytes
        raise unsafe(path, str(problem)) from problem


_TAKES_MEMORY = re.compile(r"(?:__builtin__|builtins)\.bytearray|torch\.(?:.*\.)?(?:\w*Tensor|(?:Unt|T)ypedStorage)")
"""What torch also calls with a number: of bytes or elements that the file does not have."""
_GLOBAL = re.compile(rb"(?=c([\w.]{1,64})\n([\w.]{1,64})\n)")
"""The operation of a pickle that names a module and something in it, also where a text looks like one."""


def _require_bounded(stream: io.IOBase) -> None:
    """Check by torch's own reader that the values need no more memory than the file has bytes.

    Raises:
        pickle.UnpicklingError: they do, such as zeros that are stored compressed.
        RuntimeError: it is not of the form that torch.save writes since 1.6; the older one reserves before it reads.
    """
    start = stream.tell()
    stream.seek(0, io.SEEK_END)
    length = stream.tell() - start
    stream.seek(start)
    reader = torch._C.PyTorchFileReader(cast(IO[bytes], stream))
    size = sum(map(reader.get_record_size, reader.get_all_records()))
    if size > length:
        raise pickle.UnpicklingError(f"{length:,} bytes hold values of {size:,}")
    for module, name in _GLOBAL.findall(reader.get_record("data.pkl")):
        if _TAKES_MEMORY.fullmatch(called := f"{module.decode()}.{name.decode()}"):
            raise pickle.UnpicklingError(f"it calls {called}")
    stream.seek(start)


def unsafe(path: Path, why: str) -> UserError:
    """The error for an unsafe file."""
    lines = [line for line in why.splitlines() if line.strip() and not line.startswith(_ADVICE)]
    detail = lines[0].rpartition("WeightsUnpickler error: ")[2] if lines else "it is corrupt"
    return UserError(
        f"this checkpoint file is not plain data: {detail}",
        where=str(path),
        rule="a checkpoint may hold only tensors, numbers, strings, lists and dicts; anything else could run code "
        "on loading",
        fix="use a checkpoint written by llmrecipes",
    )
