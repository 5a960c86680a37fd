"""Tokenizers, trained by `prepare` or loaded from Hugging Face, stored as one `tokenizer.json` beside their tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers

from llmrecipes import untrusted
from llmrecipes.data.tokens.encode import LLAMA3, WORDS, load
from llmrecipes.errors import UserError
from llmrecipes.recipe.sections.tokenizer_section import AnyTokenizer, HuggingFaceTokenizer

EOD = "<|endoftext|>"
_BYTES = 256
_PATTERNS = {"words": WORDS, "llama3": LLAMA3}
TOKENIZER_SECONDS = 60
"""CPU seconds in which an untrusted tokenizer is loaded and splits a few texts; a large one takes about five."""
_TOKENIZER_SUFFIXES = frozenset({".json", ".jinja", ".model", ".txt", ".tiktoken"})
_SLOW = tuple(
    text * 64 + end
    for text in ("a", "A", "1", " ", "\n", "!", "_", "é", "世", "a ", "ab", "a1")
    for end in ("", "!", "\0")
)
"""Texts on which regular expressions with nested repetitions backtrack."""


@dataclass(frozen=True)
class TextTokenizer:
    """A tokenizer as training, generation and megatron-core's `GPTDatasetConfig.tokenizer` need it.

    Args:
        backend: the tokenizer itself.
        eod: id that ends a document.
        identity: SHA-256 of its `tokenizer.json`; megatron-core names its index files by it.
        prefix: ids that transformers puts before a text (BOS).
        suffix: ids that it puts behind one.
        empty: id that stands for an empty context in the harness: BOS, whether it is put before texts or not; None:
            `eod`.
    """

    backend: tokenizers.Tokenizer
    eod: int
    identity: str
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    empty: int | None = None

    pad: int = -1
    """No token: samples are cut from a stream and never padded, so the loss must not mask any id."""

    @property
    def vocab_size(self) -> int:
        """Number of ids, special tokens included."""
        return vocabulary(self.backend)

    @property
    def unique_identifiers(self) -> dict[str, Any]:
        """What megatron-core hashes into the names of its index files."""
        return {"class": type(self).__name__, "sha256": self.identity, "eod": self.eod}

    def encode(self, text: str) -> list[int]:
        """Ids of a text; nothing is added, and names of special tokens are plain text."""
        return list(self.backend.encode(text, add_special_tokens=False).ids)

    @classmethod
    def beginning(cls, prefix: Sequence[int], backend: tokenizers.Tokenizer, eod: int, identity: str) -> TextTokenizer:
        """A tokenizer of texts that begin with `prefix`, whose last id also stands for an empty context."""
        return cls(backend, eod, identity, tuple(prefix), empty=prefix[-1] if prefix else None)

    def prompt(self, text: str) -> list[int]:
        """Ids of a text that is to be continued, with what documents begin with."""
        return [*self.prefix, *self.encode(text)]

    @property
    def start(self) -> list[int]:
        """What a document begins with, or follows: BOS, or the end of the document before."""
        return list(self.prefix) or [self.eod]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; incomplete characters become U+FFFD, special tokens are dropped."""
        return str(self.backend.decode(list(ids)))


def read(file: Path, eod: int, identity: str, prefix: Sequence[int] = ()) -> TextTokenizer:
    """Load a prepared folder's `tokenizer.json`.

    Args:
        file: its path.
        eod: id that ends a document.
        identity: its SHA-256.
        prefix: ids that documents begin with.

    Raises:
        UserError: it cannot be read, or its SHA-256 is not `identity`.
    """
    fix = "copy the file again from where it was prepared, or delete the folder and prepare again"
    try:
        content = untrusted.read(file)
    except OSError as error:
        raise UserError(f"cannot read: {error.strerror}", where=str(file), fix=fix) from error
    if (digest := hashlib.sha256(content).hexdigest()) != identity:
        raise UserError(
            f"SHA-256 is {digest[:16]}…, the manifest says {identity[:16]}…",
            where=str(file),
            rule="the tokenizer must be the one that made the tokens",
            fix=fix,
        )
    try:
        return TextTokenizer.beginning(prefix, load(content.decode()), eod, identity)
    except Exception as error:  # the library defines no exceptions
        raise UserError(f"is not a tokenizer: {str(error)[:200]}", where=str(file), fix=fix) from error


