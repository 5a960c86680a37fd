"""Words of all scripts, and every step that compares or counts them."""

from __future__ import annotations

import random
import re
import unicodedata
from typing import Any

import pytest
import regex  # type: ignore[import-untyped]

from llmrecipes.data.steps.copies import Duplicates
from llmrecipes.data.steps.words import (
    ends_sentence,
    normalized,
    pieces,
    sentence_starts,
    sentences,
    sequences,
    shingles,
    tokens,
    words,
)
from tests.unit.test_data_steps import run

SCRIPTS = {
    "Hindi": ("हिन्दी की क़िताब।", ["हिन्दी", "की", "क़िताब"]),
    "Bengali": ("বাংলা ভাষা", ["বাংলা", "ভাষা"]),
    "Tamil": ("தமிழ் மொழி", ["தமிழ்", "மொழி"]),
    "Tibetan": ("བོད་སྐད་ཡིག", ["བོད", "སྐད", "ཡིག"]),
    "Arabic": ("بِسْمِ اللهِ", ["بِسْمِ", "اللهِ"]),
    "Persian": ("می\u200cخواهم", ["میخواهم"]),
    "Hebrew": ("שָׁלוֹם, עולם", ["שָׁלוֹם", "עולם"]),
    "Thai": ("ที่นี่", ["ที่", "นี่"]),
    "Khmer": ("ខ្មែរ", ["ខ្", "មែ", "រ"]),
    "Burmese": ("မြန်မာ", ["မြ", "န်", "မာ"]),
    "Korean": ("한국어 문장", ["한국어", "문장"]),
    "Chinese": ("中文𠀀。", ["中", "文", "𠀀"]),
    "Japanese": ("がカー漢", ["が", "カ", "ー", "漢"]),
    "emoji": ("👨\u200d👩\u200d👧 ❤\ufe0f 👍🏽 ok", ["ok"]),
    "English": (
        "don’t de\u00adclare — a_b, ½ café cafe\u0301!",
        ["don", "t", "declare", "a_b", "½", "café", "café"],
    ),
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_marks_stay_in_their_words(script: str) -> None:
    text, expected = SCRIPTS[script]
    assert words(text) == [unicodedata.normalize("NFC", word) for word in expected]
    assert shingles(text, 99) == [" ".join(words(text.lower()))]
    assert sum(len(piece) for piece in pieces(text)) == len("".join(text.split()))
    letters = regex.sub(r"[\p{Cf}\ufe0f]", "", "".join(words(text)))
    every = regex.findall(r"[\w\p{No}]+", regex.sub(r"[\p{Cf}\ufe0f]", "", unicodedata.normalize("NFC", text)))
    assert letters == "".join(every)  # nothing is lost or added


@pytest.mark.parametrize("script", SCRIPTS)
def test_documents_that_differ_in_a_word_are_no_duplicates(script: str) -> None:
    """Their letters are rotated one by one; and accents, case and what lies between words tell none apart."""
    text, _ = SCRIPTS[script]
    duplicates = Duplicates()
    assert duplicates.add(duplicates.mark(text))
    assert not duplicates.add(duplicates.mark(f" {text.upper()}…\n"))
    others = [text[:place] + text[place + 1 :] for place, letter in enumerate(text) if letter.isalpha()]
    assert all(duplicates.add(duplicates.mark(other)) for other in dict.fromkeys(others) if other)


def test_sentences_in_hindi_that_differ_in_signs_are_kept() -> None:
    rows = ["यह माला है।", "यह मेला है।", "यह मील है।", "यह दिन है।", "यह दान है।", "यह देन है।"]
    duplicates = Duplicates()
    assert [duplicates.add(duplicates.mark(row)) for row in rows] == [True] * 6


def test_texts_without_words_are_compared_by_their_characters() -> None:
    duplicates = Duplicates()
    assert [duplicates.add(duplicates.mark(text)) for text in ("🎉🎉", "👍", "👍 ", "+ + +")] == [
        True,
        True,
        False,
        True,
    ]


def test_what_may_be_left_out_is_no_difference() -> None:
    assert normalized("بِسْمِ اللهِ") == normalized("بسم الله")
    assert normalized("שָׁלוֹם") == normalized("שלום")
    assert normalized("Crème — BRÛLÉE, 2024") == "creme brulee 0000"
    assert normalized("か") != normalized("が") and normalized("ที่") != normalized("ที")


def test_english_and_other_latin_text_is_as_it_was() -> None:
    """Fingerprints and counts of shipped recipes are of such text. The patterns are those of earlier versions."""
    word, not_words = re.compile(r"[^\W]+"), re.compile(r"[\W_]+")

    def before(text: str) -> str:
        text = "".join(c for c in unicodedata.normalize("NFD", text) if not unicodedata.combining(c))
        return not_words.sub(" ", re.sub(r"\d", "0", text.lower())).strip()

    draw = random.Random(3)
    letters = [*map(chr, (*range(0xAD), *range(0xAE, 0x250))), *"“’—½Ж٣ \n\u2028\u212a\x1c\x85_" * 20]
    for text in ["", *("".join(draw.choices(letters, k=draw.randrange(60))) for _ in range(1000)), "a-b_c 1\n" * 9]:
        for each in (text, text.encode("ascii", "ignore").decode()):
            assert words(each) == word.findall(unicodedata.normalize("NFC", each))
            assert normalized(each) == before(each)
            assert pieces(each) == re.findall(r"\S+", each)
            assert tokens(each) == len(re.findall(r"\w(?:[^\s/-]*\w)?|[^\w\s]", each))


@pytest.mark.parametrize(
    ("text", "units"),
    [
        ("คณะกรรมการประชุมเมื่อวันอังคารเพื่อหารือเรื่องงบประมาณของปีหน้า", 39),
        ("គណៈកម្មាធិការបានប្រជុំនៅថ្ងៃអង្គារដើម្បីពិភាក្សាអំពីថវិកាសម្រាប់ឆ្នាំក្រោយ", 39),
        ("委员会星期二开会讨论来年的预算大多数成员同意", 13),
    ],
)
def test_sequences_of_words_without_blanks(text: str, units: int) -> None:
    """13 words are 13 characters of Chinese, and 39 letters of Thai or Khmer, each with its marks."""
    grams = sequences(text, 13)
    assert len(grams) == len(words(text)) - units + 1
    assert all(gram.count(" ") == units - 1 for gram in grams)
    assert grams[0].replace(" ", "") == text[: len(grams[0].replace(" ", ""))]
    mixed = sequences(f"one two {text}", 13)
    assert mixed[0].startswith("one two ") and len(mixed[0].split()) == 2 + units * 11 // 13


def test_sentences_of_all_scripts() -> None:
    assert sentence_starts("A b. C? “D.” e\nf") == [0, 5, 8, 13, 15]
    assert [len(sentence_starts(text)) for text in ("यह है। वह है।", "他走了。她来了！", "これ。」それ")] == [3, 3, 2]
    assert [sentences(text) for text in ("A b. C 1.5? D", "यह है। वह है॥", "他走了。她来了！")] == [2, 2, 2]
    assert [ends_sentence(text) for text in ("a.", "है।", "了。", "؟", "a", "")] == [
        True,
        True,
        True,
        True,
        False,
        False,
    ]


STEPS: list[dict[str, Any]] = [
    {"type": "c4"},
    {"type": "fineweb"},
    {"type": "duplicates", "span_sentences": 3},
    {"type": "near_duplicates"},
]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: str(step["type"]))
@pytest.mark.parametrize(
    "sentence",
    [
        "委员会星期二开会讨论了来年的预算第{}号。",
        "समिति ने बजट पर चर्चा की और {} सदस्य सहमत थे।",
        "これは長い文であり{}です。",
        "គណៈកម្មាធិការបានប្រជុំនៅថ្ងៃអង្គារ{}ដើម្បីពិភាក្សាអំពីថវិកា។",
    ],
)
def test_other_scripts_survive_the_rules(step: dict[str, Any], sentence: str) -> None:
    lines = ["".join(sentence.format(chr(0x4E00 + 97 * (9 * line + k))) for k in range(3)) for line in range(6)]
    assert run("\n".join(lines), step) == "\n".join(lines)


