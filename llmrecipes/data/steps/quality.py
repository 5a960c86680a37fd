"""Steps that judge documents: by Gopher's rules of quality and repetition (Rae et al. 2021, arXiv 2112.11446, A.1.1),
those of C4, FineWeb and StarCoder2, by language, and by a classifier."""

from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmrecipes.data.steps.steps import Step
from llmrecipes.data.steps.words import ends_sentence, pieces, sentences, tokens
from llmrecipes.errors import UserError

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


_MEMBERS = {"ar": ("ary", "arz"), "ku": ("sdh",), "lv": ("ltg",), "no": ("nn",), "uz": ("uzs",), "zh": ("wuu", "yue")}
"""Languages that ISO 639-3 counts to a macrolanguage, of those that the model knows."""


def language(languages: list[str], min_probability: float) -> Step:
    """Drop documents that are not in one of the languages, by py3langid's model (Lui and Baldwin 2012).

    The probabilities of the wanted languages are added up, those of a macrolanguage's members too: the model often
    takes short Chinese texts (zh) for Wu or Cantonese (wuu, yue). A document is dropped if another language is more
    probable than they are together, counted by that language, or below `min_probability`, as `uncertain`.
    """
    return _Languages(languages, min_probability)


class _Languages:
    """A `Step` that has the language of the latest document that it kept."""

    def __init__(self, languages: list[str], min_probability: float) -> None:
        self._identifier = _identifier()
        self._least = min_probability
        self.language = ""
        self._wanted = {member: code for code in languages for member in _MEMBERS.get(code, ())}
        self._wanted |= {code: code for code in languages}

    def __call__(self, texts: list[str]) -> list[str] | str:
        ranks = self._identifier.rank("\n".join(texts))
        ranked = [(str(code), float(probability)) for code, probability in ranks]
        wanted = [(code, probability) for code, probability in ranked if code in self._wanted]
        together = sum(probability for _, probability in wanted)
        other, highest = next(((code, value) for code, value in ranked if code not in self._wanted), ("", 0.0))
        if highest > together:
            return other
        self.language = self._wanted[wanted[0][0]]
        return texts if together >= self._least else "uncertain"


def classifier_of_languages() -> Callable[[str], tuple[str, float]]:
    """What gives the most probable language of a text, and its probability; some 100 MB."""
    identifier = _identifier()
    return lambda text: (str((result := identifier.classify(text))[0]), float(result[1]))


def _identifier() -> Any:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier  # type: ignore[import-untyped]

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)


_CITATION = re.compile(r"\[\d*]|\[edit]|\[citation needed]")
_LINE_ENDS = (".", "?", "!", '"', "'")
_POLICIES = ("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies")
_LONGEST_WORD, _LEAST_WORDS = 1000, 3  # characters of a word, words of a line


def c4(terminal_punctuation: bool, min_sentences: int) -> Step:
    """Take lines out of documents, and drop documents, by the rules of C4 (Raffel et al. 2020, arXiv 1910.10683, 2.2).

    A line stays if it ends with a mark that ends sentences in some script or a straight quotation mark, but not with an
    ellipsis, and has at least 3 words, none of more than 1,000 characters, and neither "javascript" nor a phrase of
    cookie and privacy notices. Citations such as [1] are removed. A document is dropped by `curly_bracket` or
    `lorem_ipsum` in a line that would stay, or by `sentences` if what stays has fewer than `min_sentences`. C4's list
    of bad words is not applied.

    Args:
        terminal_punctuation: whether a line has to end with such a mark; FineWeb leaves this rule out.
        min_sentences: that a document has.
    """

    def step(texts: list[str]) -> list[str] | str:
        kept_lines, count = [], 0
        for text in texts:
            kept = []
            for whole in text.splitlines():
                line = _line(whole.strip(), terminal_punctuation)
                if line in _C4_DROPS:
                    return line
                if line:
                    count += max(1, sentences(line))
                    kept.append(line)
            kept_lines.append("\n".join(kept).strip())
        return kept_lines if count >= min_sentences else "sentences"

    return step


_C4_DROPS = frozenset({"lorem_ipsum", "curly_bracket"})


def _line(line: str, terminal: bool) -> str:
    """A line as it stays, empty if it does not, or the rule by which it drops its document."""
    words = pieces(line)
    if len(line) > _LONGEST_WORD and any(len(word) > _LONGEST_WORD for word in words):
        return ""
    if "[" in line:
        line = _CITATION.sub("", line)
    if terminal and (not (line.endswith(_LINE_ENDS) or ends_sentence(line)) or line.endswith("...")):
        return ""
    if len(words) < _LEAST_WORDS:
        return ""
    lower = line.lower()
    if "lorem ipsum" in lower:
        return "lorem_ipsum"
    if "javascript" in lower:
        return ""
    if "{" in line:
        return "curly_bracket"
    return "" if any(map(lower.__contains__, _POLICIES)) else line


_SHORT_LINE = 30


