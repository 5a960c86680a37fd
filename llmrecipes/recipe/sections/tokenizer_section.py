"""The section `data.tokenizer`: a class for each type."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from llmrecipes.recipe.sections.section import NonEmpty, Variant, type_or


class Tokenizer(Variant):
    """How text is turned into token ids."""

    records_defaults = True


class BpeTokenizer(Tokenizer):
    """A byte-level BPE with `model.vocab_size` tokens, trained on the training split."""

    type: Literal["bpe"] = "bpe"
    pattern: Literal["words", "llama3"] = "words"
    """How text is split into words: `words`, this program's own pattern, or `llama3`, which gigatoken and llama.cpp
    support."""


class HuggingFaceTokenizer(Tokenizer):
    """An existing tokenizer."""

    type: Literal["huggingface"]
    path: NonEmpty
    """Name or folder of the tokenizer."""
    revision: str | None = None
    """Commit of the tokenizer."""
    add_bos_token: bool | None = None
    """Begin documents and prompts of text with BOS; chat templates write it themselves. Unset: as transformers does
    with this tokenizer, unless BOS is the end-of-text token."""


AnyTokenizer = Annotated[BpeTokenizer | HuggingFaceTokenizer, Field(discriminator="type"), type_or("bpe")]
