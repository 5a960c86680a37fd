"""Byte-level BPEs of Hugging Face through gigatoken: the ids are always those of tokenizers."""

from __future__ import annotations

import hashlib
import json
import random
import sys
import unicodedata
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import Regex, normalizers
from tokenizers.pre_tokenizers import ByteLevel, PreTokenizer, Sequence, Split

from llmrecipes.data.preparation import corpus
from llmrecipes.data.preparation import shards as shards_module
from llmrecipes.data.preparation.corpus import EncoderSpec
from llmrecipes.data.preparation.shards import Shards
from llmrecipes.data.steps.split import SplitRule
from llmrecipes.data.steps.steps import StepSpec
from llmrecipes.data.tokens import encode, gigatoken
from llmrecipes.data.tokens.gigatoken import Gigatoken
from llmrecipes.recipe.sections.source import make_source

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?"
_SPACE = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = encode.LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_BIG, _SMALL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
O200K = (
    "|".join(f"{_WORD}{_BIG}{one}{_SMALL}{other}{_CONTRACTIONS}?" for one, other in ("*+", "+*"))
    + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*"
    + _SPACE
)
DEEPSEEK = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
)
SAMPLE = [
    "def main(argv: list[str]) -> int:\n    return sum(len(a) for a in argv)\n" * 3,
    "The quick brown fox doesn't jump over 12345 lazy dogs. I'LL SAY!\n\n\tEnd.   \n" * 3,
    "naïve café — “quotes”, 日本語のテキスト。 Привет мир! नमस्ते 🥊🎉\r\n" * 3,
]
SPECIAL = ("<|endoftext|>", "<|im_start|>")
ALPHABET = "ab Zs'tT_09 \n\r\t\x0b'\"().,;:-=<|>éßñж中。—“”\u00a0\u2028\u3000\u0301🥊\x00\x1c\u0085"


def splits(*patterns: str) -> PreTokenizer:
    parts: list[PreTokenizer] = [Split(Regex(pattern), "isolated") for pattern in patterns]
    return Sequence([*parts, ByteLevel(add_prefix_space=False, use_regex=False)])


TOOL = tokenizers.AddedToken("<tool>", normalized=False)
SPACES = tuple(tokenizers.AddedToken(" " * number, normalized=True) for number in range(2, 9))
"""As GPT-NeoX and OLMo have them."""


