"""The documents of an evaluation: a split of the run's data, or any source that a recipe could have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from llmrecipes.data.folder.prepared import TOKENIZER, Prepared
from llmrecipes.data.sources import sources
from llmrecipes.data.steps.split import SPLITS, Split
from llmrecipes.data.tokens.tokenizer import TextTokenizer
from llmrecipes.errors import UserError
from llmrecipes.recipe.sections.source import SOURCE_TYPES, PathSource, Source, make_source

OPTION = "--data"
TYPES = tuple(kind for kind, source in SOURCE_TYPES.items() if issubclass(source, PathSource))
_PATHLESS = ("stdlib", "machine")


@dataclass(frozen=True)
class Text:
    """A document: token ids without an end token, and bytes of its UTF-8 text."""

    tokens: list[int]
    bytes: int


@dataclass(frozen=True)
class Texts:
    """Documents of an evaluation.

    Attributes:
        name: as the user wrote it, such as `valid` or `jsonl:questions.jsonl`.
        split: split of the run's data; None for another source.
        source: None for a split.
        limit: documents at most; None for all.
    """

    name: str
    split: Split | None
    source: Source | None
    limit: int | None = None

    @classmethod
    def parse(cls, name: str, *, text_key: str = "text", limit: int | None = None) -> Texts:
        """Documents by name: `valid`, `test`, `train`, `stdlib`, `machine`, or `TYPE:PATH` with a source's type.

        Raises:
            UserError: it is neither.
        """
        if name in SPLITS:
            return cls(name, name, None, limit)
        kind, _, path = name.partition(":")
        if kind not in (TYPES if path else _PATHLESS):
            raise UserError(
                f"{name!r} is not a data source",
                where=OPTION,
                rule=f"a split of the run ({', '.join(SPLITS)}), {', '.join(_PATHLESS)}, or TYPE:PATH, with TYPE of: "
                + ", ".join(TYPES),
                fix=f"{OPTION} text:{name}" if Path(name).exists() else f"{OPTION} valid",
            )
        keys = {"path": path, "text_key": text_key}
        source = make_source(type=kind, **{key: keys[key] for key in keys if key in SOURCE_TYPES[kind].model_fields})
        return cls(name, None, source, limit)

    def require(self, prepared: Prepared | None) -> None:
        """Refuse data that is missing or empty, before a model is loaded: reads one document.

        Raises:
            UserError: it is.
        """
        if self.split is not None:
            if prepared is None:
                raise UserError(
                    f"{self.name!r} is a split of a run's data, but this run has none",
                    where=OPTION,
                    rule="an imported model has no training data",
                    fix=f"{OPTION} stdlib, or {OPTION} text:PATH",
                )
            if not any(source.splits[self.split].documents for source in prepared.manifest.sources):
                raise _empty(self.name)
            prepared.check([TOKENIZER, *prepared.tokens(self.split)], lambda _line: None)
        elif self.source is not None and next(_read(self.source), None) is None:
            raise _empty(self.name)

    def documents(
        self, tokenizer: TextTokenizer, prepared: Prepared | None, *, with_empty: bool = False
    ) -> Iterator[Text]:
        """The documents in order, without empty ones unless asked for, and without those that are not valid Unicode.

        Bytes are counted from the text. A split only has tokens, whose text is decoded.

        Raises:
            UserError: data that cannot be read.
        """
        if self.source is not None:
            texts = (Text(tokenizer.encode(text), len(text.encode())) for text in _read(self.source))
        elif self.split is not None and prepared is not None:
            from llmrecipes.data.folder.documents import documents  # imports megatron-core

            ids = documents(prepared, self.split)
            texts = (Text(tokens, len(tokenizer.decode(tokens).encode())) for tokens in ids)
        else:
            raise ValueError(f"{self.name} is a split, and no prepared data was passed")
        return islice((text for text in texts if text.tokens or with_empty), self.limit)

    def count(self, prepared: Prepared | None) -> int | None:
        """Documents of a split, as many as the limit lets through; None if they are not known before they are read."""
        if self.split is None or prepared is None:
            return self.limit
        number = sum(source.splits[self.split].documents for source in prepared.manifest.sources)
        return number if self.limit is None else min(number, self.limit)

    def bytes(self, prepared: Prepared | None) -> int | None:
        """Bytes of a split, counted when it was prepared; None if they are not known before it is read."""
        if self.split is None or prepared is None or self.limit is not None:
            return None
        counts = [source.splits[self.split] for source in prepared.manifest.sources]
        if any(count.tokens and not count.bytes for count in counts):  # tokens whose text was never read
            return None
        return sum(count.bytes for count in counts)


def _read(source: Source) -> Iterator[str]:
    return (text for text in sources.documents(source) if text and not text.isspace())


def _empty(name: str) -> UserError:
    return UserError(
        f"{name!r} has no documents",
        where=OPTION,
        rule="an evaluation needs at least one document that is not empty",
        fix="other data" if name not in SPLITS else f"{OPTION} of a source with documents, or a larger data.split",
    )
