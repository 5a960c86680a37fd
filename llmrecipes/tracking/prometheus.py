"""The newest values of a run as text for Prometheus, on the loopback address of the first rank's machine.

The loop only keeps references; a scrape turns them into text, in a thread of its own. Names and units are those of
https://prometheus.io/docs/practices/naming; `grafana.json` beside this module is a dashboard of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Self

from prometheus_client import CollectorRegistry, Metric, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from llmrecipes.runfiles import RunFiles
from llmrecipes.tracking.energy import Energy
from llmrecipes.tracking.events import EvalMetrics, Note, RunStart, RunStatus, Sink, StepMetrics
from llmrecipes.tracking.spread import SHOWN

HOST = "127.0.0.1"
PREFIX = "llmrecipes"
GAUGES = {
    "step": ("step", "Optimizer steps done."),
    "loss": ("loss", "Training loss of the last step, in nats per token."),
    "grad_norm": ("gradient_norm", "Global L2 norm of the gradients before clipping."),
    "lr": ("learning_rate", "Learning rate of the last step."),
    "step_seconds": ("step_seconds", "Seconds of the last step."),
    "tokens_per_second": ("tokens_per_second", "Tokens per second in the last step."),
    "loss_scale": ("loss_scale", "Loss scale of fp16."),
    "memory_bytes": ("memory_bytes", "Peak bytes on the GPU of the first rank, or resident bytes on a CPU."),
    "mfu": ("mfu_ratio", "Model FLOPs utilisation, counting full attention."),
    "time": ("last_step_timestamp_seconds", "When the last step ended."),
}
"""By fields of `StepMetrics`: name and help."""
COUNTERS = {
    "consumed_tokens": ("tokens", "Tokens consumed since step 0."),
    "consumed_samples": ("samples", "Sequences consumed since step 0."),
}
UNITS = {"_c": ("_celsius", 1.0), "_mhz": ("_hertz", 1e6), "_use": ("_use_ratio", 1.0)}
"""Ends of names in metrics.jsonl, in Prometheus' base units."""
RATIOS = {"throttled", "slowness"}
SPREADS = {"ranks": "rank", "nodes": "node"}


class PrometheusSink(Sink, Collector):
    """Serves the newest values until the run ends.

    Args:
        run: value of the label `run`.
        port: port of `HOST`.
        total_steps: the last step.

    Raises:
        OSError: another program has the port.
    """

    def __init__(self, run: str, *, port: int, total_steps: int) -> None:
        self._run = run
        self._total = total_steps
        self._step: StepMetrics | None = None
        self._eval: EvalMetrics | None = None
        self._spreads: dict[str, Mapping[str, Mapping[str, Any]]] = {}
        self._energy: Mapping[str, Any] = {}
        self._notes: Counter[tuple[str, str]] = Counter()
        self._saved: int | None = None
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = start_http_server(port, HOST, registry)
        except OSError as error:
            raise OSError(f"port {port} of {HOST} (tracking.prometheus_port): {error.strerror}") from error

    @classmethod
    def of(cls, start: RunStart) -> Self:
        tracking = start.recipe.tracking
        return cls(RunFiles(start.run_dir).name, port=tracking.prometheus_port, total_steps=start.total_steps)

    def step(self, metrics: StepMetrics) -> None:
        self._step = metrics
        for name in SPREADS:
            if values := getattr(metrics, name):
                self._spreads = {**self._spreads, name: values}
        self._energy = metrics.energy or self._energy

    def eval(self, metrics: EvalMetrics) -> None:
        self._eval = metrics

    def note(self, note: Note) -> None:
        key = (note.event, "true" if note.alarm else "false")
        self._notes = self._notes + Counter([key])  # another thread may be reading the old one
        if note.event == "checkpoint_saved":
            self._saved = note.step

    def close(self, status: RunStatus) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def collect(self) -> Iterator[Metric]:
        """What is known so far; called by the server's threads."""
        yield from self._gauges({"steps": (self._total, "The last step.")})
        if (step := self._step) is not None:
            yield from self._gauges({name: (getattr(step, key), text) for key, (name, text) in GAUGES.items()})
            for key, (name, text) in COUNTERS.items():
                yield self._counter(name, text, getattr(step, key))
        if (evaluation := self._eval) is not None:
            bits = evaluation.valid_bits_per_byte
            yield from self._gauges(
                {
                    "valid_step": (evaluation.step, "Step of the last evaluation."),
                    "valid_loss": (evaluation.valid_loss, "Its loss, in nats per token."),
                    "valid_compression_ratio": (bits and bits / 8, "The same, in bits per bit of text."),
                }
            )
        yield from self._gauges({"checkpoint_step": (self._saved, "Step of the newest checkpoint of this start.")})
        yield from self._of_spreads()
        yield from self._of_energy()
        notes = CounterMetricFamily(f"{PREFIX}_events", "Events of this start.", labels=("run", "event", "alarm"))
        for (event, alarm), count in self._notes.items():
            notes.add_metric((self._run, event, alarm), count)
        yield notes

    def _gauges(self, values: Mapping[str, tuple[float | None, str]]) -> Iterable[Metric]:
        for name, (value, text) in values.items():
            if value is not None:
                gauge = GaugeMetricFamily(f"{PREFIX}_{name}", text, labels=("run",))
                gauge.add_metric((self._run,), value)
                yield gauge

    def _counter(self, name: str, text: str, value: float) -> Metric:
        counter = CounterMetricFamily(f"{PREFIX}_{name}", text, labels=("run",))
        counter.add_metric((self._run,), value)
        return counter

    def _of_spreads(self) -> Iterator[Metric]:
        for group, values in self._spreads.items():
            for key, spread in values.items():
                name, factor = in_base_units(key)
                text = f"{key} of the {group}: least, median, largest; see docs/guide/tracking.md."
                gauge = GaugeMetricFamily(f"{PREFIX}_{SPREADS[group]}_{name}", text, labels=("run", "stat"))
                for stat in SHOWN:
                    gauge.add_metric((self._run, stat), factor * spread[stat])
                yield gauge

    def _of_energy(self) -> Iterator[Metric]:
        used = Energy.of({"energy": self._energy})
        if used is None:
            return
        yield self._counter("energy_joules", f"Energy of all starts of the run: {used.how()}.", used.joules)
        if used.kg_co2 is not None:
            yield self._counter("carbon_grams", "CO2 of that energy, by the cluster's factors.", 1000 * used.kg_co2)
        rate = self._energy.get("tokens_per_joule")
        yield from self._gauges({"tokens_per_joule": (rate, "Tokens a joule of the last steps.")})


def in_base_units(name: str) -> tuple[str, float]:
    """Name of a spread by Prometheus' conventions, and the factor of its values."""
    if name in RATIOS:
        return f"{name}_ratio", 1.0
    for end, (unit, factor) in UNITS.items():
        if name.endswith(end):
            return name.removesuffix(end) + unit, factor
    return name, 1.0
