"""The vocabulary of a GGUF file: tokens, how text is split into words, and what ends an answer."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from llmrecipes.errors import UserError

if TYPE_CHECKING:
    from llmrecipes.workflow.model_source import OpenedRun

LOOKS_SPECIAL = re.compile(r"<\|.*\|>|<｜.*｜>|<unused.*>|<pad>|<mask>|<2mass>|\[@BOS@\]")
"""Added tokens that llama.cpp's converter takes for special ones, whatever the tokenizer says."""
GPT2 = "gpt-2"
"""llama.cpp's name of the pattern that the library tokenizers has built in."""
OURS = "llama-bpe"
"""llama.cpp's pattern of words next to that of the byte-level BPE of `prepare`, which it does not have."""
PATTERNS = {
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+": "qwen2",
}
"""llama.cpp's name of a pattern that splits text into words, besides Llama 3's."""
SAMPLING: Mapping[str, str] = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
"""Keys of generation_config.json by the package's names of llama.cpp's."""


def unsupported(what: str, rule: str, fix: str = "--to onnx") -> UserError:
    """The refusal of what llama.cpp does not have."""
    return UserError(what, where="--to gguf", rule=rule, fix=fix)


def add_vocabulary(writer: Any, vocabulary: Vocabulary | None, size: int) -> None:
    """Write a vocabulary of so many tokens; None: only that there is none."""
    import gguf

    if vocabulary is None:
        writer.add_tokenizer_model("no_vocab")
        return
    names: list[str] = [f"[PAD{number}]" for number in range(size)]
    kinds = [gguf.TokenType.UNUSED] * size
    for text, number in vocabulary.tokens.items():
        names[number], kinds[number] = text, gguf.TokenType.NORMAL
    for token in vocabulary.added:
        control = token["special"] or LOOKS_SPECIAL.fullmatch(token["content"])
        names[token["id"]] = token["content"]
        kinds[token["id"]] = gguf.TokenType.CONTROL if control else gguf.TokenType.USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(vocabulary.pattern)
    writer.add_token_list(names)
    writer.add_token_types([int(kind) for kind in kinds])
    vocabulary.special.add_to_gguf(writer, quiet=True)
    if "bos" not in vocabulary.special.add_special_token:
        writer.add_add_bos_token(False)  # llama.cpp's default depends on the pattern
    for key, name in SAMPLING.items():
        value = vocabulary.generation.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool):
            getattr(writer, f"add_sampling_{name}")(value)
    if vocabulary.ends[1:]:
        # Generation stops at the end of an answer and at that of a document.
        writer.add_eot_token_id(vocabulary.ends[0])
        writer.add_eom_token_id(vocabulary.ends[1])


class Vocabulary(NamedTuple):
    """What a file says of a byte-level BPE."""

    tokens: Mapping[str, int]
    added: Sequence[Mapping[str, Any]]
    """Added tokens, as in tokenizer.json."""
    special: Any
    """`gguf.SpecialVocab`: merges, special tokens, which of them the tokenizer adds to a text, and chat templates."""
    pattern: str
    """llama.cpp's name of how text is split into words."""
    ends: Sequence[int]
    """Ids that end an answer."""
    generation: Mapping[str, Any]
    """generation_config.json."""


def vocabulary_of(opened: OpenedRun, data_dir: Path) -> tuple[Vocabulary, tuple[str, ...]]:
    """The vocabulary of a run, by the files that `export --to hf` writes; and notes.

    Raises:
        UserError: its data is not prepared, or llama.cpp lacks its pattern.
    """
    import gguf

    from llmrecipes.data.folder.prepared import TOKENIZER
    from llmrecipes.data.tokens.encode import WORDS
    from llmrecipes.hf.generation_config import FILE as FILE_OF_GENERATION
    from llmrecipes.hf.reading import CONFIG
    from llmrecipes.hf.safetensors import write_json
    from llmrecipes.hf.tokenizer_files import write_companions
    from llmrecipes.models.export import prepared_of

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepared = prepared_of(opened, data_dir)
        special = write_companions(folder, opened.recipe, prepared, opened.folder, tokenizer=True)
        end = special["eos_token_id"]
        ends: list[int] = end if isinstance(end, list) else [end]
        generation = json.loads((folder / FILE_OF_GENERATION).read_text("utf-8"))
        write_json(folder / CONFIG, {**special, "eos_token_id": ends[0]})
        file: dict[str, Any] = json.loads((folder / TOKENIZER).read_text("utf-8"))
        marks = gguf.SpecialVocab(folder, load_merges=True, n_vocab=opened.config["vocab_size"])
    model = file["model"]
    pattern = _pattern(file.get("pre_tokenizer"))
    if model.get("type") != "BPE" or pattern is None:
        raise unsupported(
            f"a tokenizer of type {model.get('type')} with an unknown pattern",
            "the tokenizer must be a byte-level BPE with a word pattern that llama.cpp knows",
            "--no-tokenizer, with token ids as input",
        )
    names = {number: text for text, number in model["vocab"].items()}
    names |= {token["id"]: token["content"] for token in file.get("added_tokens", [])}
    notes: tuple[str, ...] = ()
    if more := ends[2:]:
        listed = ", ".join(names.get(number, str(number)) for number in more)
        notes = (f"llama.cpp has no key for more than two tokens that end an answer: {listed}",)
    if json.dumps(WORDS)[1:-1] in json.dumps(file["pre_tokenizer"]):
        notes += (
            f"llama.cpp splits text into words by its pattern {OURS}; where it differs from this tokenizer's "
            "(contractions, line ends after punctuation), tokens differ from those of training",
        )
    return Vocabulary(model["vocab"], file.get("added_tokens", []), marks, pattern, ends, generation), notes


def _pattern(splitter: Any) -> str | None:
    """llama.cpp's name of a `pre_tokenizer`; None: it has none."""
    from llmrecipes.data.tokens.encode import LLAMA3, WORDS

    text = json.dumps(splitter)
    known = PATTERNS | {LLAMA3: OURS, WORDS: OURS}
    if isinstance(splitter, dict) and splitter.get("type") == "ByteLevel":
        plain = splitter.get("use_regex", True) and not splitter.get("add_prefix_space", True)
        return GPT2 if plain else None
    return next((name for pattern, name in known.items() if json.dumps(pattern)[1:-1] in text), None)