def trained(
    pre_tokenizer: PreTokenizer | None = None,
    *,
    nfc: bool = False,
    added: tuple[tokenizers.AddedToken, ...] = (TOOL,),
) -> tokenizers.Tokenizer:
    """A tokenizer with two special tokens and some that are not."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = pre_tokenizer or ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    if nfc:
        backend.normalizer = normalizers.NFC()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=500, special_tokens=list(SPECIAL), initial_alphabet=sorted(ByteLevel.alphabet()), show_progress=False
    )
    backend.train_from_iterator(SAMPLE, trainer)
    backend.add_tokens(list(added))
    return backend


def hostile(count: int) -> list[str]:
    rng = random.Random(11)
    made = ["".join(rng.choices(ALPHABET, k=rng.randrange(1, 200))) for _ in range(count)]
    names = [f"a{name}b {name}\n{name[:-1]} {name}{name}" for name in (*SPECIAL, "<tool>")]
    anywhere = [c for c in map(chr, range(0, sys.maxunicode, 997)) if not 0xD800 <= ord(c) < 0xE000]
    return [
        *SAMPLE,
        *made,
        *names,
        "".join(anywhere),
        " ".join(anywhere),
        "",
        " " * 99,
        "e\u0323\u0302 \u212b \U00010940",
    ]


class Fake:
    """What gigatoken does, done by tokenizers: names of special tokens are tokens. Some documents are other ones."""

    def __init__(self, content: str, wrong: Callable[[str], bool]) -> None:
        self._library, self._wrong = tokenizers.Tokenizer.from_str(content), wrong
        self.encoded: list[str] = []

    def encode(self, document: bytes) -> np.ndarray:
        text = document.decode()
        self.encoded.append(text)
        if text == "panic":
            raise Panic
        text = "wrong" if self._wrong(text) else text
        return np.array(self._library.encode(text, add_special_tokens=False).ids, np.uint32)


class Panic(BaseException):
    """A panic of Rust code, which is no Exception."""


class Package:
    """Installed, as gigatoken is: all that was loaded, and which documents are encoded wrongly."""

    def __init__(self) -> None:
        self.loaded: list[Fake] = []
        self.wrong: Callable[[str], bool] = lambda _: False

    def load(self, content: str) -> SimpleNamespace:
        self.loaded.append(Fake(content, lambda text: self.wrong(text)))
        return SimpleNamespace(backend=self.loaded[-1])

    @property
    def encoded(self) -> list[str]:
        return [text for fake in self.loaded for text in fake.encoded]


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[Package]:
    made = Package()
    monkeypatch.setitem(
        sys.modules,
        "gigatoken",
        SimpleNamespace(Tokenizer=SimpleNamespace(from_json=made.load)),
    )
    for module in (gigatoken, encode):
        monkeypatch.setattr(module, "version", lambda name: "0.0")
    encode.gigatoken.cache_clear()
    yield made
    encode.gigatoken.cache_clear()


def require_same(backend: tokenizers.Tokenizer, texts: list[str], dtype: str = "int32") -> None:
    """The ids of all texts are those of tokenizers, each with an end token."""
    reference = encode.load(backend.to_str())
    encoded = encode.encoder(backend.to_str(), 0, dtype, by_word=False)([text.encode() for text in texts])
    expected = [[*reference.encode(text, add_special_tokens=False).ids, 0] for text in texts]
    assert encoded.lengths == [len(ids) for ids in expected]
    assert np.frombuffer(encoded.ids, dtype).tolist() == [number for ids in expected for number in ids]


@pytest.mark.parametrize("dtype", ["uint16", "int32"])
def test_documents_that_both_see_differently_go_to_tokenizers(package: Package, dtype: str) -> None:
    odd = ("<|endoftext|>", "<|im_start|>", "\U00010940", "e\u0323\u0302")
    package.wrong = lambda text: any(part in text for part in odd)
    texts = hostile(100)
    require_same(trained(nfc=True), texts, dtype)
    assert not Gigatoken.differences
    assert set(package.encoded) > set(SAMPLE)
    assert "<tool>" in "".join(package.encoded)  # an added token that is not special is one to both
    assert not any(part in text for text in package.encoded for part in odd)


def test_no_documents_are_no_ids(package: Package) -> None:
    assert encode.encoder(trained().to_str(), 0, "uint16", by_word=False)([]) == encode.Encoded(b"", [])


def test_other_ids_at_the_start_are_reported_and_not_used(package: Package) -> None:
    package.wrong = lambda text: "١" in text
    backend = trained()
    require_same(backend, hostile(20))
    line = encode.encoded_by(backend.to_str())
    assert f"tokenizers {tokenizers.__version__}" in line
    assert "not by gigatoken" in line
    assert "token" in line
    package.wrong = lambda _: False
    encode.gigatoken.cache_clear()
    assert "gigatoken 0.0" in encode.encoded_by(backend.to_str())


@pytest.mark.parametrize("kind", ["other ids", "panic"])
def test_after_a_difference_the_process_uses_tokenizers(
    package: Package, kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gigatoken, "CHECKED", 3)
    monkeypatch.setattr(Gigatoken, "differences", 0)
    backend = trained()
    texts = [f"document {number}" for number in range(9)]
    texts[6] = "panic" if kind == "panic" else "zebra"
    package.wrong = lambda text: text in ("zebra", "document 7", "document 8")
    if kind == "panic":
        texts[6:] = ["document 6", "panic", "document 8"]
    require_same(backend, texts)
    assert Gigatoken.differences == 1
    shown = capsys.readouterr().err
    text = "panic" if kind == "panic" else "zebra"
    assert hashlib.sha256(text.encode()).hexdigest() in shown
    assert repr(text) in shown
    before = len(package.encoded)
    require_same(backend, texts)
    assert len(package.encoded) == before
    assert not capsys.readouterr().err  # said once


def test_a_document_that_is_not_compared_is_used_as_it_is(package: Package, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the tests above would see a wrong document that is not caught."""
    monkeypatch.setattr(gigatoken, "CHECKED", 3)
    backend = trained()
    package.wrong = lambda text: text == "zebra"
    with pytest.raises(AssertionError):
        require_same(backend, ["a", "zebra"])


