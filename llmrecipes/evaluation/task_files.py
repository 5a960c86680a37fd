"""Task files of users: read once, merged with what they include, and turned into plain values, which are what runs.

The harness reads a file again for each purpose, follows links, and imports the Python code that `!function` names.
This loader has no functions and reads the real file; code becomes a `Code`, which only `--trust-code` turns into a
function; everything else has to be a key of `Task`, `Group` or `TaskOverride`, whose types hold data only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import yaml
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from llmrecipes import untrusted
from llmrecipes.errors import UserError

LARGEST = 256 * 1024
"""Bytes of a task file."""
DEEPEST = 32
"""Levels of lists and mappings in it."""
MOST_FILES = 1000
"""Files that one includes, or in a folder of tasks."""
TRUST = "--trust-code, after reading the code: llmrecipes eval runs it without network and without your variables"
_ON_HUB = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_CODE = {
    "class": "names a class",
    "custom_dataset": "names a function",
    "process_docs": "names a function",
    "process_results": "names a function",
    "use_prompt": "names a file or package of prompts",
    "unsafe_code": "runs what the model writes",
}
"""Keys of the harness whose values are code."""


@dataclass(frozen=True)
class Code:
    """Python code that a task file names.

    Attributes:
        name: `module.function`, as in the file.
        folder: folder of the file, without links; the harness looks in it first.
        line: line of the file.
        file: for messages.
    """

    name: str
    folder: Path
    line: int
    file: Path


@dataclass(frozen=True)
class TaskFile:
    """A task or group, with all that it includes.

    Attributes:
        path: as the user wrote it, or of the folder's file.
        values: by key; plain, except for `Code`.
    """

    path: Path
    values: dict[str, Any]

    @property
    def name(self) -> str:
        """Name of the group, or of the task."""
        return str(self.values.get("group") or self.values["task"])

    @property
    def tags(self) -> list[str]:
        """Names of lists of tasks that it belongs to."""
        tags = self.values.get("tag") or []
        return [tags] if isinstance(tags, str) else [str(tag) for tag in tags]


def read_task_file(path: Path, where: str) -> TaskFile:
    """A task or group.

    Args:
        path: path of a YAML file.
        where: option or key that named it.

    Raises:
        UserError: it cannot be read, is corrupt, or has no name.
    """
    values = _Reader(where).merged(path)
    _require_name(values, path)
    return TaskFile(path, values)


def read_folder(folder: Path, where: str) -> list[TaskFile]:
    """The tasks and groups in a folder and below it; other files are for `include`.

    Raises:
        UserError: the folder does not exist, or a file cannot be read or is corrupt.
    """
    if not folder.is_dir():
        raise UserError("no such folder", where=f"--include-path {folder}", fix="a folder with task files")
    files = []
    for path in sorted(folder.rglob("*.yaml")):
        values = _Reader(where).merged(path)
        if {"task", "group"} & values.keys():
            _require_name(values, path)
            files.append(TaskFile(path, values))
        if len(files) > MOST_FILES:
            raise UserError(f"more than {MOST_FILES} tasks", where=str(folder), fix="a folder with task files only")
    return files


def require_data(file: TaskFile) -> None:
    """Refuse a file that is not data, whether or not its task is requested.

    Raises:
        UserError: see `checked`; of a group, only code.
    """
    if "group" not in file.values:
        require_loader(checked(Task, file.values, file.path), file.path)
    _refuse_code(file.values, file.path)


def checked(kind: type[TaskSection], values: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Values that are data, as they are passed to the harness.

    Args:
        kind: which keys there are.
        values: values of a file.
        file: for messages.

    Raises:
        UserError: one that is code, unknown, or of another type.
    """
    _refuse_code(values, file)
    try:
        data = kind.model_validate({key: value for key, value in values.items() if key not in _CODE})
    except ValidationError as error:
        raise _invalid(error, kind, file) from error
    return data.model_dump(exclude_unset=True)


def require_loader(config: Mapping[str, Any], file: Path) -> None:
    """Refuse data that is not in plain files.

    Raises:
        UserError: another loader, a script, or a URL.
    """
    path = config["dataset_path"]
    options = config.get("dataset_kwargs") or {}
    if not (path in LOADERS or Path(path).is_dir() or _ON_HUB.fullmatch(path)):
        raise UserError(
            f"dataset_path: {path}",
            where=str(file),
            rule=f"one of {', '.join(LOADERS)} with dataset_kwargs.data_files, a folder, or a name on the Hub",
            fix="dataset_path: json",
        )
    files = options.get("data_files") or []
    lists = list(files.values()) if isinstance(files, dict) else [files]
    names = [name for list_ in lists for name in (list_ if isinstance(list_, list) else [list_])]
    for name in (*names, options.get("data_dir") or ""):
        if "://" in name or "::" in name:
            raise UserError(
                f"dataset_kwargs: {name}",
                where=str(file),
                rule="data must be files of this machine, or a dataset on the Hub by its name",
                fix="download it, and use the file",
            )


