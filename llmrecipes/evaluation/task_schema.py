"""What a task file may say: the keys of the harness's tasks and groups that are data, with their types."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

LOADERS = ("json", "csv", "parquet", "text", "arrow")
"""Loaders of the `datasets` library that read plain data, and nothing else."""
Text = Annotated[str, Field(max_length=64 * 1024)]
"""A template, or a name."""
Texts = str | list[str]


class Section(BaseModel):
    """Keys that are not listed are refused, and values have exactly these types."""

    model_config = ConfigDict(extra="forbid", strict=True)


class DatasetKwargs(Section):
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


class Metric(Section):
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


class Filters(Section):
    """Steps, and the name of what they give."""

    name: str
    filter: list[FilterStep]


class FewshotConfig(Section):
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


class Task(Section):
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


class Override(Section):
    """What a group may change of a task of the harness: its functions would take anything else for theirs."""

    task: str | None = None
    group: str | None = None
    task_alias: str | None = None
    group_alias: str | None = None
    tag: Texts | None = None
    num_fewshot: Annotated[int, Field(ge=0)] | None = None
    description: Text | None = None
    target_delimiter: str | None = None
    fewshot_delimiter: str | None = None


class Aggregate(Section):
    """A metric of a group."""

    metric: str
    filter_list: Texts | None = None
    aggregation: Literal["mean"] | None = None
    weight_by_size: bool | None = None


class Group(Section):
    """A group's own keys; the others are for its tasks."""

    group: str
    group_alias: str | None = None
    task: Any = None
    aggregate_metric_list: Aggregate | list[Aggregate] | None = None
    metadata: JsonValue = None
    tag: Texts | None = None
