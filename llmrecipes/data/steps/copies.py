"""Steps that drop copies of earlier documents: equal ones, and near-duplicates by MinHash and LSH."""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np

from llmrecipes.data.steps.words import normalized, pieces, sentence_starts, shingles


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
        min_words: minimum number of words of what is left of a document that was cut, without which it is dropped.
    """

    def __init__(
        self,
        span_sentences: int | None = None,
        max_repeated_spans: float = 0.5,
        cut_spans: bool = False,
        min_words: int = 50,
    ) -> None:
        self._seen: set[bytes] = set()
        self._span = span_sentences
        self._most = max_repeated_spans
        self._cuts = cut_spans
        self._min_words = min_words

    def mark(self, text: str) -> bytes:
        """The hash of the normalized text: 16 bytes; then 8 bytes of each span."""
        # Of a text without words, such as emoji, the characters.
        words = normalized(text) or "".join(text.split())
        whole = hashlib.blake2b(words.encode(), digest_size=16).digest()
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
        repeated = set[int]()
        new = set[bytes]()
        for first, span in enumerate(spans):
            if span in self._seen or span in new:
                repeated.update(range(first, first + (self._span or 0)))
            new.add(span)
        if not repeated:
            self._seen |= new
            return text, []
        # What has no words, such as a rule of dashes, belongs to the sentence before it.
        starts = [start for start, _ in _sentences(text)]
        bounds = zip(starts, [*starts[1:], len(text)], strict=True)
        parts = [text[start:end] for start, end in bounds]
        left = text[: starts[0]] + "".join(part for n, part in enumerate(parts) if n not in repeated)
        if len(pieces(left)) < self._min_words:
            return "", [text]
        self._seen |= new
        return left, [part for n, part in enumerate(parts) if n in repeated]


def _whole_and_spans(mark: bytes) -> tuple[bytes, list[bytes]]:
    return mark[:16], [mark[start : start + 8] for start in range(16, len(mark), 8)]


def _sentences(text: str) -> list[tuple[int, str]]:
    """Where the sentences and lines of a text begin, and each normalized; none without a word."""
    starts = sentence_starts(text)
    bounds = zip(starts, [*starts[1:], len(text)], strict=True)
    return [(start, words) for start, end in bounds if (words := normalized(text[start:end]))]


_SEED = 1
_CERTAIN = 0.99
"""Probability of comparing a document with an earlier one of exactly the threshold's similarity."""


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


@lru_cache
def _factors(bands: int, rows: int) -> np.ndarray:
    random = np.random.Generator(np.random.Philox(_SEED))
    return random.integers(1, 2**63, (bands, rows), np.uint64) * np.uint64(2) + np.uint64(1)


def band_keys(values: np.ndarray, bands: int, rows: int) -> np.ndarray:
    """A key for each band of a signature, never 0: uint64[bands]. Two documents have it in common if they have all
    values of that band in common, and else with probability 2^-63."""
    factors = _factors(bands, rows)
    of_bands = values[: bands * rows].reshape(bands, rows).astype(np.uint64)
    mixed = ((of_bands + np.uint64(1)) * factors).sum(axis=1, dtype=np.uint64)
    mixed ^= mixed >> np.uint64(32)
    return (mixed * factors[:, 0]) | np.uint64(1)


_IN_WORD = 16
_BITS = 4
"""Of a value in a sketch."""


