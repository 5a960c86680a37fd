"""The weights of a checkpoint as whole tensors, one at a time, without a model or a process group."""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import numpy as np
import torch

from llmrecipes.checkpoint.manifest import mismatch
from llmrecipes.checkpoint.store import Entry
from llmrecipes.engine.core import ema
from llmrecipes.engine.core.checkpoint.index import StoredTensor, as_index
from llmrecipes.engine.core.checkpoint.loader import (
    INDEXES,
    load_plain,
    open_inside,
    read_index,
    require_tensor,
    unfit,
    unsafe,
)
from llmrecipes.engine.core.model.init import unfused
from llmrecipes.errors import UserError

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
            ema.require(index, entry)
        self._files = index.files
        self._places = {
            name: place
            for key, stored in index.tensors.items()
            if not key.startswith(_OTHERS)
            for name, place in weights_of(key, index.tensors.get(ema.PREFIX + key, stored) if averaged else stored)
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
    try:
        with zipfile.ZipFile(cast(IO[bytes], part)) as archive:
            damaged = archive.testzip()
    except (zipfile.BadZipFile, NotImplementedError, ValueError) as problem:
        raise unsafe(path, str(problem)) from problem
    if damaged is not None:
        raise UserError(
            f"{name} is corrupt: its CRC-32 differs", where=str(path), fix="use an older checkpoint: RUN@STEP"
        )
    part.seek(0)
    return load_plain(part, path)


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