def vocabulary(backend: tokenizers.Tokenizer) -> int:
    """One more than the largest id: Hugging Face vocabularies may have gaps."""
    return 1 + max(backend.get_vocab(with_added_tokens=True).values())


def train(
    texts: Iterable[str],
    vocab_size: int,
    more_special: Sequence[str] = (),
    infilling: Sequence[str] = (),
    *,
    pattern: str = "words",
) -> tuple[tokenizers.Tokenizer, int]:
    """Train a byte-level BPE (arXiv 1508.07909, GPT-2's bytes) with `tokenizers`; decoding is lossless for any text.

    Args:
        texts: documents of the train split only.
        vocab_size: maximum ids, including the 256 bytes and `<|endoftext|>`; fewer if the texts have fewer pairs.
        more_special: special tokens of a chat template; the last one ends an answer.
        infilling: special tokens of fill-in-the-middle.
        pattern: how text is split into words, a value of `data.tokenizer.pattern`.

    Returns:
        The tokenizer and the id of the last token of the template: without one that of `<|endoftext|>` (0).

    Raises:
        UserError: `vocab_size` below 257.
    """
    special = [EOD, *infilling, *more_special]
    if vocab_size < _BYTES + len(special):
        raise UserError(
            f"a vocabulary of {vocab_size} is too small",
            where="model.vocab_size",
            rule=f"a byte-level BPE has {_BYTES} bytes and {', '.join(special)}",
            fix=f"model.vocab_size={_BYTES + len(special)} or more",
        )
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(_PATTERNS[pattern]), behavior="isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.train_from_iterator(
        texts,
        tokenizers.trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=special,
            initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    return backend, len(special) - 1 if more_special else 0  # special tokens come first


def load_huggingface(section: AnyTokenizer, vocab_size: int) -> tuple[tokenizers.Tokenizer, int]:
    """Load an existing Hugging Face tokenizer by name or folder.

    Returns:
        The tokenizer and the id of its end-of-text token.

    Raises:
        UserError: not found or not reachable, no end-of-text token, more ids than `vocab_size`.
    """
    where = "data.tokenizer"
    section = existing(section)
    loaded = _huggingface(section)
    backend = load(loaded.backend_tokenizer.to_str(), special_as_text=False)
    eod = loaded.eos_token_id if loaded.eos_token_id is not None else backend.token_to_id(EOD)
    if eod is None:
        raise UserError(
            f"tokenizer {section.path!r} has no end-of-text token",
            where=where,
            rule=f"documents end with eos_token, or with {EOD}",
            fix="use another tokenizer, or set eos_token in its tokenizer_config.json",
        )
    if vocabulary(backend) > vocab_size:
        raise UserError(
            f"tokenizer {section.path!r} has {vocabulary(backend)} ids, the model {vocab_size}",
            where="model.vocab_size",
            rule="model.vocab_size must be at least the tokenizer's",
            fix=f"model.vocab_size={vocabulary(backend)}",
        )
    return backend, int(eod)


def open_huggingface(section: AnyTokenizer, vocab_size: int) -> TextTokenizer:
    """The tokenizer in the folder of a model, with what transformers puts before and behind a text.

    Raises:
        UserError: see `load_huggingface`.
    """
    section = existing(section)
    backend, eod = load_huggingface(section, vocab_size)
    prefix, suffix = added_ids(backend)
    return TextTokenizer(backend, eod, "", prefix, suffix, _huggingface(section).bos_token_id)


