"""A process that copies a run's metrics.jsonl to a tracker such as MLflow or W&B.

It is a separate process, started by a `MirrorSink`, for four reasons: training neither waits for the tracker nor shares
the GIL with it; importing the tracker's library (about a second) delays no step; data loader processes can be forked at
any time; and if the training process is killed, this one can still report it. metrics.jsonl is its buffer: points that
an unreachable server missed are read from it again, during this run or when it is resumed.

Standard input has one JSON line with the configuration, and later one with the final status; EOF without a status means
that the training died. This process then delivers what it can within `close_seconds`, and exits.
Standard output has JSON lines for the training process: warnings, a link to the run and, at the end, a report.
"""

from __future__ import annotations

import fcntl
import gc
import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar

from llmrecipes.redact import guard_streams, redact, redacted
from llmrecipes.runfiles import RunFiles
from llmrecipes.tracking.events import VALID
from llmrecipes.tracking.jsonl import NESTED, parse

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_BATCHES = 1.0
LONGEST_RETRY_SECONDS = 60.0
CLOSE_SECONDS = 30.0
LONGEST_MESSAGE = 200
NOT_METRICS = {"step", "time", "non_finite", *NESTED}
OF_THE_STEP = {"consumed_samples", "consumed_tokens"}  # an evaluation repeats them


@dataclass(frozen=True, kw_only=True)
class MirrorConfig:
    """Configuration of a mirror.

    Attributes:
        run_dir: the run directory, with metrics.jsonl and the files that become artifacts.
        run_name: name of the run in the tracker.
        tags: tags, as text.
        artifacts: names of files in `run_dir` to upload.
        log_interval: send every this many steps.
        resumed_step: the step this attempt resumes from.
        total_steps: the last step, which is always sent.
        system_metrics_interval: seconds between samples of system metrics; None for no samples.
        close_seconds: time after the end of the training, or its death, in which the last points must arrive.
        lock: file in `run_dir` with the id of the newest start; also the mutex of the mirrors of one run.
        start: id of this start of the run; set by the sink.
    """

    run_dir: str
    run_name: str
    log_interval: int
    resumed_step: int
    total_steps: int
    system_metrics_interval: float | None
    tags: dict[str, str] = field(default_factory=dict)
    artifacts: list[str] = field(default_factory=list)
    close_seconds: float = field(default_factory=lambda: CLOSE_SECONDS)
    lock: str
    start: str = ""

    @property
    def is_newest(self) -> bool:
        """Whether this is the latest start of the run; only that one may set the final status."""
        return (Path(self.run_dir) / self.lock).read_text("utf-8") == self.start


class Ending:
    """Waits in the background for the final status, or for the death of the training process."""

    def __init__(self, stream: BinaryIO, seconds: float) -> None:
        self.status = "KILLED"
        self.event = threading.Event()
        threading.Thread(target=self._listen, args=(stream, seconds), daemon=True).start()

    def _listen(self, stream: BinaryIO, seconds: float) -> None:
        with suppress(ValueError, TypeError, KeyError):
            self.status = json.loads(stream.readline())["status"]
        self.event.set()
        time.sleep(seconds)
        os._exit(1)  # the server hangs; what is missing is sent when the run is resumed


C = TypeVar("C", bound=MirrorConfig)
R = TypeVar("R")