def fineweb() -> Step:
    """Drop documents that break one of FineWeb's own rules (Penedo et al. 2024, arXiv 2406.17557, 3.5), counted by the
    name of the first.

    `line_punctuation`: less than 12 % of the lines end with a mark that ends sentences in some script; `short_lines`:
    more than 67 % have at most 30 characters; `line_characters`: more than 1 % of the characters are in lines that
    repeat an earlier one; `list`: more than 0.3 line breaks a word or punctuation mark.
    """

    def step(texts: list[str]) -> list[str] | str:
        text = "\n".join(texts)
        lines = [line for line in text.split("\n") if line.strip()]
        if not lines:
            return "line_punctuation"
        if sum(map(ends_sentence, lines)) < 0.12 * len(lines):
            return "line_punctuation"
        if sum(len(line) <= _SHORT_LINE for line in lines) > 0.67 * len(lines):
            return "short_lines"
        seen: set[str] = set()
        again = 0
        for line in lines:
            if line in seen:
                again += len(line)
            seen.add(line)
        breaks = text.count("\n")
        if again > 0.01 * (len(text) - breaks):
            return "line_characters"
        return "list" if breaks > 0.3 * tokens(text) else texts

    return step


_GENERATED = (
    "auto-generated",
    "autogenerated",
    "automatically generated",
    "generated automatically",
    "this file is generated",
)
_ENCODED = tuple(
    map(
        re.compile,
        (
            r"[a-zA-Z0-9+/\n=]{64,}",
            r"(?:\b(?:0x|\\x)?[0-9a-fA-F]{2}(?:,|\b\s*)){8,}",
            r"(?:\\u[0-9a-fA-F]{4}){8,}",
        ),
    )
)
_MOST_ENCODED = 1024  # characters


def code(max_line_length: int, max_mean_line_length: int) -> Step:
    """Drop files of code by StarCoder2's rules (Lozhkov et al. 2024, arXiv 2402.19173, 3.1), counted by the name of the
    first.

    `lines`: more than 100,000 of them; `line_length`, `mean_line_length`: longer than the limits; `generated`: one of
    the first five lines says so; `letters`: less than 25 % of the characters are letters; `encoded`: base64,
    hexadecimal or escaped data of more than 1,024 characters, or half of the file. What go-enry knows of generated
    files is not applied: it goes by names.

    Args:
        max_line_length: characters of the longest line.
        max_mean_line_length: characters of a line on average.
    """

    def step(texts: list[str]) -> list[str] | str:
        text = "\n".join(texts)
        return _bad_code(text, max_line_length, max_mean_line_length) or texts

    return step


def _bad_code(text: str, longest: int, mean: int) -> str:
    lines = text.splitlines()
    if len(lines) > 100_000:
        return "lines"
    lengths = list(map(len, lines))
    if max(lengths, default=0) > longest:
        return "line_length"
    if sum(lengths) > mean * len(lines):
        return "mean_line_length"
    head = "\n".join(lines[:5]).lower()
    if any(map(head.__contains__, _GENERATED)):
        return "generated"
    if sum(map(str.isalpha, text)) < 0.25 * len(text):
        return "letters"
    encoded = [len(match[0]) for pattern in _ENCODED for match in pattern.finditer(text)]
    if encoded and (max(encoded) > _MOST_ENCODED or sum(encoded) > 0.5 * len(text)):
        return "encoded"
    return ""


_LABEL = "__label__"
_FASTTEXT = struct.Struct("<iii")  # of a file's beginning: magic number, version, dimension of the vectors


def classifier(model: str, labels: list[str], min_probability: float) -> Step:
    """Drop documents by a custom model, a supervised fastText one (Joulin et al. 2016, arXiv 1607.01759).

    Counted by the most probable label, as `uncertain` if that is one of `labels`. The lines of a document are joined by
    spaces, as a fastText file of training examples has them.

    Args:
        model: its file, `.bin` or `.ftz`.
        labels: labels of the documents to keep, without `__label__`.
        min_probability: that these labels have together.

    Raises:
        UserError: the file is missing or no such model, or a label is not the model's.
    """
    loaded = _fasttext(model)
    known = [name.removeprefix(_LABEL) for name in loaded.predict("", k=-1)[0]]
    if unknown := [name for name in labels if name not in known]:
        raise UserError(
            f"{unknown[0]!r} is not a label of {model}",
            where="data.steps[].labels",
            rule="labels are those of the model, without __label__",
            fix=f"choose from: {', '.join(sorted(known))}",
        )
    wanted = frozenset(labels)

    def step(texts: list[str]) -> list[str] | str:
        names, values = loaded.predict(" ".join("\n".join(texts).split()), k=-1)
        names = [name.removeprefix(_LABEL) for name in names]
        if sum(value for name, value in zip(names, values, strict=True) if name in wanted) >= min_probability:
            return texts
        return "uncertain" if names[0] in wanted else names[0]

    return step


def _fasttext(model: str) -> Any:
    import fasttext  # type: ignore[import-untyped]

    rule = "model must be a supervised fastText model, .bin or .ftz"
    fix = "use a complete file written by fastText"
    try:
        loaded = fasttext.load_model(str(Path(model).expanduser()))
        labels = len(loaded.predict("", k=-1)[0])
        complete = model.endswith(".ftz") or _complete(Path(model).expanduser(), labels)
    except (ValueError, RuntimeError, MemoryError) as error:
        raise UserError(f"cannot read {model}: {error}", where="data.steps[].model", rule=rule, fix=fix) from error
    if not complete:
        raise UserError(f"{model} is truncated", where="data.steps[].model", rule=rule, fix=fix)
    return loaded


def _complete(file: Path, labels: int) -> bool:
    """Whether a file ends with a matrix of a vector a label; fastText reads past the end of one that does not."""
    with file.open("rb") as stream:
        _, _, width = _FASTTEXT.unpack(stream.read(_FASTTEXT.size))
        stream.seek(max(0, file.stat().st_size - 16 - 4 * width * labels))
        return struct.unpack("<qq", stream.read(16)) == (labels, width)
