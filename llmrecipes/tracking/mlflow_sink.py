"""The training process's side of MLflow: starts the mirror process, ends it, and passes its messages on."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import uuid
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any, cast

from llmrecipes.recipe.schema import Recipe
from llmrecipes.tracking.events import EvalMetrics, Note, RunStatus, StepMetrics
from llmrecipes.tracking.mlflow_mirror import LOCK, MirrorConfig
from llmrecipes.tracking.store import process_environment, redact

logger = logging.getLogger(__name__)

LONGEST_PARAM = 6000  # MLflow's limits, in characters
CUT = " ... [cut: the whole value is in the artifact recipe.yaml]"
CLOSE_SECONDS = 30.0


class MlflowSink:
    """Mirrors the run into MLflow through another process, which follows metrics.jsonl.

    Nothing here waits for MLflow except `close`, and that at most `close_seconds`.

    Raises:
        OSError: the process could not be started.
    """

    def __init__(self, config: MirrorConfig, *, close_seconds: float = CLOSE_SECONDS) -> None:
        self._config = replace(config, start=uuid.uuid4().hex)
        self._close_seconds = close_seconds
        self._report: dict[str, Any] | None = None
        self._closing = False
        logs = Path(config.run_dir) / "logs"
        logs.mkdir(exist_ok=True)
        # In place: earlier mirrors wait for the lock on this very file.
        (Path(config.run_dir) / LOCK).write_text(self._config.start, "utf-8")
        with (logs / "mlflow.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "llmrecipes.tracking.mlflow_mirror"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=process_environment(),
                start_new_session=True,  # a Ctrl-C at the terminal is for the training, which then ends this process
            )
        # Both are pipes here; the types allow for none.
        self._stdin = cast(IO[bytes], self._process.stdin)
        self._stdout = cast(IO[bytes], self._process.stdout)
        self._listener = threading.Thread(target=self._listen, name="mlflow-messages", daemon=True)
        self._listener.start()
        self._write(asdict(self._config))

    def step(self, metrics: StepMetrics) -> None:
        """Nothing to do: the mirror reads metrics.jsonl."""

    def eval(self, metrics: EvalMetrics) -> None:
        """Nothing to do: the mirror reads metrics.jsonl."""

    def note(self, note: Note) -> None:
        """Nothing to do: the mirror reads metrics.jsonl."""

    def close(self, status: RunStatus) -> None:
        self._closing = True
        self._write({"status": status})
        with suppress(OSError):
            self._stdin.close()
        try:
            self._process.wait(self._close_seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._listener.join(1.0)
        where = redact(self._config.uri)
        if self._report is None:
            logger.warning("MLflow at %s: not finished (see logs/mlflow.log); metrics.jsonl is complete", where)
        elif self._report["error"]:
            logger.warning(
                "MLflow at %s: %d point(s) lost (%s); metrics.jsonl has them, and resuming the run sends them",
                where,
                self._report["lost"],
                self._report["error"],
            )

    def _write(self, message: dict[str, Any]) -> None:
        with suppress(OSError):  # a mirror that died says so by not reporting
            self._stdin.write(json.dumps(message).encode() + b"\n")
            self._stdin.flush()

    def _listen(self) -> None:
        for line in self._stdout:
            message = json.loads(line)
            if "warning" in message:
                logger.warning("%s", message["warning"])
            else:
                self._report = message
        if self._report is None and not self._closing:
            logger.warning("the process that writes to MLflow ended early; see logs/mlflow.log in the run directory")


def flatten(recipe: Recipe) -> dict[str, str]:
    """Recipe as MLflow parameters: dotted keys, list items by number, values as JSON (text as it is), visibly cut."""
    flat: dict[str, str] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, dict) and value:
            for key, item in value.items():
                walk(f"{prefix}.{key}" if prefix else key, item)
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            for index, item in enumerate(value):
                walk(f"{prefix}.{index}", item)
        else:
            text = value if isinstance(value, str) else json.dumps(value)
            flat[prefix] = text if len(text) <= LONGEST_PARAM else text[: LONGEST_PARAM - len(CUT)] + CUT

    walk("", recipe.model_dump(mode="json"))
    return flat
