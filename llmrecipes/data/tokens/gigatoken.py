"""Byte-level BPEs of Hugging Face through gigatoken, tens of times as fast, where its ids are the same.

gigatoken (https://github.com/marcelroed/gigatoken, MIT) has its own code for the patterns that split text, and looks
words up that it has seen. Prepared data must not depend on whether it is installed, so its ids have to be those of
Hugging Face's library, `tokenizers`, on every document. Four things see to that:

1. It is used for tokenizers whose every setting it has: byte-level BPEs with a pattern that it knows.
2. Both tokenize some 15,000 texts at the start. If one differs, it is not used, and `prepare` says why.
3. Documents on which they are known to differ go to `tokenizers`: with the name of a special token, which is plain text
   in data and a token to gigatoken; with characters that this Python's Unicode does not have, because their versions of
   it differ (16 and 17); and those that an NFC normalizer changes.
4. Both tokenize one document in `CHECKED`. After one that differs, or that gigatoken fails on, the process uses
   `tokenizers` only, and says so; a task encodes its shard again. It is not an error: with tasks, all of them would end
   one after the other at the same document, for a difference that costs nothing but equality of bytes.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import sys
import unicodedata
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.metadata import version
from typing import Any

import numpy as np
import psutil
import tokenizers

from llmrecipes.units import MIB

PACKAGE = "gigatoken"
CHECKED = 4096
"""Both tokenize one document of so many: 1 % of the time if one of them is 40 times as fast."""
MOST_BYTES = 256 * MIB
"""By which the process may grow before what gigatoken has kept of words is dropped: version 0.10 has no bound."""
_SHOWN = 40
_VOCABULARY = 2000
"""Tokens of the vocabulary whose texts are compared at the start."""


class UnsupportedTokenizer(Exception):
    """Why a tokenizer does not run through gigatoken."""


class Gigatoken:
    """A tokenizer that runs through gigatoken.

    Args:
        tokenizer_json: the tokenizer's `tokenizer.json`.
        reference: the same, of Hugging Face's library, to which names of special tokens are plain text.

    Raises:
        Unsupported: gigatoken is not installed, or cannot do it, or makes other ids.
    """

    differences = 0
    """Tokenizers for which this process has found a document whose ids differ."""

    def __init__(self, tokenizer_json: str, reference: tokenizers.Tokenizer) -> None:
        config = json.loads(tokenizer_json)
        if refusal := _refusal(config):
            raise UnsupportedTokenizer(refusal)
        self._json = tokenizer_json
        self._reference = reference
        self._normalizes = config["normalizer"] is not None
        names = _names(config["added_tokens"])
        self._starts = sorted({name.encode()[:2] for name in names})
        self._names = re.compile(b"|".join(re.escape(name.encode()) for name in names)) if names else None
        self._count = 0
        self._distrusted = False
        self._encode: Any = None
        self._renew()
        compared = [text for text in map(str.encode, _texts(config, reference)) if self.takes(text)]
        for text, expected in zip(compared, self._expected(compared), strict=True):
            if found := _difference(self._encoded(text), expected, text):
                raise UnsupportedTokenizer(f"it gives other ids for {found}")

    def takes(self, document: bytes) -> bool:
        """Whether a document of UTF-8 text is one of which both are known to see the same."""
        if self._names is not None and any(map(document.__contains__, self._starts)) and self._names.search(document):
            return False
        if document.isascii():
            return True
        text = document.decode()
        if _unknown()[np.frombuffer(text.encode("utf-32-le"), "<u4")].any():
            return False
        return not self._normalizes or unicodedata.is_normalized("NFC", text)

    def rows(self, documents: list[bytes]) -> list[np.ndarray]:
        """The ids of each document, uint32, as Hugging Face's library makes them."""
        if self._distrusted:
            return self._expected(documents)
        taken = list(map(self.takes, documents))
        others = iter(self._expected([each for each, fast in zip(documents, taken, strict=True) if not fast]))
        rows = []
        for document, fast in zip(documents, taken, strict=True):
            ids = self._encoded(document) if fast else next(others)
            if ids is None or (fast and self._is_wrong(document, ids)):
                self._distrust(document, ids)
                return self._expected(documents)
            rows.append(ids)
        if psutil.Process().memory_info().rss > self._most:
            self._renew()
        return rows

    def _encoded(self, document: bytes) -> np.ndarray | None:
        """Its ids by gigatoken; None if it has failed."""
        try:
            return np.asarray(self._encode(document), np.uint32)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # a panic of Rust code is not an Exception, and it has printed itself
            return None

    def _is_wrong(self, document: bytes, ids: np.ndarray) -> bool:
        self._count += 1
        return self._count % CHECKED == 1 and not np.array_equal(ids, self._expected([document])[0])

    def _distrust(self, document: bytes, ids: np.ndarray | None) -> None:
        self._distrusted, self._encode = True, None
        Gigatoken.differences += 1
        what = _difference(ids, self._expected([document])[0], document)
        print(
            f"note: {PACKAGE} {version(PACKAGE)} and tokenizers {tokenizers.__version__} give different ids for {what} "
            f"(SHA-256 {hashlib.sha256(document).hexdigest()}); this process encodes with tokenizers from now on",
            file=sys.stderr,
            flush=True,
        )

    def _expected(self, documents: list[bytes]) -> list[np.ndarray]:
        texts = [document.decode() for document in documents]
        encodings = self._reference.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, np.uint32) for encoding in encodings]

    def _renew(self) -> None:
        """Load it, without the words it has seen."""
        self._encode = None  # the old one goes first
        try:
            self._encode = import_module(PACKAGE).Tokenizer.from_json(self._json).backend.encode
        except ImportError as error:
            raise UnsupportedTokenizer("it is not installed (pip install 'llmrecipes[corpora]')") from error
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # it defines none, and a panic of Rust code is not an Exception
            lines = str(error).splitlines() or [type(error).__name__]
            if "pretokenizer" in lines[0]:  # with the whole pattern
                raise UnsupportedTokenizer(
                    "it does not know the pattern that splits text into words "
                    "(for a new tokenizer, data.tokenizer.pattern=llama3 is one that it knows)"
                ) from error
            raise UnsupportedTokenizer(lines[0][:200]) from error
        self._most = psutil.Process().memory_info().rss + MOST_BYTES


