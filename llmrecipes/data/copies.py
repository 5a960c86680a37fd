"""Steps that drop copies of earlier documents: equal ones, and near-duplicates by MinHash and LSH."""

from __future__ import annotations

import hashlib
import re
import unicodedata

import numpy as np

_DIGITS, _NOT_WORDS = re.compile(r"\d"), re.compile(r"[\W_]+")


class Duplicates:
    """Drops documents that are equal to an earlier one but for case, digits, punctuation, accents and white space.

    The normalization is that of CCNet (Wenzek et al. 2020, arXiv 1911.00359, section 3.1), which applies it to
    paragraphs. 16 bytes of BLAKE2b are kept of a document.
    """

    def __init__(self) -> None:
        self._seen: set[bytes] = set()

    def mark(self, text: str) -> bytes:
        """The hash of the normalized text."""
        return hashlib.blake2b(normalized(text).encode(), digest_size=16).digest()

    def add(self, mark: bytes) -> bool:
        """Whether it is the first of its kind."""
        if mark in self._seen:
            return False
        self._seen.add(mark)
        return True


def normalized(text: str) -> str:
    """Lower case, digits as 0, without accents, one space for what lies between words."""
    if not text.isascii():
        text = "".join(c for c in unicodedata.normalize("NFD", text) if not unicodedata.combining(c))
    return _NOT_WORDS.sub(" ", _DIGITS.sub("0", text.lower())).strip()


# A word; of Chinese and Japanese, which do not put spaces between words, a character.
_HAN_KANA = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_HAN_KANA}]|[^\W{_HAN_KANA}]+")
_SEED = 1
_CERTAIN = 0.99
"""Probability of comparing a document with an earlier one of exactly the threshold's similarity."""


def shingles(text: str, n: int) -> list[str]:
    """Sequences of n words in lower case, without punctuation; of a shorter text all its words."""
    words = _WORD.findall(text.lower())
    return list(map(" ".join, zip(*(words[k:] for k in range(n)), strict=False))) or [" ".join(words)]


def bands_of(threshold: float, permutations: int) -> tuple[int, int]:
    """Bands and rows a band: the most rows with which a pair of exactly that similarity has a band in common with
    probability 0.99, 1 − (1 − threshold^rows)^bands (Leskovec et al., Mining of Massive Datasets, section 3.4.2)."""
    for rows in range(permutations, 1, -1):
        bands = permutations // rows
        if 1 - (1 - threshold**rows) ** bands >= _CERTAIN:
            return bands, rows
    return permutations, 1


def margin(threshold: float, permutations: int) -> float:
    """Two standard errors of an estimate of that similarity: sqrt(s (1 − s) / permutations) each."""
    return 2 * float(threshold * (1 - threshold) / permutations) ** 0.5


def signature(grams: list[str], permutations: int, seed: int = _SEED) -> np.ndarray:
    """MinHash values of a set of shingles: uint32[permutations]."""
    from rensa import RMinHash  # type: ignore[import-untyped]

    return np.array(RMinHash.digests_from_token_sets([grams], permutations, seed)[0], np.uint32)


class NearDuplicates:
    """Drops documents that are nearly equal to an earlier one that was kept (Broder 1997).

    The similarity of two documents is the Jaccard index of their sets of shingles: those in common over those of both.
    It is estimated by the share of equal values of `permutations` hash functions (rensa's R-MinHash), for the documents
    that have all values of a band in common. A document is dropped from two standard errors of the estimate below the
    threshold on (`margin`), so that one of exactly the threshold is found.

    A document is only compared with kept ones, of which no two are therefore similar: whatever splits they are in, no
    held-out text has a near-copy in training text, and every cluster of copies is represented once, in one split.

    Held for a kept document: 4 to 8 bytes a permutation, and 24 to 48 a band.

    Args:
        threshold: Jaccard index from which on documents are near-duplicates.
        permutations: values of a signature.
        shingle_words: words of a shingle.
    """

    def __init__(self, threshold: float, permutations: int, shingle_words: int) -> None:
        self._permutations, self._words = permutations, shingle_words
        self._bands, self._rows = bands_of(threshold, permutations)
        self._least = (threshold - margin(threshold, permutations)) * permutations
        self._index = SignatureIndex(permutations, self._bands, self._rows)

    def mark(self, text: str) -> bytes:
        """The signature: `permutations` values of 4 bytes."""
        return signature(shingles(text, self._words), self._permutations).tobytes()

    def add(self, mark: bytes) -> bool:
        """Whether no kept document is similar; it is then one of them."""
        values = np.frombuffer(mark, np.uint32)
        keys = self._index.keys(values)
        if self._index.equal(values, keys) >= self._least:
            return False
        self._index.add(values, keys)
        return True


