"""The step that drops documents which contain text of evaluation sets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llmrecipes.data.sources.file_parts import MOST_BYTES, bounded_lines, damages, decompressor, too_large
from llmrecipes.data.steps.eval_files import files, task_files
from llmrecipes.data.steps.steps import Step
from llmrecipes.data.steps.words import sequences
from llmrecipes.errors import UserError

_ROWS = tuple(f".{name}{end}" for name in ("jsonl", "json") for end in ("", ".gz", ".zst", ".xz", ".bz2"))


def decontaminate(paths: list[str] | None, ngram_words: int, tasks: dict[str, list[str]] | None = None) -> Step:
    """Drop documents that have a sequence of `ngram_words` words in common with a text of the files.

    Words (`words.words`) are in lower case, without punctuation. GPT-3's sequences have 13 (Brown et al. 2020, arXiv
    2005.14165, appendix C), and what is around them is removed; this step drops the document. Texts with fewer words
    are not looked for. Counted by the name of the file or task. Every process holds the hashes of all sequences: some
    100 bytes a word.

    Args:
        paths: files or globs: of JSON lines and Parquet every string of a row is a text, of samples that
            lm-evaluation-harness logs those of the document and its answer; a YAML file is a task of it whose data are
            local files; any other file is one text.
        ngram_words: words of a sequence.
        tasks: files of tasks of lm-evaluation-harness, by name.
    """
    names: dict[int, str] = {}
    named_files = [(file.name, file) for file in files(paths or [])]
    named_files += [(name, Path(file)) for name, of_task in (tasks or {}).items() for file in of_task]
    for name, file in named_files:
        for text in _texts(file):
            for gram in sequences(text, ngram_words):
                names.setdefault(hash(gram), name)

    def step(texts: list[str]) -> list[str] | str:
        for gram in sequences("\n".join(texts), ngram_words):
            if name := names.get(hash(gram)):
                return name
        return texts

    return step


def _texts(file: Path) -> Iterator[str]:
    name = file.name.lower()
    if name.endswith((".yaml", ".yml")):
        for task_file in task_files(file):
            yield from _texts(task_file)
    elif name.endswith(".parquet"):
        yield from _columns(file)
    elif name.endswith(_ROWS):
        yield from _rows(file)
    else:
        try:
            if file.stat().st_size > MOST_BYTES:
                raise too_large(str(file))
            yield file.read_text("utf-8")
        except (OSError, ValueError) as error:
            raise UserError(f"cannot read: {error}", where=str(file)) from error


def _rows(file: Path) -> Iterator[str]:
    where = str(file)
    unpack = decompressor(file.name)
    errors: tuple[type[Exception], ...] = (OSError, *damages())
    try:
        with file.open("rb") as raw, raw if unpack is None else unpack(raw, mode="rb") as stream:
            for line in bounded_lines(stream, file):
                where, row = line
                if row.strip():
                    yield from _strings(_question(json.loads(row)))
    except errors as error:
        raise UserError(f"cannot read: {error}", where=where) from error


def _question(row: Any) -> Any:
    """Document and answer of a row that lm-evaluation-harness writes with `--log_samples`: the rest is examples of
    other documents and what a model said."""
    if isinstance(row, dict) and {"doc_id", "doc", "arguments"} <= set(row):
        return [row["doc"], row.get("target")]
    return row


def _columns(file: Path) -> Iterator[str]:
    import pyarrow as pa  # type: ignore[import-untyped]
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    try:
        with pq.ParquetFile(file) as table:
            for batch in table.iter_batches(batch_size=1000):
                yield from _strings(batch.to_pylist())
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"cannot read: {str(error).splitlines()[0]}", where=str(file)) from error


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _strings(item)