def prefix_of(section: AnyTokenizer, backend: tokenizers.Tokenizer, eod: int) -> tuple[int, ...]:
    """Ids that documents and prompts of text begin with, by `data.tokenizer.add_bos_token`.

    Unset, they are those that transformers puts before a text, unless that is the token that ends documents: it stands
    between documents already.

    Raises:
        UserError: BOS is wanted, and the tokenizer has none, or it is the end-of-text token.
    """
    if section.type != "huggingface" or section.add_bos_token is False:
        return ()
    before = added_ids(backend)[0]
    if section.add_bos_token is None:
        return () if set(before) <= {eod} else before
    bos = _huggingface(section).bos_token_id
    ids = before or (() if bos is None else (int(bos),))
    if set(ids) <= {eod}:
        raise UserError(
            f"tokenizer {section.path!r} has no bos_token other than its end-of-text token",
            where="data.tokenizer.add_bos_token",
            rule="BOS must be a token of its own: the end-of-text token stands between documents already",
            fix="leave it out, or set bos_token in its tokenizer_config.json",
        )
    return ids


def added_ids(backend: tokenizers.Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ids that a tokenizer's post-processor puts before and behind every text."""
    both = backend.encode("a")
    text = backend.encode("a", add_special_tokens=False).ids
    before = next((n for n, special in enumerate(both.special_tokens_mask) if not special), len(both.ids))
    return tuple(both.ids[:before]), tuple(both.ids[before + len(text) :])


def huggingface_template(section: HuggingFaceTokenizer) -> tuple[str | None, dict[str, str]]:
    """A Hugging Face tokenizer's chat template, if it has one, and its special tokens by name.

    Raises:
        UserError: not found or not reachable.
    """
    loaded = _huggingface(section)
    template = loaded.chat_template
    if isinstance(template, dict):  # several, by purpose
        template = template.get("default")
    return template, {name: token for name, token in loaded.special_tokens_map.items() if isinstance(token, str)}


def huggingface_special(section: HuggingFaceTokenizer) -> set[str]:
    """Texts of a Hugging Face tokenizer's special tokens.

    Raises:
        UserError: not found or not reachable.
    """
    added = _huggingface(section).added_tokens_decoder.values()
    return {token.content for token in added if token.special}


def require_bounded(section: HuggingFaceTokenizer) -> None:
    """Check the tokenizer of a folder, or of the Hub, before it is loaded in this process.

    Its files could block, and its regular expressions take exponential time: they are tried on texts on which such ones
    are usually slow. One that is slow on other texts is not seen.

    Raises:
        UserError: a file is not a regular file of the folder, or it takes too long or too much memory.
    """
    import transformers

    folder = Path(section.path)
    if folder.is_dir():
        for file in sorted(folder.iterdir()):
            if file.suffix in _TOKENIZER_SUFFIXES:
                untrusted.real(file, root=untrusted.model_root(folder))

    def load_and_use() -> None:
        loaded = transformers.AutoTokenizer.from_pretrained(
            section.path, revision=section.revision or "main", trust_remote_code=False
        )
        backend = load(loaded.backend_tokenizer.to_str())
        for text in _SLOW:
            backend.encode(text, add_special_tokens=False)

    untrusted.require_ends(
        load_and_use,
        TOKENIZER_SECONDS,
        f"data.tokenizer: {section.path}",
        "a tokenizer must split a short text within seconds",
    )


def existing(section: AnyTokenizer) -> HuggingFaceTokenizer:
    """The tokenizer of a recipe, which must not be one that is trained; UserError if it is."""
    if section.type != "huggingface":
        raise UserError(
            f"a tokenizer of type {section.type} is trained on data",
            where="data.tokenizer",
            rule="an existing tokenizer is needed",
            fix="data.tokenizer.type=huggingface data.tokenizer.path=FOLDER",
        )
    return section


@cache
def _huggingface(section: HuggingFaceTokenizer) -> Any:
    from transformers import AutoTokenizer

    where = "data.tokenizer"
    require_bounded(section)
    try:
        loaded = AutoTokenizer.from_pretrained(
            section.path, revision=section.revision or "main", trust_remote_code=False
        )
        loaded.backend_tokenizer.to_str()
    except Exception as error:  # HTTP, DNS, missing files, unknown classes: each library below raises other errors
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"cannot load tokenizer {section.path!r}: {reason}",
            where=where,
            fix="use a tokenizer with a tokenizer.json; check that this machine reaches the Hub (HF_ENDPOINT)",
        ) from error
    return loaded
