"""The process that copies a run's metrics.jsonl into MLflow.

It is a process of its own, started by `MlflowSink`, for four reasons: the training never waits for the database nor
shares Python's lock with it; importing MLflow (about a second) delays no step; loader processes can be forked at any
time; and when the training is killed outright this process is left to say so in MLflow. metrics.jsonl is its buffer:
what an unreachable server missed is read again from there, during this run or when it is resumed.

Standard input has one JSON line, the `MirrorConfig`, and later one with the final status; its end without a status
means that the training died. Either way this process delivers what it can within `LAST_DELIVERY_SECONDS`, and ends.
Standard output has JSON lines for the training process: warnings and, at the end, a report.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from llmrecipes.tracking.experts import expert_metrics
from llmrecipes.tracking.jsonl import parse
from llmrecipes.tracking.store import redact

if TYPE_CHECKING:
    from mlflow.entities import Metric, RunTag
    from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

    from llmrecipes.tracking.mlflow_run import MlflowRun

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_BATCHES = 1.0
LONGEST_RETRY_SECONDS = 60.0
LAST_DELIVERY_SECONDS = 30.0  # after the end of the training
LOCK = ".mlflow.lock"  # holds the id of the newest start
VALUES_IN_A_BATCH = 1000  # MLflow refuses more in one request
LONGEST_MESSAGE = 200
NOT_METRICS = {"step", "time", "non_finite", "experts"}
OF_THE_STEP = {"consumed_samples", "consumed_tokens"}  # an evaluation repeats them


@dataclass(frozen=True, kw_only=True)
class MirrorConfig:
    """What a mirror needs to know.

    Attributes:
        run_dir: the run's directory, with metrics.jsonl and the files that become artifacts.
        uri: MLflow store.
        artifact_root: place for artifacts of a new experiment; None lets the server choose.
        experiment: MLflow experiment.
        run_name: name of the MLflow run.
        params: parameters, already text.
        tags: tags, already text.
        artifacts: names of files in `run_dir` to upload.
        log_interval: every so many steps go to MLflow.
        resumed_step: the step this attempt goes on from.
        total_steps: the last step, which always goes there.
        system_metrics_interval: seconds between samples of the machine's load; None for no samples.
        start: id of this start of the run; the sink gives it.
    """

    run_dir: str
    uri: str
    artifact_root: str | None
    experiment: str
    run_name: str
    log_interval: int
    resumed_step: int
    total_steps: int
    system_metrics_interval: float | None
    params: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    artifacts: list[str] = field(default_factory=list)
    start: str = ""


class Ending:
    """Waits in the background for the final status, or for the death of the training process."""

    def __init__(self, stream: BinaryIO) -> None:
        self.status = "KILLED"
        self.event = threading.Event()
        threading.Thread(target=self._listen, args=(stream,), daemon=True).start()

    def _listen(self, stream: BinaryIO) -> None:
        with suppress(ValueError, TypeError, KeyError):
            self.status = json.loads(stream.readline())["status"]
        self.event.set()
        time.sleep(LAST_DELIVERY_SECONDS)
        os._exit(1)  # the server hangs; what is missing is sent when the run is resumed


class Mirror:
    """Follows metrics.jsonl and sends it in batches until `ending`."""

    def __init__(self, config: MirrorConfig, ending: Ending, messages: BinaryIO) -> None:
        self._config = config
        self._ending = ending
        self._messages = messages
        self._path = Path(config.run_dir) / "metrics.jsonl"
        self._offset = 0
        self._run: MlflowRun | None = None
        self._monitor: SystemMetricsMonitor | None = None
        self._system_step = 0
        self._next_sample = 0.0
        self._warned = False

    def run(self) -> None:
        """Send until the end, then close the MLflow run and report."""
        wait, retry = 0.0, SECONDS_BETWEEN_BATCHES
        while not self._ending.event.wait(wait):
            if self._attempt() is None:
                wait = retry = SECONDS_BETWEEN_BATCHES
            else:
                wait = retry = min(2 * retry, LONGEST_RETRY_SECONDS)
        error = self._attempt(self._ending.status)
        self._tell(lost=self._count_lost(), error=error)

    def _attempt(self, final_status: str | None = None) -> str | None:
        """Connect if need be, send what is new, sample the machine; with `final_status` also close the MLflow run.

        Returns:
            What went wrong, or None.
        """
        try:
            if self._run is None:
                self._run = self._connect()
            self._send(self._run)
            if final_status is None:
                self._sample(self._run)
            elif is_newest(self._config):
                self._run.finish(final_status)
        except Exception as error:  # whatever MLflow, its database or its server raises: the training must not care
            where = redact(self._config.uri)
            logger.warning("%s", traceback.format_exc().replace(self._config.uri, where))
            text = next(iter(str(error).replace(self._config.uri, where).splitlines()), "")[:LONGEST_MESSAGE]
            message = f"{type(error).__name__}: {text}"
            if not self._warned:
                self._warned = True
                self._tell(warning=f"MLflow at {where} takes no metrics, trying again in the background ({message})")
            return message
        return None

    def _count_lost(self) -> int:
        """Points behind the last one delivered; of an attempt that never reached MLflow its own points."""
        known = self._config.resumed_step if self._run is None else -1
        return sum(values["step"] > known for _, values in self._points(self._offset))

    def _connect(self) -> MlflowRun:
        from llmrecipes.tracking.mlflow_run import MlflowRun

        return MlflowRun(self._config)

    def _send(self, run: MlflowRun) -> None:
        metrics: list[Metric] = []
        tags: dict[str, RunTag] = {}
        complete = self._offset
        for end, values in self._points(self._offset):
            new_metrics, new_tags = ([], []) if run.has(values) else entities(values)
            if len(metrics) + len(new_metrics) > VALUES_IN_A_BATCH:
                self._deliver(run, metrics, tags, complete)
                metrics, tags = [], {}
            metrics += new_metrics
            tags |= {tag.key: tag for tag in new_tags}
            complete = end
        if metrics or tags:
            self._deliver(run, metrics, tags, complete)

    def _deliver(self, run: MlflowRun, metrics: list[Metric], tags: dict[str, RunTag], end: int) -> None:
        run.log(metrics, list(tags.values()))
        self._offset = end

    def _points(self, offset: int) -> Iterator[tuple[int, dict[str, Any]]]:
        """Complete lines from `offset` that MLflow should have, each with the offset behind it."""
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

    def _sample(self, run: MlflowRun) -> None:
        """Measure the machine with MLflow's own collectors; their thread and retries are not needed here."""
        from mlflow.entities import Metric
        from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

        interval = self._config.system_metrics_interval
        if interval is None or time.monotonic() < self._next_sample:
            return
        if self._monitor is None:
            self._monitor = SystemMetricsMonitor(run.run_id, tracking_uri=self._config.uri)
            self._system_step = run.last_step("system/cpu_utilization_percentage") + 1
        self._next_sample = time.monotonic() + interval
        self._monitor.collect_metrics()
        now = int(time.time() * 1000)
        sample = {f"system/{key}": value for key, value in self._monitor.aggregate_metrics().items()}
        for collector in self._monitor.monitors:
            collector.clear_metrics()
        run.log([Metric(key, value, now, self._system_step) for key, value in sample.items()], [])
        self._system_step += 1

    def _tell(self, **message: Any) -> None:
        with suppress(OSError):  # the training process may be gone
            self._messages.write(json.dumps(message).encode() + b"\n")
            self._messages.flush()