def _refusal(config: dict[str, Any]) -> str:
    """Which setting of a `tokenizer.json` gigatoken does not have, or has without asking; empty if there is none."""
    model = config["model"]
    normalizer = config["normalizer"]
    if model["type"] != "BPE" or model.get("byte_fallback"):
        return f"the model is {'a BPE of characters' if model['type'] == 'BPE' else model['type']}"
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            return f"the model has {key}"
    for key in ("truncation", "padding"):
        if config[key]:
            return f"the tokenizer has {key}"
    if normalizer is not None and normalizer["type"] != "NFC":
        return f"the normalizer is {normalizer['type']}"
    return _refused_split(config["pre_tokenizer"] or {"type": "none"})


def _refused_split(before: dict[str, Any]) -> str:
    """Which setting of a pre-tokenizer it does not have."""
    parts = before["pretokenizers"] if before["type"] == "Sequence" else [before]
    *splits, last = parts
    if last["type"] != "ByteLevel":
        return f"the pre-tokenizer ends with {last['type']}"
    if last["use_regex"] is bool(splits) or (splits and last["add_prefix_space"]):
        return "the pre-tokenizer has a ByteLevel with other settings"
    for part in splits:
        if (
            part["type"] != "Split"
            or (part["behavior"], part["invert"]) not in (("Isolated", False), ("Removed", True))
            or "Regex" not in part["pattern"]
        ):
            return f"the pre-tokenizer has a {part['type']} with other settings"
    return ""


def _names(added: list[dict[str, Any]]) -> list[str]:
    """Texts of the added tokens that are not one to both wherever they stand.

    Special tokens are none to `tokenizers` here. It looks for normalized ones behind the others, gigatoken for all at
    once.
    """
    odd = ("special", "single_word", "lstrip", "rstrip")
    plain = [token for token in added if not any(token[key] for key in odd)]
    if len({token["normalized"] for token in plain}) > 1:
        plain = [token for token in plain if not token["normalized"]]
    texts = {token["content"] for token in plain if unicodedata.is_normalized("NFC", token["content"])}
    return [token["content"] for token in added if token["content"] not in texts]


@cache
def _categories() -> tuple[np.ndarray, np.ndarray]:
    """Code points of the planes that have characters, and the general category of each in this Python's Unicode."""
    points = np.array([*range(0xD800), *range(0xE000, 0x40000), *range(0xE0000, 0xF0000)])
    return points, np.array(list(map(unicodedata.category, map(chr, points.tolist()))))


