"""The harness's tasks: checked and loaded, with their data, before a model is.

A task of the harness is its authors' code, installed as a package, and runs as such. A task file of the user is data
(`task_files`): what runs is what was parsed and checked, and the harness never sees the file.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmrecipes.errors import UserError
from llmrecipes.evaluation.sandbox import sandboxed_templates
from llmrecipes.evaluation.task_files import (
    LOADERS,
    Code,
    Group,
    TaskFile,
    TaskOverride,
    checked,
    read_folder,
    read_task_file,
    require_data,
)
from llmrecipes.packages import find_spec

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

logger = logging.getLogger(__name__)

OPTION = "--task"
SECONDS_TO_HUB = 5.0
MOST_TASKS = 2000
"""Tasks of the groups in task files; groups that contain others can multiply."""


@dataclass(frozen=True)
class Tasks:
    """Loaded tasks.

    Attributes:
        names: as the user wrote them.
        built: the harness's tasks and groups.
        manager: manager of the harness's own tasks.
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


def load_tasks(
    names: Sequence[str], include: Path | None = None, where: str = OPTION, *, trust_code: bool = False
) -> Tasks:
    """Load tasks and their data.

    Args:
        names: tasks, groups or tags of the harness or of `include`, or paths of YAML files.
        include: folder with more task files.
        where: option or key that named them.
        trust_code: run the code that task files name; only in an isolated process.

    Raises:
        UserError: the harness is not installed; an unknown task, with the nearest; a task file that is corrupt or
            is code; data that is missing, or is on the Hub where this machine does not reach it.
    """
    require_harness(where)
    if trust_code:
        from llmrecipes.evaluation.isolation import require_isolated

        require_isolated()
    files = {name: read_task_file(Path(name), where) for name in names if name.endswith((".yaml", ".yml"))}
    folder = {} if include is None else {file.name: file for file in read_folder(include, where)}
    if not trust_code:
        for file in (*files.values(), *folder.values()):
            require_data(file)
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns of every default that a task relies on
    files_only = (
        include is None and len(files) == len(names) and not any("group" in file.values for file in files.values())
    )
    manager = _manager(not files_only)
    for name, file in folder.items():
        if name in manager.task_index:
            raise UserError(
                f"{name!r} is already a task of the harness",
                where=str(file.path),
                rule="a file must not replace a task of the harness: its results would be taken for that task's",
                fix="use another name",
            )
    builder = _TaskBuilder(manager, folder, where, trust_code)
    with sandboxed_templates():
        built = [
            task
            for name in names
            for task in (builder.file(files[name], {}, ()) if name in files else builder.named(name, {}, ()))
        ]
    return Tasks(tuple(names), tuple(built), manager)


@cache
def _manager(defaults: bool) -> TaskManager:
    """The index of the harness's tasks, which takes seconds to read; without `defaults`, an empty one."""
    import lm_eval.tasks

    if defaults:
        logger.info("reading the index of the harness's tasks, which takes a few seconds")
    return lm_eval.tasks.TaskManager(include_defaults=defaults)


