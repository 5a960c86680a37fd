"""The harness's tasks: found, checked and loaded before a model is.

A task of the harness is its authors' code and runs as such. A task file of the user is data: what would make it code
(`!function`, a class, another templating) is refused, and templates run in Jinja's sandbox.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from llmrecipes.errors import UserError

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

OPTION = "--task"
FILES = ("json", "csv", "parquet", "text", "arrow")
"""Loaders of the `datasets` library that read plain data; the others unpickle or run what they find."""
SECONDS_TO_HUB = 5.0


@dataclass(frozen=True)
class Tasks:
    """Loaded tasks.

    Attributes:
        names: as given.
        built: the harness's tasks and groups.
        manager: that has built them.
    """

    names: tuple[str, ...]
    built: tuple[Any, ...]
    manager: TaskManager


def require_harness(where: str = OPTION) -> None:
    """Refuse tasks where the harness is not installed.

    Raises:
        UserError: it is not.
    """
    if find_spec("lm_eval") is None:
        raise UserError(
            "the package lm_eval is not installed",
            where=where,
            rule="lm-evaluation-harness is optional: it is in the extra eval",
            fix="make setup in the checkout, or pip install 'llmrecipes[eval]'",
        )


def load_tasks(names: Sequence[str], include: Path | None = None, where: str = OPTION) -> Tasks:
    """Load tasks and their data.

    Args:
        names: tasks, groups or tags of the harness or of `include`, or paths of YAML files.
        include: folder with more task files.
        where: option or key that named them.

    Raises:
        UserError: the harness is not installed; an unknown task, with the nearest; a task file that is damaged or
            is code; data that is missing, or is on the Hub where this machine does not reach it.
    """
    require_harness(where)
    files = [name for name in names if name.endswith((".yaml", ".yml"))]
    alone = len(files) == len(names) and include is None
    for name in files:
        alone = require_data(Path(name), where) and alone
    if include is not None:
        if not include.is_dir():
            raise UserError("no such folder", where=f"--include-path {include}", fix="a folder with task files")
        for path in sorted(include.rglob("*.yaml")):
            require_data(path, where)
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns of every default that a task relies on
    manager = _manager(None if include is None else str(include), not alone)
    for name in names:
        if name not in files and name not in manager.task_index:
            near = difflib.get_close_matches(name, manager.all_tasks, n=3, cutoff=0.5)
            raise UserError(
                f"no task {name!r}",
                where=where,
                rule="a task, group or tag of lm-evaluation-harness, or the path of a task file",
                fix=f"one of {', '.join(near)}" if near else "lm-eval ls tasks lists them",
            )
    with sandboxed_templates():
        return Tasks(tuple(names), tuple(each for name in names for each in _load(manager, name, where)), manager)


@cache
def _manager(include: str | None, defaults: bool) -> TaskManager:
    """The index of tasks; that of the harness's own takes seconds to read."""
    import lm_eval.tasks

    return lm_eval.tasks.TaskManager(include_path=include, include_defaults=defaults)


def _load(manager: TaskManager, name: str, where: str) -> list[Any]:
    remote = sorted({path for config in _leaves(manager, name, set()) if (path := _on_hub(config, name, where))})
    unreachable = bool(remote) and not _reaches_hub()
    try:
        with _quiet(offline=unreachable):
            loaded = manager.load([name])
    except UserError:
        raise
    except Exception as error:  # of datasets, fsspec, HTTP, Jinja and the task itself
        reason = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
        if unreachable:
            raise UserError(
                f"task {name!r} needs {', '.join(remote[:3])} from the Hugging Face Hub, which this machine does not "
                f"reach, and it is not in the cache ({type(error).__name__}: {reason[:200]})",
                where=where,
                rule="a task's data is read before the model is loaded",
                fix="a machine with network, or its cache in HF_HOME; a task file with local data works everywhere",
            ) from error
        raise UserError(
            f"task {name!r} cannot be loaded: {type(error).__name__}: {reason[:300]}",
            where=where,
            fix="correct the task file or its data" if name.endswith((".yaml", ".yml")) else "",
        ) from error
    # Groups contain their tasks.
    inside = {child for children in loaded["group_map"].values() for child in children}
    groups = [group for key, group in loaded["groups"].items() if key not in inside]
    return groups or list(loaded["tasks"].values())


def _leaves(manager: TaskManager, name: str, seen: set[str]) -> Iterator[dict[str, Any]]:
    """Configurations of the tasks that a name stands for, with functions left as names."""
    from lm_eval.tasks._yaml_loader import load_yaml

    entry = manager.task_index.get(name)
    if name in seen:
        return
    seen.add(name)
    if entry is None:
        path = Path(name)
        config = load_yaml(path, resolve_func=False) if path.is_file() else {}
        children = config.get("task")
    elif entry.yaml_path is None:
        config, children = {}, sorted(entry.tags or ())
    else:
        config = load_yaml(entry.yaml_path, resolve_func=False)
        children = config.get("task")
    if not isinstance(children, list):
        yield config
        return
    for child in children:
        if isinstance(child, str):
            yield from _leaves(manager, child, seen)
        elif isinstance(child, dict):
            inner = child.get("task")
            if isinstance(inner, str) and inner in manager.task_index:
                yield from _leaves(manager, inner, seen)
            else:
                yield {**config, **child}


