"""Text to token ids, fast: what the worker processes of `prepare` run. Imports neither torch nor megatron.

The byte-level BPE of `prepare` splits text into words with `WORDS` before it merges bytes. A word's tokens depend only
on the word, so they are looked up in a table that the library fills: the same ids as `Tokenizer.encode`, three times
as fast, because words repeat and the library tracks the origin of every byte. `WORDS` uses explicit ranges, so that
Python's `re` and the tokenizer's Oniguruma agree on every character, independent of their Unicode versions.

Another byte-level BPE runs through gigatoken where that is installed and has the same ids (`data/tokens/gigatoken.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version

import numpy as np
import tokenizers

from llmrecipes.data.tokens.gigatoken import CHECKED, PACKAGE, Gigatoken, UnsupportedTokenizer

# Letters: ASCII, and all from U+00C0 on but general and CJK punctuation; marks and symbols of other scripts count too.
_LETTER = "A-Za-zÀ-\u1fff\u2070-\u2fff\u3040-\U0010ffff"
_SPACE = " \t\n\r\f\v"
WORDS = "|".join(
    (
        f"[^\r\n0-9{_LETTER}]?[{_LETTER}]+",  # a word with one symbol or space in front
        "[0-9]{1,3}",
        f" ?[^{_SPACE}0-9{_LETTER}]+",
        f"[{_SPACE}]+(?![^{_SPACE}])",  # indentation, less the space that belongs to the next word
        f"[{_SPACE}]+",
    )
)
"""How text is split into words: between GPT-2's and GPT-4's patterns (openai/tiktoken), on explicit ranges."""
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
"""How Llama 3 does (meta-llama/llama3), in Oniguruma's syntax."""

_MAX_WORDS = 1 << 20  # entries of the table: some 200 MB at most
_MAX_PIECE = 1 << 20  # characters that are cut into words at once
_CUT = re.compile(f"(?<=[^{_SPACE}]\n)(?=[^{_SPACE}])")  # after a lone newline: it is a word regardless of what follows


@dataclass(frozen=True)
class Encoded:
    """Token ids of several documents, of texts each with its end token: their bytes, and tokens per document."""

    ids: bytes
    lengths: list[int]


Encode = Callable[[list[bytes]], Encoded]


def load(tokenizer_json: str, *, special_as_text: bool = True) -> tokenizers.Tokenizer:
    """A tokenizer whose ids depend on the text only.

    A `tokenizer.json` keeps the truncation and padding of the last call before it was saved; transformers switches both
    off unless a call asks for them. It may also keep the dropout of a BPE, which draws other ids in every call.

    Args:
        tokenizer_json: text of the file.
        special_as_text: names of special tokens in text are plain text, so that data cannot end a document.
    """
    tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if getattr(tokenizer.model, "dropout", None):
        tokenizer.model.dropout = None
    tokenizer.encode_special_tokens = special_as_text
    return tokenizer


def encoder(tokenizer_json: str, eod: int, dtype: str, *, by_word: bool, prefix: Sequence[int] = ()) -> Encode:
    """Make the function that turns UTF-8 documents into ids.

    Args:
        tokenizer_json: the tokenizer's `tokenizer.json`.
        eod: id appended to each document.
        dtype: NumPy name of the ids' type.
        by_word: the tokenizer splits text with `WORDS` (it was trained by `tokenizer.train`, with its default).
        prefix: ids put before each document.
    """
    if by_word:
        return _by_word(load(tokenizer_json), eod, dtype)
    fast = gigatoken(tokenizer_json)
    if isinstance(fast, str):
        return _by_library(load(tokenizer_json), eod, dtype, prefix)
    return _by_gigatoken(fast, eod, dtype, prefix)


@lru_cache(maxsize=1)
def gigatoken(tokenizer_json: str) -> Gigatoken | str:
    """What encodes with a Hugging Face tokenizer in this process, or why its own library does."""
    reference = load(tokenizer_json)
    try:
        return Gigatoken(reference.to_str(), reference)
    except UnsupportedTokenizer as reason:
        return str(reason)


def encoded_by(tokenizer_json: str) -> str:
    """What encodes with a Hugging Face tokenizer, as a line."""
    fast = gigatoken(tokenizer_json)
    library = f"tokenizers {tokenizers.__version__}"
    if isinstance(fast, str):
        return f"encoded by {library}, not by {PACKAGE}: {fast}"
    return f"encoded by {PACKAGE} {version(PACKAGE)}, and one document in {CHECKED:,} by {library} too"


def pieces(text: str, limit: int = _MAX_PIECE) -> Iterator[str]:
    """Split a long text where `WORDS` splits it anyway, so that memory stays bounded."""
    start = 0
    while len(text) - start > limit:
        cut = _CUT.search(text, start + limit)
        if cut is None:
            break
        yield text[start : cut.start()]
        start = cut.start()
    yield text[start:] if start else text


class _Table(dict[str, bytes]):
    """Word to the bytes of its ids, filled on demand."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, dtype: str) -> None:
        self._tokenizer, self._dtype = tokenizer, np.dtype(dtype)

    def __missing__(self, word: str) -> bytes:
        if len(self) >= _MAX_WORDS:
            self.clear()
        ids = self._tokenizer.encode(word, add_special_tokens=False).ids
        self[word] = value = np.array(ids, self._dtype).tobytes()
        return value


def _by_word(tokenizer: tokenizers.Tokenizer, eod: int, dtype: str) -> Encode:
    table = _Table(tokenizer, dtype)
    find = re.compile(WORDS).findall
    end = np.array([eod], dtype).tobytes()
    itemsize = np.dtype(dtype).itemsize

    def encode(documents: list[bytes]) -> Encoded:
        parts = []
        for document in documents:
            words = (b"".join(map(table.__getitem__, find(piece))) for piece in pieces(document.decode()))
            parts.append(b"".join((*words, end)))
        return Encoded(b"".join(parts), [len(part) // itemsize for part in parts])

    return encode


def _by_library(tokenizer: tokenizers.Tokenizer, eod: int, dtype: str, prefix: Sequence[int]) -> Encode:
    def encode(documents: list[bytes]) -> Encoded:
        encodings = tokenizer.encode_batch_fast([document.decode() for document in documents], add_special_tokens=False)
        rows = [np.array([*prefix, *encoding.ids, eod], dtype) for encoding in encodings]
        return Encoded(b"".join(row.tobytes() for row in rows), [len(row) for row in rows])

    return encode


def _by_gigatoken(fast: Gigatoken, eod: int, dtype: str, prefix: Sequence[int]) -> Encode:
    beginning, end = np.array(prefix, np.uint32), np.array([eod], np.uint32)

    def encode(documents: list[bytes]) -> Encoded:
        rows = fast.rows(documents)
        parts = [part for row in rows for part in (beginning, row, end)]
        ids = np.concatenate(parts).astype(dtype) if parts else np.empty(0, dtype)
        return Encoded(ids.tobytes(), [len(beginning) + len(row) + 1 for row in rows])

    return encode
