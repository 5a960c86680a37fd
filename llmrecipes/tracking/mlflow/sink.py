"""MLflow, seen from our processes: the sink, the configuration of its mirror, and metrics added after a training."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from llmrecipes.commandline import command_line
from llmrecipes.nested import leaves
from llmrecipes.recipe.schema import Recipe
from llmrecipes.redact import redacted
from llmrecipes.tracking.events import RunStart
from llmrecipes.tracking.mirror import MirrorConfig
from llmrecipes.tracking.mirror_sink import MirrorSink
from llmrecipes.tracking.mlflow.database import (
    DATABASE,
    artifact_root,
    holds,
    is_local,
    own_database,
    own_run,
    process_environment,
    redact,
    sqlite_uri,
    tracking_uri,
)
from llmrecipes.untrusted import RECORD, read_json

RUN_FILE = "mlflow.json"
"""File of the run directory that names its MLflow run."""
LOCK = ".mlflow.lock"
LOCAL_CLOSE_SECONDS = 120.0
"""Longer than for a server, which may be dead: a busy machine takes a minute to create a database."""
LONGEST_PARAM = 6000  # MLflow's limits, in characters
LONGEST_NAMED = 200
CUT = " ... [cut: the whole value is in the artifact recipe.yaml]"


@dataclass(frozen=True, kw_only=True)
class MlflowConfig(MirrorConfig):
    """Configuration of the MLflow mirror.

    Attributes:
        uri: MLflow store.
        artifact_root: place for artifacts of a new experiment; None lets the server choose.
        kept_database: copy of the SQLite database in the run directory, restored at the start and renewed at the end of
            an attempt; None if the database is where it stays.
        experiment: MLflow experiment.
        params: parameters, already text.
        datasets: values of `events.DatasetUse`.
    """

    uri: str
    artifact_root: str | None
    experiment: str
    kept_database: str | None = None
    params: dict[str, str] = field(default_factory=dict)
    datasets: list[dict[str, Any]] = field(default_factory=list)
    lock: str = LOCK


class MlflowSink(MirrorSink):
    """Mirrors the run into MLflow.

    Raises:
        OSError: the process could not be started.
    """

    def __init__(self, config: MlflowConfig, show: Callable[[str], None]) -> None:
        super().__init__(
            "llmrecipes.tracking.mlflow.sender",
            f"MLflow at {redact(config.uri)}",
            "mlflow.log",
            replace(config, close_seconds=LOCAL_CLOSE_SECONDS) if is_local(config.uri) else config,
            process_environment(),
            show=show,
        )

    @classmethod
    def of(cls, start: RunStart) -> Self:
        return cls(mlflow_config(start), start.messages.put)


def mlflow_config(start: RunStart) -> MlflowConfig:
    """Configuration of the mirror; for a local store, prints the command that opens it."""
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
        datasets=[asdict(each) for each in start.datasets],
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


def add_metrics(run_dir: Path, runs_dir: Path, values: Mapping[str, float], step: int) -> str | None:
    """Add points to the MLflow run of a run directory, whose status and times stay as they are.

    Args:
        run_dir: the run, whose mlflow.json names the MLflow run; it may come from somebody else.
        runs_dir: where runs are kept, with their store unless MLFLOW_TRACKING_URI names another.
        values: by name of the metric.
        step: step of all of them.

    Returns:
        Why they were not added; None if they were.
    """
    try:
        known = read_json(run_dir / RUN_FILE, root=run_dir, most=RECORD)
        named = str(known["tracking_uri"])
        identity = {name: str(known[name]) for name in ("run_id", "key")}
    except (OSError, ValueError, KeyError, TypeError):
        return "MLflow does not have this run; the results are only in the run's directory"
    uri = tracking_uri(runs_dir)
    if is_local(named) and (run_dir / DATABASE).is_file():  # that of a pod, kept at its end
        uri = sqlite_uri(run_dir.resolve() / DATABASE)
    # The file may be somebody else's, so the address in it is compared or shown, and never opened.
    same_kind = is_local(uri) if is_local(named) else redact(uri) == named
    if not same_kind or (is_local(uri) and not holds(uri, identity, run_dir)):
        shown = "".join(c for c in named[:LONGEST_NAMED] if c.isprintable())
        return (
            f"MLflow: {redact(uri)} does not have this run, whose {RUN_FILE} names {shown}; the results are in the "
            "run's directory; if the address is yours, set MLFLOW_TRACKING_URI to it to add them"
        )
    os.environ.update(process_environment())  # short timeouts, before the client is created
    from mlflow.entities import Metric
    from mlflow.tracking import MlflowClient

    now = int(time.time() * 1000)
    metrics = [Metric(name, value, now, step) for name, value in values.items()]
    try:
        client = MlflowClient(uri)
        if (run := own_run(client, identity)) is None:
            return f"MLflow: {redact(uri)} does not have this run; the results are in the run's directory"
        for start in range(0, len(metrics), 1000):
            client.log_batch(run.info.run_id, metrics=metrics[start : start + 1000])
    except Exception as error:  # of MLflow, its database or its server
        reason = next(iter(str(error).splitlines()), "")[:200].replace(uri, redact(uri))
        return (
            f"the results were not sent to MLflow ({type(error).__name__}: {reason}); they are in the run's directory"
        )
    return None
