"""The process that copies a run's metrics.jsonl into MLflow."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any, BinaryIO

from llmrecipes.tracking.events import METRIC_NOTES, expert_metrics, note_metrics, source_metrics
from llmrecipes.tracking.histograms import HistogramFiles
from llmrecipes.tracking.mirror import LONGEST_MESSAGE, Ending, Mirror, numbers, serve
from llmrecipes.tracking.mlflow.database import TRAINING_VIEW, redact
from llmrecipes.tracking.mlflow.sink import MlflowConfig
from llmrecipes.tracking.spread import spread_metrics

if TYPE_CHECKING:
    from mlflow.entities import Metric, RunTag
    from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

    from llmrecipes.tracking.mlflow.client import MlflowRun

VALUES_IN_A_BATCH = 1000  # MLflow refuses more in one request


class MlflowMirror(Mirror[MlflowConfig, "MlflowRun"]):
    """Sends metrics, and one tag per kind of note."""

    def __init__(self, config: MlflowConfig, ending: Ending, messages: BinaryIO) -> None:
        super().__init__(config, f"MLflow at {redact(config.uri)}", ending, messages)
        self._monitor: SystemMetricsMonitor | None = None
        self._system_step = 0
        self._next_sample = 0.0
        self._histograms = HistogramFiles(self._no_histograms)

    def _connect(self) -> tuple[MlflowRun, str | None]:
        from llmrecipes.tracking.mlflow.client import MlflowRun

        run = MlflowRun(self._config)
        uri = redact(self._config.uri)
        if not uri.startswith(("http://", "https://")):
            return run, None
        return run, f" MLflow  {uri.rstrip('/')}/#/experiments/{run.experiment_id}/runs/{run.run_id}?{TRAINING_VIEW}"

    def _hide(self, text: str) -> str:
        return super()._hide(text.replace(self._config.uri, redact(self._config.uri)))

    def _send(self, run: MlflowRun) -> None:
        metrics: list[Metric] = []
        tags: dict[str, RunTag] = {}
        complete = self._offset
        for end, values in self._points(self._offset):
            self._histograms.add(values)
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

    def _sample(self, run: MlflowRun) -> None:
        self._histograms.upload(run.client, run.run_id)
        self._sample_system(run)

    def _sample_system(self, run: MlflowRun) -> None:
        """Sample system metrics with MLflow's collectors, without their thread and retries."""
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

    def _finish(self, run: MlflowRun, status: str) -> None:
        run.finish(status)
        self._histograms.upload(run.client, run.run_id, last=True)

    def _no_histograms(self, reason: str) -> None:
        text = next(iter(self._hide(reason).splitlines()), "")[:LONGEST_MESSAGE]
        self._tell(warning=f"{self._where} does not take the files of histograms ({text}); metrics.jsonl has them")


def entities(values: dict[str, Any]) -> tuple[list[Metric], list[RunTag]]:
    """A line of metrics.jsonl as MLflow metrics, or for a note as a tag with its last occurrence."""
    from mlflow.entities import Metric, RunTag

    if values.get("event") in METRIC_NOTES:
        when = int(values.get("time", 0) * 1000)
        details = values["details"]
        words = [RunTag(key.replace("/", "."), value) for key, value in details.items() if isinstance(value, str)]
        return [Metric(key, value, when, values["step"]) for key, value in note_metrics(details).items()], words
    if "event" in values:
        text = json.dumps({"step": values["step"], **(values.get("details") or {})})
        tags = [RunTag(f"note.{values['event']}"[:250], text[:5000])]
        if values.get("alarm"):  # one name for all, to look for runs with `tags.alarm LIKE '%'`
            tags.append(RunTag("alarm", f"step {values['step']}: {values['event']}"))
        return [], tags
    when = int(values.get("time", 0) * 1000)
    # Experts first: a step counts as delivered once its loss has arrived.
    points = (
        expert_metrics(values.get("experts", ())) | spread_metrics(values) | source_metrics(values) | numbers(values)
    )
    return [Metric(key, value, when, values["step"]) for key, value in points.items()], []


if __name__ == "__main__":
    serve(lambda values: MlflowConfig(**values), MlflowMirror)