def sketch(values: np.ndarray) -> np.ndarray:
    """Four bits of each value of a signature, 16 to a word: uint64[ceil(permutations / 16)].

    As b-bit minwise hashing (Li and König 2010, arXiv 0910.3349): values that differ are taken for equal with
    probability 1/16, which `most_different` takes into account.
    """
    bits = np.zeros(-(-len(values) // _IN_WORD) * _IN_WORD, np.uint64)
    bits[: len(values)] = (values * np.uint32(2654435769)) >> np.uint32(32 - _BITS)  # the high bits of a mixture
    shifts = np.arange(0, 64, _BITS, dtype=np.uint64)
    words: np.ndarray = np.bitwise_or.reduce(bits.reshape(-1, _IN_WORD) << shifts, axis=1)
    return words


def different(some: np.ndarray, others: np.ndarray) -> np.ndarray:
    """In how many values sketches differ: [n] of uint64[n, words] and uint64[n, words] or uint64[words]."""
    bits = some ^ others
    bits |= bits >> np.uint64(1)
    bits |= bits >> np.uint64(2)
    counts: np.ndarray = np.bitwise_count(bits & np.uint64(0x1111111111111111)).sum(axis=-1, dtype=np.int64)
    return counts


def most_different(threshold: float, permutations: int) -> int:
    """Values in which the sketches of two documents may differ that count as similar: from two standard errors below
    the threshold on (`margin`)."""
    least = threshold - margin(threshold, permutations)
    return int((1 - least) * (1 - 2**-_BITS) * permutations)


class NearDuplicates:
    """Drops documents that are nearly equal to an earlier one (Broder 1997).

    The similarity of two documents is the Jaccard index of their sets of shingles: those in common over those of both.
    It is estimated by the share of equal values of `permutations` hash functions (rensa's R-MinHash), of which four
    bits are compared, for the documents that have all values of a band in common: those of a bucket.

    In a bucket a document is compared with the representatives, in the order of the sources. If one of them is similar,
    the document is dropped; otherwise it becomes a representative. What happens in a bucket does not depend on
    other buckets, so workers may share them in any order (`compare.Buckets`); this class has all of them.

    A document that is kept is a representative in each of its buckets. So two that are kept are not similar, if they
    have a bucket in common: whatever splits they are in, no held-out text has a near-copy in training text. And a
    document that is dropped is similar to an earlier one, which is kept or similar to a still earlier one.

    Held for a document: half a byte a permutation, and 24 to 48 bytes for each bucket that it represents.

    Args:
        threshold: Jaccard index from which on documents are near-duplicates.
        permutations: values of a signature.
        shingle_words: words of a shingle.
    """

    def __init__(self, threshold: float, permutations: int, shingle_words: int) -> None:
        self._permutations = permutations
        self._shingle_words = shingle_words
        self.bands, self._rows = bands_of(threshold, permutations)
        self.most_different = most_different(threshold, permutations)
        self.words = -(-permutations // _IN_WORD)
        self._index = BandIndex()
        self._count = 0
        self._sketches = np.empty((1024, self.words), np.uint64)

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        return self._index.nbytes + self._sketches.nbytes

    def mark(self, text: str) -> bytes:
        """The keys of its bands and its sketch, as words of 8 bytes."""
        values = signature(shingles(text, self._shingle_words), self._permutations)
        return np.concatenate([band_keys(values, self.bands, self._rows), sketch(values)]).astype("<u8").tobytes()

    def add(self, mark: bytes) -> bool:
        """Whether it is kept: no representative of its buckets is similar."""
        keys, its_sketch = self._parts(mark)
        close = self._close(keys, its_sketch)
        represented = np.delete(keys, close) if len(close) else keys
        if len(represented):
            if self._count == len(self._sketches):
                self._sketches = doubled(self._sketches)
            self._sketches[self._count] = its_sketch
            self._index.add(represented, self._count)
            self._count += 1
        return not len(close)

    def similar(self, mark: bytes) -> bool:
        """Whether a representative is similar."""
        return len(self._close(*self._parts(mark))) > 0

    def _parts(self, mark: bytes) -> tuple[np.ndarray, np.ndarray]:
        words = np.frombuffer(mark, "<u8")
        return words[: self.bands], words[self.bands :]

    def _close(self, keys: np.ndarray, its_sketch: np.ndarray) -> np.ndarray:
        """The bands in whose buckets a representative is similar."""
        bands, numbers = self._index.find(keys)
        if not len(bands):
            return bands
        return np.unique(bands[different(self._sketches[numbers], its_sketch) <= self.most_different])


_SLOTS = np.arange(8)
"""Of a hash table, that are looked at together: one look at eight takes as long as one at one."""


class BandIndex:
    """Documents by their bands: a hash table of 64-bit keys with linear probing, in arrays that double."""

    def __init__(self) -> None:
        self._used = 0
        self._table = np.zeros(1 << 16, np.uint64)
        self._numbers = np.zeros(1 << 16, np.uint32)

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        return self._table.nbytes + self._numbers.nbytes

    def find(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Each key with each document that has it: places in `keys`, and numbers of documents."""
        mask = len(self._table) - 1
        slots = self._home(keys)
        asked = np.arange(len(keys))
        places = [asked[:0]]
        numbers = [self._numbers[:0]]
        while len(slots):  # several slots of each key at once: behind a free one there is none with the key
            several = (slots[:, None] + _SLOTS) & mask
            stored = self._table[several]
            same = stored == keys[asked, None]
            if same.any():
                places.append(asked[same.nonzero()[0]])
                numbers.append(self._numbers[several[same]])
            go_on = (stored != 0).all(axis=1)
            if not go_on.any():
                break
            slots = several[go_on, -1] + 1
            asked = asked[go_on]
        return np.concatenate(places), np.concatenate(numbers)

    def add(self, keys: np.ndarray, number: int) -> None:
        """One more document."""
        if 2 * (self._used + len(keys)) > len(self._table):
            self._double()
        several = (self._home(keys)[:, None] + _SLOTS) & (len(self._table) - 1)
        places = several[np.arange(len(keys)), (self._table[several] == 0).argmax(axis=1)]
        if len(set(places.tolist())) == len(keys) and not self._table[places].any():  # as mostly: all are free
            self._table[places], self._numbers[places] = keys, number
        else:
            self._insert(keys, np.full(len(keys), number, np.uint32))
        self._used += len(keys)

    def _home(self, keys: np.ndarray) -> np.ndarray:
        return (keys >> np.uint64(64 - len(self._table).bit_length() + 1)).astype(np.int64)

    def _insert(self, keys: np.ndarray, numbers: np.ndarray) -> None:
        """Each round, one of the keys that meet at a free place takes it; the others go on to the next."""
        mask = len(self._table) - 1
        places = self._home(keys)
        while len(places):
            free = self._table[places] == 0
            self._table[places[free]], self._numbers[places[free]] = keys[free], numbers[free]
            waiting = (self._table[places] != keys) | (self._numbers[places] != numbers)
            places = (places[waiting] + 1) & mask
            keys = keys[waiting]
            numbers = numbers[waiting]

    def _double(self) -> None:
        used = self._table != 0
        keys = self._table[used]
        numbers = self._numbers[used]
        size = 2 * len(self._table)
        self._table, self._numbers = np.zeros(size, np.uint64), np.zeros(size, np.uint32)
        self._insert(keys, numbers)


def doubled(array: np.ndarray) -> np.ndarray:
    """The array with room for as many rows again."""
    return np.concatenate([array, np.empty_like(array)])
