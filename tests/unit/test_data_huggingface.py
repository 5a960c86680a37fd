"""Tokenizers of others: from a folder with any key of its files set, missing or odd, the ids are transformers'."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

import llmrecipes
from llmrecipes.data.tokens.encode import encoder, load
from llmrecipes.data.tokens.tokenizer import load_huggingface
from llmrecipes.recipe.sections.tokenizer_section import HuggingFaceTokenizer

TEXTS = [
    "the cat sat on the mat and then ran to a house , didn 't it ?",
    " Two  spaces, UPPER case; a house on the mat",
    "naïve café\n\n\tthe end ",
    "a",
    "the cat " * 40,
]
BOS, EOS, PAD = "<s>", "</s>", "<pad>"


def bpe(dropout: float | None = None) -> Tokenizer:
    made = Tokenizer(models.BPE(dropout=dropout))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        TEXTS * 3,
        trainers.BpeTrainer(
            vocab_size=320, special_tokens=[BOS, EOS, PAD], initial_alphabet=alphabet, show_progress=False
        ),
    )
    return made


def sentencepiece() -> Tokenizer:
    """As Gemma's and Llama 2's: characters with bytes for the others, blanks as ▁."""
    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))  # noqa: S106 - no password
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", BOS, EOS, PAD, *(f"<0x{byte:02X}>" for byte in range(256))]
    made.train_from_iterator(
        TEXTS * 3, trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    )
    return made


def unigram() -> Tokenizer:
    made = Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    made.train_from_iterator(
        TEXTS * 3,
        trainers.UnigramTrainer(
            vocab_size=80,
            special_tokens=["<unk>", BOS, EOS, PAD],
            unk_token="<unk>",  # noqa: S106
            show_progress=False,
        ),
    )
    return made


def truncated(made: Tokenizer) -> None:
    made.enable_truncation(max_length=4)


def padded(made: Tokenizer) -> None:
    made.enable_padding(pad_id=2, pad_token=PAD)


def padded_to_multiples(made: Tokenizer) -> None:
    made.enable_padding(pad_id=2, pad_token=PAD, length=64, pad_to_multiple_of=8, direction="left")


def both_kept(made: Tokenizer) -> None:
    truncated(made)
    padded(made)


def dropping(made: Tokenizer) -> None:
    made.model.dropout = 0.5


def normalizing(made: Tokenizer) -> None:
    made.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])


def added(made: Tokenizer) -> None:
    made.add_tokens([AddedToken("house on", special=False, normalized=False, lstrip=True)])


def with_bos(made: Tokenizer) -> None:
    made.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, made.token_to_id(BOS))]
    )


def with_both(made: Tokenizer) -> None:
    special = [(name, made.token_to_id(name)) for name in (BOS, EOS)]
    made.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single=f"{BOS} $A {EOS}", pair=f"{BOS} $A {EOS} {BOS} $B {EOS}", special_tokens=special
            ),
        ]
    )


MODELS: dict[str, Callable[[], Tokenizer]] = {"bpe": bpe, "sentencepiece": sentencepiece, "unigram": unigram}
STATES: dict[str, Callable[[Tokenizer], None]] = {
    function.__name__: function
    for function in (
        truncated, padded, padded_to_multiples, both_kept, dropping, normalizing, added, with_bos, with_both,
    )
}  # fmt: skip
KEYS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "add_bos_token": {"add_bos_token": True},
    "no add_bos_token": {"add_bos_token": False},
    "add_eos_token": {"add_eos_token": True},
    "both": {"add_bos_token": True, "add_eos_token": True},
    "null": {"add_bos_token": None},
    "add_prefix_space": {"add_prefix_space": True},
    "no add_prefix_space": {"add_prefix_space": False},
    "clean_up_tokenization_spaces": {"clean_up_tokenization_spaces": True},
    "model_max_length": {"model_max_length": 4},
    "sides": {"truncation_side": "left", "padding_side": "left"},
    "max_length": {"max_length": 4, "stride": 0, "truncation_strategy": "longest_first", "pad_to_multiple_of": 8},
    "do_lower_case": {"do_lower_case": True},
    "unknown key": {"something": 1},
    "extra_special_tokens": {"extra_special_tokens": ["<new>"]},
    "split_special_tokens": {"split_special_tokens": True},
    "GPT2": {"tokenizer_class": "GPT2Tokenizer"},
    "Llama": {"tokenizer_class": "LlamaTokenizer"},
    "LlamaFast": {"tokenizer_class": "LlamaTokenizerFast", "legacy": False},
    "Qwen2": {"tokenizer_class": "Qwen2Tokenizer"},
    "Gemma": {"tokenizer_class": "GemmaTokenizer"},
    "T5": {"tokenizer_class": "T5Tokenizer"},
}


def folder_of(made: Tokenizer, folder: Path, keys: dict[str, Any], name: str = "tokenizer_config.json") -> Path:
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    base = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS, "pad_token": PAD}
    (folder / name).write_text(json.dumps({**base, **keys}))
    return folder


CASES = [
    *((kind, state, "nothing") for kind in MODELS for state in STATES if kind != "unigram" or state != "dropping"),
    *(("bpe", None, key) for key in KEYS if key not in ("Gemma", "T5")),
    *(("bpe", "with_both", key) for key in ("add_bos_token", "no add_bos_token", "both", "null", "GPT2", "Qwen2")),
    *(("sentencepiece", None, key) for key in KEYS if key not in ("GPT2", "Qwen2", "T5")),
    *(("unigram", None, key) for key in KEYS if key not in ("GPT2", "Qwen2", "Llama", "LlamaFast", "Gemma")),
]


@pytest.mark.parametrize("kind", MODELS)
def test_ids_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    for number, (_, state, key) in enumerate(case for case in CASES if case[0] == kind):
        made = MODELS[kind]()
        if state is not None:
            STATES[state](made)
        folder = folder_of(made, tmp_path / str(number), KEYS[key])
        theirs = transformers.AutoTokenizer.from_pretrained(folder)
        if state == "dropping":  # draws other ids in every call
            theirs.backend_tokenizer.model.dropout = None
        backend, eod = load_huggingface(HuggingFaceTokenizer(type="huggingface", path=str(folder)), 1 << 20)
        assert eod == theirs.eos_token_id
        encode = encoder(backend.to_str(), eod, "uint32", by_word=False)([text.encode() for text in TEXTS])
        rows = np.split(np.frombuffer(encode.ids, "uint32"), np.cumsum(encode.lengths)[:-1])
        for text, row in zip(TEXTS, rows, strict=True):
            expected = theirs(text, add_special_tokens=False).input_ids
            assert backend.encode(text, add_special_tokens=False).ids == expected, (state, key, text)
            assert row.tolist() == [*expected, eod], (state, key, text)


def test_one_place_loads_tokenizers() -> None:
    """The others would apply what the file keeps of the last call: see `encode.load`."""
    root = Path(llmrecipes.__file__).parent
    places = [
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if re.search(r"(?<!Auto)Tokenizer\.(from_str|from_file|from_buffer|from_pretrained)\(", path.read_text("utf-8"))
    ]
    assert places == ["data/tokens/encode.py"]
    for kept in (truncated, padded, dropping):
        made = bpe()
        expected = made.encode(TEXTS[0]).ids
        kept(made)
        assert load(made.to_str()).encode(TEXTS[0]).ids == expected