def _invalid(error: ValidationError, kind: type[TaskSection], file: Path) -> UserError:
    first = error.errors(include_url=False, include_context=False)[0]
    key = ".".join(
        str(part) for part in first["loc"] if not str(part).startswith(("list[", "dict[", "str", "function"))
    )
    if kind is TaskOverride:
        rule = "a group can only change examples and delimiters of a task of the harness, which may be code"
        fix = "write a separate task, with its data and templates"
    elif first["type"] == "extra_forbidden":
        rule = "a task file may have those keys of lm-evaluation-harness that are data"
        fix = f"remove it; or {TRUST}"
    else:
        rule = "values of a task file must have the types of lm-evaluation-harness's keys"
        fix = f"fix {key}"
    missing = first["type"] == "missing"
    what = f"{key} is missing" if missing else f"{key}: {first['msg']}: {str(first['input'])[:80]!r}"
    return UserError(what, where=str(file), rule=rule, fix=f"add {key}" if missing else fix)


def _refuse_code(values: Mapping[str, Any], file: Path) -> None:
    for key, value in _pairs(values):
        if isinstance(value, Code):
            raise UserError(
                f"line {value.line}: {key}: !function {value.name}",
                where=str(value.file),
                rule="a task file must be data: !function runs Python code of this machine",
                fix=f"doc_to_text, doc_to_choice and doc_to_target as templates; or {TRUST}",
            )
        if key in _CODE and value:
            raise UserError(
                f"{key}: {_CODE[key]}",
                where=str(file),
                rule="a task file must be data, without code",
                fix=f"doc_to_text, doc_to_choice and doc_to_target as templates; or {TRUST}",
            )


def _pairs(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """All values, with their keys; those of a list have the list's."""
    yield key, value
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _pairs(inner, str(name))
    elif isinstance(value, list):
        for inner in value:
            yield from _pairs(inner, key)


def _require_name(values: Mapping[str, Any], path: Path) -> None:
    name = values.get("group", values.get("task"))
    if not isinstance(name, str) or not 0 < len(name) <= 200 or not name.isprintable():
        raise UserError(
            "has no key task",
            where=str(path),
            rule="a task file must be a mapping with the name of the task or group",
            fix="task: my_task",
        )


@dataclass
class _Reader:
    """One file, and those that it includes.

    Args:
        where: option or key that named the first.
    """

    where: str
    _seen: set[Path] = field(default_factory=set)

    def merged(self, path: Path, above: Path | None = None) -> dict[str, Any]:
        """Values of a file; they take precedence over those of included files, and later included ones over earlier."""
        try:
            real = untrusted.real(path.expanduser())
            data = untrusted.read(real, most=LARGEST)
        except OSError as error:
            raise UserError(
                f"cannot read: {error.strerror}", where=str(path), fix=f"an existing file for {self.where}"
            ) from error
        if real in self._seen or len(self._seen) >= MOST_FILES:
            raise UserError(
                f"includes {path.name} again",
                where=str(above),
                rule=f"a file may be included once, and at most {MOST_FILES} files",
                fix="remove the include",
            )
        self._seen.add(real)
        values = _parsed(data, path, real)
        includes = values.pop("include", None) or []
        merged: dict[str, Any] = {}
        for name in includes if isinstance(includes, list) else [includes]:
            if not isinstance(name, str):
                raise UserError(
                    f"include: {name!r}",
                    where=str(path),
                    rule="include must be the path of a task file",
                    fix="include: FILE.yaml",
                )
            merged |= self.merged(real.parent / name, path)
        return merged | values


def _parsed(data: bytes, path: Path, real: Path) -> dict[str, Any]:
    class Loader(_Plain):
        file, folder = path, real.parent

    try:
        values = yaml.load(data, Loader=Loader)  # noqa: S506 (a SafeLoader)
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:  # the others: of numbers and dates
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"is not a task file in YAML: {reason}", where=str(path), fix="fix the YAML") from error
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise UserError(
            "is not a mapping", where=str(path), rule="a task file must be a mapping of keys", fix="task: my_task"
        )
    return values


class _Plain(yaml.SafeLoader):
    """YAML of the harness's task files, without functions, aliases or deep nesting."""

    file: Path
    folder: Path
    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            self._refuse("an alias", event, "aliases are not allowed, because they can expand to any number of values")
        self._depth += 1
        if self._depth > DEEPEST:
            self._refuse("a value", event, f"lists and mappings may be nested at most {DEEPEST} times")
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def _refuse(self, what: str, event: yaml.Event, rule: str) -> NoReturn:
        line = event.start_mark.line + 1 if event.start_mark else 1
        raise UserError(f"line {line}: {what}", where=str(self.file), rule=rule, fix="write the task without it")


