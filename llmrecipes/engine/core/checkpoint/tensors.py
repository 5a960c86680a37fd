"""The weights of a checkpoint as whole tensors, one at a time, without a model or a process group."""

from __future__ import annotations

import io
import re
import struct
import sys
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import numpy as np
import torch

from llmrecipes.checkpoint.manifest import mismatch
from llmrecipes.checkpoint.store import Entry
from llmrecipes.engine.core.checkpoint.index import AVERAGE, StoredTensor, as_index
from llmrecipes.engine.core.checkpoint.reading import (
    INDEXES,
    load_plain,
    open_inside,
    read_index,
    require_average,
    require_tensor,
    unfit,
    unsafe,
)
from llmrecipes.errors import UserError
from llmrecipes.recipe.derived.weight_names import unfused

_LENGTHS = 26
"""Where the header of a member of a zip file has the lengths of its name and of what follows that, two bytes each."""
_READ = 1 << 20
"""Bytes that are read at once: they are in the processor's cache when their CRC-32 is computed."""
_OTHERS = ("optimizer.", "random.")
"""Prefixes of the names of what is not a weight."""


class StoredWeights:
    """Weights of a checkpoint by the names in one process (`recipe.derived.weight_names.weights`); see `TensorSource`.

    A file's SHA-256 can only be compared by reading all of it, optimizer included, which is most of a checkpoint. What
    is read is compared with the CRC-32 that torch.save wrote beside it instead.

    Args:
        entry: the checkpoint; its manifest protects itself, and the index is compared with it here.
        averaged: the moving average of the weights in their place (`optimizer.ema_decay`).

    Raises:
        UserError: the index is corrupt, or has no average.
    """

    def __init__(self, entry: Entry, *, averaged: bool = False) -> None:
        self._entry = entry
        indexes = {name: file for name, file in entry.manifest.files.items() if name in INDEXES}
        if problem := mismatch(entry.path, indexes):
            raise unfit(entry.path, problem)
        index = read_index(entry)
        if averaged:
            require_average(index, entry)
        self._files = index.files
        self._places = {
            name: place
            for key, stored in index.tensors.items()
            if not key.startswith(_OTHERS)
            for name, place in weights_of(key, index.tensors.get(AVERAGE + key, stored) if averaged else stored)
        }

    def names(self) -> Sequence[str]:
        return list(self._places)

    def shape(self, name: str) -> tuple[int, ...]:
        place = self._places[name]
        return place.stored.shape[len(place.before) :]

    def dtype(self, name: str) -> torch.dtype:
        return self._places[name].stored.dtype

    def read(self, name: str) -> torch.Tensor:
        stored, before = self._places[name]
        depth = len(before)
        shape = (*(1 for _ in before), *stored.shape[depth:])
        offset = (*before, *(0 for _ in stored.shape[depth:]))
        try:
            parts = stored.slices(offset, shape)
        except ValueError as problem:
            raise unfit(self._entry.path, str(problem)) from problem
        low = np.asarray(offset)
        high = np.asarray(offset) + shape
        whole: torch.Tensor | None = None
        for start, size, place in zip(parts.offsets, parts.sizes, parts.places.tolist(), strict=True):
            value = self._part(stored, place, tuple(size.tolist()))
            if tuple(value.shape) == shape:
                whole = value  # the only one: not copied
                break
            if whole is None:
                whole = torch.empty(shape, dtype=stored.dtype)
            first = np.maximum(start, low)
            last = np.minimum(start + size, high)
            whole[as_index(first - low, last - low)] = value[as_index(first - start, last - start)]
        if whole is None:
            raise unfit(self._entry.path, f"{stored.name!r} has no elements")
        return whole.view(stored.shape[depth:])

    def _part(self, stored: StoredTensor, place: list[int], shape: tuple[int, ...]) -> torch.Tensor:
        number, start, length = place
        name = self._files[number]
        path = self._entry.path / name
        try:
            with open_inside(self._entry.path, name) as stream:
                value = _checked(_Window(stream, start, length), path, f"{stored.name} at byte {start}")
        except OSError as error:
            raise UserError(
                f"this checkpoint cannot be read: {error.strerror}",
                where=str(path),
                rule="a running training deletes its older checkpoints",
                fix="use a checkpoint that the run keeps (checkpoint.keep_interval)",
            ) from error
        require_tensor(value, stored.dtype, shape, stored.name, path)
        return cast(torch.Tensor, value)


