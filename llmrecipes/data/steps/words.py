"""Words of a text in any script: the one splitter of all steps that compare or count words.

A word is a run of letters, digits and underscores with their combining marks: what Unicode's annex 29 (UAX 29, word
boundaries) joins, but cut at apostrophes and full stops, as GPT-3's comparison of texts without punctuation is. Marks
stay in their word, so `हिन्दी` is one. In scripts that are written without blanks, whose words UAX 29 leaves to
dictionaries, the unit is a letter with its marks: of Chinese and Japanese it counts as a word, of Thai, Lao, Khmer,
Burmese and their kin (Unicode's line-breaking class SA) as a third of one, about what a word has there.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from functools import cache
from itertools import accumulate, chain

_APART = {code: " " for code in range(128) if not re.match(r"\w", chr(code))}
_FOLDED = dict.fromkeys(range(128), " ")
_FOLDED |= {ord(c): c.lower() for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"}
_FOLDED |= dict.fromkeys(map(ord, "0123456789"), "0")
_BEYOND = re.compile("[\U00010000-\U0010ffff]")
_DIGITS = re.compile(r"\d")
_CLOSING = "\"'”’)\\]»」』）"
_TOKEN = re.compile(r"\w(?:[^\s/-]*\w)?|[^\w\s]")  # a word or a punctuation mark; as many as spaCy's within 10 %
_PIECE = re.compile(r"\S+")
_LETTERS_OF_A_WORD = 3  # of the class SA
_ACCENT_CLASSES = (*range(10, 37), 202, 214, 216, 218, 220, 222, 224, 226, 228, 230, 232, 233, 234, 240)
"""Canonical combining classes of accents, and of the points of Hebrew, Arabic and Syriac that may be left out. Nuktas,
viramas, and the vowel and tone marks of other scripts have other classes, and tell words apart."""


class _Patterns:
    """Patterns of `re` from the properties that `regex` knows.

    Args:
        beyond: whether the texts have characters beyond the basic plane, for which `re` takes several times as long.
    """

    def __init__(self, beyond: bool) -> None:
        planes = (range(0x10000, 0x33480), range(0xE0000, 0xE0200)) if beyond else ()  # where characters are assigned
        every = "".join(map(chr, (*range(0xD800), *range(0xE000, 0x10000), *chain(*planes))))
        accents = "".join(rf"\p{{Canonical_Combining_Class={number}}}" for number in _ACCENT_CLASSES)
        accents = f"[{accents}]"
        mark = _members(r"\p{M}", every)
        sa = _members(r"[\p{Line_Break=SA}--\p{M}]", every)
        unspaced = _members(r"[\p{Han}\p{Hiragana}\p{Katakana}\p{Line_Break=SA}ー--\p{M}]", every)
        spaced = _members(r"[\w\p{No}--\p{Han}--\p{Hiragana}--\p{Katakana}--\p{Line_Break=SA}--ー--\p{M}]", every)
        self.word = re.compile(f"[{spaced}][{spaced}{mark}]*|[{unspaced}][{mark}]*")
        letter = spaced.replace("_-_", "") + unspaced
        self.plain = re.compile(f"[{letter}][{letter}{mark}]*")
        self.piece = re.compile(f"[{unspaced}][{mark}]*|[^\\s{unspaced}]+")
        self.unspaced, self.sa = re.compile(f"[{unspaced}]"), re.compile(f"[{sa}]")
        self.accents = re.compile(f"[{_members(accents, every)}]+")
        self.marks = re.compile(f"[{mark}]+")
        ends = _members(r"[\p{Sentence_Terminal}--[.!?]]", every)
        self.sentence_end = re.compile(rf"(?<=[.!?])[{_CLOSING}]*\s+|[{ends}]+[{_CLOSING}]*\s*|\n+")
        self.end = re.compile(f"[{ends}]")
        self.stops = re.compile(rf"[.!?]+[{_CLOSING}]*(?=\s|$)|[{ends}]+")
        # No part of what is compared: joiners, soft hyphens, marks of direction. U+200B parts words.
        ignored = _members(r"[\p{Default_Ignorable_Code_Point}\p{Cf}--\u200b]", every)
        self.ignored = re.compile(f"[{ignored}]+")


def _members(pattern: str, every: str) -> str:
    """What a class of `regex` matches, as the inside of a class of `re`."""
    import regex  # type: ignore[import-untyped]

    inside = ""
    for match in regex.finditer(f"{pattern}+", every, regex.VERSION1):
        run = match[0]
        # A run may go on behind the surrogates or the empty planes, which are left out of `every`.
        inside += f"{run[0]}-{run[-1]}" if ord(run[-1]) - ord(run[0]) == len(run) - 1 else run
    return inside


_make = cache(_Patterns)


def _patterns(text: str) -> _Patterns:
    return _make(_BEYOND.search(text) is not None)


def words(text: str) -> list[str]:
    """The words of a text, without punctuation and symbols; in ASCII in a third of the time."""
    if text.isascii():
        return text.translate(_APART).split()
    found: list[str] = []
    for line in text.split("\n"):  # no word goes beyond a line
        if line.isascii():
            found += line.translate(_APART).split()
        else:
            patterns = _patterns(line)
            found += patterns.word.findall(unicodedata.normalize("NFC", patterns.ignored.sub("", line)))
    return found


def sequences(text: str, n: int) -> list[str]:
    """All sequences of n words in lower case, joined by spaces; none of a text with fewer.

    One begins at every word, and at every letter of scripts without blanks.
    """
    found = words(text.lower())
    if text.isascii() or not (letter := _patterns(text).sa).search(text):
        return list(map(" ".join, zip(*(found[k:] for k in range(n)), strict=False)))
    ends = list(accumulate(1 if letter.match(word) else _LETTERS_OF_A_WORD for word in found))
    grams, last = [], 0
    for first, begin in enumerate([0, *ends[:-1]]):
        while last < len(ends) and ends[last] - begin < n * _LETTERS_OF_A_WORD:
            last += 1
        if last == len(ends):
            break
        grams.append(" ".join(found[first : last + 1]))
    return grams


def shingles(text: str, n: int) -> list[str]:
    """The sequences of n words; of a shorter text all its words as one."""
    return sequences(text, n) or [" ".join(words(text.lower()))]


def normalized(text: str) -> str:
    """Lower case, digits as 0, without accents, one space for what lies between words."""
    if text.isascii():
        return " ".join(text.translate(_FOLDED).split())
    patterns = _patterns(text)
    text = patterns.accents.sub("", unicodedata.normalize("NFD", patterns.ignored.sub("", text)))
    return " ".join(patterns.plain.findall(_DIGITS.sub("0", text.lower())))


def pieces(text: str) -> list[str]:
    """What white space parts, with punctuation; of scripts without blanks, letters."""
    if text.isascii() or not (patterns := _patterns(text)).unspaced.search(text):
        return _PIECE.findall(text)
    return patterns.piece.findall(text)


def with_pieces(text: str, replaced: Callable[[str], str]) -> str:
    """The text with each of its pieces replaced, and the white space as it is."""
    pattern = _PIECE if text.isascii() else _patterns(text).piece
    return pattern.sub(lambda piece: replaced(piece[0]), text)


def tokens(text: str) -> int:
    """How many words and punctuation marks a text has; of scripts without blanks, letters."""
    if text.isascii():
        return len(_TOKEN.findall(text))
    patterns = _patterns(text)
    text, letters = patterns.unspaced.subn(" ", patterns.marks.sub("", text))
    return letters + len(_TOKEN.findall(text))


def sentence_starts(text: str) -> list[int]:
    """Where the sentences and lines of a text begin, by the marks that end sentences in any script."""
    return [0, *(match.end() for match in _patterns(text).sentence_end.finditer(text))]


def sentences(text: str) -> int:
    """How many marks, or runs of marks, end a sentence in a text."""
    return len(_patterns(text).stops.findall(text))


def ends_sentence(line: str) -> bool:
    """Whether the last character ends sentences in some script (Unicode's Sentence_Terminal)."""
    return line.endswith((".", "!", "?")) or _patterns(line[-1:]).end.match(line, len(line) - 1) is not None
