"""What a fit takes from tracked runs: those in directories, and those in MLflow."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from llmrecipes import rundir
from llmrecipes.errors import UserError
from llmrecipes.plan.parameters import count
from llmrecipes.recipe.derived.batch_schedule import batch_schedule
from llmrecipes.recipe.derived.shape import shape
from llmrecipes.recipe.schema import Model
from llmrecipes.scaling.law import Point
from llmrecipes.tracking.mirror import tracker_name
from llmrecipes.tracking.mlflow.database import is_local, process_environment, redact, tracking_uri
from llmrecipes.tracking.mlflow.sink import flatten
from llmrecipes.tracking.run_list import summary

FINISHED = "finished"
TEXT = ("data.sources", "data.tokenizer", "data.split", "model.vocab_size")
"""Keys, with all below them, that determine the text and tokens of the validation loss."""


@dataclass(frozen=True)
class Tracked:
    """A run as its directory or MLflow has it; `recipe` has dotted keys and the text that MLflow keeps."""

    name: str
    recipe: dict[str, str]
    state: str
    tokens: float | None
    loss: float | None


@dataclass(frozen=True)
class Selection:
    """Runs of a fit, by name in the order of `points`, and why others are not in it."""

    names: tuple[str, ...]
    points: tuple[Point, ...]
    left_out: tuple[tuple[str, str], ...]


def from_directory(run_dir: Path) -> Tracked:
    """A run by its files. Its last evaluation is that of its last step."""
    recipe = rundir.Run(run_dir).recipe()
    known = summary(run_dir)
    samples = None if known.step is None else batch_schedule(recipe).samples(known.step)
    tokens = None if samples is None else samples * recipe.model.seq_length
    return Tracked(f"{known.recipe}/{known.run_id}", flatten(recipe), known.state, tokens, known.valid_loss)


def from_mlflow(experiment: str, runs_dir: Path) -> list[Tracked]:
    """All runs of an MLflow experiment.

    Raises:
        UserError: as `experiment_runs`.
    """
    return [_tracked(run) for run in experiment_runs(experiment, runs_dir)]


def experiment_runs(experiment: str, runs_dir: Path) -> list[Any]:
    """MLflow's runs of an experiment, on the server of `MLFLOW_TRACKING_URI` or in the runs directory.

    Raises:
        UserError: there is no such experiment, or the store does not answer.
    """
    uri = tracking_uri(runs_dir)
    store = redact(uri)
    if is_local(uri) and not (runs_dir / "mlflow.db").exists():
        raise UserError("no MLflow store", where=store, fix="--runs-dir, or MLFLOW_TRACKING_URI of a server")
    os.environ.update(process_environment())
    from mlflow.entities import Run
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient

    client = MlflowClient(uri)
    try:
        known = client.get_experiment_by_name(experiment)
        if known is None:
            names = ", ".join(sorted(experiment.name for experiment in client.search_experiments()))
            raise UserError(f"no experiment {experiment!r}", where="--experiment", fix=f"one of {names}")
        runs: list[Run] = []
        page: str | None = None
        while page is None or page:
            part = client.search_runs([known.experiment_id], page_token=page)
            runs += part
            page = part.token or ""
    except MlflowException as error:
        raise UserError(str(error).splitlines()[0], where=store, rule="the MLflow store must be reachable") from error
    return list(runs)


def _tracked(run: Any) -> Tracked:
    metrics = run.data.metrics
    return Tracked(
        run.info.run_name or run.info.run_id,
        dict(run.data.params),
        FINISHED if run.info.status == "FINISHED" else str(run.info.status).lower(),
        *(metrics.get(tracker_name(key)) for key in ("consumed_tokens", "valid_loss")),
    )


def select(runs: Iterable[Tracked], *, embeddings: bool) -> Selection:
    """The points of finished runs; of several with the same size and tokens the one with the lowest loss.

    N counts the parameters that one token uses: with experts the active ones.

    Args:
        runs: of one experiment.
        embeddings: whether N includes embeddings and the output layer.

    Raises:
        UserError: their losses are of different texts or tokens.
    """
    left_out: list[tuple[str, str]] = []
    best: dict[tuple[float, float], tuple[Tracked, Point]] = {}
    usable: list[Tracked] = []
    for run in sorted(runs, key=lambda run: run.name):
        point = _point(run, embeddings)
        if isinstance(point, str):
            left_out.append((run.name, point))
            continue
        usable.append(run)
        key = (point.parameters, point.tokens)
        if key in best and best[key][1].loss <= point.loss:
            left_out.append((run.name, f"{best[key][0].name} has the same size and tokens and a lower loss"))
            continue
        if key in best:
            left_out.append((best[key][0].name, f"{run.name} has the same size and tokens and a lower loss"))
        best[key] = (run, point)
    _require_same_text(usable)
    chosen = [best[key] for key in sorted(best)]
    return Selection(tuple(run.name for run, _ in chosen), tuple(point for _, point in chosen), tuple(left_out))


def _point(run: Tracked, embeddings: bool) -> Point | str:
    """The point of a run, or why it has none."""
    if run.state != FINISHED:
        return f"{run.state}: its learning rate has not decayed"
    if run.loss is None or not run.tokens:
        return "no validation loss"
    if not math.isfinite(run.loss) or run.loss <= 0:
        return f"validation loss {run.loss:g}"
    try:
        model = Model.model_validate(
            {
                name: _value(text)
                for section, _, name in (key.partition(".") for key in run.recipe)
                if section == "model" and name in Model.model_fields
                for text in (run.recipe[f"model.{name}"],)
            }
        )
    except ValidationError:
        return "not a run of this program"
    parameters = count(model, shape(model))
    size = parameters.active if embeddings else parameters.active - parameters.embedding
    return Point(float(size), float(run.tokens), run.loss)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _require_same_text(runs: Sequence[Tracked]) -> None:
    for run in runs[1:]:
        first, other = (
            {key: text for key, text in point.recipe.items() if key.startswith(TEXT)} for point in (runs[0], run)
        )
        differing = sorted(key for key in first.keys() & other.keys() if first[key] != other[key])
        if differing:
            raise UserError(
                f"{', '.join(differing)} of {run.name} differ from {runs[0].name}",
                where="RUN",
                rule="losses are only comparable on the same text with the same tokenizer",
                fix="use runs on the same data",
            )