def _code(loader: _Plain, node: yaml.Node) -> Code:
    name = node.value if isinstance(node.value, str) else "?"
    return Code(name, loader.folder, node.start_mark.line + 1 if node.start_mark else 1, loader.file)


_Plain.add_constructor("!function", _code)


LOADERS = ("json", "csv", "parquet", "text", "arrow")
"""Loaders of the `datasets` library that read plain data, and nothing else."""
Text = Annotated[str, Field(max_length=64 * 1024)]
"""A template, or a name."""
Texts = str | list[str]


class TaskSection(BaseModel):
    """Keys that are not listed are refused, and values have exactly these types."""

    model_config = ConfigDict(extra="forbid", strict=True)


class DatasetKwargs(TaskSection):
    """Arguments of the loader, without those with which `datasets` or fsspec would open something else."""

    data_files: Texts | dict[str, Texts] | None = None
    data_dir: str | None = None
    revision: str | None = None
    field: str | None = None
    encoding: str | None = None
    sep: str | None = None
    delimiter: str | None = None
    quotechar: str | None = None
    header: int | None = None
    names: list[str] | None = None
    column_names: list[str] | None = None
    columns: list[str] | None = None
    keep_linebreaks: bool | None = None
    sample_by: Literal["line", "paragraph", "document"] | None = None


class Metric(TaskSection):
    """One of the harness's, with the arguments of `exact_match`."""

    metric: str
    aggregation: str | None = None
    higher_is_better: bool | None = None
    ignore_case: bool | None = None
    ignore_punctuation: bool | None = None
    ignore_numbers: bool | None = None
    regexes_to_ignore: list[Text] | None = None


class FilterStep(BaseModel):
    """A function of the harness on answers, with its plain arguments."""

    model_config = ConfigDict(extra="allow", strict=True)
    __pydantic_extra__: dict[str, JsonValue]

    function: Literal[
        "take_first", "take_first_k", "majority_vote", "regex", "regex_pos", "multi_choice_regex", "remove_whitespace",
        "lowercase", "uppercase", "map", "format_span",
    ]  # fmt: skip


class Filters(TaskSection):
    """Steps, and the name of their result."""

    name: str
    filter: list[FilterStep]


class FewshotConfig(TaskSection):
    """Examples in the context."""

    sampler: Literal["default", "first_n"] | None = None
    split: str | None = None
    fewshot_indices: list[int] | None = None
    samples: list[dict[str, JsonValue]] | None = None
    doc_to_text: Text | int | None = None
    doc_to_choice: Text | list[str] | dict[str, str] | None = None
    doc_to_target: Text | int | None = None
    gen_prefix: Text | None = None
    fewshot_delimiter: str | None = None
    target_delimiter: str | None = None


class Task(TaskSection):
    """A task: the fields of the harness's `TaskConfig` that are data."""

    task: str
    task_alias: str | None = None
    tag: Texts | None = None
    dataset_path: str
    dataset_name: str | None = None
    dataset_kwargs: DatasetKwargs | None = None
    training_split: str | None = None
    validation_split: str | None = None
    test_split: str | None = None
    fewshot_split: str | None = None
    doc_to_text: Text | int | None = None
    doc_to_target: Text | int | list[str] | None = None
    doc_to_choice: Text | list[str] | dict[str, str] | None = None
    description: Text | None = None
    target_delimiter: str | None = None
    fewshot_delimiter: str | None = None
    fewshot_config: FewshotConfig | None = None
    num_fewshot: Annotated[int, Field(ge=0)] | None = None
    metric_list: list[Metric] | None = None
    output_type: Literal["generate_until", "loglikelihood", "loglikelihood_rolling", "multiple_choice"] | None = None
    generation_kwargs: dict[str, JsonValue] | None = None
    repeats: Annotated[int, Field(ge=1, le=1000)] | None = None
    filter_list: list[Filters] | None = None
    should_decontaminate: bool | None = None
    doc_to_decontamination_query: Text | None = None
    gen_prefix: Text | None = None
    metadata: JsonValue = None


class TaskOverride(TaskSection):
    """Keys of a harness task that a group may change: its functions would trust any other."""

    task: str | None = None
    group: str | None = None
    task_alias: str | None = None
    group_alias: str | None = None
    tag: Texts | None = None
    num_fewshot: Annotated[int, Field(ge=0)] | None = None
    description: Text | None = None
    target_delimiter: str | None = None
    fewshot_delimiter: str | None = None


class Aggregate(TaskSection):
    """A metric of a group."""

    metric: str
    filter_list: Texts | None = None
    aggregation: Literal["mean"] | None = None
    weight_by_size: bool | None = None


class Group(TaskSection):
    """Keys of a group itself; the others are for its tasks."""

    group: str
    group_alias: str | None = None
    task: Any = None
    aggregate_metric_list: Aggregate | list[Aggregate] | None = None
    metadata: JsonValue = None
    tag: Texts | None = None
