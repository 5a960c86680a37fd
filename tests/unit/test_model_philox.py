"""Random numbers of boxes: the published generator, the right distribution, and the same bits wherever a box begins."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
import torch

from llmrecipes.engine.core.model import philox

FULL = 2**64 - 1
PI = (0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89)
# The three vectors of philox4x64 with 10 rounds in Random123's kat_vectors: counter, key, block.
KNOWN = [
    ((0,) * 4, (0,) * 2, (0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B)),
    ((FULL,) * 4, (FULL,) * 2, (0x87B092C3013FE90B, 0x438C3C67BE8D0224, 0x9CC7D7C69CD777B6, 0xA09CAEBF594F0BA0)),
    (PI, (0x452821E638D01377, 0xBE5466CF34E90C6C),
     (0xA528F45403E61D95, 0x38C72DBD566E9788, 0xA5A1610E72FD18B5, 0x57BD43B5E52B7FE6)),
]  # fmt: skip


def number(words: tuple[int, ...]) -> int:
    return sum(word << 64 * place for place, word in enumerate(words))


@pytest.mark.parametrize(("counter", "key", "block"), KNOWN)
def test_blocks_are_those_of_the_published_vectors(
    counter: tuple[int, ...], key: tuple[int, ...], block: tuple[int, ...]
) -> None:
    first = 8 * number(counter)
    shape = (2 * (first + 8),)
    found = philox.bits(number(key), shape, (first,), (8,))
    assert found.view(np.uint64).tolist() == list(block)


@pytest.mark.parametrize(
    ("offset", "size"),
    [
        ((0, 0, 0), (7, 11, 301)),
        ((2, 0, 0), (3, 11, 301)),
        ((0, 3, 0), (7, 5, 301)),
        ((1, 2, 75), (4, 3, 76)),
        ((6, 10, 300), (1, 1, 1)),
        ((2, 0, 0), (0, 11, 301)),
    ],
)
def test_a_box_has_the_bits_of_the_whole(
    offset: tuple[int, ...], size: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = (7, 11, 301)
    whole = philox.bits(5, shape, (0, 0, 0), shape).reshape(shape)
    monkeypatch.setattr(philox, "CHUNK", 64)  # pieces end inside blocks
    box = tuple(slice(start, start + length) for start, length in zip(offset, size, strict=True))
    assert np.array_equal(philox.bits(5, shape, offset, size), whole[box].ravel())


def test_elements_beyond_32_bits_of_index_have_numbers_of_their_own() -> None:
    shape = (1 << 20, 1 << 20)
    rows = [philox.bits(5, shape, (row, 8), (1, 8)).tolist() for row in (0, 1 << 12, 1 << 13, (1 << 20) - 1)]
    assert len({tuple(row) for row in rows}) == 4
    assert philox.bits(5, shape, (1 << 12, 8), (1, 8)).tolist() == rows[1]


def test_normal_values_are_the_inverse_distribution_function_of_the_bits() -> None:
    edges = [np.arange(start, start + 4096) for start in (-(2**31), 2**31 - 4096, -2048, 1825361100 - 2048)]
    words = np.concatenate([*edges, np.linspace(-(2**31), 2**31 - 1, 200_001)]).astype(np.int32)
    found = philox._transformed(words.view(np.uint32).copy(), philox._normal)
    distance = torch.from_numpy(np.where(words < 0, words + 2.0**31, 2.0**31 - 1 - words))
    expected = torch.special.ndtri((distance + 0.5) * 2.0**-32).numpy() * np.where(words < 0, 1, -1)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=5e-7, atol=1e-7)
    assert np.abs(found).max() == pytest.approx(6.338, abs=1e-3)


def test_a_million_values_have_the_distribution_they_should() -> None:
    """Bounds of five standard errors, for one fixed key."""
    n = 1 << 20
    found = philox.normal(1, (n,), (0,), (n,)).astype(np.float64)
    for power, expected, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs((found**power).mean() - expected) < 5 * math.sqrt(variance / n), power
    for lag in (1, 2, 3, 4, 7, 8, 1024):
        assert abs((found[:-lag] * found[lag:]).mean()) < 5 / math.sqrt(n), lag
    probability = np.sort(0.5 * (1 + torch.erf(torch.from_numpy(found) / math.sqrt(2)).numpy()))
    assert np.abs(probability - (np.arange(n) + 0.5) / n).max() < 1.95 / math.sqrt(n)  # Kolmogorov and Smirnov, 0.1 %
    other = philox.normal(2, (n,), (0,), (n,))
    assert abs((found * other).mean()) < 5 / math.sqrt(n)


def test_values_are_the_same_to_the_bit_on_every_machine_and_with_every_numpy() -> None:
    """Ranks of a run draw replicas of a weight on different machines."""
    found = [philox.normal(3, (1 << 18,), (0,), (1 << 18,)), philox.uniform(3, (1000,), (0,), (1000,))]
    assert [hashlib.sha256(values.tobytes()).hexdigest()[:16] for values in found] == [
        "953708900357f666",
        "d66963d45cba8545",
    ]