def is_newest(config: MirrorConfig) -> bool:
    """Whether no later start of the run has begun; only the last one may say how the run ended."""
    return (Path(config.run_dir) / LOCK).read_text("utf-8") == config.start


def entities(values: dict[str, Any]) -> tuple[list[Metric], list[RunTag]]:
    """A line of metrics.jsonl as MLflow metrics, or for a note as a tag with its last occurrence."""
    from mlflow.entities import Metric, RunTag

    if "event" in values:
        text = json.dumps({"step": values["step"], **(values.get("details") or {})})
        return [], [RunTag(f"note.{values['event']}"[:250], text[:5000])]
    when = int(values.get("time", 0) * 1000)
    # Before the others: a step whose loss has arrived counts as delivered.
    of_experts = expert_metrics(values.get("experts", ()))
    metrics = [Metric(key, value, when, values["step"]) for key, value in of_experts.items()]
    for key in values.keys() - NOT_METRICS - (OF_THE_STEP if "valid_loss" in values else set()):
        value = values[key]
        if value is None:
            value = float("nan")
        if isinstance(value, int | float):
            metrics.append(Metric(key, float(value), when, values["step"]))
    return metrics, []


def main() -> None:
    """Entry of the process: see the module's text."""
    # The end of standard input is the only thing that ends this process, so that the last points and the status arrive
    # although Slurm or a terminal signals every process of a job.
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    os.nice(10)
    messages = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # MLflow prints, too: into the log
    config = MirrorConfig(**json.loads(sys.stdin.buffer.readline()))
    ending = Ending(sys.stdin.buffer)
    with (Path(config.run_dir) / LOCK).open("r+") as lock:  # writable, or NFS gives no exclusive lock
        # The mirror of an attempt that was just killed may still be sending its last points.
        with suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        # Mirrors of starts that were killed one after another get the lock in any order. The newest has the points of
        # the others, which are in metrics.jsonl.
        if is_newest(config):
            Mirror(config, ending, messages).run()


if __name__ == "__main__":
    main()
