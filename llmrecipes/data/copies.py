"""Steps that drop copies of earlier documents: equal ones, and near-duplicates by MinHash and LSH."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import tempfile
import unicodedata
from pathlib import Path
from typing import IO
from weakref import finalize

import numpy as np
import numpy.typing as npt

from llmrecipes.units import GIB

_DIGITS, _NOT_WORDS = re.compile(r"\d"), re.compile(r"[\W_]+")


_SENTENCE = re.compile(r"(?<=[.!?])[\"'”’)\]]*\s+|\n+")


class Duplicates:
    """Drops documents that are equal to an earlier one but for case, digits, punctuation, accents and white space, or
    made of spans of sentences that kept documents have; or cuts such spans out.

    The normalization is that of CCNet (Wenzek et al. 2020, arXiv 1911.00359, section 3.1), which applies it to
    paragraphs. C4 cuts out all but one of spans of three sentences that occur again (Raffel et al. 2020, arXiv
    1910.10683, section 2.2), as `cut_spans` does; without it, a document is dropped where they are more than a share
    of its spans, and else left whole. 16 bytes of BLAKE2b are kept of a document, and 8 of each span.

    Args:
        span_sentences: sentences or lines of a span; None: whole documents only. A shorter text has no spans.
        max_repeated_spans: largest share of spans that kept documents have.
        cut_spans: remove the sentences of spans that are in kept documents or earlier in this one.
        min_words: of what is left of a document that was cut, without which it is dropped.
    """

    def __init__(
        self,
        span_sentences: int | None = None,
        max_repeated_spans: float = 0.5,
        cut_spans: bool = False,
        min_words: int = 50,
    ) -> None:
        self._seen: set[bytes] = set()
        self._span, self._most = span_sentences, max_repeated_spans
        self._cuts, self._min_words = cut_spans, min_words

    def mark(self, text: str) -> bytes:
        """The hash of the normalized text: 16 bytes; then 8 bytes of each span."""
        whole = hashlib.blake2b(normalized(text).encode(), digest_size=16).digest()
        if self._span is None:
            return whole
        sentences = [each for _, each in _sentences(text)]
        spans = zip(*(sentences[k:] for k in range(self._span)), strict=False)
        return whole + b"".join(hashlib.blake2b("\n".join(s).encode(), digest_size=8).digest() for s in spans)

    def add(self, mark: bytes) -> bool:
        """Whether it is kept: the first of its kind, with enough that is new; cutting keeps what is new."""
        whole, spans = _whole_and_spans(mark)
        if whole in self._seen:
            return False
        if not self._cuts and sum(span in self._seen for span in spans) > self._most * len(spans):
            return False
        self._seen.add(whole)
        if not self._cuts:
            self._seen.update(spans)
        return True

    def cut(self, mark: bytes, text: str) -> tuple[str, list[str]]:
        """What is left of a document that was added, and the pieces that are cut out of it; what is left is empty if it
        has fewer than `min_words` words and something was cut."""
        _, spans = _whole_and_spans(mark)
        repeated, new = set[int](), set[bytes]()
        for first, span in enumerate(spans):
            if span in self._seen or span in new:
                repeated.update(range(first, first + (self._span or 0)))
            new.add(span)
        if not repeated:
            self._seen |= new
            return text, []
        # What has no words, such as a rule of dashes, belongs to the sentence before it.
        starts = [start for start, _ in _sentences(text)]
        pieces = [text[start:end] for start, end in zip(starts, [*starts[1:], len(text)], strict=True)]
        left = text[: starts[0]] + "".join(piece for n, piece in enumerate(pieces) if n not in repeated)
        if len(left.split()) < self._min_words:
            return "", [text]
        self._seen |= new
        return left, [piece for n, piece in enumerate(pieces) if n in repeated]


def _whole_and_spans(mark: bytes) -> tuple[bytes, list[bytes]]:
    return mark[:16], [mark[start : start + 8] for start in range(16, len(mark), 8)]


def _sentences(text: str) -> list[tuple[int, str]]:
    """Where the sentences and lines of a text begin, and each normalized; none without a word."""
    starts = [0, *(match.end() for match in _SENTENCE.finditer(text))]
    bounds = zip(starts, [*starts[1:], len(text)], strict=True)
    return [(start, words) for start, end in bounds if (words := normalized(text[start:end]))]


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

    Held for a kept document: 4 to 8 bytes a permutation, and 24 to 48 a band; with `spill_to` at most `MEMORY`, and on
    disk 4 bytes a permutation and 16 a band.

    Args:
        threshold: Jaccard index from which on documents are near-duplicates.
        permutations: values of a signature.
        shingle_words: words of a shingle.
    """

    def __init__(self, threshold: float, permutations: int, shingle_words: int) -> None:
        self._permutations, self._words = permutations, shingle_words
        self._bands, self._rows = bands_of(threshold, permutations)
        self._least = (threshold - margin(threshold, permutations)) * permutations
        self._index: SignatureIndex | SpillingIndex = SignatureIndex(permutations, self._bands, self._rows)

    def spill_to(self, folder: Path) -> None:
        """Keep what is beyond `MEMORY` in files there, which no name leads to; before the first document."""
        self._index = SpillingIndex(self._permutations, self._bands, self._rows, folder)

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

    def similar(self, mark: bytes) -> bool:
        """Whether a kept document is similar."""
        values = np.frombuffer(mark, np.uint32)
        return self._index.equal(values, self._index.keys(values)) >= self._least


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

    def sorted(self) -> tuple[np.ndarray, np.ndarray]:
        """All keys in order, and the numbers of their signatures: uint64[n], uint32[n]."""
        used = self._table != 0
        keys, numbers = self._table[used], self._numbers[used]
        order = np.argsort(keys, kind="stable")
        return keys[order], numbers[order]

    @property
    def signatures(self) -> np.ndarray:
        """uint32[signatures, permutations]."""
        return self._signatures[: self._count]

    @property
    def full(self) -> bool:
        """Whether the next signature doubles an array."""
        return self._count == len(self._signatures) or 2 * (self._count + 1) * self._bands > len(self._table)

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