def _checked(part: _Window, path: Path, name: str) -> Any:
    """Read what torch.save wrote, if its CRC-32 are right; torch compares none."""
    values = None
    try:
        with zipfile.ZipFile(cast(IO[bytes], part)) as archive:
            members = archive.infolist()
            large = [member for member in members if "/data/" in member.filename]
            if len(large) == 1 and large[0].compress_type == zipfile.ZIP_STORED and _in_this_order(archive):
                archive.filelist = [member for member in members if member is not large[0]]
                values = large[0]
            damaged = archive.testzip()
    except (zipfile.BadZipFile, NotImplementedError, ValueError) as problem:
        raise unsafe(path, str(problem)) from problem
    part.seek(0)
    form = None if values is None else load_plain(part, path, "meta")
    if values is None or not isinstance(form, torch.Tensor) or form.untyped_storage().nbytes() != values.file_size:
        read = load_plain(part, path)
    else:
        read, crc = _filled(form, part, values.header_offset)
        damaged = damaged or (values.filename if crc != values.CRC else None)
    if damaged is not None:
        raise UserError(
            f"{name} is corrupt: its CRC-32 differs", where=str(path), fix="use an older checkpoint: RUN@STEP"
        )
    return read


def _in_this_order(archive: zipfile.ZipFile) -> bool:
    """Whether the bytes of numbers are in the order of this machine."""
    names = [name for name in archive.namelist() if name.endswith("/byteorder")]
    return [archive.read(name).decode("ascii", "replace") for name in names] == [sys.byteorder]


def _filled(form: torch.Tensor, part: _Window, header: int) -> tuple[torch.Tensor, int]:
    """A tensor with the values in a zip file, and their CRC-32: each byte is read once, and not by both libraries.

    Args:
        form: the tensor on the meta device.
        part: the zip file.
        header: where in it the member with the values begins.
    """
    part.seek(header + _LENGTHS)
    lengths = struct.unpack("<HH", part.read(4))
    part.seek(header + _LENGTHS + 4 + sum(lengths))
    storage = torch.UntypedStorage(form.untyped_storage().nbytes())
    memory = memoryview(torch.empty(0, dtype=torch.uint8).set_(storage).numpy())
    crc = 0
    for start in range(0, len(memory), _READ):
        piece = memory[start : start + _READ]
        if part.readinto(piece) != len(piece):
            return form, -1
        crc = zlib.crc32(piece, crc)
    return torch.empty(0, dtype=form.dtype).set_(storage, form.storage_offset(), form.shape, form.stride()), crc


class _Window(io.RawIOBase):
    """A range of a file as a file: torch's own cannot be read from its end, where the table of a zip file is."""

    def __init__(self, stream: io.BufferedReader, start: int, length: int) -> None:
        self._stream = stream
        self._start = start
        self._length = length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer).cast("B")
        self._stream.seek(self._start + self._at)
        count = self._stream.readinto(view[: max(0, self._length - self._at)])
        self._at += count
        return count


_LAYERS = re.compile(r"decoder\.layers\.(?:(\d+)\.)?(.+)")
_PREDICTION = re.compile(r"(mtp\.layers\.\d+\.transformer_layer\.)(.+)")
_EXPERTS = re.compile(r"mlp\.experts\.experts\.(?:(\d+)\.)?(.+)")


class StoredWeight(NamedTuple):
    """A weight in a stored tensor."""

    stored: StoredTensor
    before: tuple[int, ...]
    """Its layer and expert, where these are dimensions of the tensor."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape[len(self.before) :]


def weights_of(key: str, stored: StoredTensor) -> Iterator[tuple[str, StoredWeight]]:
    """The weights that a stored tensor consists of, by their names in one process."""
    if prediction := _PREDICTION.fullmatch(key):
        yield from _of_layer(prediction[1], prediction[2], stored, ())
        return
    match = _LAYERS.fullmatch(key)
    if match is None:
        yield key, StoredWeight(stored, ())
        return
    number, rest = match.groups()
    stacked = number is None
    for layer in range(*stored.shape[:1]) if stacked else (int(number),):
        front = f"decoder.layers.{layer}."
        before = (layer,) if stacked else ()
        yield from _of_layer(front, rest, stored, before)


def _of_layer(
    front: str, rest: str, stored: StoredTensor, before: tuple[int, ...]
) -> Iterator[tuple[str, StoredWeight]]:
    match = _EXPERTS.fullmatch(rest)
    if match is None:
        yield front + unfused(rest), StoredWeight(stored, before)
        return
    number, rest = match.groups()
    depth = len(before)
    for expert in range(*stored.shape[depth : depth + 1]) if number is None else (int(number),):
        place = StoredWeight(stored, (*before, expert) if number is None else before)
        yield f"{front}mlp.experts.local_experts.{expert}.{rest}", place