class SignatureIndex:
    """Signatures by their bands: a hash table of 64-bit keys with linear probing, in arrays that double."""

    def __init__(self, permutations: int, bands: int, rows: int) -> None:
        self._bands, self._rows = bands, rows
        self._signatures = np.empty((1024, permutations), np.uint32)
        self._count = 0
        random = np.random.Generator(np.random.Philox(_SEED))
        self._factors = random.integers(1, 2**63, (bands, rows), np.uint64) * np.uint64(2) + np.uint64(1)
        self._table = np.zeros(1 << 16, np.uint64)
        self._numbers = np.zeros(1 << 16, np.uint32)

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        return self._signatures.nbytes + self._table.nbytes + self._numbers.nbytes

    def keys(self, values: np.ndarray) -> np.ndarray:
        """A key for each band, never 0."""
        bands = values[: self._bands * self._rows].reshape(self._bands, self._rows).astype(np.uint64)
        mixed = ((bands + np.uint64(1)) * self._factors).sum(axis=1, dtype=np.uint64)
        mixed ^= mixed >> np.uint64(32)
        return (mixed * self._factors[:, 0]) | np.uint64(1)

    def candidates(self, keys: np.ndarray) -> np.ndarray:
        """Numbers of the signatures that have a band in common."""
        mask = len(self._table) - 1
        places, wanted = self._home(keys), keys
        hits: list[np.ndarray] = []
        while len(places):
            stored = self._table[places]
            same = stored == wanted
            if same.any():
                hits.append(self._numbers[places[same]])
            go_on = stored != 0
            places, wanted = (places[go_on] + 1) & mask, wanted[go_on]
        return np.unique(np.concatenate(hits)) if hits else np.empty(0, np.uint32)

    def equal(self, values: np.ndarray, keys: np.ndarray) -> int:
        """Most values in common with a signature that has a band in common; 0 without one."""
        numbers = self.candidates(keys)
        return int((self._signatures[numbers] == values).sum(axis=1).max()) if len(numbers) else 0

    def add(self, values: np.ndarray, keys: np.ndarray) -> None:
        """Append a signature."""
        if self._count == len(self._signatures):
            self._signatures = np.concatenate([self._signatures, np.empty_like(self._signatures)])
        if 2 * (self._count + 1) * self._bands > len(self._table):
            self._double()
        self._signatures[self._count] = values
        self._insert(keys, np.full(len(keys), self._count, np.uint32))
        self._count += 1

    def _home(self, keys: np.ndarray) -> np.ndarray:
        return (keys >> np.uint64(64 - len(self._table).bit_length() + 1)).astype(np.int64)

    def _insert(self, keys: np.ndarray, numbers: np.ndarray) -> None:
        """Each round, one of the keys that meet at a free place takes it; the others go on to the next."""
        mask, places = len(self._table) - 1, self._home(keys)
        while len(places):
            free = self._table[places] == 0
            self._table[places[free]], self._numbers[places[free]] = keys[free], numbers[free]
            waiting = (self._table[places] != keys) | (self._numbers[places] != numbers)
            places, keys, numbers = (places[waiting] + 1) & mask, keys[waiting], numbers[waiting]

    def _double(self) -> None:
        used = self._table != 0
        keys, numbers = self._table[used], self._numbers[used]
        size = 2 * len(self._table)
        self._table, self._numbers = np.zeros(size, np.uint64), np.zeros(size, np.uint32)
        self._insert(keys, numbers)