MEMORY = GIB
"""Bytes of signatures and keys that `SpillingIndex` holds."""
_BLOCK = 512
"""Keys of a run that are read at once: 4 KiB. The first of each is in memory."""
_FAN_IN = 4
"""Runs of a level that are merged into one of the next."""
_MERGED = 1 << 21
"""About as many keys are merged at once."""


class SpillingIndex:
    """Signatures by their bands in bounded memory, with the answers of `SignatureIndex`.

    As in a log-structured merge tree, a `SignatureIndex` that has `memory` bytes becomes a run of sorted keys on disk,
    and `_FAN_IN` runs of a level are merged into one. To look up a key costs one read of 4 KiB in each run: of N
    signatures in runs of n, three times log4(N / n) at most. In memory stays one key of each block, 0.35 bytes a
    document with 21 bands.

    Args:
        folder: has the files, which are deleted when they are created and vanish with this process.
        memory: bytes of the arrays of signatures that are not on disk; None: `MEMORY`.
    """

    def __init__(self, permutations: int, bands: int, rows: int, folder: Path, memory: int | None = None) -> None:
        self._shape, self._folder = (permutations, bands, rows), folder
        self._memory = MEMORY if memory is None else memory
        self._recent = SignatureIndex(*self._shape)
        self._spilled = 0
        self._signatures = _temporary(self, folder)
        self._levels: list[list[_Run]] = []

    def __len__(self) -> int:
        return self._spilled + len(self._recent)

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        return self._recent.nbytes + sum(run.fences.nbytes for level in self._levels for run in level)

    @property
    def runs(self) -> int:
        """Runs on disk."""
        return sum(map(len, self._levels))

    def keys(self, values: np.ndarray) -> np.ndarray:
        """See `SignatureIndex.keys`."""
        return self._recent.keys(values)

    def equal(self, values: np.ndarray, keys: np.ndarray) -> int:
        """See `SignatureIndex.equal`.

        Raises:
            OSError: a file cannot be read.
        """
        most, seen = self._recent.equal(values, keys), set[int]()
        for run in (run for level in self._levels for run in level):
            for number in run.numbers(keys):
                if number not in seen:
                    seen.add(number)
                    stored = _read(self._signatures, np.uint32, len(values), number * values.nbytes)
                    most = max(most, int((stored == values).sum()))
        return most

    def add(self, values: np.ndarray, keys: np.ndarray) -> None:
        """Append a signature.

        Raises:
            OSError: a file cannot be written.
        """
        if self._recent.full and 2 * self._recent.nbytes > self._memory and len(self._recent):
            self._spill()
        self._recent.add(values, keys)

    def _spill(self) -> None:
        self._signatures.write(self._recent.signatures.data)
        self._signatures.flush()
        keys, numbers = self._recent.sorted()
        new = _Run(self._folder)
        new.append(keys, numbers + np.uint64(self._spilled))
        self._spilled += len(self._recent)
        self._recent = SignatureIndex(*self._shape)
        for level in range(len(self._levels) + 1):
            if level == len(self._levels):
                self._levels.append([])
            self._levels[level].append(new)
            if len(self._levels[level]) < _FAN_IN:
                return
            new = _merged(self._levels[level], self._folder)
            self._levels[level] = []


