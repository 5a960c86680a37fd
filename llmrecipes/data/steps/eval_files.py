"""Files of evaluation sets: by path, by a task file of lm-evaluation-harness, and by the name of one of its tasks.

The harness is not started, and nothing is downloaded. Which dataset a task has is read from the YAML files in the
installed package, without the Python code that they name; the files of a dataset of the Hub are those in its cache on
this machine.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from llmrecipes.errors import UserError
from llmrecipes.packages import find_spec

WHERE = "data.steps[].tasks"
_DATA = re.compile(r"\.(parquet|csv|tsv|txt|jsonl?(\.(gz|zst|xz|bz2))?)$", re.IGNORECASE)
_SPLITS = ("test_split", "validation_split")


class _TaskLoader(yaml.SafeLoader):
    """Loads a task file, of which only names are used: tags such as `!function` are nothing."""


_TaskLoader.add_constructor(None, lambda loader, node: None)


def files(paths: list[str]) -> list[Path]:
    """The files of paths and globs, sorted.

    Raises:
        UserError: a path that has none.
    """
    unique: set[Path] = set()
    for path in paths:
        matches = {Path(name) for name in glob.glob(str(Path(path).expanduser()), recursive=True)}  # noqa: PTH207
        here = {file for file in matches if file.is_file()}
        if not here:
            raise UserError(
                f"no file matches {path!r}",
                where="data.steps[].paths",
                rule="paths must be files or globs",
                fix=f"use an existing path; looked in {Path.cwd()}",
            )
        unique |= here
    return sorted(unique)


def task_files(task: Path) -> list[Path]:
    """The files of the data of a task of lm-evaluation-harness, as its YAML file names them in `dataset_kwargs`.

    Raises:
        UserError: it cannot be read, or its data is a dataset of the Hub.
    """
    settings = _settings(task)
    named = _data_files(settings)
    if not named or any("://" in path for path in named):
        origin = settings.get("dataset_path")
        raise UserError(
            f"the data of this task is not in local files{f', but in {origin!r}' if origin else ''}",
            where=str(task),
            rule="a task file must list its data in dataset_kwargs.data_files",
            fix="add the dataset's files to paths, for example the Parquet files in $HF_HOME/hub/datasets--ORG--NAME",
        )
    return files(named)


def _data_files(settings: dict[str, Any]) -> list[str]:
    keys = settings.get("dataset_kwargs")
    named = keys.get("data_files") if isinstance(keys, dict) else None
    by_split = list(named.values()) if isinstance(named, dict) else [named]
    return [path for pattern in by_split for path in _listed(pattern)]


@lru_cache(maxsize=4)
def files_of_tasks(names: tuple[str, ...]) -> dict[str, tuple[Path, ...]]:
    """The files of the data of tasks, groups and tags of the harness, by name.

    Raises:
        UserError: the harness is not installed, it has no such task, or its data is not on this machine.
    """
    package = find_spec("lm_eval")
    if package is None or not package.submodule_search_locations:
        raise UserError(
            f"task {names[0]!r} needs the package lm_eval, which is not installed",
            where=WHERE,
            rule="tasks are those of lm-evaluation-harness, in the extra eval",
            fix="pip install 'llmrecipes[eval]', or list files in paths",
        )
    texts = {}
    for file in sorted(Path(package.submodule_search_locations[0], "tasks").rglob("*.yaml")):
        texts[file] = file.read_text("utf-8", errors="replace")
    by_task: dict[str, tuple[Path, ...]] = {}
    for name in names:
        paths = [path for settings in _tasks(name, texts, set()) for path in _files(name, settings)]
        by_task[name] = tuple(dict.fromkeys(paths))
    return by_task


def _tasks(name: str, texts: dict[Path, str], seen: set[str]) -> Iterator[dict[str, Any]]:
    """The settings of all tasks that a name stands for."""
    if name in seen:
        return
    seen.add(name)
    quoted = rf"['\"]?{re.escape(name)}['\"]?\s*(#.*)?$"
    named = re.compile(rf"^['\"]?(task|group)['\"]?:\s*{quoted}", re.MULTILINE)
    tagged = re.compile(rf"^\s*(-\s*|['\"]?tag['\"]?:\s*){quoted}", re.MULTILINE)
    matching = [settings for file, text in texts.items() if named.search(text) for settings in [_settings(file)]]
    if not matching:
        group_settings = (_settings(file) for file, text in texts.items() if tagged.search(text))
        matching = [settings for settings in group_settings if name in _listed(settings.get("tag"))]
    if not matching:
        raise UserError(
            f"{name!r} is not a task of the installed lm-evaluation-harness",
            where=WHERE,
            rule="tasks takes names of tasks, groups and tags; files go into paths",
            fix="`lm-eval ls tasks` lists them",
        )
    for settings in matching:
        parts = settings.get("task")
        if isinstance(parts, list):
            for part in parts:
                yield from _part(part, settings, texts, seen)
        else:
            yield settings


def _part(part: Any, settings: dict[str, Any], texts: dict[Path, str], seen: set[str]) -> Iterator[dict[str, Any]]:
    """The settings of a part of a group: the name of a task, or settings that may have one."""
    inner = part.get("task") if isinstance(part, dict) else part
    if isinstance(inner, str) and not (isinstance(part, dict) and "dataset_path" in part):
        yield from _tasks(inner, texts, seen)
    elif isinstance(part, dict):
        yield {**settings, **part}


def _listed(value: Any) -> list[str]:
    return [str(item) for item in value] if isinstance(value, list) else [] if value is None else [str(value)]


def _settings(file: Path, depth: int = 0) -> dict[str, Any]:
    """The values of a task file with those of the files that it includes."""
    try:
        values = yaml.load(file.read_text("utf-8"), Loader=_TaskLoader)  # noqa: S506 (a SafeLoader)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"cannot read: {str(error).splitlines()[0]}", where=str(file)) from error
    if not isinstance(values, dict):
        return {}
    settings: dict[str, Any] = {}
    for included in _listed(values.pop("include", None)) if depth < 8 else ():
        settings |= _settings(file.parent / included, depth + 1)
    return settings | values


def _files(name: str, settings: dict[str, Any]) -> Sequence[Path]:
    dataset, task = settings.get("dataset_path"), settings.get("task", name)
    if named := _data_files(settings):
        return files(named)
    folder = None if not isinstance(dataset, str) else _cached(dataset)
    paths = [] if folder is None else [path for path in sorted(folder.rglob("*")) if _DATA.search(path.name)]
    if not paths:
        raise UserError(
            f"dataset {dataset!r} of task {task!r} is not on this machine",
            where=WHERE,
            rule="prepare reads datasets of tasks from the Hub cache (HF_HOME), as Parquet, JSON, CSV or text",
            fix=f"`hf download --repo-type dataset {dataset}` where there is network, or list its files in paths",
        )
    return _of_splits(_of_configuration(paths, folder, settings.get("dataset_name")), settings)


def _cached(dataset: str) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(dataset, repo_type="dataset", local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None


def _of_configuration(paths: list[Path], folder: Path | None, name: Any) -> list[Path]:
    """The files in the folder of a dataset's configuration, if it has a folder; else all."""
    inside = [path for path in paths if folder is not None and str(name) in path.relative_to(folder).parts[:-1]]
    return inside or paths


def _of_splits(paths: list[Path], settings: dict[str, Any]) -> list[Path]:
    """The files whose names begin with a split that is evaluated, if there are any; else all."""
    splits = tuple(str(settings[key]) for key in _SPLITS if settings.get(key))
    return [path for path in paths if splits and path.name.startswith(splits)] or paths
