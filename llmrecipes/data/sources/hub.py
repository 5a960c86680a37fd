"""Datasets of the Hugging Face Hub: the files of a split, read by ranges, or its rows.

A dataset of Parquet or JSON lines is read by its data files, as those of a store: nothing is downloaded whole, tasks
share the files, and a Hub that does not answer is asked again. Other forms are read through `datasets`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from llmrecipes.data.sources.rows import Rows, section
from llmrecipes.errors import UserError
from llmrecipes.recipe.sections.source import HubSource
from llmrecipes.stores import StoreFile, is_final, patiently

_ROWS = 1000
_LINES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".jsonl.xz", ".jsonl.bz2", ".json.gz", ".json.zst")
"""A plain `.json` may be one list of all rows, which `datasets` reads."""
_FIX = "check path, name, split and revision, and that this machine reaches the Hub (HF_ENDPOINT)"


def split_of(source: HubSource) -> str:
    """The split that is read."""
    return source.split or "train"


def data_files(source: HubSource) -> list[Path | StoreFile]:
    """The files of a dataset's split, in the order of the dataset; none if it cannot be read by files.

    A process asks once: the commit is the same for all its files.

    Raises:
        UserError: no such dataset, configuration or split, or the Hub has not answered for `stores.PATIENCE_SECONDS`.
    """
    try:
        return list(_data_files(source.path, source.name, split_of(source), source.revision))
    except UserError as error:
        what = f"cannot read dataset {source.path!r}: {error.what}"
        raise UserError(what, where=section(source), fix=_FIX, again=error.again) from error


@cache
def _data_files(path: str, name: str | None, split: str, revision: str | None) -> tuple[Path | StoreFile, ...]:
    import datasets
    import huggingface_hub

    if huggingface_hub.constants.HF_HUB_OFFLINE and not Path(path).is_dir():
        return ()  # what `datasets` has in its cache
    builder = patiently(lambda: datasets.load_dataset_builder(path, name, revision=revision), path, _is_final)
    config = builder.config
    named = [str(data_file) for data_file in (config.data_files or {}).get(split, ())]
    by_lines = builder.name == "json" and getattr(config, "field", None) is None
    suffixes = _LINES if by_lines else (".parquet",) if builder.name == "parquet" else ()
    if not named or not all(url.endswith(suffixes) for url in named):
        return ()
    if not any("://" in url for url in named):
        return tuple(map(Path, named))
    if not all(url.startswith("hf://") for url in named):
        return ()

    def listed() -> tuple[StoreFile, ...]:
        import fsspec  # type: ignore[import-untyped]

        fs, _ = fsspec.core.url_to_fs(named[0])  # it lists a folder once
        return tuple(StoreFile(url, int(fs.info(url)["size"])) for url in named)

    return patiently(listed, path, _is_final)


def _is_final(error: Exception) -> bool:
    """Whether asking again would not help: `datasets` and the Hub's library have errors of many kinds."""
    answered = getattr(error, "response", None) is not None
    network = isinstance(error, (ConnectionError, TimeoutError)) or type(error).__module__.startswith("http")
    return is_final(error) or not (answered or network)


def rows(source: HubSource, of: Rows) -> Iterator[str | None]:
    """The documents of a dataset that is not read by files.

    Raises:
        UserError: it cannot be read.
    """
    import datasets

    path, row = source.path, 0
    try:
        dataset: Any = datasets.load_dataset(
            path,
            source.name,
            split=split_of(source),
            revision=source.revision,
            streaming=source.max_tokens is not None,  # only the files that are read are fetched
        )
        columns = of.columns(dataset.column_names or list(dataset._resolve_features().features or ()), path)
        for batch in dataset.select_columns(columns).with_format("arrow").iter(batch_size=_ROWS):
            for value in batch.to_pylist():
                row += 1
                if of.wanted(value):
                    yield of.document(value, f"{path}: row {row}")
    except UserError:
        raise
    except Exception as error:  # HTTP, DNS, authentication, parsing: each library below has its own errors
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        after = f" after row {row:,}" if row else ""
        what = f"cannot read dataset {path!r}{after}: {reason}"
        raise UserError(what, where=section(source), fix=_FIX, again=True) from error
