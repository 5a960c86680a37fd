"""The step that drops documents which contain text of evaluation sets."""

from __future__ import annotations

import glob
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llmrecipes.data.copies import shingles
from llmrecipes.data.steps import Step
from llmrecipes.errors import UserError

_ROWS = (".jsonl", ".json")


def decontaminate(paths: list[str], ngram_words: int) -> Step:
    """Drop documents that have a sequence of `ngram_words` words in common with a text of the files.

    Words are in lower case, without punctuation. GPT-3's sequences have 13 (Brown et al. 2020, arXiv 2005.14165,
    appendix C), and what is around them is removed; this step drops the document. Texts with fewer words are not
    looked for. Counted by the name of the file. Every process holds the hashes of all sequences: some 100 bytes a word.

    Args:
        paths: files or globs: of JSON lines every string of a row is a text, any other file is one.
        ngram_words: words of a sequence.
    """
    names: dict[int, str] = {}
    for file in files(paths):
        for text in _texts(file):
            for gram in shingles(text, ngram_words):
                if gram.count(" ") == ngram_words - 1:
                    names.setdefault(hash(gram), file.name)

    def step(texts: list[str]) -> list[str] | str:
        for gram in shingles("\n".join(texts), ngram_words):
            if name := names.get(hash(gram)):
                return name
        return texts

    return step


def files(paths: list[str]) -> list[Path]:
    """The files of paths and globs, sorted.

    Raises:
        UserError: a path that has none.
    """
    every: set[Path] = set()
    for path in paths:
        matches = {Path(name) for name in glob.glob(str(Path(path).expanduser()), recursive=True)}  # noqa: PTH207
        here = {file for file in matches if file.is_file()}
        if not here:
            raise UserError(
                f"no file {path!r}",
                where="data.steps[].paths",
                rule="paths of decontaminate are files or globs",
                fix=f"name files that exist; looked in {Path.cwd()}",
            )
        every |= here
    return sorted(every)


def _texts(file: Path) -> Iterator[str]:
    line = 0
    try:
        if file.suffix not in _ROWS:
            yield file.read_text("utf-8")
            return
        with file.open(encoding="utf-8") as stream:
            for row in stream:
                line += 1
                if row.strip():
                    yield from _strings(json.loads(row))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read: {error}", where=f"{file}:{line}" if line else str(file)) from error


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _strings(each)
