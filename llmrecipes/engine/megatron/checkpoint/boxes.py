"""A range of a flattened tensor as boxes of that tensor.

ZeRO cuts flat buffers into equal ranges, wherever a parameter begins or ends. A checkpoint stores boxes of named
tensors, which any other layout can read: a range of a tensor of n dimensions is at most 2n - 1 of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from typing import NamedTuple


class Box(NamedTuple):
    """A box of a tensor whose elements are one after the other in the flattened tensor."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    start: int
    """Index of its first element in the flattened tensor."""


def boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Boxes that together are the elements [start, stop) of a row-major tensor, in order.

    Args:
        shape: of the tensor.
        start: first element; 0 ≤ start.
        stop: after the last element; stop ≤ product of the shape.
    """
    if start >= stop:
        return
    if len(shape) <= 1:
        yield Box((start,) if shape else (), (stop - start,) if shape else (), start)
        return
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row  # the whole rows in between
    if first > last:
        yield from _in_row(shape, first - 1, start, stop)
        return
    if start < first * row:
        yield from _in_row(shape, first - 1, start, first * row)
    if first < last:
        yield Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]), first * row)
    if last * row < stop:
        yield from _in_row(shape, last, last * row, stop)


def _in_row(shape: tuple[int, ...], index: int, start: int, stop: int) -> Iterator[Box]:
    before = index * prod(shape[1:])
    for box in boxes(shape[1:], start - before, stop - before):
        yield Box((index, *box.offset), (1, *box.shape), box.start + before)


def runs(shape: Sequence[int], offset: Sequence[int], size: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Start and length of the ranges of a flattened row-major tensor that a box is, in the box's order.

    Args:
        shape: of the tensor.
        offset, size: of the box.
    """
    if not prod(size):
        return
    whole = len(shape)  # the dimensions from here on are taken whole
    while whole and size[whole - 1] == shape[whole - 1]:
        whole -= 1
    cut = max(whole - 1, 0)
    strides = [prod(shape[number + 1 :]) for number in range(len(shape))]
    length = prod(size[cut:])
    for index in product(*map(range, size[:cut])):
        place = [*(first + step for first, step in zip(offset, index, strict=False)), *offset[cut:]]
        yield sum(number * stride for number, stride in zip(place, strides, strict=True)), length
