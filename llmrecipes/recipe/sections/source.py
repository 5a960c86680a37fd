"""Where documents come from: sources that are blended for training, and held-out sets."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal, get_args

from pydantic import Field, TypeAdapter

from llmrecipes.recipe.sections.only_with import OnlyWith
from llmrecipes.recipe.sections.section import EXECUTION, NonEmpty, NonNegInt, PosFloat, PosInt, Section, Variant

Share = Annotated[float, Field(ge=0, le=1)]
LABEL = r"^[a-z0-9][a-z0-9_-]*$"
LONGEST_LABEL = 40
Label = Annotated[str, Field(pattern=LABEL, max_length=LONGEST_LABEL)]
_SUFFIXES = re.compile(r"(\.(jsonl?|parquet|txt|gz|zst|xz|bz2))+$")


class Source(Variant):
    """A source of any type."""

    records_defaults = True
    tokenized: ClassVar[bool] = False  # documents are token ids, without a text

    label: Annotated[Label | None, EXECUTION] = None
    """Name of the source in metrics by source; unset: derived from its path, such as `web` for
    `corpora/web/*.jsonl`."""
    weight: PosFloat = 1.0
    """Share of training samples drawn from this source, relative to the weights of the other sources."""
    max_tokens: PosInt | None = None
    """Stop reading the source after this many tokens, over all splits; a `hub` dataset is then streamed instead of
    downloaded in full. Unset: read all of it."""

    @property
    def location(self) -> str:
        """Its path, or the name of its dataset; empty for what is on every machine."""
        return ""


class TextSource(Source):
    """A source of plain text."""

    fim_rate: Share = 0.0
    """Fraction of the training documents, or in a held-out set of its documents, rearranged for fill-in-the-middle
    (`data.fim`)."""


class PathSource(Source):
    """A source that is not on every machine."""

    path: NonEmpty
    """File, folder or glob, relative to the working directory, or a URL that fsspec can read (`s3://`, `gs://`,
    `https://`), with a trailing `/` for a folder."""

    @property
    def location(self) -> str:
        """Its path, or the name of its dataset."""
        return self.path


class RowSource(PathSource, TextSource):
    """A source whose documents are rows."""

    text_key: str = "text"
    """Column of the text."""
    label_key: Annotated[str | None, OnlyWith("label_value")] = None
    """Column of labels, such as the language of a document: only rows with `label_value` are read. Sources that read
    the same files with different labels are blended by label."""
    label_value: Annotated[str | None, OnlyWith("label_key")] = None
    """Label of the rows to read; for a number or boolean, its text in Python, such as `3` or `True`."""


class StdlibSource(TextSource):
    """The source code of Python's standard library."""

    type: Literal["stdlib"]


class DocstringsSource(Source):
    """The functions of the standard library and what they do, as questions and answers (`data.chat`)."""

    type: Literal["docstrings"]


class MachineSource(TextSource):
    """Files of this machine, with planted copies and junk, to try `data.steps`."""

    type: Literal["machine"]


class FilesSource(PathSource, TextSource):
    """One document per file."""

    type: Literal["text"]


class JsonlSource(RowSource):
    """One document per line of JSON."""

    type: Literal["jsonl"]


class ParquetSource(RowSource):
    """One document per row of Parquet."""

    type: Literal["parquet"]


class HubSource(RowSource):
    """A Hugging Face dataset."""

    type: Literal["hub"]
    path: NonEmpty
    """Name of the dataset."""
    name: str | None = None
    """Its configuration."""
    split: str | None = None
    """Split of the dataset; unset: `train`. Document hashes divide it into train, valid and test."""
    revision: str | None = None
    """Its commit."""


class MegatronSource(PathSource):
    """`.bin` and `.idx` files of Megatron-LM."""

    tokenized = True
    type: Literal["megatron"]
    path: NonEmpty
    """Path without `.bin` and `.idx`."""


class ValidSource(Source):
    """A held-out set of any type."""

    label: Label
    """Name of the set in metrics: `valid_source_loss` by label."""


class ValidStdlib(ValidSource, StdlibSource):
    """The source code of Python's standard library."""

    type: Literal["stdlib"]


class ValidMachine(ValidSource, MachineSource):
    """Files of this machine."""

    type: Literal["machine"]


class ValidFiles(ValidSource, FilesSource):
    """One document per file."""

    type: Literal["text"]


class ValidJsonl(ValidSource, JsonlSource):
    """One document per line of JSON."""

    type: Literal["jsonl"]


