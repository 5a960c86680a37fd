"""The order of a curriculum: the documents of a source by their difficulty, window by window.

`prepare` writes it into the index of samples, which ranks map into memory: which sample a step has stays a function of
the recipe and the step, on any layout and after a resume, and no rank sorts anything.

Losses of another model are a folder that `llmrecipes eval --per-document` writes. They belong to texts, whatever the
tokenizer: a source is recognised by the hash of the digests of its documents. The index keeps the folder's record, so
that a run needs the folder no more, and `prepare` notices if another one took its place.
"""

from __future__ import annotations

import hashlib
import math
import shutil
import zlib
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
from pydantic import Field, ValidationError

from llmrecipes import untrusted
from llmrecipes.data.folder.data_manifest import Record, stem
from llmrecipes.data.steps.split import Split
from llmrecipes.errors import UserError
from llmrecipes.io import sync, write_synced
from llmrecipes.recipe.sections.source import Curriculum

if TYPE_CHECKING:
    from megatron.core.datasets.gpt_dataset import GPTDataset

    from llmrecipes.data.folder.prepared import Prepared

SUFFIX = ".scores"
"""Of the file of a source's compression ratios: a little-endian float32 for each training document."""
RECORD = "scores.json"
"""What a folder of losses belongs to."""
KEPT = "scores.txt"
"""Its copy in the index of samples that were ordered by them, where other files are arrays."""
FORMAT = 1
OPTION = "--per-document"
AGAIN = f"llmrecipes eval RUN --data train {OPTION} DIR, with a RUN trained on these sources"
BLOCK = 1 << 24
"""Bytes of losses that are checked at once."""


def compression_ratio(text: bytes) -> float:
    """Bytes of a text after DEFLATE at its fastest level, by its bytes: low where it repeats itself."""
    return len(zlib.compress(text, 1, wbits=-zlib.MAX_WBITS)) / len(text)


def order_by_difficulty(
    parts: Mapping[int, tuple[GPTDataset, int]], prepared: Prepared, curriculum: Curriculum, cache: Path
) -> None:
    """Order the training samples of all sources that are drawn from.

    Args:
        parts: by the number of the source: its dataset, whose indices have just been built, and samples that the run
            draws from it.
        prepared: the opened folder.
        curriculum: how.
        cache: folder of the indices; with losses of another model it gets their record.

    Raises:
        UserError: such losses are missing, or are not those of these documents.
    """
    scores: Mapping[int, np.ndarray] = {}
    if curriculum.scores is not None:
        record, content = read_record(Path(curriculum.scores), _where(curriculum))
        scores = _losses(Path(curriculum.scores), record, prepared, list(parts))
        write_synced(cache / KEPT, content)
    elif curriculum.score == "compression_ratio":
        scores = {number: np.memmap(prepared.path / f"{stem(number, 'train')}{SUFFIX}", "<f4", "r") for number in parts}
    for number, (part, drawn) in parts.items():
        _order_source(part, scores.get(number), drawn, curriculum)


def _order_source(source: GPTDataset, scores: np.ndarray | None, drawn: int, curriculum: Curriculum) -> None:
    """Rewrite the indices of a source: first the ordered samples, then the others as they are shuffled.

    Args:
        source: whose indices have just been built.
        scores: scores of its documents; None: their lengths.
        drawn: samples that the run draws from it.
        curriculum: how.
    """
    from megatron.core.datasets import helpers

    lengths: np.ndarray = source.dataset.sequence_lengths.copy()
    scores = lengths if scores is None else scores
    config = source.config
    passes = len(source.document_index) // len(lengths)
    count = round(drawn * curriculum.share)
    tokens = count * config.sequence_length + 1  # and the label of the last one
    documents = ordered(lengths, scores, passes, tokens, config.random_seed, curriculum)
    samples = helpers.build_sample_idx(
        lengths, documents, config.sequence_length, passes, int(lengths.sum(dtype=np.int64)), True, True
    )
    shuffled = np.asarray(source.shuffle_index)
    order = np.concatenate([np.arange(count, dtype=shuffled.dtype), shuffled[shuffled >= count]])
    base = f"{source.unique_description_hash}-{type(source).__name__}-{source.index_split.name}"
    for name, values in (("document_index", documents), ("sample_index", samples), ("shuffle_index", order)):
        file = Path(config.path_to_cache, f"{base}-{name}.npy")
        part = file.with_suffix(".part")
        with part.open("wb") as stream:  # beside the old one, which may be mapped into memory
            np.save(stream, values)
        part.replace(file)


