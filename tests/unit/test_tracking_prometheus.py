"""What Prometheus reads of a run, through the tracker, and over a real socket."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from llmrecipes.hardware.profile import Costs
from llmrecipes.recipe.schema import Tracking
from llmrecipes.tracking.energy import Energy
from llmrecipes.tracking.events import EvalMetrics, Note
from llmrecipes.tracking.run_tracker import RunTracker
from tests.dashboard import free_port, text
from tests.unit.test_tracking_run import open_tracker, recipe, step


@pytest.fixture
def port() -> int:
    return free_port()


def opened(folder: Path, port: int, resumed_step: int = 0) -> RunTracker:
    tracking = Tracking(mlflow=False, tensorboard=False, prometheus=True, prometheus_port=port)
    return open_tracker(folder, resumed_step=resumed_step, made_from=recipe(tracking=tracking))


def samples(port: int) -> Iterator[tuple[str, str, float]]:
    """Name, other labels than the run, and value, as Prometheus' own parser reads them."""
    for family in text_string_to_metric_families(text(port)):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("run") == "tiny/one"
            yield sample.name, ",".join(labels.values()), sample.value


def test_the_newest_values_are_served_in_base_units(tmp_path: Path, port: int) -> None:
    spread: dict[str, Any] = {"min": 1.0, "median": 2.0, "max": 3.0, "min_node": "a", "max_node": "b"}
    energy = Energy().plus(3.6e6, ["nvml"], Costs(kg_co2_per_kwh=0.5)).values() | {"tokens_per_joule": 7.0}
    with opened(tmp_path, port) as tracker:
        assert {name: value for name, _, value in samples(port)}["llmrecipes_steps"] == 20
        tracker.step(replace(step(1), nodes={"sm_clock_mhz": spread, "temperature_c": spread}, energy=energy))
        tracker.step(step(2, loss=float("nan")))
        tracker.eval(EvalMetrics(step=2, valid_loss=4.0, consumed_samples=1, consumed_tokens=1, eval_seconds=1.0))
        tracker.note(Note(step=2, event="checkpoint_saved"))
        tracker.note(Note(step=2, event="loss_spike", alarm=True))
        served = {(name, labels): value for name, labels, value in samples(port)}
    assert str(served["llmrecipes_loss", ""]) == "nan"
    expected = {
        ("llmrecipes_step", ""): 2,
        ("llmrecipes_tokens_total", ""): 16,
        ("llmrecipes_valid_loss", ""): 4,
        ("llmrecipes_checkpoint_step", ""): 2,
        ("llmrecipes_node_sm_clock_hertz", "max"): 3e6,
        ("llmrecipes_node_temperature_celsius", "median"): 2,
        ("llmrecipes_energy_joules_total", ""): 3.6e6,
        ("llmrecipes_carbon_grams_total", ""): 500,
        ("llmrecipes_tokens_per_joule", ""): 7,
        ("llmrecipes_events_total", "true,loss_spike"): 1,
    }
    assert served | expected == served, "what a step has not measured is kept from the last one that has"
    assert ("llmrecipes_mfu_ratio", "") not in served, "absent, not zero"
    assert text(port) == "", "nobody listens after the run"


def test_a_port_in_use_is_said_once_and_the_run_goes_on(
    tmp_path: Path, port: int, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as other, caplog.at_level(logging.WARNING):
        other.bind(("127.0.0.1", port))
        other.listen()
        with opened(tmp_path, port) as tracker:
            for number in range(1, 4):
                tracker.step(step(number))
    (said,) = [entry.getMessage() for entry in caplog.records]
    assert "tracking.prometheus_port" in said and str(port) in said
    assert len((tmp_path / "tiny/one/metrics.jsonl").read_text().splitlines()) == 3


def test_a_run_that_goes_back_serves_again_and_only_this_machine_is_served(tmp_path: Path, port: int) -> None:
    for resumed in (0, 5):
        with opened(tmp_path, port, resumed) as tracker:
            tracker.step(step(resumed + 1))
            assert ("llmrecipes_step", "", resumed + 1) in set(samples(port))
            with socket.socket() as outside:
                outside.settimeout(5)
                assert outside.connect_ex(("127.0.0.2", port)) != 0, "it would answer if it listened everywhere"
