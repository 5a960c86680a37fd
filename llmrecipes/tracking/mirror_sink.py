"""The training process's side of a mirror: starts and stops its process, and forwards its messages."""

from __future__ import annotations

import json
import logging
import math
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any, cast

import psutil

from llmrecipes.hardware.process import STARTED_FOR
from llmrecipes.runfiles import RunFiles
from llmrecipes.tracking.events import EvalMetrics, Note, RunStatus, Sink, StepMetrics
from llmrecipes.tracking.mirror import MirrorConfig

logger = logging.getLogger(__name__)


class MirrorSink(Sink):
    """Copies the run to a tracker through another process, which follows metrics.jsonl.

    Only `close` waits for the tracker, for at most `close_seconds` of the configuration; then the process and its
    children are killed.

    Args:
        module: started with `python -m`.
        where: name of the tracker for messages.
        log: file in the run's logs/ with the output of its library.
        config: passed to the process.
        environment: environment of the process.
        show: called from another thread with the line that has the address of the run.

    Raises:
        OSError: the process could not be started.
    """

    def __init__(
        self,
        module: str,
        where: str,
        log: str,
        config: MirrorConfig,
        environment: Mapping[str, str],
        *,
        show: Callable[[str], None],
    ) -> None:
        self._where = where
        self._log = log
        self._show = show
        self._report: dict[str, Any] | None = None
        self._deadline = math.inf
        logs = RunFiles(Path(config.run_dir)).logs
        logs.mkdir(exist_ok=True)
        config = replace(config, start=uuid.uuid4().hex)
        self._close_seconds = config.close_seconds
        # Written in place: earlier mirrors wait for the lock on this file.
        (Path(config.run_dir) / config.lock).write_text(config.start, "utf-8")
        with (logs / log).open("ab") as stream:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stream,
                # Without the mark of this start: it sends what is left when the ranks are gone.
                env={name: value for name, value in environment.items() if name != STARTED_FOR},
                start_new_session=True,  # Ctrl-C in the terminal must only reach the training, which ends this process
            )
        # Both are pipes; the types also allow None.
        self._stdin = cast(IO[bytes], self._process.stdin)
        self._stdout = cast(IO[bytes], self._process.stdout)
        self._listener = threading.Thread(target=self._listen, name=f"{log}-messages", daemon=True)
        self._listener.start()
        self._write(asdict(config))

    def step(self, metrics: StepMetrics) -> None:
        """Nothing to do: the mirror reads metrics.jsonl."""

    def eval(self, metrics: EvalMetrics) -> None:
        """Nothing to do: the mirror reads metrics.jsonl."""

    def note(self, note: Note) -> None:
        """Nothing to do: the mirror reads metrics.jsonl."""

    def end(self, status: RunStatus) -> None:
        """Send the final status without waiting, so that several mirrors end at the same time."""
        if math.isfinite(self._deadline):
            return
        self._deadline = time.monotonic() + self._close_seconds
        self._write({"status": status})
        with suppress(OSError):
            self._stdin.close()

    def close(self, status: RunStatus) -> None:
        self.end(status)
        try:
            self._process.wait(max(0.0, self._deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            _kill(self._process)
        self._listener.join(1.0)
        if self._report is None:
            logger.warning("%s: not finished (see logs/%s); metrics.jsonl is complete", self._where, self._log)
        elif self._report["error"]:
            logger.warning(
                "%s: %d point(s) lost (%s); metrics.jsonl has them, and resuming the run sends them",
                self._where,
                self._report["lost"],
                self._report["error"],
            )

    def _write(self, message: dict[str, Any]) -> None:
        with suppress(OSError):  # a dead mirror is detected by its missing report
            self._stdin.write(json.dumps(message).encode() + b"\n")
            self._stdin.flush()

    def _listen(self) -> None:
        for line in self._stdout:
            message = json.loads(line)
            if "warning" in message:
                logger.warning("%s", message["warning"])
            elif "link" in message:
                self._show(message["link"])
            else:
                self._report = message
        if self._report is None and math.isinf(self._deadline):
            logger.warning("the process that writes to %s exited early; see logs/%s", self._where, self._log)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its children, which may have their own sessions."""
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                child.kill()
    process.kill()
    process.wait()