@dataclass
class _TaskBuilder:
    """Makes the harness's objects from parsed files, and from its tasks.

    Args:
        manager: manager of the harness's own tasks.
        folder: files of `--include-path`, by name.
        where: option or key that named the tasks.
        trust_code: see `load_tasks`.
    """

    manager: TaskManager
    folder: Mapping[str, TaskFile]
    where: str
    trust_code: bool
    _count: int = field(default=0, init=False)

    def named(
        self, name: str, overrides: dict[str, Any], above: tuple[str, ...], file: Path | None = None
    ) -> list[Any]:
        """A task, group or tag of the folder or the harness."""
        if name in self.folder:
            return self.file(self.folder[name], overrides, above)
        if tagged := [file for file in self.folder.values() if name in file.tags]:
            return [task for file in tagged for task in self.file(file, overrides, above)]
        if name in self.manager.task_index:
            return self._harness_task(name, overrides, file)
        near = difflib.get_close_matches(name, [*self.folder, *self.manager.all_tasks], n=3, cutoff=0.5)
        raise UserError(
            f"no task {name!r}",
            where=self.where if file is None else str(file),
            rule="a task, group or tag of lm-evaluation-harness, or the path of a task file",
            fix=f"did you mean {' or '.join(near)}?" if near else "lm-eval ls tasks lists them",
        )

    def file(self, file: TaskFile, overrides: dict[str, Any], above: tuple[str, ...]) -> list[Any]:
        """The task or group of a file."""
        if "group" in file.values:
            return [self._group(file.name, file.values, overrides, file.path, above)]
        return [self._task({**file.values, **overrides}, file.path)]

    def _group(
        self, name: str, values: Mapping[str, Any], overrides: dict[str, Any], file: Path, above: tuple[str, ...]
    ) -> Any:
        from lm_eval.api.group import Group as HarnessGroup
        from lm_eval.config.group import GroupConfig

        if name in above:
            raise UserError(f"group {name!r} contains itself", where=str(file), fix="remove it from its tasks")
        section = {key: values[key] for key in values.keys() & (Group.model_fields.keys() - {"task", "tag"})}
        config = checked(Group, section, file)
        children = values.get("task") or []
        group = HarnessGroup.from_config(GroupConfig(**{**config, "group": name}))
        common = {key: value for key, value in values.items() if key not in Group.model_fields} | overrides
        for child in children if isinstance(children, list) else [children]:
            for task in self._child(child, name, common, file, (*above, name)):
                group.add(task)
        return group

    def _child(self, child: Any, group: str, common: dict[str, Any], file: Path, above: tuple[str, ...]) -> list[Any]:
        if isinstance(child, str):
            return self.named(child, common, above, file)
        name = child.get("group", child.get("task")) if isinstance(child, dict) else None
        if not isinstance(name, str):
            raise UserError(
                f"{str(child)[:80]!r} is not a valid entry of group {group!r}",
                where=str(file),
                rule="the tasks of a group must be names, or mappings with task or group",
                fix="task: my_task",
            )
        known = name in self.folder or name in self.manager.task_index
        section = {key: value for key, value in child.items() if key not in ("task", "group") or not known}
        if known:
            return self.named(name, common | section, above, file)
        if "group" in child:
            return [self._group(f"{group}::{name}", section, common, file, above)]
        return [self._task({**common, **section, "task": f"{group}::{name}"}, file)]

    def _task(self, values: Mapping[str, Any], file: Path) -> Any:
        self._count += 1
        if self._count > MOST_TASKS:
            raise UserError(f"more than {MOST_TASKS} tasks", where=str(file), fix="evaluate fewer tasks at once")
        name = str(values["task"])
        _require_no_written_code(values, name, str(file))
        if self.trust_code:
            return self._made(str(file), name, [], lambda: _trusted(values))
        from llmrecipes.evaluation.data_task import DataTask, plain_config

        config = plain_config(values, file)
        path = config["dataset_path"]
        remote = [] if path in LOADERS or Path(path).is_dir() else [path]
        return self._made(str(file), name, remote, lambda: DataTask(config=config))

    def _harness_task(self, name: str, overrides: dict[str, Any], file: Path | None) -> list[Any]:
        """A task of the harness: its code is installed, and a file changes nothing that the code gets."""
        changed = checked(TaskOverride, overrides, file) if file is not None else {}
        remote = sorted(
            {path for config in _leaves(self.manager, name, set()) if (path := _data(config, name, self.where))}
        )
        entry = self.manager.task_index[name]
        index = self.manager.task_index
        task = self._made(
            name, name, remote, lambda: self.manager._factory.build(entry, overrides=changed or None, registry=index)
        )
        return task if isinstance(task, list) else [task]

    def _made(self, shown: str, name: str, remote: list[str], make: Callable[[], Any]) -> Any:
        unreachable = bool(remote) and not _reaches_hub()
        try:
            with _quiet(offline=unreachable):
                return make()
        except UserError:
            raise
        except Exception as error:  # of datasets, fsspec, HTTP, Jinja and the task itself
            reason = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
            if unreachable:
                raise UserError(
                    f"task {name!r} needs {', '.join(remote[:3])} from the Hugging Face Hub, which this machine does "
                    f"not reach, and it is not in the cache ({type(error).__name__}: {reason[:200]})",
                    where=self.where,
                    rule="a task's data must be readable before the model is loaded",
                    fix="use a machine with network, or copy its cache (HF_HOME); a task file with local data works "
                    "everywhere",
                ) from error
            raise UserError(
                f"task {shown!r} cannot be loaded: {type(error).__name__}: {reason[:300]}",
                where=self.where,
                fix="fix the task file or its data" if shown.endswith((".yaml", ".yml")) else "",
            ) from error