def _on_hub(config: dict[str, Any], name: str, where: str) -> str | None:
    """The dataset of a task on the Hub; None if its data is local.

    Raises:
        UserError: a task that runs generated code, or whose metric is code from the Hub.
    """
    if config.get("unsafe_code"):
        raise UserError(
            f"task {name!r} runs code that the model writes",
            where=where,
            rule="nothing that a model writes is executed here",
            fix="another task",
        )
    if not config.get("process_results"):
        for metric in config.get("metric_list") or ():
            _require_own_metric(metric, name, where)
    path = config.get("dataset_path")
    if not isinstance(path, str) or config.get("custom_dataset"):
        return None
    return None if path in FILES or Path(path).exists() else path


def _require_own_metric(metric: Any, name: str, where: str) -> None:
    from lm_eval.api.registry import metric_registry

    known = isinstance(metric, dict) and (
        str(metric.get("metric")).endswith(".py")
        or "/" in str(metric.get("metric"))  # a function of the harness's own task, as a path
        or metric.get("metric") in metric_registry
    )
    if not known or metric.get("hf_evaluate"):
        what = metric.get("metric") if isinstance(metric, dict) else metric
        raise UserError(
            f"metric {what!r} of task {name!r}",
            where=where,
            rule="a metric is one of the harness's: others are code that is downloaded from the Hub",
            fix="one of acc, acc_norm, exact_match, f1, perplexity, bits_per_byte, …",
        )


def require_data(path: Path, where: str = OPTION) -> bool:
    """Refuse a task file that is not plain data, with what it includes.

    Returns:
        Whether it is a task by itself, and not a group of others.

    Raises:
        UserError: it cannot be read, is no YAML mapping, or would run code.
    """
    alone = True
    for file, config in _files(path, where, ()):
        alone = alone and not isinstance(config.get("task"), list)
        for key, value in _pairs(config):
            if key in ("class", "use_prompt", "custom_dataset", "unsafe_code") and value:
                raise UserError(
                    f"has {key}",
                    where=str(file),
                    rule="a task file is data, without code of its own",
                    fix="doc_to_text, doc_to_choice and doc_to_target as templates",
                )
            if key == "dataset_path" and isinstance(value, str):
                _require_loader(value, file)
    return alone


def _require_loader(path: str, file: Path) -> None:
    local = Path(path).is_dir()
    if path in FILES or local or ("/" in path and not path.endswith(".py") and not path.startswith((".", "/"))):
        return
    raise UserError(
        f"dataset_path: {path}",
        where=str(file),
        rule=f"one of {', '.join(FILES)} with dataset_kwargs.data_files, an existing folder, or a name on the Hub",
        fix="dataset_path: json",
    )


def _files(path: Path, where: str, above: tuple[Path, ...]) -> Iterator[tuple[Path, dict[str, Any]]]:
    try:
        with path.open("rb") as stream:  # errors have its name
            config = yaml.load(stream, Loader=_Plain)  # noqa: S506 (a SafeLoader)
    except OSError as error:
        raise UserError(
            f"cannot read: {error.strerror}", where=str(path), fix=f"an existing file for {where}"
        ) from error
    except yaml.YAMLError as error:
        raise UserError(f"is no YAML: {' '.join(str(error).split())}", where=str(path), fix="correct it") from error
    if not isinstance(config, dict) or not (above or {"task", "group"} & config.keys()):
        raise UserError(
            "has no key task",
            where=str(path),
            rule="a task file is a mapping with the task's name",
            fix="task: my_task",
        )
    yield path, config
    includes = config.get("include") or []
    for name in includes if isinstance(includes, list) else [includes]:
        inner = path.parent / str(name)
        if inner.resolve() in (each.resolve() for each in (*above, path)):
            raise UserError(f"includes {name}, which includes it", where=str(path), fix="remove one of them")
        yield from _files(inner, where, (*above, path))


class _Plain(yaml.SafeLoader):
    """YAML of the harness's task files, without its functions."""


def _function(_loader: yaml.Loader, node: yaml.Node) -> Any:
    raise UserError(
        f"line {node.start_mark.line + 1}: !function {node.value}",
        where=str(node.start_mark.name),
        rule="a task file is data: !function would run Python code of this machine",
        fix="doc_to_text, doc_to_choice and doc_to_target as templates",
    )


_Plain.add_constructor("!function", _function)


def _pairs(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield str(key), inner
            yield from _pairs(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _pairs(inner)


@contextmanager
def sandboxed_templates() -> Iterator[None]:
    """A block in which the harness renders its templates in Jinja's sandbox, where they reach only a document."""
    import lm_eval.utils
    from jinja2.sandbox import SandboxedEnvironment

    before = lm_eval.utils.env
    sandbox = SandboxedEnvironment(loader=before.loader, undefined=before.undefined, keep_trailing_newline=True)
    sandbox.filters.update(before.filters)
    lm_eval.utils.env = sandbox
    try:
        yield
    finally:
        lm_eval.utils.env = before


def _reaches_hub() -> bool:
    """Whether the Hub answers, through the proxy that is configured."""
    import huggingface_hub
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        huggingface_hub.get_session().head(constants.ENDPOINT, timeout=SECONDS_TO_HUB)
    except Exception:  # of its HTTP library, DNS, TLS
        return False
    return True


@contextmanager
def _quiet(*, offline: bool) -> Iterator[None]:
    """A block in which `datasets` draws no bars, and, offline, uses its cache alone, so that it never retries."""
    import datasets.config
    from huggingface_hub import constants

    drawing = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    before = datasets.config.HF_DATASETS_OFFLINE, constants.HF_HUB_OFFLINE
    if offline:
        datasets.config.HF_DATASETS_OFFLINE = constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_DATASETS_OFFLINE, constants.HF_HUB_OFFLINE = before
        if drawing:
            datasets.enable_progress_bars()
