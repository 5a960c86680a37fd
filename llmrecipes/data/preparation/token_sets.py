"""Sources that are tokens already: the `.bin` and `.idx` that megatron-core's `IndexedDatasetBuilder` writes.

The tokens are not copied where their type is that of the prepared folder: the folder has an index of each split, and a
link to the `.bin` in place of a copy. So Megatron-LM can read the prepared files too, and a copy that follows links has
everything.
"""

from __future__ import annotations

import json
import os
import struct
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from llmrecipes.console import duration
from llmrecipes.data.folder.data_manifest import IDX_DTYPES, IDX_HEADER, IDX_MAGIC, Counts
from llmrecipes.data.folder.documents import TokenFile, text_ids
from llmrecipes.data.folder.prepared import HeldOutSplit
from llmrecipes.data.preparation.corpus import EncoderSpec, Tally
from llmrecipes.data.sources.rows import section
from llmrecipes.data.sources.sources import files, label
from llmrecipes.data.steps.split import Split, digest
from llmrecipes.data.steps.steps import DUPLICATES, EMPTY, VALID_SOURCES, Document, Dropped, Seen
from llmrecipes.data.tokens.tokenizer import TextTokenizer, read
from llmrecipes.errors import UserError
from llmrecipes.recipe.schema import Source
from llmrecipes.recipe.sections.source import AnyValidSource, make_valid_source
from llmrecipes.units import GIB
from llmrecipes.untrusted import open_file

_DOCUMENTS, _TOKENS = 1 << 16, 1 << 22
"""Documents of the index, and tokens, that are read at once."""
_SAMPLE, _PREFIX, _TAIL = 100, 128, 8
"""Documents whose beginning is encoded again, its tokens, and those at its end that a cut character may change."""
_MOST_DIFFERENT = 0.5
_REPORT_SECONDS = 5.0
_RULE = "a megatron source is a complete .bin and its .idx, written by megatron-core's IndexedDatasetBuilder"


class _Stored(TokenFile):
    """A file of a set, whose errors are those of a source."""

    def read(self, dtype: Any, count: int, offset: int) -> np.ndarray:
        """`count` numbers from a byte offset."""
        try:
            return super().read(dtype, count, offset)
        except OSError as error:
            raise UserError(f"cannot read: {error.strerror}", where=str(error.filename), rule=_RULE) from error


@dataclass(frozen=True)
class TokenSet:
    """A set whose header and sizes are right; the rest of the index is checked while it is read.

    Args:
        prefix: path prefix of its files.
        dtype: NumPy name of the type of its ids.
        sequences: in the index; a document is one or more of them.
        documents: in the index.
        tokens: in the `.bin`.
    """

    prefix: str
    dtype: str
    sequences: int
    documents: int
    tokens: int

    def lengths(self, first: int, last: int) -> Iterator[tuple[int, np.ndarray]]:
        """Tokens of the documents from `first` up to `last`, in pieces: the token at which a piece begins, and [n].

        Raises:
            UserError: the index contradicts itself or the `.bin`.
        """
        index = _Stored(Path(f"{self.prefix}.idx"))
        of_lengths = IDX_HEADER.size
        of_pointers = of_lengths + 4 * self.sequences
        of_documents = of_pointers + 8 * self.sequences
        itemsize = np.dtype(self.dtype).itemsize
        expected = None
        for begin in range(first, last, _DOCUMENTS):
            count = min(_DOCUMENTS, last - begin)
            borders = index.read(np.int64, count + 1, of_documents + 8 * begin)
            low, high = int(borders[0]), int(borders[-1])
            if (borders[1:] < borders[:-1]).any() or not 0 <= low <= high <= self.sequences:
                raise self._bad("its documents are not contiguous")
            if (begin == 0 and low != 0) or (begin + count == self.documents and high != self.sequences):
                raise self._bad("its documents skip sequences")
            if low == high:
                yield 0, np.zeros(count, np.int64)
                continue
            lengths = index.read(np.int32, high - low, of_lengths + 4 * low).astype(np.int64)
            pointers = index.read(np.int64, high - low, of_pointers + 8 * low)
            ends = np.concatenate([[0], np.cumsum(lengths)])
            start = int(pointers[0])
            follows = start >= 0 and not start % itemsize and expected in (None, start)
            if not follows or (lengths < 0).any() or (pointers != start + ends[:-1] * itemsize).any():
                raise self._bad("its sequences are not contiguous")
            total = start // itemsize + int(ends[-1])
            expected = total * itemsize
            if total > self.tokens or (low == 0 and start) or (high == self.sequences and total != self.tokens):
                raise self._bad(f"its sequences have {total:,} tokens, the .bin {self.tokens:,}")
            of_each = ends[borders[1:] - low] - ends[borders[:-1] - low]
            if of_each.max(initial=0) >= 1 << 31:
                raise self._bad("a document has more than 2,147,483,647 tokens")
            yield start // itemsize, of_each

    def read(self, first: int, last: int) -> Iterator[tuple[int, np.ndarray]]:
        """The documents from `first` up to `last`: the token at which each begins, and its ids.

        Raises:
            UserError: the index contradicts itself, or a file cannot be read.
        """
        stored = _Stored(Path(f"{self.prefix}.bin"))
        itemsize = np.dtype(self.dtype).itemsize
        for begin, lengths in self.lengths(first, last):
            ends, number = np.cumsum(lengths), 0
            while number < len(lengths):  # as many documents as have so many tokens, at least one
                done = int(ends[number - 1]) if number else 0
                after = max(number + 1, int(np.searchsorted(ends, done + _TOKENS, side="right")))
                ids = stored.read(self.dtype, int(ends[after - 1]) - done, (begin + done) * itemsize)
                for end, length in zip(ends[number:after].tolist(), lengths[number:after].tolist(), strict=True):
                    yield begin + end - length, ids[end - length - done : end - done]
                number = after

    def _bad(self, what: str) -> UserError:
        return UserError(what, where=f"{self.prefix}.idx", rule=_RULE, fix="copy or write the set again")


