"""Steps that drop copies of earlier documents."""

from __future__ import annotations

import hashlib
import re
import unicodedata

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
