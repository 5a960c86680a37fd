"""What a run has used survives its starts; a node without counters is modelled by the real codecarbon."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from llmrecipes.hardware.profile import Costs
from llmrecipes.recipe.schema import Tracking
from llmrecipes.tracking import run_tracker
from llmrecipes.tracking.energy import Energy
from llmrecipes.tracking.events import ENERGY, STARTED, Note, StepMetrics, note_metrics
from llmrecipes.tracking.jsonl import JsonlSink, record
from llmrecipes.tracking.mlflow.sender import entities
from llmrecipes.tracking.run_tracker import require_packages_of_tracking
from llmrecipes.train.observers.node_monitor import Modelled
from tests.refusals import refused
from tests.unit.test_tracking_run import recipe, step

COSTS = Costs(pue=1.5, kg_co2_per_kwh=0.5)
USED = Energy().plus(3.6e6, ["nvml"], COSTS).plus(7.2e6, ["nvml", "rapl"], COSTS)


def with_energy(number: int, energy: Energy) -> StepMetrics:
    return replace(step(number), energy={"joules": 1.0, "tokens_per_joule": 2.0, **energy.values()})


def test_building_and_carbon_follow_the_profile() -> None:
    assert asdict(USED) == {"joules": 10.8e6, "kwh": 4.5, "kg_co2": 2.25, "methods": ("nvml", "rapl")}
    unknown = USED.plus(3.6e6, ["codecarbon"], None)
    assert (unknown.kwh, unknown.kg_co2) == (5.5, None), "without a factor in one start, the carbon of all is not known"
    assert unknown.plus(1.0, ["profile"], COSTS).kg_co2 is None
    assert "nvml and rapl" in unknown.how() and "codecarbon" in unknown.how()
    assert Energy().values() == {} == Energy().details(5)


@pytest.mark.parametrize(
    "event",
    [
        with_energy(3, USED),
        Note(step=3, event=ENERGY, details=USED.details(100)),
        Note(step=3, event=STARTED, details={"ranks": 2, "energy": USED.values()}),
    ],
    ids=["step", "end", "start"],
)
def test_each_line_that_has_it_is_read_back(event: StepMetrics | Note) -> None:
    assert Energy.of(json.loads(json.dumps(record(event)))) == USED


@pytest.mark.parametrize(
    "damaged",
    [
        {"energy": []},
        {"energy": {"total_joules": "1", "kwh": 1}},
        {"energy": {"joules": 5}},
        {"energy": {"total_joules": -1, "kwh": 1}},
        {"event": ENERGY, "details": {}},
        {"event": ENERGY, "details": None},
        {"event": STARTED, "details": {"energy": 7}},
        {"event": "network", "details": {"energy": USED.values()}},
    ],
)
def test_what_is_damaged_or_older_says_nothing(damaged: dict[str, Any]) -> None:
    assert Energy.of({"step": 1, **damaged}) is None


def test_the_words_of_the_note_are_a_tag_and_no_metric() -> None:
    assert note_metrics(USED.details(100)) == {
        "energy/total_joules": 10.8e6,
        "energy/kwh": 4.5,
        "energy/kg_co2": 2.25,
        "energy/run_tokens_per_joule": 100 / 10.8e6,
    }
    metrics, tags = entities(record(Note(step=3, event=ENERGY, details=USED.details(100))))
    assert {metric.key for metric in metrics} == note_metrics(USED.details(100)).keys()
    assert [(tag.key, tag.value) for tag in tags] == [("energy.method", "nvml+rapl")]


def test_steps_that_are_dropped_have_used_energy(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    path = tmp_path / "metrics.jsonl"
    first = JsonlSink(path, 0)
    for number in range(1, 9):
        first.step(with_energy(number, Energy().plus(number * 10.0, ["nvml"], COSTS)))
    # killed: not closed
    second = JsonlSink(path, 5)
    assert second.energy.joules == 80, "steps 6 to 8 were computed, and will be again"
    second.note(Note(step=5, event=STARTED, details={"energy": second.energy.values()}))
    assert JsonlSink(path, 5).energy == second.energy, "killed before its first report"


@pytest.mark.parametrize(
    ("key", "value", "package", "extra"),
    [
        ("energy_model", "codecarbon", "codecarbon", "energy"),
        ("prometheus", True, "prometheus_client", "prometheus"),
    ],
)
def test_a_key_whose_package_is_missing_is_refused(
    key: str, value: Any, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = recipe(tracking=Tracking(**{"mlflow": False, key: value}))
    require_packages_of_tracking(made)
    monkeypatch.setattr(run_tracker, "find_spec", lambda name: None if name == package else True)
    with refused(f"tracking.{key}", rule=f"'.[{extra}]'"):
        require_packages_of_tracking(made)


AUDITED = """
import sys, time
from pathlib import Path

seen = []


def audit(event, arguments):
    path, mode = (*arguments, None, None)[:2]
    writes = event == "open" and type(path) is str and type(mode) is str and set("wax+") & set(mode)  # not a pipe
    if event in ("socket.connect", "socket.getaddrinfo", "socket.sendto") or writes:
        seen.append((event, arguments[0]))


sys.dont_write_bytecode = True
sys.addaudithook(audit)
from llmrecipes.train.observers.node_monitor import Modelled, NodeSampler

sampler = NodeSampler(Path("/"), None, powercap=Path("/nowhere"), model=Modelled())
sampler.sample()
time.sleep(0.2)
sampler.sample()
print(sampler._totals["codecarbon_joules"], seen)
"""


def test_codecarbon_models_processors_and_memory_without_network_or_files(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", AUDITED], cwd=tmp_path, capture_output=True, text=True, check=True)
    joules, seen = done.stdout.split(maxsplit=1)
    assert seen.strip() == "[]"
    assert done.stderr == "", "nothing is said in the terminal of a run"
    assert list(tmp_path.iterdir()) == []
    assert 0.2 * 10 < float(joules) < 1000, "two memory modules of 5 W, at least"


@pytest.mark.parametrize(
    ("name", "watts"), [("Processor of 2050", None), ("Intel(R) Xeon(R) CPU E5-2687W v3 @ 3.10GHz", 160.0)]
)
def test_sockets_are_counted_once(name: str, watts: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, util = (pytest.importorskip(f"codecarbon.core.{module}") for module in ("cpu", "util"))
    monkeypatch.setattr(cpu, "detect_cpu_model", lambda: name)
    monkeypatch.setattr(util, "count_physical_cpus", lambda: 2)
    expected = 4 * util.count_cpus() if watts is None else 2 * watts
    assert Modelled()._processors._tdp == expected