def ordered(
    lengths: np.ndarray, scores: np.ndarray, passes: int, tokens: int, seed: int, curriculum: Curriculum
) -> np.ndarray:
    """Numbers of documents [passes × documents] in int32, each pass shuffled and then sorted window by window.

    Args:
        lengths: tokens of each document.
        scores: scores of each document.
        passes: over all documents.
        tokens: from the first on, whose documents are sorted.
        seed: seed of the run.
        curriculum: how.
    """
    places = []
    for turn in range(passes):
        order = np.random.default_rng((seed, turn)).permutation(len(lengths)).astype(np.int32)
        ends = np.cumsum(lengths[order], dtype=np.int64)
        within = min(tokens, int(ends[-1]))
        tokens -= within
        borders = [within * number // curriculum.windows for number in range(curriculum.windows + 1)]
        # A window ends with the document that has its last token.
        edges = [0, *(int(np.searchsorted(ends, border)) + 1 for border in borders[1:])] if within else []
        for first, last in pairwise(edges):
            window = order[first:last]
            keys = scores[window]
            order[first:last] = window[np.argsort(keys if curriculum.order == "ascending" else -keys, kind="stable")]
        places.append(order)
    return np.concatenate(places)


# -- losses of another model ------------------------------------------------------------------------------------------


class ScoredSource(Record):
    """The losses of a source's documents: a little-endian float32 each, in the order of its tokens."""

    label: str
    documents: int
    texts: str
    """SHA-256 of `NN-<split>.sha256`, the digests of its texts: whose losses these are."""
    file: Annotated[str, Field(pattern=r"^[0-9]+\.scores$")]
    sha256: str


class ScoresRecord(Record):
    """The content of `scores.json`."""

    format: int
    split: Split
    model: str
    """Checkpoint or folder that the losses are of."""
    window: int
    stride: int
    """Of the windows in which a document was read, in tokens."""
    sources: tuple[ScoredSource, ...]


def _where(curriculum: Curriculum) -> str:
    return f"data.curriculum.scores: {curriculum.scores}"


def read_record(folder: Path, where: str) -> tuple[ScoresRecord, bytes]:
    """The record of a folder of losses, and the bytes of its file.

    Args:
        folder: folder of the losses.
        where: key and value that name it.

    Raises:
        UserError: there is none, it is corrupt, or of another split.
    """
    try:
        content = untrusted.read(folder / RECORD, root=folder)
        record = ScoresRecord.model_validate_json(content)
    except OSError as error:
        raise UserError(
            f"{RECORD} is missing",
            where=where,
            rule="a curriculum orders documents by losses computed beforehand",
            fix=AGAIN,
        ) from error
    except (ValidationError, UserError) as error:
        raise UserError(
            "is corrupt", where=str(folder / RECORD), rule=f"the file must be as {OPTION} wrote it", fix=AGAIN
        ) from error
    if record.format != FORMAT:
        raise UserError(
            f"has format {record.format}",
            where=str(folder / RECORD),
            rule=f"this version reads format {FORMAT}",
            fix=AGAIN,
        )
    if record.split != "train":
        raise UserError(
            f"has losses of the {record.split} split",
            where=where,
            rule="a curriculum needs losses of the train split",
            fix=AGAIN,
        )
    return record, content


def digests(prepared: Prepared, number: int, split: Split) -> str | None:
    """What tells the documents of a split of a source from others, None if it has only tokens."""
    file = prepared.manifest.files.get(f"{stem(number, split)}.sha256")
    return None if file is None else file.sha256


def _losses(folder: Path, record: ScoresRecord, prepared: Prepared, numbers: Sequence[int]) -> dict[int, np.ndarray]:
    """The losses of each source's training documents, mapped into memory, after one look at each of them.

    Raises:
        UserError: a source has none, or they are damaged or not finite.
    """
    by_texts = {source.texts: source for source in record.sources}
    by_label = {source.label: source for source in record.sources}
    losses = {}
    for number in numbers:
        source = prepared.manifest.sources[number]
        scored = by_texts.get(digests(prepared, number, "train") or "")
        documents = source.splits["train"].documents
        if scored is None or scored.documents != documents:
            other = by_label.get(source.label)
            has = "no losses" if other is None else f"losses of {other.documents:,} documents with other texts"
            raise UserError(
                f"{has} for source {source.label!r}, which has {documents:,} training documents",
                where=f"data.curriculum.scores: {folder}",
                rule="every training document of a source in use needs a loss",
                fix=AGAIN,
            )
        losses[number] = _intact(folder, scored)
    return losses


def _intact(folder: Path, scored: ScoredSource) -> np.ndarray:
    path = folder / scored.file
    checksum = hashlib.sha256()
    finite = True
    try:
        with untrusted.open_file(path, root=folder) as stream:
            while block := stream.read(BLOCK):
                checksum.update(block)
                finite = finite and len(block) % 4 == 0 and bool(np.isfinite(np.frombuffer(block, "<f4")).all())
            size = stream.tell()
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", where=str(path), fix=AGAIN) from error
    if size != 4 * scored.documents or checksum.hexdigest() != scored.sha256:
        raise UserError(
            f"has {size:,} bytes and SHA-256 {checksum.hexdigest()[:16]}…",
            where=str(path),
            rule=f"{RECORD} expects {4 * scored.documents:,} bytes and {scored.sha256[:16]}…",
            fix=AGAIN,
        )
    if not finite:
        raise UserError("has a loss that is not finite", where=str(path), rule="losses must be finite", fix=AGAIN)
    return np.memmap(path, "<f4", "r", shape=(scored.documents,))


def require_same_scores(curriculum: Curriculum | None, index: Path) -> None:
    """Refuse an order of samples that was made by other losses than the folder has now, if it is still there.

    Args:
        curriculum: curriculum of the recipe.
        index: folder of the order, which has been checked.

    Raises:
        UserError: it was.
    """
    if curriculum is None or curriculum.scores is None:
        return
    try:
        now = untrusted.read(Path(curriculum.scores, RECORD))
    except OSError:
        return
    if now != untrusted.read(index / KEPT):
        raise UserError(
            "its losses differ from those that the sample order was built from",
            where=_where(curriculum),
            rule="the sample order of a recipe must not change",
            fix=f"use another folder for the new losses, or delete {index} if no run has to resume with it",
        )


def ordering(curriculum: Curriculum, index: Path) -> dict[str, object]:
    """What an order depends on besides documents and seed: the keys, and of losses their record, not where it was.

    Args:
        curriculum: curriculum of the recipe.
        index: folder of the order, which has been checked.
    """
    keys = curriculum.model_dump(exclude_none=True)
    if keys.pop("scores", None) is not None:
        keys["losses"] = hashlib.sha256(untrusted.read(index / KEPT)).hexdigest()
    return keys


class ScoreWriter:
    """Writes the losses of a split's documents, one by one, into a folder that gets its name when it is complete.

    It holds one file open, and nothing else grows with the number of documents.

    Args:
        folder: that is written; `require_free` has checked it.
        prepared: whose documents.
        split: the split that they belong to.
        model: that the losses are of.
        window, stride: see `ScoresRecord`.
    """

    def __init__(self, folder: Path, prepared: Prepared, split: Split, model: str, window: int, stride: int) -> None:
        self._folder, self._part = folder, folder.with_name(f".{folder.name}.part")
        self._prepared = prepared
        self._split = split
        self._about = {"format": FORMAT, "split": split, "model": model, "window": window, "stride": stride}
        self._left = [number for number, each in enumerate(prepared.manifest.sources) if each.splits[split].documents]
        self._written: list[ScoredSource] = []
        self._missing = 0
        shutil.rmtree(self._part, ignore_errors=True)
        self._part.mkdir(parents=True)

    def add(self, nats: float, tokens: int) -> None:
        """Add the next document.

        Args:
            nats: sum of the negative log-probabilities of its tokens.
            tokens: their number; 0 has a loss of 0.

        Raises:
            UserError: the loss is not finite.
        """
        if not self._missing:
            self._begin()
        loss = nats / max(tokens, 1)
        source = self._prepared.manifest.sources[self._number]
        if not math.isfinite(loss):
            document = source.splits[self._split].documents - self._missing
            raise UserError(
                f"document {document:,} of source {source.label!r} has loss {loss}",
                where=OPTION,
                rule="losses must be finite",
                fix="use another checkpoint",
            )
        value = np.float32(loss).astype("<f4").tobytes()
        self._stream.write(value)
        self._checksum.update(value)
        self._missing -= 1
        if not self._missing:
            self._end()

    def _begin(self) -> None:
        self._number = self._left.pop(0)
        self._missing = self._prepared.manifest.sources[self._number].splits[self._split].documents
        self._checksum = hashlib.sha256()
        self._stream = (self._part / self._file).open("wb")

    @property
    def _file(self) -> str:
        return f"{self._number:02d}{SUFFIX}"

    def _end(self) -> None:
        self._stream.close()
        sync(self._part / self._file)
        source = self._prepared.manifest.sources[self._number]
        self._written.append(
            ScoredSource(
                label=source.label,
                documents=source.splits[self._split].documents,
                texts=digests(self._prepared, self._number, self._split) or "",
                file=self._file,
                sha256=self._checksum.hexdigest(),
            )
        )

    def publish(self) -> None:
        """Give the folder its name, after the last document."""
        if self._left or self._missing:
            raise ValueError(f"{self._missing} documents of source {self._number} are missing, and {self._left}")
        record = ScoresRecord.model_validate({**self._about, "sources": tuple(self._written)})
        write_synced(self._part / RECORD, record.model_dump_json(indent=2).encode() + b"\n")
        sync(self._part)
        self._part.rename(self._folder)

    def discard(self) -> None:
        """Delete what was not published."""
        shutil.rmtree(self._part, ignore_errors=True)


def require_free(folder: Path, prepared: Prepared, split: Split) -> None:
    """Refuse a folder that exists, and data whose texts are not known.

    Raises:
        UserError: with the option.
    """
    if folder.exists():
        raise UserError(
            f"{folder} already exists",
            where=OPTION,
            rule="losses are written to a new folder",
            fix="choose another folder",
        )
    for number, source in enumerate(prepared.manifest.sources):
        if source.splits[split].documents and digests(prepared, number, split) is None:
            raise UserError(
                f"source {source.label!r} has only token ids",
                where=OPTION,
                rule="losses are matched to documents by their text",
                fix="use a source of text instead of type megatron",
            )