class Mirror(ABC, Generic[C, R]):
    """Follows metrics.jsonl and sends it in batches until `ending`.

    Args:
        config: see `MirrorConfig`.
        where: name of the tracker for messages.
        ending: set when the run is over.
        messages: stream to the training process.
    """

    def __init__(self, config: C, where: str, ending: Ending, messages: BinaryIO) -> None:
        self._config = config
        self._where = where
        self._ending = ending
        self._messages = messages
        self._path = RunFiles(Path(config.run_dir)).metrics
        self._offset = 0
        self._run: R | None = None
        self._warned = False

    @abstractmethod
    def _connect(self) -> tuple[R, str | None]:
        """Create or reopen the run; also returns a line for the user with its address."""

    @abstractmethod
    def _send(self, run: R) -> None:
        """Send the points from `_offset` on, and advance `_offset` past each that arrived."""

    @abstractmethod
    def _sample(self, run: R) -> None:
        """Sample system metrics if they are due."""

    @abstractmethod
    def _finish(self, run: R, status: str) -> None:
        """Set the final status."""

    def _hide(self, text: str) -> str:
        """`text` without secrets."""
        return redact(text)

    def run(self) -> None:
        """Send until the end, then close the run and report."""
        wait = 0.0
        retry = SECONDS_BETWEEN_BATCHES
        while not self._ending.event.wait(wait):
            if self._attempt() is None:
                wait = retry = SECONDS_BETWEEN_BATCHES
            else:
                wait = retry = min(2 * retry, LONGEST_RETRY_SECONDS)
        error = self._attempt(self._ending.status)
        self._tell(lost=self._count_lost(), error=error)

    def _attempt(self, final_status: str | None = None) -> str | None:
        """Connect if necessary, send new points, sample system metrics; with `final_status` also close the run.

        Returns:
            The error, or None.
        """
        try:
            if self._run is None:
                self._run, link = self._connect()
                if link is not None:
                    self._tell(link=link)
            self._send(self._run)
            if final_status is None:
                self._sample(self._run)
            elif self._config.is_newest:
                self._finish(self._run, final_status)
        except Exception as error:  # of the library, its database or its server: must not affect the training
            logger.warning("%s", self._hide(traceback.format_exc()))
            text = next(iter(self._hide(str(error)).splitlines()), "")[:LONGEST_MESSAGE]
            message = f"{type(error).__name__}: {text}"
            if not self._warned:
                self._warned = True
                self._tell(warning=f"{self._where} does not accept metrics; retrying in the background ({message})")
            return message
        return None

    def _count_lost(self) -> int:
        """Undelivered points; if this attempt never reached the tracker, only the points of this attempt."""
        known = self._config.resumed_step if self._run is None else -1
        return sum(values["step"] > known for _, values in self._points(self._offset))

    def _points(self, offset: int) -> Iterator[tuple[int, dict[str, Any]]]:
        """Complete lines from `offset` that the tracker should have, each with its end offset."""
        with suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                offset += len(line)
                values = parse(line)
                if values is not None and self._wanted(values):
                    yield offset, values

    def _wanted(self, values: dict[str, Any]) -> bool:
        return (
            "loss" not in values
            or values["step"] % self._config.log_interval == 0
            or values["step"] == self._config.total_steps
        )

    def _tell(self, **message: Any) -> None:
        with suppress(OSError):  # the training process may be gone
            self._messages.write(json.dumps(redacted(message)).encode() + b"\n")
            self._messages.flush()


def tracker_name(key: str) -> str:
    """Name in MLflow and W&B of a key of metrics.jsonl: `train/loss`, `valid/valid_loss`, as in TensorBoard.

    What was consumed is in a separate group, shown after `train`.
    """
    group = "usage" if key in OF_THE_STEP else "valid" if key in VALID or key == "eval_seconds" else "train"
    return f"{group}/{key}"


def numbers(values: dict[str, Any]) -> dict[str, float]:
    """The metrics of a step or an evaluation by their names in trackers; NaN where metrics.jsonl has null."""
    named = {
        key: float("nan") if values[key] is None else values[key]
        for key in values.keys() - NOT_METRICS - (OF_THE_STEP if "valid_loss" in values else set())
    }
    return {tracker_name(key): float(value) for key, value in named.items() if isinstance(value, int | float)}


def serve(read: Callable[[dict[str, Any]], C], make: Callable[[C, Ending, BinaryIO], Mirror[C, Any]]) -> None:
    """Main function of the process: see the module docstring.

    Args:
        read: creates the configuration from JSON values.
        make: creates the mirror.
    """
    # Only EOF on standard input ends this process, so that the last points and the status arrive although Slurm or a
    # terminal signals every process of a job.
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    os.nice(10)
    messages = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # libraries print, too: into the log
    guard_streams()
    gc.set_threshold(50_000)  # imports leave no cycles behind; looking for some takes a sixth of MLflow's
    config = read(json.loads(sys.stdin.buffer.readline()))
    ending = Ending(sys.stdin.buffer, config.close_seconds)
    with (Path(config.run_dir) / config.lock).open("r+") as lock:  # NFS needs write mode for an exclusive lock
        # The mirror of an attempt that was just killed may still be sending its last points.
        with suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        # Mirrors of starts that were killed in succession get the lock in any order. The newest sends the points of
        # all, from metrics.jsonl.
        if config.is_newest:
            make(config, ending, messages).run()
