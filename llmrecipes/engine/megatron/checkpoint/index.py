"""The index of a checkpoint: which part of which tensor is in which file.

It is untrusted. What describes all tensors is checked when it is opened; a part is checked when it is used, so that of
millions a rank looks at those that it reads. Three forms are read: `index.bin` (`table`), and of older checkpoints
`index.json` and torch's `.metadata`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from llmrecipes.checkpoint.manifest import FileRecord
from llmrecipes.engine.megatron.checkpoint.table import Integers, Numbers, Table, boxes_of

INDEX_NAME = "index.bin"
_MOST = 1 << 62
"""Elements of a tensor must be fewer, so that their number fits 64 bits."""

DTYPES = {str(kind).removeprefix("torch."): kind for kind in vars(torch).values() if isinstance(kind, torch.dtype)}
"""Element types by name in the index."""

Span = tuple[str, int, int]
"""File, first byte, bytes."""


class Parts(NamedTuple):
    """Stored parts that together have every element of a box once."""

    offsets: Numbers
    """[k, d] in the tensor."""
    sizes: Numbers
    """[k, d]"""
    places: Numbers
    """[k, 3] number of the file, first byte and bytes."""


@dataclass(frozen=True, eq=False)
class Stored:
    """A tensor in a checkpoint.

    Args:
        name: of the tensor.
        dtype: of its elements.
        shape: global, of d dimensions.
        longest: size of a part in the first dimension, at most.
        columns: of its parts, as in the table.
        file_sizes: [files] bytes.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    longest: int
    columns: list[Integers]
    file_sizes: Numbers

    def parts(self, offset: tuple[int, ...], shape: tuple[int, ...]) -> Parts:
        """Parts that have elements of a box; what the box has outside of the tensor is in none.

        Raises:
            ValueError: they do not fit the tensor or their files, or do not have every element once.
        """
        low = np.asarray(offset, np.int64)
        high = np.minimum(low + np.asarray(shape, np.int64), np.asarray(self.shape, np.int64))
        first, last = 0, len(self.columns[0])
        if self.shape:
            # Only the parts of a box's layers are compared. That rows are sorted is seen by what is found.
            first = int(np.searchsorted(self._starts, low[0] - self.longest + 1, "left"))
            last = int(np.searchsorted(self._starts, high[0], "left"))
        offsets, sizes = boxes_of([column[first:last] for column in self.columns], len(self.shape))
        found = np.flatnonzero(((offsets < high) & (offsets + sizes > low)).all(1))
        offsets, sizes = offsets[found], sizes[found]
        places = np.stack([column[first:last][found].astype(np.int64) for column in self.columns[:3]], 1)
        self._require_inside(offsets, sizes)
        require_places(self.name, places, self.file_sizes)
        starts, ends = np.maximum(offsets, low), np.minimum(offsets + sizes, high)
        if not covered(np.maximum(high - low, 0), starts - low, ends - starts):
            raise ValueError(f"{self.name!r} has elements in no part, or in two, in {shape} at {offset}")
        return Parts(offsets, sizes, places)

    @cached_property
    def _starts(self) -> Numbers:
        """[parts] offsets in the first dimension."""
        return self.columns[3].astype(np.int64)

    def _require_inside(self, offsets: Numbers, sizes: Numbers) -> None:
        # As differences, because sums of such numbers may exceed 64 bits.
        inside = (offsets >= 0) & (sizes >= 0) & (offsets <= self.shape) & (sizes <= np.subtract(self.shape, offsets))
        for number in np.flatnonzero(~inside.all(1))[:1]:
            part = f"a part of {sizes[number].tolist()} at {offsets[number].tolist()}"
            raise ValueError(f"{self.name!r} has the shape {list(self.shape)}, {part} lies outside")


@dataclass(frozen=True)
class Index:
    """What a checkpoint has."""

    files: tuple[str, ...]
    tensors: dict[str, Stored]
    objects: dict[str, Span]
    """Place of each object, by name."""


def build(table: Table, files: Mapping[str, FileRecord]) -> Index:
    """The index of a checkpoint, of its table.

    Args:
        table: untrusted.
        files: the manifest's; other files do not belong to the checkpoint.

    Raises:
        ValueError: with the first inconsistent tensor or object, and why.
    """
    for file in table.files:
        if file not in files:
            raise ValueError(f"the manifest does not list {file!r}")
    sizes = np.asarray([files[file].size for file in table.files], np.int64)
    tensors: dict[str, Stored] = {}
    objects: dict[str, Span] = {}
    for record in table.objects:
        _require(record.name not in objects, record.name, "is there twice")
        require_places(record.name, np.asarray([record.place], np.int64), sizes)
        objects[record.name] = (table.files[record.place[0]], record.place[1], record.place[2])
    for head, rows in zip(table.tensors, table.rows, strict=True):
        _require(head.name not in tensors and head.name not in objects, head.name, "is there twice")
        _require(head.dtype in DTYPES, head.name, f"has the unknown type {head.dtype!r}")
        _require(prod(size + 1 for size in head.shape) < _MOST, head.name, f"has the shape {head.shape}")
        columns = [column[rows] for column in table.columns]
        tensors[head.name] = Stored(head.name, DTYPES[head.dtype], tuple(head.shape), head.longest, columns, sizes)
    return Index(tuple(table.files), tensors, objects)


def covered(shape: npt.ArrayLike, offsets: Numbers, sizes: Numbers) -> bool:
    """Whether boxes have every element of a whole once.

    A box is the sum of the orthants at its corners, with a minus where the number of ends among a corner's coordinates
    is odd. So the boxes are the whole if all corners but the whole's own cancel.

    Args:
        shape: [d] of the whole, of less than 2⁶² corners.
        offsets, sizes: [k, d] of the boxes, inside of it.
    """
    whole = np.asarray(shape, np.int64)
    if not whole.all():
        return True  # there are none
    cut = ~((offsets == 0) & (sizes == whole)).all(0)  # others are the same for all boxes
    whole, starts, ends = whole[cut], offsets[:, cut], (offsets + sizes)[:, cut]
    if not whole.size:
        return len(offsets) == 1
    steps = np.concatenate(([1], np.cumprod(whole[:0:-1] + 1)))[::-1]
    signed: tuple[list[Numbers], list[Numbers]] = [], []
    for corner in product((False, True), repeat=len(whole)):
        sign = sum(corner) % 2
        signed[sign].append(np.where(corner, ends, starts) @ steps)
        signed[1 - sign].append(np.where(corner, whole, 0)[None] @ steps)
    plus, minus = (np.sort(np.concatenate(numbers)) for numbers in signed)
    return np.array_equal(plus, minus)


def require_places(name: str, places: Numbers, file_sizes: Numbers) -> None:
    """Check that spans of bytes lie inside their files.

    Args:
        name: of the tensor or object.
        places: [k, 3] number of the file, first byte and bytes.
        file_sizes: [files]

    Raises:
        ValueError: one does not.
    """
    numbers, starts, lengths = places.T
    for number in numbers[(numbers < 0) | (numbers >= len(file_sizes))][:1]:
        raise ValueError(f"{name!r} is in file {number} of {len(file_sizes)}")
    sizes = file_sizes[numbers]
    wrong = (starts < 0) | (lengths < 0) | (starts > sizes) | (lengths > sizes - starts)
    for file, start, length in places[wrong][:1].tolist():
        raise ValueError(f"{name!r} ends at byte {start + length} of file {file}, which has {file_sizes[file]}")


def _require(holds: bool, name: str, problem: str) -> None:
    if not holds:
        raise ValueError(f"{name!r} {problem}")
