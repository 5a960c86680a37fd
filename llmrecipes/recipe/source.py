"""Where documents come from: sources that are blended for training, and held-out sets."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from llmrecipes.recipe.section import NonNegInt, PosFloat, PosInt, Section

EMBEDDED = ("stdlib", "docstrings", "machine")
"""Types of sources that have no path: what is on every machine."""
Share = Annotated[float, Field(ge=0, le=1)]
LABEL = r"^[a-z0-9][a-z0-9_-]*$"
LONGEST_LABEL = 40
Label = Annotated[str, Field(pattern=LABEL, max_length=LONGEST_LABEL)]
_SUFFIXES = re.compile(r"(\.(jsonl?|parquet|txt|gz|zst|xz|bz2))+$")


class Source(Section):
    """One source of documents. Several are blended by weight."""

    type: Literal["stdlib", "docstrings", "machine", "text", "jsonl", "parquet", "hub", "megatron"]
    """`stdlib`: the source code of Python's standard library, one document per file, no network. `docstrings`: its
    functions and what they do, as questions and answers (`data.chat`). `machine`: documentation, licences, manual pages
    and code of this machine, with planted copies and junk, to try `data.steps`. `text`: one document per file. `jsonl`,
    `parquet`: one document per row. `hub`: a Hugging Face dataset. `megatron`: tokens that Megatron-LM's
    `preprocess_data.py` or anything else has written as `.bin` and `.idx`."""
    path: str | None = None
    """File, folder or glob (`text`, `jsonl`, `parquet`), relative to the working directory, or its URL in a store that
    fsspec reads (`s3://`, `gs://`, `https://`), a folder with `/` at its end; dataset name (`hub`); the
    files' name without `.bin` and `.idx` (`megatron`)."""
    name: str | None = None
    """Configuration of a `hub` dataset."""
    split: str | None = None
    """Split of a `hub` dataset; unset: `train`. It is divided into our own train, valid and test splits by document
    hash."""
    revision: str | None = None
    """Commit of a `hub` dataset."""
    text_key: str = "text"
    """Column that holds the text (`jsonl`, `parquet`, `hub`)."""
    label_key: str | None = None
    """Column of labels, such as the language of a document (`jsonl`, `parquet`, `hub`): only rows with `label_value`
    are read. Sources of the same files with other labels are blended, or balanced, by label."""
    label_value: str | None = None
    """Label of the rows that are read; of a number or a truth value its text in Python, such as `3` or `True`."""
    label: Label | None = None
    """Its name in metrics by source (`data.multiple_validation_sets`, `tracking.loss_by_source`); unset: made of its
    path, such as `web` of `corpora/web/*.jsonl`."""
    weight: PosFloat = 1.0
    """Share of training samples drawn from this source, relative to the other sources' weights."""
    max_tokens: PosInt | None = None
    """Tokens, of all splits, after which the source is not read further; a `hub` dataset is then streamed, not
    downloaded whole. Unset: all of it."""
    fim_rate: Share = 0.0
    """Share of the training documents, of a held-out set that of its documents, that are rearranged for
    fill-in-the-middle (`data.fim`)."""

    @property
    def tokenized(self) -> bool:
        """Whether its documents are token ids, without a text."""
        return self.type == "megatron"


class ValidSource(Source):
    """A held-out set, evaluated on `train.eval_iters` batches. It has no weight, and `data.steps` do not change it."""

    label: Label
    """Its name in metrics: `valid_source_loss` by label."""


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
    """An order of the training documents of each source by difficulty (arXiv 2506.11300), within their shuffled order;
    each pass over them is one by itself. The mixture of sources and held-out splits stay the same."""

    score: Literal["length", "compression_ratio", "loss"]
    """`length`: tokens of a document. `compression_ratio`: bytes of its text after DEFLATE, by its bytes; `prepare`
    writes it. `loss`: of another, often smaller model, in nats per token, of `scores`."""
    scores: str | None = None
    """Folder of losses, as `llmrecipes eval RUN --data train --per-document DIR` writes it, relative to the working
    directory. With `score: loss` only. `prepare` reads it; a run does not."""
    order: Literal["ascending", "descending"] = "ascending"
    """`ascending`: low scores come first."""
    windows: PosInt = 1
    """Parts of a pass with as many tokens, each of which begins with the first scores again."""
    share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Part of the run, from its first sample on, that is ordered: a curriculum as a warm-up. What follows is shuffled.
    With stages, of those that share an order of samples."""

    @property
    def rehearsed(self) -> Curriculum:
        """With a score that other data have too."""
        return self if self.scores is None else self.model_copy(update={"score": "length", "scores": None})


class Fim(Section):
    """Fill-in-the-middle: of the share `fim_rate` of a source's documents, the middle comes last.

    A `bpe` tokenizer is trained with the special tokens; another one must have them."""

    spm_rate: Share = 0.5
    """Share of the order suffix, prefix, middle among the rearranged documents; the others have prefix, suffix,
    middle."""
    seed: NonNegInt = 1234
    """Seed of the choice of documents and cuts."""
    prefix_token: str = "<fim_prefix>"  # noqa: S105
    """Special token in front of the prefix."""
    middle_token: str = "<fim_middle>"  # noqa: S105
    """Special token in front of the middle."""
    suffix_token: str = "<fim_suffix>"  # noqa: S105
    """Special token in front of the suffix."""


ValidSources = Annotated[tuple[ValidSource, ...], Field(strict=False)]
