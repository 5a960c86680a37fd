"""Where documents come from: sources that are blended for training, and held-out sets."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from llmrecipes.recipe.sections.only_with import OnlyWith
from llmrecipes.recipe.sections.section import EXECUTION, NonNegInt, PosFloat, PosInt, Section

EMBEDDED = ("stdlib", "docstrings", "machine")
"""Types of sources that have no path: what is on every machine."""
Share = Annotated[float, Field(ge=0, le=1)]
LABEL = r"^[a-z0-9][a-z0-9_-]*$"
LONGEST_LABEL = 40
Label = Annotated[str, Field(pattern=LABEL, max_length=LONGEST_LABEL)]
_SUFFIXES = re.compile(r"(\.(jsonl?|parquet|txt|gz|zst|xz|bz2))+$")


class Source(Section):
    """A source of documents. Several sources are blended by weight."""

    type: Literal["stdlib", "docstrings", "machine", "text", "jsonl", "parquet", "hub", "megatron"]
    """`stdlib`: the source code of Python's standard library. `docstrings`: its functions and what they do, as
    questions and answers (`data.chat`). `machine`: files of this machine, with planted copies and junk, to try
    `data.steps`. `text`: one document per file. `jsonl`, `parquet`: one per row. `hub`: a Hugging Face dataset.
    `megatron`: `.bin` and `.idx` files of Megatron-LM."""
    path: str | None = None
    """For `text`, `jsonl` and `parquet`: file, folder or glob, relative to the working directory, or a URL that fsspec
    can read (`s3://`, `gs://`, `https://`), with a trailing `/` for a folder. For `hub`: dataset name. For `megatron`:
    path without `.bin` and `.idx`."""
    name: str | None = None
    """Configuration of a `hub` dataset."""
    split: str | None = None
    """Split of a `hub` dataset; unset: `train`. Document hashes divide it into train, valid and test."""
    revision: str | None = None
    """Commit of a `hub` dataset."""
    text_key: str = "text"
    """Column of the text (`jsonl`, `parquet`, `hub`)."""
    label_key: Annotated[str | None, OnlyWith("label_value")] = None
    """Column of labels, such as the language of a document: only rows with `label_value` are read. Sources that read
    the same files with different labels are blended by label."""
    label_value: Annotated[str | None, OnlyWith("label_key")] = None
    """Label of the rows to read; for a number or boolean, its text in Python, such as `3` or `True`."""
    label: Annotated[Label | None, EXECUTION] = None
    """Name of the source in metrics by source; unset: derived from its path, such as `web` for
    `corpora/web/*.jsonl`."""
    weight: PosFloat = 1.0
    """Share of training samples drawn from this source, relative to the weights of the other sources."""
    max_tokens: PosInt | None = None
    """Stop reading the source after this many tokens, over all splits; a `hub` dataset is then streamed instead of
    downloaded in full. Unset: read all of it."""
    fim_rate: Share = 0.0
    """Fraction of the training documents, or in a held-out set of its documents, rearranged for fill-in-the-middle
    (`data.fim`)."""

    @property
    def tokenized(self) -> bool:
        """Whether its documents are token ids, without a text."""
        return self.type == "megatron"


class ValidSource(Source):
    """A held-out set, evaluated on `train.eval_iters` batches. Its other keys are those of `data.sources.N`, but it has
    no weight, and `data.steps` does not change it."""

    label: Label
    """Name of the set in metrics: `valid_source_loss` by label."""


def source_names(sources: Sequence[Source]) -> tuple[str, ...]:
    """The name of each source in metrics: its label, or one made of its path. `data_rules` refuses equal ones where
    they are used."""
    return tuple(source.label or _name_of(source) for source in sources)


def _name_of(source: Source) -> str:
    """The last part of the path without wildcards, with what else tells sources of one path apart."""
    parts = [part for part in re.split(r"[/\\]", source.path or "") if part and not set(part) & set("*?[]{}")]
    words = [_SUFFIXES.sub("", parts[-1]) if parts else source.type, source.name, source.label_value]
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


ValidSources = Annotated[tuple[ValidSource, ...], Field(strict=False)]
