"""The fast encoder gives the library's ids, and text survives the tokenizer."""

from __future__ import annotations

import random
import re
import sys

import numpy as np
import pytest
import tokenizers

from llmrecipes.data.tokens import encode, tokenizer
from llmrecipes.data.tokens.encode import WORDS, encoder, pieces
from tests.refusals import refused

SAMPLE = [
    "def main(argv: list[str]) -> int:\n    return sum(len(a) for a in argv)\n" * 3,
    "The quick brown fox doesn't jump over 12345 lazy dogs.\n\n\tEnd.   \n",
    "naïve café — “quotes”, 日本語のテキスト。 Привет мир! नमस्ते 🥊🎉",
]
ALPHABET = "ab Z_09 \n\r\t\x0b\x0c'\"().,;:-=<|>éßñж中。—“”\u00a0\u2028\u3000\u0301🥊\x00\x1c\u0085"


@pytest.fixture(scope="module")
def trained() -> tokenizers.Tokenizer:
    return tokenizer.train(SAMPLE * 5, 400)[0]


def _texts(count: int) -> list[str]:
    rng = random.Random(7)
    made = ["".join(rng.choices(ALPHABET, k=rng.randrange(1, 200))) for _ in range(count)]
    anywhere = [c for c in map(chr, range(0, sys.maxunicode, 97)) if not 0xD800 <= ord(c) < 0xE000]
    return [*SAMPLE, *made, "".join(anywhere), " ".join(anywhere), "\n" * 50 + " " * 50 + "x", "<|endoftext|>"]


def test_words_lose_nothing() -> None:
    for text in _texts(200):
        assert "".join(re.findall(WORDS, text)) == text


@pytest.mark.parametrize("dtype", ["uint16", "int32"])
def test_both_encoders_give_the_library_s_ids(trained: tokenizers.Tokenizer, dtype: str) -> None:
    texts = _texts(400)
    documents = [text.encode() for text in texts]
    fast = encoder(trained.to_str(), 0, dtype, by_word=True)(documents)
    plain = encoder(trained.to_str(), 0, dtype, by_word=False)(documents)
    reference = encode.load(trained.to_str())
    expected = [[*reference.encode(text, add_special_tokens=False).ids, 0] for text in texts]
    assert fast == plain
    assert fast.lengths == [len(ids) for ids in expected]
    assert np.frombuffer(fast.ids, dtype).tolist() == [i for ids in expected for i in ids]


def test_a_text_cannot_contain_the_end_of_document(trained: tokenizers.Tokenizer) -> None:
    text = "before<|endoftext|>after"
    ids = np.frombuffer(encoder(trained.to_str(), 0, "uint16", by_word=True)([text.encode()]).ids, "uint16")
    assert (ids == 0).sum() == 1
    assert tokenizer.TextTokenizer(encode.load(trained.to_str()), 0, "").decode(ids[:-1].tolist()) == text


def test_long_texts_are_cut_without_changing_their_words() -> None:
    text = "".join(_texts(300)) + "x = 1\n    y\n\n\nz\n" * 20
    parts = list(pieces(text, 50))
    assert len(parts) > 10
    assert "".join(parts) == text
    assert [word for part in parts for word in re.findall(WORDS, part)] == re.findall(WORDS, text)


def test_every_text_round_trips(trained: tokenizers.Tokenizer) -> None:
    whole = tokenizer.TextTokenizer(encode.load(trained.to_str()), 0, "")
    for text in _texts(100):
        assert whole.decode(whole.encode(text)) == text
    assert whole.vocab_size == 400


def test_the_table_of_words_stays_bounded(trained: tokenizers.Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = [text.encode() for text in _texts(50)]
    expected = encoder(trained.to_str(), 0, "uint16", by_word=True)(documents)
    monkeypatch.setattr(encode, "_MAX_WORDS", 4)
    assert encoder(trained.to_str(), 0, "uint16", by_word=True)(documents) == expected


def test_a_vocabulary_smaller_than_the_bytes_is_refused() -> None:
    with refused("model.vocab_size", rule="256") as caught:
        tokenizer.train(SAMPLE, 256)
    assert caught.value.fix.startswith("model.vocab_size=257")
