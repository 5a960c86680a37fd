"""A task of a file, as the harness's task: its configuration is plain data, and so is what it reads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import datasets
import lm_eval.api.metrics  # noqa: F401 (fills the registries)
from datasets.packaged_modules.arrow.arrow import Arrow
from datasets.packaged_modules.csv.csv import Csv
from datasets.packaged_modules.json.json import Json
from datasets.packaged_modules.parquet.parquet import Parquet
from datasets.packaged_modules.text.text import Text
from lm_eval.api.registry import aggregation_registry, metric_registry
from lm_eval.api.task import ConfigurableTask

from llmrecipes.errors import UserError
from llmrecipes.evaluation.sandbox import bounded
from llmrecipes.evaluation.task_files import LOADERS, Task, checked, require_loader

READERS = (Arrow, Csv, Json, Parquet, Text)
"""What `datasets` reads the files with: the classes of `LOADERS`."""


class DataTask(ConfigurableTask):
    """A task whose configuration is the result of `plain_config`."""

    def download(self, dataset_kwargs: dict[str, Any] | None = None, **_kwargs: Any) -> None:
        """Read the data: `datasets.load_dataset`, but the reader that it has chosen from the files is checked."""
        builder = datasets.load_dataset_builder(
            self.config.dataset_path, self.config.dataset_name, **(dataset_kwargs or {})
        )
        if not isinstance(builder, READERS):
            raise UserError(
                f"{self.config.dataset_path} would be read by {type(builder).__name__}",
                where=f"task {self.config.task}",
                rule=f"data must be {', '.join(LOADERS)}",
                fix="convert it to JSON or Parquet",
            )
        builder.download_and_prepare()
        self.dataset = builder.as_dataset()

    def process_results(self, doc: Any, results: Any) -> Any:
        """The metrics of a document, with a time limit for regular expressions."""
        with bounded():
            return super().process_results(doc, results)

    def apply_filters(self) -> Any:
        """The filtered answers, with a time limit for regular expressions."""
        with bounded(60.0 + 0.01 * len(self._instances)):
            return super().apply_filters()


def plain_config(values: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """The configuration of a task, of which every value is data and every name one of the harness's.

    Args:
        values: parsed from the file, with those of its group.
        file: for messages.

    Raises:
        UserError: one that is not.
    """
    config = checked(Task, values, file)
    _require_known_metrics(config, file)
    require_loader(config, file)
    return {key: value for key, value in config.items() if key != "tag"}


def _require_known_metrics(config: Mapping[str, Any], file: Path) -> None:

    for metric in config.get("metric_list") or ():
        if metric["metric"] not in metric_registry:
            raise unknown_metric(metric["metric"], config["task"], str(file))
        aggregation = metric.get("aggregation")
        if aggregation is not None and aggregation not in aggregation_registry:
            raise UserError(
                f"unknown aggregation {aggregation!r} of metric {metric['metric']!r}",
                where=str(file),
                rule="an aggregation must be one of the harness's",
                fix=f"one of {', '.join(sorted(aggregation_registry))}",
            )


def unknown_metric(metric: object, name: str, where: str) -> UserError:
    """The error of a metric that the harness does not have."""
    return UserError(
        f"metric {metric!r} of task {name!r} is not allowed",
        where=where,
        rule="a metric must be one of the harness's: others are code, in a file or from the Hub",
        fix="one of acc, acc_norm, exact_match, f1, perplexity, bits_per_byte, …",
    )