def shard(folder: Path, text: Path, backend: tokenizers.Tokenizer) -> bytes:
    """What a task publishes of a file of JSON lines."""
    folder.mkdir()
    file, source = folder / "tokenizer.json", make_source(type="jsonl", path=str(text))
    file.write_text(backend.to_str(), encoding="utf-8")
    spec = EncoderSpec(file, "", 0, "uint16", False, StepSpec(SplitRule((90.0, 5.0, 5.0))))
    encode.gigatoken.cache_clear()
    every = Shards(folder, (source,), spec, tuple(shards_module.cut((source,))))
    every.work(0)
    return every.published()[0][0].read_bytes()


def test_a_task_encodes_a_shard_with_a_difference_from_its_start_again(
    package: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Documents that were encoded before the one that is compared may be wrong too."""
    monkeypatch.setattr(gigatoken, "CHECKED", 5)
    monkeypatch.setattr(corpus, "_BATCH_CHARACTERS", 10)  # several batches
    rows = [json.dumps({"text": f"document {number}"}) for number in range(12)]
    rows[2], rows[10] = json.dumps({"text": "early zebra"}), json.dumps({"text": "late zebra"})
    text, backend = tmp_path / "a.jsonl", trained()
    text.write_text("\n".join(rows))
    fast = shard(tmp_path / "right", text, backend)
    package.wrong = lambda text: text.endswith("zebra")
    assert shard(tmp_path / "wrong", text, backend) == fast
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    assert shard(tmp_path / "without", text, backend) == fast


def test_what_it_keeps_of_words_is_dropped_when_the_process_has_grown(
    package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = trained()
    require_same(backend, SAMPLE)
    loaded = len(package.loaded)
    require_same(backend, SAMPLE)
    assert len(package.loaded) == loaded
    monkeypatch.setattr(gigatoken, "MOST_BYTES", -1)
    encode.gigatoken.cache_clear()
    for _ in range(3):
        require_same(backend, SAMPLE)
    assert len(package.loaded) == loaded + 1 + 3


def test_without_the_package_tokenizers_encodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    encode.gigatoken.cache_clear()
    backend = trained()
    require_same(backend, SAMPLE)
    assert "not installed" in encode.encoded_by(backend.to_str())
    encode.gigatoken.cache_clear()


def _set(key: str, value: object, *path: str | int) -> Callable[[dict[str, Any]], None]:
    def change(config: dict[str, Any]) -> None:
        at: Any = config
        for name in path:
            at = at[name]
        at[key] = value

    return change


REFUSED = {
    "WordPiece": lambda config: config["model"].update(type="WordPiece"),
    "characters": _set("byte_fallback", True, "model"),
    "dropout": _set("dropout", 0.1, "model"),
    "end_of_word_suffix": _set("end_of_word_suffix", "</w>", "model"),
    "truncation": _set("truncation", {"max_length": 5, "direction": "Right", "strategy": "LongestFirst", "stride": 0}),
    "padding": _set("padding", {"strategy": "BatchLongest"}),
    "Lowercase": _set("normalizer", {"type": "Lowercase"}),
    "none": _set("pre_tokenizer", None),
    "Digits": _set("pre_tokenizer", {"type": "Digits", "individual_digits": True}),
    "Split": _set("behavior", "Removed", "pre_tokenizer", "pretokenizers", 0),
    "ByteLevel": _set("use_regex", True, "pre_tokenizer", "pretokenizers", 1),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_tokenizers_with_other_settings_are_not_taken(package: Package, reason: str) -> None:
    config = json.loads(trained(splits(encode.LLAMA3)).to_str())
    reference = encode.load(json.dumps(config))
    Gigatoken(json.dumps(config), reference)
    REFUSED[reason](config)
    with pytest.raises(gigatoken.UnsupportedTokenizer, match=reason):
        Gigatoken(json.dumps(config), reference)


# The package itself.
installed = pytest.mark.skipif(find_spec("gigatoken") is None, reason="gigatoken is not installed: make setup")
PATTERNS = {
    "gpt2": (ByteLevel(add_prefix_space=False), False),
    "roberta": (ByteLevel(add_prefix_space=True), False),
    "llama3": (splits(encode.LLAMA3), False),
    "qwen2": (splits(QWEN2), True),
    "o200k": (splits(O200K), False),
    "deepseek": (splits(*DEEPSEEK), False),
}


@installed
@pytest.mark.parametrize("pattern", PATTERNS)
def test_gigatoken_makes_the_same_ids(pattern: str) -> None:
    pre_tokenizer, nfc = PATTERNS[pattern]
    backend = trained(pre_tokenizer, nfc=nfc)
    backend.model.ignore_merges = pattern == "llama3"  # as Llama 3 has it
    encode.gigatoken.cache_clear()
    assert "not by" not in encode.encoded_by(backend.to_str())
    require_same(backend, hostile(300))


@installed
@pytest.mark.parametrize("added", [SPACES, (TOOL, *SPACES)], ids=["spaces", "mixed"])
def test_added_tokens_that_are_not_special_are_the_same(added: tuple[tokenizers.AddedToken, ...]) -> None:
    """All of them if one automaton is enough to find them; else documents with some go to tokenizers."""
    backend = trained(nfc=True, added=added)
    encode.gigatoken.cache_clear()
    fast = encode.gigatoken(backend.to_str())
    assert isinstance(fast, Gigatoken)
    assert fast.takes(b"a    b") is (added == SPACES)
    require_same(backend, hostile(300))


@installed
def test_a_pattern_that_gigatoken_does_not_know_is_refused() -> None:
    assert isinstance(encode.gigatoken(trained(splits(encode.LLAMA3 + "|x{9}")).to_str()), str)


@installed
@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["gpt2", "o200k"])
def test_every_character_is_of_the_same_kind_to_both(pattern: str) -> None:
    """With a token for each pair of bytes of characters, so that ids show where text was split."""
    config = json.loads(trained(PATTERNS[pattern][0]).to_str())
    names = {value: key for key, value in _bytes().items()}
    used = [*range(0x80, 0xF5), *b"aA1 .'\n"]
    vocab = {names[byte]: byte for byte in range(256)}
    merges = [[names[one], names[other]] for one in used for other in used]
    vocab |= {"".join(pair): 256 + number for number, pair in enumerate(merges)}
    config["model"] |= {"vocab": vocab, "merges": merges}
    config["added_tokens"] = []
    content = json.dumps(config)
    encode.gigatoken.cache_clear()
    fast, library = encode.gigatoken(content), encode.load(content)
    assert isinstance(fast, Gigatoken)
    characters = [c for c in map(chr, range(sys.maxunicode + 1)) if unicodedata.category(c) not in ("Cn", "Cs", "Co")]
    texts = [f"a{c}A {c}{c}1{c}.{c}\n{c}'{c}" for c in characters]
    expected = library.encode_batch_fast(texts, add_special_tokens=False)
    rows = fast.rows([text.encode() for text in texts])
    assert [c for c, row, ids in zip(characters, rows, expected, strict=True) if row.tolist() != ids.ids] == []
    assert sum(map(fast.takes, (text.encode() for text in texts))) == len(texts) > 140_000


def _bytes() -> dict[str, int]:
    """The characters that stand for bytes in a byte-level vocabulary."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {chr(256 + n): byte for n, byte in enumerate(others)}