class ValidParquet(ValidSource, ParquetSource):
    """One document per row of Parquet."""

    type: Literal["parquet"]


class ValidHub(ValidSource, HubSource):
    """A Hugging Face dataset."""

    type: Literal["hub"]


class ValidMegatron(ValidSource, MegatronSource):
    """`.bin` and `.idx` files of Megatron-LM."""

    type: Literal["megatron"]


AnySource = Annotated[
    StdlibSource
    | DocstringsSource
    | MachineSource
    | FilesSource
    | JsonlSource
    | ParquetSource
    | HubSource
    | MegatronSource,
    Field(discriminator="type", description="A source of documents."),
]
AnyValidSource = Annotated[
    ValidStdlib | ValidMachine | ValidFiles | ValidJsonl | ValidParquet | ValidHub | ValidMegatron,
    Field(
        discriminator="type",
        description="A held-out set, evaluated on `train.eval_iters` batches. Its other keys are those of "
        "`data.sources.N`, but it has no weight, and `data.steps` does not change it.",
    ),
]

SOURCE_TYPES: dict[str, type[Source]] = {
    get_args(kind.model_fields["type"].annotation)[0]: kind for kind in get_args(get_args(AnySource)[0])
}


def make_source(**values: object) -> AnySource:
    """The source with these keys, of which `type` is one; ValidationError for wrong ones."""
    return TypeAdapter[AnySource](AnySource).validate_python(values)


def make_valid_source(**values: object) -> AnyValidSource:
    """The held-out set with these keys; ValidationError for wrong ones."""
    return TypeAdapter[AnyValidSource](AnyValidSource).validate_python(values)


def source_names(sources: Sequence[Source]) -> tuple[str, ...]:
    """The name of each source in metrics: its label, or one made of its path. `data_rules` refuses equal ones where
    they are used."""
    return tuple(source.label or _name_of(source) for source in sources)


def _name_of(source: Source) -> str:
    """The last part of the path without wildcards, with what else tells sources of one path apart."""
    parts = [part for part in re.split(r"[/\\]", source.location) if part and not set(part) & set("*?[]{}")]
    words = [_SUFFIXES.sub("", parts[-1]) if parts else source.type]
    words += [getattr(source, key, None) or "" for key in ("name", "label_value")]
    text = re.sub(r"[^a-z0-9_-]+", "-", "-".join(word for word in words if word).lower()).strip("-_")
    return text[:LONGEST_LABEL] or source.type


class Curriculum(Section):
    """Order the training documents of each source by difficulty (arXiv 2506.11300), in each pass over them. The mixture
    of sources and the held-out splits stay the same."""

    score: Literal["length", "compression_ratio", "loss"]
    """Difficulty of a document: its tokens (`length`), bytes of its text after DEFLATE divided by its bytes
    (`compression_ratio`), or its loss in another model, from `scores` (`loss`)."""
    scores: str | None = None
    """Folder of losses that `llmrecipes eval RUN --data train --per-document DIR` has written, read by `prepare`;
    only with `score: loss`."""
    order: Literal["ascending", "descending"] = "ascending"
    """`ascending`: low scores first; `descending`: high scores first."""
    windows: PosInt = 1
    """Parts of a pass with equal numbers of tokens; the order starts again in each."""
    share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Fraction of the run, from its first sample, that is ordered; the rest is shuffled. With stages, fraction of
    those that share an order of samples."""

    @property
    def rehearsed(self) -> Curriculum:
        """With a score that other data have too."""
        return self if self.scores is None else self.model_copy(update={"score": "length", "scores": None})


class Fim(Section):
    """Fill-in-the-middle: in the fraction `fim_rate` of a source's documents, move the middle to the end.

    A `bpe` tokenizer is trained with the special tokens; any other must have them."""

    spm_rate: Share = 0.5
    """Fraction of the rearranged documents in the order suffix, prefix, middle; the others have prefix, suffix,
    middle."""
    seed: NonNegInt = 1234
    """Seed for choosing documents and cuts."""
    prefix_token: str = "<fim_prefix>"  # noqa: S105
    """Special token before the prefix."""
    middle_token: str = "<fim_middle>"  # noqa: S105
    """Special token before the middle."""
    suffix_token: str = "<fim_suffix>"  # noqa: S105
    """Special token before the suffix."""


Sources = Annotated[tuple[AnySource, ...], Field(min_length=1, strict=False)]
ValidSources = Annotated[tuple[AnyValidSource, ...], Field(strict=False)]