@cache
def _unknown() -> np.ndarray:
    """Whether a code point is not a character of this Python's Unicode [0x110000], of type bool."""
    points, categories = _categories()
    unknown = np.ones(sys.maxunicode + 1, bool)
    unknown[points] = categories == "Cn"
    unknown[0xF0000:] = False  # for private use
    return unknown


def _difference(ids: np.ndarray | None, expected: np.ndarray, document: bytes) -> str:
    """Where ids differ, and how the document begins; empty if they do not."""
    if ids is None:
        where = "a failure"
    elif np.array_equal(ids, expected):
        return ""
    else:
        common = min(len(ids), len(expected))
        different = np.flatnonzero(ids[:common] != expected[:common])
        where = f"token {1 + (int(different[0]) if len(different) else common):,}"
    text = document[: 4 * _SHOWN].decode(errors="ignore")[:_SHOWN]
    return f"{text!r}{'' if text.encode() == document else '…'}, at {where}"


_ORDINARY = (
    "The quick brown fox doesn't jump over 12345 lazy dogs; they'll say: “it's O'Neill's, I'M SURE”.\n\n\tEnd.   \n",
    "def main(argv: list[str]) -> int:\n    return sum(len(a) for a in argv)  # 0x1F, 1_000\n\n\n\nclass A:\r\n\tb\r\n",
    "<html><body class='x'>&nbsp;a/b/c?d=1&e=%20#f</body></html>\n{\"a\": [1, 2.5e-3, null]}\n",
    "naïve café, ÅNGSTRÖM, Straße, Ελληνικά, Привет мир! שלום עולם مرحبا ١٢٣ नमस्ते দুনিয়া ภาษาไทย தமிழ்\n",
    "日本語のテキスト。中文字符，全角１２３！한국어 텍스트\u3000カタカナ\n",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪 👍🏽 ✊ ½ ² ① Ⅷ ㈠ ٣ 𝟘 𝔘𝔫𝔦 𠀀𪛖\n",
    "'s 'S 'ſ 'K '\u212a 're'RE 'Ve'll'd'D'x ''s 's's don’t I'mm\n",
    "a\u0301e\u0323\u0302 \u1112\u1161\u11ab q\u0307\u0323 A\u030a \u2126 \u212b \u0340 \u0958 \ufb1d \U0001d15e\n",
    "\ufeff\u200b\u200d\u00ad\u2060\u202e\u2028x\u2029y\u0085z\u00a0\u1680\u2003\u205f\ue000\ufffd\ufffc",
    "".join(map(chr, range(0x80))),
    "".join(map(chr, range(0x80, 0x250))),
    "".join(c * (290 + n) for n, c in enumerate(" x\t\n 1!é世")) + " \n  \n\t\n \r\n\r\r\n" + "\n" * 129 + " " * 77,
    "".join(f"{' ' * n}{word}" for n in range(20) for word in ("a", "1", ".", "é", "\n", "世")),
    " ".join(c * n for n, c in enumerate("abcdefghijklmnopqrst", 10)) + "AbCdEfGhIjKl" * 9,
)
_ALPHABET = (
    "aBz'sStTlLreEvVmMdDZ_09  \n\r\t\x0b\x0c'\"().,;:-=<|>/éßñжЖ中。ー—“”\u00a0\u2028\u3000\u0301"
    "\u20e3🥊🏽\u200d\x00\x1c\u0085\u0661½ǅʰ"
)


def _texts(config: dict[str, Any], reference: tokenizers.Tokenizer) -> Iterator[str]:
    """What both tokenize at the start: ordinary and hostile texts, tokens, and a character of every kind."""
    yield ""
    yield from _ORDINARY
    yield "".join(_ORDINARY)
    rng = random.Random(7)
    for _ in range(500):
        yield "".join(rng.choices(_ALPHABET, k=rng.randrange(1, 200)))
    contents = [token["content"] for token in config["added_tokens"]]
    for content in (*contents[:64], *contents[-64:]):
        yield f"a{content}b {content} {content}{content}\n{content}"
    size = reference.get_vocab_size()
    tokens = [[number] for number in range(0, size, -(-size // _VOCABULARY))]
    texts = reference.decode_batch(tokens, skip_special_tokens=False)
    yield from texts
    yield " ".join(texts)
    points, categories = _categories()
    borders = np.flatnonzero(categories[1:] != categories[:-1])
    for point in points[np.union1d(borders, borders + 1)]:
        c = chr(point)
        yield f"a{c}a {c}{c}1{c}.{c}\n{c}"
        yield f"{c}{unicodedata.normalize('NFD', c)}"
