"""Reports progress to Kubeflow Trainer, which shows it in the status of the run's TrainJob.

Trainer 2.2 and later puts three variables into the pods of a TrainJob if its feature gate TrainJobStatus is on
(KEP-2779). The fields and their limits are those of `TrainerStatus` in pkg/apis/trainer/v1alpha1/trainjob_types.go.
"""

from __future__ import annotations

import json
import logging
import math
import os
import ssl
import statistics
import threading
import time
from collections import deque
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from llmrecipes.tracking.events import EvalMetrics, Note, RunStart, RunStatus, Sink, StepMetrics
from llmrecipes.tracking.posting import post
from llmrecipes.untrusted import read

logger = logging.getLogger(__name__)

URL = "KUBEFLOW_TRAINER_SERVER_URL"
CERTIFICATE = "KUBEFLOW_TRAINER_SERVER_CA_CERT"
TOKEN = "KUBEFLOW_TRAINER_SERVER_TOKEN"  # noqa: S105 - the variable that has the token's path
SHOWN = ("loss", "lr", "grad_norm", "tokens_per_second", "mfu")
SECONDS_BETWEEN = 10.0
SEND_SECONDS, CLOSE_SECONDS = 5.0, 5.0
LONGEST_TOKEN = 64 << 10
STEPS_FOR_TIME_LEFT = 50
MOST_SECONDS = 2**31 - 1


@dataclass(frozen=True)
class TrainerServer:
    """Where Trainer takes the status, as its variables say.

    Attributes:
        url: begins with https://.
        certificate: file of the authority that has signed the server's certificate.
        token: file that the kubelet renews within the hour, so it is read for each message.
    """

    url: str
    certificate: Path
    token: Path

    @classmethod
    def of_environment(cls) -> Self:
        """Raises ValueError if a variable is missing, or the address is not one of https."""
        url, certificate, token = (os.environ.get(name, "") for name in (URL, CERTIFICATE, TOKEN))
        if urlsplit(url).scheme != "https":
            raise ValueError(f"{URL} is not an address that begins with https://")
        if not certificate or not token:
            raise ValueError(f"{URL} is set, but {CERTIFICATE} or {TOKEN} is not")
        return cls(url, Path(certificate), Path(token))

    def send(self, status: dict[str, Any]) -> None:
        """Send a `TrainerStatus`.

        Raises:
            OSError, ValueError, http.client.HTTPException: a file cannot be read, or the server does not take it.
        """
        token = read(self.token, most=LONGEST_TOKEN).decode().strip()
        if not token.isascii() or len(token.split()) != 1:  # errors of http.client would quote it
            raise ValueError(f"{self.token} is not one word")
        context = ssl.create_default_context(cafile=str(self.certificate))
        body = json.dumps({"trainerStatus": status}).encode()
        post(self.url, body, SEND_SECONDS, {"Authorization": f"Bearer {token}"}, context)


class TrainJobSink(Sink):
    """Sends the newest state from a thread, every `SECONDS_BETWEEN` seconds and at the end.

    Args:
        server: takes it.
        resumed_step: step that this attempt continues.
        total_steps: the last step.
        interval: seconds between two messages.
    """

    def __init__(
        self, server: TrainerServer, *, resumed_step: int, total_steps: int, interval: float = SECONDS_BETWEEN
    ) -> None:
        self._server = server
        self._total = total_steps
        self._interval = interval
        self._step, self._metrics = resumed_step, dict[str, float]()
        self._seconds: deque[float] = deque(maxlen=STEPS_FOR_TIME_LEFT)
        self._status = self._now()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._work, name="trainjob", daemon=True)
        self._thread.start()

    @classmethod
    def of(cls, start: RunStart) -> Self:
        return cls(TrainerServer.of_environment(), resumed_step=start.resumed_step, total_steps=start.total_steps)

    def step(self, metrics: StepMetrics) -> None:
        self._step = metrics.step
        self._seconds.append(metrics.step_seconds)
        values = ((name, getattr(metrics, name)) for name in SHOWN)
        self._metrics |= {name: value for name, value in values if value is not None}
        self._status = self._now()

    def eval(self, metrics: EvalMetrics) -> None:
        self._metrics["valid_loss"] = metrics.valid_loss
        self._status = self._now()

    def note(self, note: Note) -> None:
        """Not in a TrainJob's status."""

    def end(self, status: RunStatus) -> None:
        self._ending.set()

    def close(self, status: RunStatus) -> None:
        self.end(status)
        self._thread.join(CLOSE_SECONDS)

    def _now(self) -> dict[str, Any]:
        """A `TrainerStatus`: a percentage rounded down, seconds, and numbers as text."""
        metrics = {"step": self._step, "total_steps": self._total, **self._metrics}
        status: dict[str, Any] = {
            "lastUpdatedTime": datetime.now(UTC).isoformat(timespec="seconds"),
            "metrics": [{"name": name, "value": f"{value:.6g}"} for name, value in metrics.items()],
        }
        if self._total > 0:
            status["progressPercentage"] = min(100, 100 * self._step // self._total)
        if self._seconds:
            left = max(0, self._total - self._step) * statistics.median(self._seconds)
            status["estimatedRemainingSeconds"] = min(math.ceil(left), MOST_SECONDS)
        return status

    def _work(self) -> None:
        failed = ended = False
        while not ended:
            started = time.monotonic()
            ended = self._ending.is_set()
            try:
                self._server.send(self._status)
            except Exception as error:  # of a server or of a file of the cluster: must not end the thread
                if not failed:
                    logger.warning("cannot report progress to Kubeflow Trainer (%s); training continues", error)
                failed = True
            self._ending.wait(max(0.0, self._interval - (time.monotonic() - started)))
