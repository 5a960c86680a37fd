"""Steps that drop documents by Gopher's rules of quality and repetition (Rae et al. 2021, arXiv 2112.11446, A.1.1), and
by language."""

from __future__ import annotations

import re
from collections import Counter

from llmrecipes.data.steps import Step

_STOP_WORDS = frozenset({"the", "be", "to", "of", "and", "that", "have", "with"})
_BULLETS = ("•", "‣", "▶", "◀", "◦", "■", "□", "▪", "▫", "–", "- ", "* ")
_ELLIPSES = ("...", "…")
_PARAGRAPHS = re.compile(r"\n{2,}")
_MOST_REPEATED = {2: 0.20, 3: 0.18, 4: 0.16}
"""Largest share of characters in the most frequent n-gram."""
_REPEATED = {5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.10}
"""Largest share of characters in n-grams that occur more than once."""


def gopher(min_words: int, max_words: int) -> Step:
    """Drop documents that break one of Gopher's quality rules, counted by the name of the first.

    `words`: between `min_words` and `max_words` of them; `word_length`: on average 3 to 10 characters; `symbols`: at
    most 0.1 hashes, and 0.1 ellipses, a word; `bullets`: at most 90 % of the lines begin with a bullet; `ellipses`: at
    most 30 % end with an ellipsis; `letters`: at least 80 % of the words have a letter; `stop_words`: at least two of
    the, be, to, of, and, that, have, with, so English only.
    """

    def step(texts: list[str]) -> list[str] | str:
        text = "\n".join(texts)
        return _broken(text, min_words, max_words) or texts

    return step


def _broken(text: str, min_words: int, max_words: int) -> str:
    words = text.split()
    count = len(words)
    if not min_words <= count <= max_words:
        return "words"
    if not 3 <= sum(map(len, words)) / count <= 10:
        return "word_length"
    if text.count("#") > 0.1 * count or sum(map(text.count, _ELLIPSES)) > 0.1 * count:
        return "symbols"
    lines = [line.strip() for line in text.splitlines() if not line.isspace() and line]
    if sum(line.startswith(_BULLETS) for line in lines) > 0.9 * len(lines):
        return "bullets"
    if sum(line.endswith(_ELLIPSES) for line in lines) > 0.3 * len(lines):
        return "ellipses"
    if sum(any(map(str.isalpha, word)) for word in words) < 0.8 * count:
        return "letters"
    if len(_STOP_WORDS.intersection(word.lower() for word in words)) < 2:
        return "stop_words"
    return ""


def repetition() -> Step:
    """Drop documents that repeat themselves, by the limits of Gopher's table A1, counted by the name of the first.

    `lines`, `paragraphs`: at most 30 % of them repeat an earlier one; `line_characters`, `paragraph_characters`: which
    have at most 20 % of the characters; `top_2_gram` to `top_4_gram`: the most frequent n-gram of words has at most
    20, 18 and 16 % of the characters; `5_grams` to `10_grams`: n-grams that occur again have at most 15 to 10 %.
    """

    def step(texts: list[str]) -> list[str] | str:
        return _repeated("\n".join(texts)) or texts

    return step


def _repeated(text: str) -> str:
    size = len(text)
    for unit, parts in (
        ("line", [line for line in text.splitlines() if line.strip()]),
        ("paragraph", [part for part in _PARAGRAPHS.split(text) if part.strip()]),
    ):
        again = [part for part, count in Counter(parts).items() for _ in range(count - 1)]
        if len(again) > 0.3 * len(parts):
            return f"{unit}s"
        if sum(map(len, again)) > 0.2 * size:
            return f"{unit}_characters"
    words = text.split()
    characters = sum(map(len, words))
    for n, most in _MOST_REPEATED.items():
        grams = Counter(zip(*(words[k:] for k in range(n)), strict=False))
        if grams:
            gram, count = max(grams.items(), key=lambda item: (item[1], sum(map(len, item[0]))))
            if count > 1 and count * sum(map(len, gram)) > most * characters:
                return f"top_{n}_gram"
    for n, most in _REPEATED.items():
        if _again(words, n) > most * characters:
            return f"{n}_grams"
    return ""


def _again(words: list[str], n: int) -> int:
    """Characters in n-grams that occur earlier in the document; those of overlapping ones once."""
    seen: set[tuple[str, ...]] = set()
    covered = total = 0
    for start, gram in enumerate(zip(*(words[k:] for k in range(n)), strict=False)):
        if gram in seen:
            first = max(covered, start)
            total += sum(map(len, words[first : start + n]))
            covered = start + n
        else:
            seen.add(gram)
    return total


def language(languages: list[str], min_probability: float) -> Step:
    """Drop documents that are not in one of the languages, by py3langid's model (Lui and Baldwin 2012).

    Counted by the most probable language of all that the model knows, or as `uncertain` below `min_probability`.
    """
    from py3langid.langid import MODEL_FILE, LanguageIdentifier  # type: ignore[import-untyped]

    identifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
    wanted = frozenset(languages)

    def step(texts: list[str]) -> list[str] | str:
        code, probability = identifier.classify("\n".join(texts))
        if code not in wanted:
            return str(code)
        return texts if probability >= min_probability else "uncertain"

    return step