NO_STOPS: list[dict[str, Any]] = [
    {"type": "c4", "terminal_punctuation": False},
    {"type": "duplicates", "span_sentences": 3},
    {"type": "near_duplicates"},
    {"type": "repetition"},
]


@pytest.mark.parametrize("step", NO_STOPS, ids=lambda step: str(step["type"]))
def test_thai_which_ends_no_sentence_with_a_mark_survives(step: dict[str, Any]) -> None:
    lines = [f"คณะกรรมการประชุมเมื่อวัน{'กขคงจฉ'[n]} เพื่อหารือเรื่อง{'ซญดตถท'[n]} งบประมาณของปีหน้า" for n in range(6)]
    assert run("\n".join(lines), step) == "\n".join(lines)


@pytest.mark.parametrize(
    ("kept", "other"),
    [
        ("यह माला है और वह दिन है जिस पर सब लोग मेला देखने गए थे।", "यह मेला है और वह दान है जिस पर सब लोग माला देखने गए थे।"),
        ("ที่นี่มีข้าวและน้ำสำหรับทุกคนในหมู่บ้าน", "ที่นั่นมีข่าวและน้าสำหรับทุกคนในหมู่บ้าน"),
        ("គាត់ទៅផ្សារទិញត្រីនិងបន្លែសម្រាប់គ្រួសារ", "គាត់ទៅផ្សារទិញត្រានិងបន្លាសម្រាប់គ្រួសារ"),
    ],
    ids=["Hindi", "Thai", "Khmer"],
)
def test_texts_that_differ_in_marks_only_are_different_everywhere(kept: str, other: str) -> None:
    """For all comparisons: as documents, as sentences, and as sequences of words of an evaluation."""
    assert words(kept) != words(other) and normalized(kept) != normalized(other)
    assert not set(sequences(kept, 9)) & set(sequences(other, 9))
    duplicates = Duplicates(span_sentences=1, max_repeated_spans=0.1)
    assert [duplicates.add(duplicates.mark(text)) for text in (kept, other, kept)] == [True, True, False]


def test_noise_replaces_letters_where_there_are_no_blanks() -> None:
    noisy = run("委员会星期二开会讨论来年的预算" * 20, {"type": "noise", "noise_rate": 0.3})
    assert isinstance(noisy, str) and 0.2 < noisy.count("_") / len(noisy) < 0.4
