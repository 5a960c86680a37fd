"""Random numbers of any slice of a tensor, without drawing the rest of it.

The bits are those of Philox 4x64-10 (Salmon et al., SC 2011), a function of a key and a counter: element i of the
flattened tensor has word i % 8, of 32 bits, of block i // 8. A slice costs the same wherever it is.

Normal values come from the inverse distribution function (Wichura 1988, algorithm AS 241, PPND7) in fp32. It uses only
operations that IEEE 754 defines to the last bit, one at a time, so the values are bit-equal on every CPU; a library's
log and erfinv are not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from math import log, prod

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

BLOCK = 8
"""Words of 32 bits in a block."""
CHUNK = 1 << 17
"""Elements transformed at a time, so that intermediates stay in the cache."""

# Coefficients of PPND7, of the highest power first.
_CENTRE = (59.109374720, 159.29113202, 50.434271938, 3.3871327179), (67.187563600, 78.757757664, 17.895169469, 1.0)
_TAIL = (0.17023821103, 1.3067284816, 2.7568153900, 1.4234372777), (0.12021132975, 0.73700164250, 1.0)
_ATANH = tuple(2 / power for power in range(13, 0, -2))
"""Series of log((1 + s) / (1 - s)) / s in s², to 1e-7 for |s| ≤ 1/3."""


def normal(key: int, shape: Sequence[int], offset: Sequence[int], size: Sequence[int]) -> Floats:
    """Standard normal values of a slice, flattened; at most 6.34 in size.

    Args:
        key: 128 bits that name the tensor.
        shape: of the tensor.
        offset, size: of the slice.
    """
    return _transformed(bits(key, shape, offset, size), _normal)


def uniform(key: int, shape: Sequence[int], offset: Sequence[int], size: Sequence[int]) -> Floats:
    """Values of a slice, flattened, uniform in [-1, 1]; arguments as `normal`."""
    return _transformed(bits(key, shape, offset, size), _uniform)


def bits(key: int, shape: Sequence[int], offset: Sequence[int], size: Sequence[int]) -> npt.NDArray[np.uint32]:
    """Random words of 32 bits of a slice, flattened; arguments as `normal`."""
    result = np.empty(prod(size), np.uint32)
    filled = 0
    # numpy increments the counter before each block.
    generator = np.random.Philox(counter=(1 << 256) - 1, key=key)
    at = 0
    for start, length in runs(shape, offset, size):
        for first in range(start, start + length, CHUNK):
            taken = min(start + length - first, CHUNK)
            block, skipped = divmod(first, BLOCK)
            blocks = -(-(skipped + taken) // BLOCK)
            generator.advance(block - at)
            words = generator.random_raw(blocks * 4).view(np.uint32)
            result[filled : filled + taken] = words[skipped : skipped + taken]
            filled = filled + taken
            at = block + blocks
    return result


def _transformed(words: npt.NDArray[np.uint32], transform: Callable[[npt.NDArray[np.int32]], Floats]) -> Floats:
    """A function of each word, in the words' memory."""
    numbers, floats = words.view(np.int32), words.view(np.float32)
    for first in range(0, words.size, CHUNK):
        piece = slice(first, first + CHUNK)
        floats[piece] = transform(numbers[piece])
    return floats


def _uniform(words: npt.NDArray[np.int32]) -> Floats:
    values = words.astype(np.float32)
    values += 0.5
    values *= 2.0**-31
    return values


def _normal(words: npt.NDArray[np.int32]) -> Floats:
    values = words.astype(np.float32)
    values += 0.5
    values *= 2.0**-32  # the probability minus a half
    tail = np.flatnonzero(np.abs(values) > 0.425)
    square = values * values
    np.subtract(0.180625, square, out=square)
    values *= _polynomial(square, _CENTRE[0])
    values /= _polynomial(square, _CENTRE[1])
    values[tail] = _normal_tail(words[tail])
    return values


def _normal_tail(words: npt.NDArray[np.int32]) -> Floats:
    # The distance to the nearer end is exact as an integer; the fp32 probability next to one end is not.
    distance = (words ^ (words >> 31)) ^ 0x7FFFFFFF
    probability = distance.astype(np.float32)
    probability += 0.5
    probability *= 2.0**-32
    fraction, exponent = np.frexp(probability)
    s = (fraction - 1) / (fraction + 1)
    logarithm = _polynomial(s * s, _ATANH)
    logarithm *= s
    logarithm += exponent.astype(np.float32) * log(2)
    root = np.sqrt(-logarithm)
    root -= 1.6
    value = _polynomial(root, _TAIL[0])
    value /= _polynomial(root, _TAIL[1])
    return np.copysign(value, words, out=value)


def _polynomial(x: Floats, coefficients: Sequence[float]) -> Floats:
    """By Horner's rule, of the coefficient of the highest power first."""
    value = x * coefficients[0]
    for coefficient in coefficients[1:-1]:
        value += coefficient
        value *= x
    value += coefficients[-1]
    return value


def runs(shape: Sequence[int], offset: Sequence[int], size: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Start and length of the ranges of a flattened row-major tensor that a slice is, in the slice's order.

    Args:
        shape: of the tensor.
        offset, size: of the slice.
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