class _Run:
    """Keys in order, and the number of the signature of each, in two files."""

    def __init__(self, folder: Path) -> None:
        self._keys, self._numbers = _temporary(self, folder), _temporary(self, folder)
        self._count = 0
        self.fences = np.empty(0, np.uint64)
        """Every `_BLOCK`-th key."""

    def __len__(self) -> int:
        return self._count

    def append(self, keys: np.ndarray, numbers: np.ndarray) -> None:
        """Add keys that are not before its last one."""
        self._keys.write(keys.data)
        self._numbers.write(numbers.astype(np.uint64).data)
        self._keys.flush()
        self._numbers.flush()
        self.fences = np.concatenate([self.fences, keys[-self._count % _BLOCK :: _BLOCK]])
        self._count += len(keys)

    def numbers(self, keys: np.ndarray) -> list[int]:
        """Of the signatures that have one of these keys."""
        drawn: list[int] = []
        firsts, lasts = (np.searchsorted(self.fences, keys, side) for side in ("left", "right"))
        for key, first, last in zip(keys, firsts, lasts, strict=True):
            start = max(int(first) - 1, 0) * _BLOCK
            block = _read(self._keys, np.uint64, min(int(last) * _BLOCK, self._count) - start, 8 * start)
            low, high = (int(np.searchsorted(block, key, side)) for side in ("left", "right"))
            if high > low:
                drawn += _read(self._numbers, np.uint64, high - low, 8 * (start + low)).tolist()
        return drawn

    def part(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        """Keys and numbers of some places."""
        return _read(self._keys, np.uint64, last - first, 8 * first), _read(
            self._numbers, np.uint64, last - first, 8 * first
        )

    def place(self, key: int) -> int:
        """How many keys are smaller."""
        start = max(int(np.searchsorted(self.fences, np.uint64(key))) - 1, 0) * _BLOCK
        block = _read(self._keys, np.uint64, min(_BLOCK, self._count - start), 8 * start)
        return start + int(np.searchsorted(block, np.uint64(key)))


def _merged(runs: list[_Run], folder: Path) -> _Run:
    """All keys of the runs in order. Keys are hashes, so equal ranges of them have about equally many."""
    merged, parts = _Run(folder), max(1, sum(map(len, runs)) // _MERGED)
    bounds = [(part << 64) // parts for part in range(1, parts)]
    places = [[0, *(run.place(bound) for bound in bounds), len(run)] for run in runs]
    for part in range(parts):
        pieces = [run.part(at[part], at[part + 1]) for run, at in zip(runs, places, strict=True)]
        keys, numbers = (np.concatenate(column) for column in zip(*pieces, strict=True))
        order = np.argsort(keys, kind="stable")
        merged.append(keys[order], numbers[order])
    return merged


def _temporary(owner: object, folder: Path) -> IO[bytes]:
    """A file that is closed, and thereby gone, when its owner is."""
    file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (closed with its owner)
    finalize(owner, file.close)
    return file


def _read(file: IO[bytes], dtype: npt.DTypeLike, count: int, offset: int) -> np.ndarray:
    size, parts = count * np.dtype(dtype).itemsize, list[bytes]()
    while size:
        part = os.pread(file.fileno(), size, offset)
        if not part:
            raise OSError(errno.EIO, "a file of near-duplicates is shorter than what was written")
        parts.append(part)
        size, offset = size - len(part), offset + len(part)
    return np.frombuffer(b"".join(parts), dtype)
