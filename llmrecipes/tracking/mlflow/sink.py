"""The training process's side of MLflow."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Self

from llmrecipes.commandline import command_line
from llmrecipes.nested import leaves
from llmrecipes.recipe.schema import Recipe
from llmrecipes.redact import redacted
from llmrecipes.tracking.events import RunStart
from llmrecipes.tracking.mirror_sink import MirrorSink
from llmrecipes.tracking.mlflow.config import MlflowConfig
from llmrecipes.tracking.store import (
    DATABASE,
    artifact_root,
    is_local,
    own_database,
    process_environment,
    redact,
    sqlite_uri,
    tracking_uri,
)

LONGEST_PARAM = 6000  # MLflow's limits, in characters
CUT = " ... [cut: the whole value is in the artifact recipe.yaml]"


class MlflowSink(MirrorSink):
    """Mirrors the run into MLflow.

    Raises:
        OSError: the process could not be started.
    """

    def __init__(self, config: MlflowConfig, show: Callable[[str], None]) -> None:
        super().__init__(
            "llmrecipes.tracking.mlflow.mirror",
            f"MLflow at {redact(config.uri)}",
            "mlflow.log",
            config,
            process_environment(),
            show=show,
        )

    @classmethod
    def of(cls, start: RunStart) -> Self:
        return cls(mlflow_config(start), start.messages.put)


def mlflow_config(start: RunStart) -> MlflowConfig:
    """Configuration of the mirror; if the store is a local one, the user is told how to look at it."""
    recipe, run_dir, runs_dir = start.recipe, start.run_dir, start.runs_dir
    database = own_database(run_dir)
    uri = tracking_uri(runs_dir) if database is None else sqlite_uri(database)
    experiment = recipe.tracking.experiment or recipe.name
    if is_local(uri) and database is None:
        where = f"experiment {experiment}, run {run_dir.name}"
        start.messages.put(f" MLflow  {command_line('ui', runs_dir=runs_dir)}: {where}")
    return MlflowConfig(
        run_dir=str(run_dir.resolve()),
        uri=uri,
        artifact_root=artifact_root(runs_dir) if is_local(uri) else None,
        experiment=experiment,
        kept_database=None if database is None else str(run_dir.resolve() / DATABASE),
        run_name=run_dir.name,
        params=redacted(flatten(recipe)),
        tags=dict(start.tags),
        artifacts=list(start.documents),
        log_interval=recipe.train.log_interval,
        resumed_step=start.resumed_step,
        total_steps=start.total_steps,
        system_metrics_interval=recipe.tracking.system_metrics_interval,
    )


def flatten(recipe: Recipe) -> dict[str, str]:
    """Recipe as MLflow parameters: dotted keys, list items by number, values as JSON (text as it is), visibly cut.

    Without the section `search`, which a training ignores.
    """
    flat = {}
    values = recipe.model_dump(mode="json", exclude={"search"})
    for name, value in leaves(values, enter=lambda items: isinstance(items[0], dict)):
        text = value if isinstance(value, str) else json.dumps(value)
        flat[name] = text if len(text) <= LONGEST_PARAM else text[: LONGEST_PARAM - len(CUT)] + CUT
    return flat