def open_set(source: Source) -> TokenSet:
    """The set of a source.

    Raises:
        UserError: a file is missing, truncated or not of such a set, or its ids are of another type.
    """
    tokens, index = (Path(str(file)) for file in files(source))
    prefix = str(index.with_suffix("")) if index.suffix == ".idx" else str(index)
    fix = "set path to complete files written by megatron-core, without .bin and .idx"
    try:
        with open_file(index) as stream, open_file(tokens) as ids:
            header = stream.read(IDX_HEADER.size)
            size = os.fstat(stream.fileno()).st_size
            stored = os.fstat(ids.fileno()).st_size
    except OSError as error:
        raise UserError(f"cannot read: {error.strerror}", where=prefix, rule=_RULE, fix=fix) from error
    try:
        magic, version, code, sequences, borders = IDX_HEADER.unpack(header)
    except struct.error:
        magic = b""
        version = 0
        code = 0
        sequences = 0
        borders = 0
    if magic != IDX_MAGIC or version != 1:
        raise UserError("is not an index of megatron-core", where=str(index), rule=_RULE, fix=fix)
    if code not in IDX_DTYPES:
        raise UserError(
            f"its ids have the unknown dtype code {code}",
            where=str(index),
            rule=f"ids must be {', '.join(f'{name} ({number})' for number, name in IDX_DTYPES.items())}",
            fix="write the set with megatron-core's preprocess_data.py",
        )
    expected = IDX_HEADER.size + 12 * sequences + 8 * borders
    if size == expected + sequences and sequences:
        raise UserError("has modes (images and text)", where=str(index), rule="a token set must be text only", fix=fix)
    itemsize = np.dtype(IDX_DTYPES[code]).itemsize
    if size != expected or not borders:
        raise UserError(
            f"has {size:,} bytes, its header says {expected:,}", where=str(index), rule=_RULE, fix="copy it again"
        )
    if stored % itemsize:
        raise UserError(
            f"has {stored:,} bytes, not a multiple of the id size {itemsize}", where=str(tokens), rule=_RULE, fix=fix
        )
    return TokenSet(prefix, IDX_DTYPES[code], sequences, borders - 1, stored // itemsize)


def check_tokenizer(number: int, source: Source, tokenizer: TextTokenizer, log: Callable[[str], None]) -> None:
    """Compare a set with the recipe's tokenizer before minutes of work.

    The beginnings of some documents are decoded and encoded again: the tokenizer that made them returns the same ids,
    another one hardly ever. That most documents end with another id than the recipe's end token is only reported:
    Megatron-LM writes sets without `--append-eod` too.

    Raises:
        UserError: the set is damaged, an id is outside the vocabulary, or more than half of the documents differ.
    """
    token_set = open_set(source)
    documents = range(token_set.documents)
    chosen = documents[:: max(1, len(documents) // _SAMPLE)][:_SAMPLE]
    special = {token for token, added in tokenizer.backend.get_added_tokens_decoder().items() if added.special}
    compared = 0
    different = 0
    last = Counter[int]()
    for document in chosen:
        for start, ids in token_set.read(document, document + 1):
            _require_ids(token_set, start, ids, tokenizer.vocab_size)
            if not len(ids):
                continue
            last[int(ids[-1])] += 1
            begin = [token for token in ids[:_PREFIX].tolist() if token not in special]
            same = len(begin) if len(ids) <= _PREFIX else len(begin) - _TAIL
            if same > 0:
                compared += 1
                again = tokenizer.encode(tokenizer.decode(begin))
                different += again[:same] != begin[:same]
    where = f"{section(source)}[{number}]"
    if different > _MOST_DIFFERENT * compared:
        raise UserError(
            f"{different} of {compared} documents of {label(source)!r} give other tokens when encoded again",
            where=where,
            rule="data.tokenizer must be the tokenizer that made the tokens of a megatron source",
            fix="set data.tokenizer.path to that tokenizer, or write the set again with this one",
        )
    if different:
        log(f"note: {label(source)}: {different} of {compared} documents give other tokens when encoded again")
    ended = last[tokenizer.eod]
    if ended < 0.99 * last.total():
        other, count = last.most_common(1)[0]
        most = f", {count} with id {other}" if other != tokenizer.eod else ""
        log(
            f"note: {label(source)}: {ended} of {last.total()} documents end with the end token "
            f"{tokenizer.eod}{most}; without it, nothing separates documents within a sample (--append-eod of "
            "preprocess_data.py)"
        )


class LinkedPart:
    """A split of a set whose tokens stay where they are: the split's index, and a link to the `.bin`."""

    def __init__(self, prefix: Path, token_set: TokenSet, stack: ExitStack) -> None:
        self._prefix = prefix
        self._dtype = token_set.dtype
        self._lengths, self._pointers = array("i"), array("q")
        self._itemsize = np.dtype(token_set.dtype).itemsize
        self._digests = stack.enter_context(prefix.with_suffix(".sha256").open("wb"))
        Path(f"{prefix}.bin").symlink_to(Path(f"{token_set.prefix}.bin").resolve())
        self.counts = Counts()

    def add(self, document: Document, length: int, start: int) -> None:
        """The next document, which begins at a token of the set."""
        self._lengths.append(length)
        self._pointers.append(start * self._itemsize)
        self._digests.write(document.digest)
        self.counts = _with(self.counts, document, length)

    def finish(self) -> None:
        """Write the index."""
        count = len(self._lengths)
        code = next(code for code, name in IDX_DTYPES.items() if name == self._dtype)
        with Path(f"{self._prefix}.idx").open("wb") as stream:
            stream.write(IDX_HEADER.pack(IDX_MAGIC, 1, code, count, count + 1))
            self._lengths.tofile(stream)
            self._pointers.tofile(stream)
            np.arange(count + 1, dtype=np.int64).tofile(stream)


class CopiedPart:
    """A split of a set whose tokens are written again."""

    def __init__(self, prefix: Path, dtype: str, stack: ExitStack) -> None:
        self._idx = f"{prefix}.idx"
        self._builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.dtype(dtype).type)
        stack.callback(self._builder.data_file.close)
        self._digests = stack.enter_context(prefix.with_suffix(".sha256").open("wb"))
        self.counts = Counts()

    def add(self, document: Document, length: int, ids: np.ndarray) -> None:
        """The next document."""
        self._builder.add_document(ids, [length])
        self._digests.write(document.digest)
        self.counts = _with(self.counts, document, length)

    def finish(self) -> None:
        """Write the index."""
        self._builder.finalize(self._idx)


def _with(counts: Counts, document: Document, length: int) -> Counts:
    return Counts(documents=counts.documents + 1, tokens=counts.tokens + length, bytes=counts.bytes + document.size)


def write_set(
    folder: Path,
    source: Source,
    spec: EncoderSpec,
    seen: Seen,
    name: Callable[[Split], str],
    add_text: Callable[[HeldOutSplit, bytes], None],
    log: Callable[[str], None],
) -> tuple[Tally, dict[Split, Counts], bool]:
    """Write the splits of a set: a document is in that of the hash of its ids, and dropped if an earlier one has them.

    Args:
        folder: the prepared folder.
        source: source of the set.
        spec: has the type of ids of the folder, its tokenizer and the rule of splits.
        seen: the documents of the folder so far.
        name: name of a split's files, without suffix.
        add_text: takes the texts of held-out splits, which are decoded.
        log: receives the progress.

    Returns:
        What was read and dropped, what is kept by split, and whether the tokens stay where they are.

    Raises:
        UserError: the set is damaged, or an id is outside the vocabulary.
    """
    token_set = open_set(source)
    tokenizer = read(spec.tokenizer, spec.eod, spec.identity)
    tally = Tally()
    tokens = 0
    held_out = _held_out(spec)
    linked: dict[Split, LinkedPart] = {}
    copied: dict[Split, CopiedPart] = {}
    in_place = token_set.dtype == spec.dtype
    if not in_place:
        size = token_set.tokens * np.dtype(spec.dtype).itemsize / GIB
        log(f"{label(source)}: {token_set.dtype} ids are rewritten as {spec.dtype}, up to {size:,.1f} GiB")
    progress = _progress(label(source), token_set.tokens, log)
    with ExitStack() as stack:
        for start, ids in token_set.read(0, token_set.documents):
            if source.max_tokens is not None and tokens >= source.max_tokens:
                break
            tally.read += 1
            length = len(ids)
            _require_ids(token_set, start, ids, tokenizer.vocab_size)
            if _is_empty(ids, spec.eod):
                tally.dropped[EMPTY] += 1
                continue
            as_stored = ids.astype(spec.dtype, copy=False)
            identity = digest(as_stored.tobytes())
            if identity in held_out:
                tally.dropped[VALID_SOURCES] += 1
                tally.rules[f"{VALID_SOURCES}.{held_out[identity]}"] += 1
                continue
            split = spec.steps.rule.of(identity)
            text = b""
            if split != "train":
                text = tokenizer.decode(text_ids(ids, spec.eod)).encode()
            document = Document(b"", identity, split, len(text))
            if isinstance(seen.add(document), Dropped):
                tally.dropped[DUPLICATES] += 1
                continue
            tokens += length
            if not in_place:
                if split not in copied:
                    copied[split] = CopiedPart(folder / name(split), spec.dtype, stack)
                copied[split].add(document, length, as_stored)
            else:
                if split not in linked:
                    linked[split] = LinkedPart(folder / name(split), token_set, stack)
                linked[split].add(document, length, start)
            if split != "train":
                add_text(split, text)
            progress(start + length)
        written: dict[Split, LinkedPart] | dict[Split, CopiedPart] = linked if in_place else copied
        for part in written.values():
            part.finish()
    return tally, {split: part.counts for split, part in written.items()}, in_place and bool(linked)


def _progress(name: str, tokens: int, log: Callable[[str], None]) -> Callable[[int], None]:
    """A function that takes how many tokens are read, and logs that from time to time."""
    began = reported = time.monotonic()

    def report(done: int) -> None:
        nonlocal reported
        if (now := time.monotonic()) - reported > _REPORT_SECONDS:
            reported = now
            left = duration((tokens - done) * (now - began) / done)
            log(f"{name}: {done:,} of {tokens:,} tokens read; about {left} left")

    return report


def documents(source: AnyValidSource, spec: EncoderSpec) -> Iterator[tuple[np.ndarray, bytes, int]]:
    """The documents of a held-out set: ids of the folder's type, their hash, and bytes of the decoded text.

    Raises:
        UserError: the set is damaged, or an id is outside the vocabulary.
    """
    token_set = open_set(source)
    tokenizer = read(spec.tokenizer, spec.eod, spec.identity)
    for start, ids in token_set.read(0, token_set.documents):
        _require_ids(token_set, start, ids, tokenizer.vocab_size)
        if not _is_empty(ids, spec.eod):
            stored = ids.astype(spec.dtype, copy=False)
            yield stored, digest(stored.tobytes()), len(tokenizer.decode(text_ids(ids, spec.eod)).encode())


def _held_out(spec: EncoderSpec) -> dict[bytes, str]:
    """Labels of the held-out sets of tokens, by the hashes of all of their documents."""
    settings = next((value for name, _, value in spec.steps.steps if name == VALID_SOURCES), '{"sets": []}')
    labels = dict[bytes, str]()
    for source in (make_valid_source(**set_) for set_ in json.loads(settings)["sets"]):
        if source.tokenized:
            token_set = open_set(source)
            for _, ids in token_set.read(0, token_set.documents):
                labels.setdefault(digest(ids.astype(spec.dtype, copy=False).tobytes()), source.label)
    return labels


def _is_empty(ids: np.ndarray, eod: int) -> bool:
    return len(ids) == 0 or (len(ids) == 1 and int(ids[0]) == eod)


def _require_ids(token_set: TokenSet, start: int, ids: np.ndarray, vocab_size: int) -> None:
    """UserError if an id of a document that begins at a token of the set is outside the vocabulary."""
    if not len(ids) or (int(ids.min()) >= 0 and int(ids.max()) < vocab_size):
        return
    place = int(np.flatnonzero((ids < 0) | (ids >= vocab_size))[0])
    raise UserError(
        f"token {start + place:,} has id {int(ids[place])}",
        where=f"{token_set.prefix}.bin",
        rule=f"ids must be 0 to {vocab_size - 1:,}, the vocabulary of data.tokenizer",
        fix="set data.tokenizer.path to the tokenizer that made the tokens",
    )