def _trusted(values: Mapping[str, Any]) -> Any:
    """A task with code, as the harness makes it."""
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks._factory import _ctor_accepts_config

    config = {key: _with_functions(value) for key, value in values.items() if key not in ("tag", "group")}
    kind = config.get("class")
    if kind is None:
        return ConfigurableTask(config=config)
    task = kind(config=config) if _ctor_accepts_config(kind) else kind()
    if hasattr(getattr(task, "config", None), "task"):
        task.config.task = config["task"]
    return task


def _with_functions(value: Any) -> Any:
    from lm_eval.tasks._yaml_loader import _import_func_in_yml

    if isinstance(value, Code):
        return _import_func_in_yml(value.name, value.folder)
    if isinstance(value, dict):
        return {key: _with_functions(inner) for key, inner in value.items()}
    return [_with_functions(inner) for inner in value] if isinstance(value, list) else value


def _leaves(manager: TaskManager, name: str, seen: set[str]) -> Iterator[dict[str, Any]]:
    """Configurations of the harness's tasks that a name stands for, with functions left as names."""
    from lm_eval.tasks._yaml_loader import load_yaml

    entry = manager.task_index.get(name)
    if entry is None or name in seen:
        return
    seen.add(name)
    if entry.yaml_path is None:
        config: dict[str, Any] = {}
        children: Any = sorted(entry.tags or ())
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


def _data(config: dict[str, Any], name: str, where: str) -> str | None:
    """The data set of a task of the harness on the Hub; None if its data is local.

    Raises:
        UserError: a task that runs generated code, or whose metric is code from the Hub; or a folder in the
            working directory has the name of its data set, and would be read in its place.
    """
    _require_no_written_code(config, name, where)
    for metric in () if config.get("process_results") else config.get("metric_list") or ():
        _require_own_metric(metric, name, where)
    path = config.get("dataset_path")
    if not isinstance(path, str) or config.get("custom_dataset") or path in LOADERS:
        return None
    if Path(path).exists():
        raise UserError(
            f"the folder {path} in the working directory has the name of the Hub dataset of task {name!r}",
            where=where,
            rule="a task of the harness must run on its own data: its code trusts that data, and its scores are "
            "compared",
            fix="run this in another folder",
        )
    return path


def _require_no_written_code(config: Mapping[str, Any], name: str, where: str) -> None:
    if config.get("unsafe_code"):
        raise UserError(
            f"task {name!r} runs code that the model writes",
            where=where,
            rule="text that a model writes is never executed",
            fix="another task",
        )


def _require_own_metric(metric: Any, name: str, where: str) -> None:
    from lm_eval.api.registry import metric_registry

    from llmrecipes.evaluation.data_task import unknown_metric

    known = isinstance(metric, dict) and (
        str(metric.get("metric")).endswith(".py")
        or "/" in str(metric.get("metric"))  # a function of the harness's own task, as a path
        or metric.get("metric") in metric_registry
    )
    if not known or metric.get("hf_evaluate"):
        raise unknown_metric(metric.get("metric") if isinstance(metric, dict) else metric, name, where)


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
    """A block in which `datasets` draws no bars, and, offline, uses only its cache, so that it never retries."""
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
