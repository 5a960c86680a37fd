"""What trials report, validation losses and time: from a run's metrics.jsonl, or from MLflow if that cannot be read."""

from __future__ import annotations

import logging
import math
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from llmrecipes import untrusted
from llmrecipes.runfiles import RunFiles
from llmrecipes.tracking.jsonl import parse
from llmrecipes.tracking.mirror import tracker_name
from llmrecipes.tracking.mlflow.database import process_environment, redact

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient


@dataclass(frozen=True)
class TrialEvaluation:
    """One evaluation; None where the loss was not finite, or is not known."""

    step: int
    valid_loss: float | None
    valid_bits_per_byte: float | None


@dataclass
class TrialProgress:
    """Reports of a run up to now."""

    step: int = 0
    tokens: int = 0
    """Tokens trained on."""
    seconds: float = 0.0
    """Seconds in optimizer steps."""
    diverged: bool = False
    """A loss or gradient norm was not finite."""
    evaluations: dict[int, TrialEvaluation] = field(default_factory=dict)
    """By step."""

    def add(self, line: bytes) -> None:
        """Add a line of metrics.jsonl."""
        values = parse(line)
        if values is None:
            return
        step = values["step"]
        if "step_seconds" in values:
            self.step = step
            self.tokens = values["consumed_tokens"]
            self.seconds += values["step_seconds"]
            self.diverged = bool(values.get("non_finite")) and not values.get("skipped")
        elif "valid_loss" in values and step:  # before the first step it is no result of the trial
            self.evaluations[step] = TrialEvaluation(step, values["valid_loss"], values.get("valid_bits_per_byte"))


class Reader(Protocol):
    """Follows what a run reports."""

    @property
    def progress(self) -> TrialProgress:
        """What was read last."""
        ...

    def read(self) -> TrialProgress:
        """What the run has reported by now."""
        ...


class MetricsReader:
    """Follows a run's metrics.jsonl; reads only what is new, and everything after a resume has replaced the file."""

    def __init__(self, run_dir: Path) -> None:
        self._path = RunFiles(run_dir).metrics
        self._file: tuple[int, int] | None = None
        self._offset = 0
        self.progress = TrialProgress()

    def read(self) -> TrialProgress:
        """What the run has reported by now."""
        try:
            with untrusted.open_file(self._path, root=self._path.parent) as file:
                status = os.fstat(file.fileno())
                identity = (status.st_dev, status.st_ino)
                if identity != self._file or status.st_size < self._offset:
                    self._file, self._offset, self.progress = identity, 0, TrialProgress()
                file.seek(self._offset)
                text = file.read()
        except (OSError, untrusted.Refused):  # not begun, or not to be read at the moment
            return self.progress
        whole = text.rfind(b"\n") + 1
        for line in text[:whole].splitlines():
            self.progress.add(line)
        self._offset += whole
        return self.progress


logger = logging.getLogger(__name__)

LOOK_SECONDS = 10.0
"""Seconds between queries of one trial."""


@dataclass
class MlflowReader:
    """Follows the run of a trial in MLflow; while the server does not respond, nothing is new.

    Attributes:
        uri: MLflow server.
        experiment: experiment of the run.
        name: name of the run: its id in the directory.
    """

    uri: str
    experiment: str
    name: str
    progress: TrialProgress = field(default_factory=TrialProgress)
    _client: MlflowClient | None = None
    _run: str | None = None
    _looked: float = -LOOK_SECONDS
    _failed: bool = False

    def read(self) -> TrialProgress:
        """What the run has reported by now."""
        if time.monotonic() - self._looked < LOOK_SECONDS:
            return self.progress
        self._looked = time.monotonic()
        try:
            self.progress = self._query()
            self._failed = False
        except Exception as error:  # of the network, the server or its database
            if not self._failed:
                logger.warning("MLflow at %s does not respond: %s", redact(self.uri), type(error).__name__)
            self._failed = True
        return self.progress

    def _query(self) -> TrialProgress:
        if self._client is None:
            os.environ.update(process_environment())
            from mlflow.tracking import MlflowClient

            self._client = MlflowClient(self.uri)
        self._run = self._run or find_run(self._client, self.experiment, self.name)
        return TrialProgress() if self._run is None else _progress(self._client, self._run)


def find_run(client: MlflowClient, experiment: str, name: str) -> str | None:
    """The id of the newest run with a name; None if there is none."""
    known = client.get_experiment_by_name(experiment)
    if known is None:
        return None
    runs = client.search_runs([known.experiment_id], f"attributes.run_name = '{name}'", max_results=1)
    return str(runs[0].info.run_id) if runs else None


def _progress(client: MlflowClient, run: str) -> TrialProgress:
    history = {
        key: {point.step: point.value for point in client.get_metric_history(run, tracker_name(key))}
        for key in ("valid_loss", "valid_bits_per_byte", "consumed_tokens", "step_seconds", "loss")
    }
    tokens = history["consumed_tokens"]
    seconds = history["step_seconds"]
    losses = history["loss"]
    step = max(losses, default=0)
    bits = history["valid_bits_per_byte"]
    return TrialProgress(
        step=step,
        tokens=int(tokens[max(tokens)]) if tokens else 0,
        # Not every step is sent, so that their time is estimated from those that are.
        seconds=step * sum(seconds.values()) / len(seconds) if seconds else 0.0,
        diverged=bool(losses) and math.isnan(losses[step]),
        evaluations={
            at: TrialEvaluation(at, None if math.isnan(value) else value, bits.get(at))
            for at, value in history["valid_loss"].items()
        },
    )
