"""What a trial reports whose files cannot be read from here: from its run in MLflow."""

from __future__ import annotations

import logging
import math
import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llmrecipes.search.metrics import Evaluation, Progress
from llmrecipes.tracking.mirror import tracker_name
from llmrecipes.tracking.store import process_environment, redact

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

logger = logging.getLogger(__name__)

LOOK_SECONDS = 10.0
"""Seconds between queries of one trial."""


@dataclass
class MlflowReader:
    """Follows the run of a trial in MLflow; while the server does not respond, nothing is new.

    Attributes:
        uri: MLflow server.
        experiment: of the run.
        name: of the run: its id here.
    """

    uri: str
    experiment: str
    name: str
    progress: Progress = field(default_factory=Progress)
    _client: MlflowClient | None = None
    _run: str | None = None
    _looked: float = -LOOK_SECONDS
    _failed: bool = False

    def read(self) -> Progress:
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

    def _query(self) -> Progress:
        if self._client is None:
            os.environ.update(process_environment())
            from mlflow.tracking import MlflowClient

            self._client = MlflowClient(self.uri)
        self._run = self._run or find_run(self._client, self.experiment, self.name)
        return Progress() if self._run is None else _progress(self._client, self._run)


def find_run(client: MlflowClient, experiment: str, name: str) -> str | None:
    """The id of the newest run with a name; None if there is none."""
    found = client.get_experiment_by_name(experiment)
    if found is None:
        return None
    runs = client.search_runs([found.experiment_id], f"attributes.run_name = '{name}'", max_results=1)
    return str(runs[0].info.run_id) if runs else None


def _progress(client: MlflowClient, run: str) -> Progress:
    history = {
        key: {
            point.step: point.value
            for name in (key, tracker_name(key))  # runs of earlier versions have the key
            for point in client.get_metric_history(run, name)
        }
        for key in ("valid_loss", "valid_bits_per_byte", "consumed_tokens", "step_seconds", "loss")
    }
    tokens, seconds, losses = history["consumed_tokens"], history["step_seconds"], history["loss"]
    step = max(losses, default=0)
    bits = history["valid_bits_per_byte"]
    return Progress(
        step=step,
        tokens=int(tokens[max(tokens)]) if tokens else 0,
        # Not every step is sent, so that their time is estimated from those that are.
        seconds=step * sum(seconds.values()) / len(seconds) if seconds else 0.0,
        diverged=bool(losses) and math.isnan(losses[step]),
        evaluations={
            at: Evaluation(at, None if math.isnan(value) else value, bits.get(at))
            for at, value in history["valid_loss"].items()
        },
    )
