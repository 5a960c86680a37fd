"""The energy of all nodes is added up on the first rank, to the last step and over starts."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from llmrecipes.engine.base import Engine, Progress, World
from llmrecipes.hardware.profile import Costs
from llmrecipes.tracking.energy import Energy
from llmrecipes.train.observers.node_monitor import Gpus, NodeReadings, NodeSampler
from llmrecipes.train.observers.telemetry import Telemetry
from tests.dist.table import Row
from tests.dist.training import training
from tests.dist.worlds import GlooWorld
from tests.observing import observer
from tests.unit.test_train_node_monitor import Nvml

pytestmark = pytest.mark.dist

STEPS = 14
"""Reported after steps 10 and 14; the last row is that of the end."""
ROW = Row("gpt", "dp2", {"train": {"train_iters": STEPS}, "tracking": {"system_metrics_interval": None}})
COSTS = Costs(watts_per_gpu=100.0, pue=2.0, kg_co2_per_kwh=0.25)


@contextmanager
def measuring(engine: Engine, world: World, costs: Costs | None) -> Iterator[Telemetry]:
    """That of a rank, which has begun, for `STEPS`."""
    loop = {"plan": engine.plan, "engine": engine, "world": world, "progress": Progress(step=STEPS)}
    with observer(Telemetry, engine.recipe, Path("/"), {"costs": costs}, **loop) as telemetry:
        telemetry.begin()
        yield telemetry


def metered(row: Row, before: Energy, gpus: bool = True) -> tuple[list[dict[str, Any]], Energy]:
    """Steps without a training. Each rank is a node, whose counter grows by a joule a step on the first, else two."""
    reports: list[dict[str, Any]] = []
    memory, nvml = mmap.mmap(-1, mmap.PAGESIZE), Nvml()
    with training(row.recipe) as (engine, world):
        counters = Gpus(nvml, None) if gpus or world.is_first else None
        sampler = NodeSampler(Path("/"), counters, powercap=Path("/nowhere"))
        data = sampler.sample()
        memory[: len(data)] = data
        with measuring(engine, world, COSTS) as telemetry:
            telemetry._readings, telemetry.energy = NodeReadings(memory), before
            for step in range(1, STEPS + 1):
                telemetry.beat("step", step)
                nvml.millijoules += 1000 * (world.rank + 1)
                data = sampler.sample()
                memory[: len(data)] = data
                if energy := telemetry.fields(step, 0.01).get("energy"):
                    reports.append(dict(energy))
            telemetry.end()
    return reports, telemetry.energy


def test_the_joules_of_all_nodes_and_starts_are_added_up_to_the_last_step(worlds: dict[int, GlooWorld]) -> None:
    reports, energy = worlds[2].run(metered, ROW, Energy())
    tokens = ROW.recipe.train.global_batch_size * ROW.recipe.model.seq_length
    assert [report["total_joules"] for report in reports] == [27, 39], "up to the steps before 10 and 14"
    assert [report["joules"] for report in reports] == [27, 12]
    assert [report["tokens_per_joule"] for report in reports] == pytest.approx([tokens / 3] * 2)
    assert energy.joules == 3 * STEPS
    assert (energy.kwh, energy.kg_co2) == pytest.approx((2 * 42 / 3.6e6, 0.5 * 42 / 3.6e6))
    assert energy.methods == ("nvml",)
    assert not any("nodes_missing" in report for report in reports)
    reports, less = worlds[2].run(metered, ROW, Energy(), False)
    assert less.joules == STEPS and [report["nodes_missing"] for report in reports] == [1, 1], (
        "the second has no counter"
    )
    _, again = worlds[2].run(metered, ROW, energy)
    assert again.joules == 6 * STEPS and again.kwh == pytest.approx(2 * energy.kwh)


def estimated(row: Row, costs: Costs | None) -> tuple[list[dict[str, Any]], Energy]:
    """The same on a node without a counter."""
    reports: list[dict[str, Any]] = []
    with training(row.recipe) as (engine, world), measuring(engine, world, costs) as telemetry:
        for step in range(1, STEPS + 1):
            telemetry.beat("step", step)
            if energy := telemetry.fields(step, 0.01).get("energy"):
                reports.append(dict(energy))
        telemetry.end()
    return reports, telemetry.energy


def test_without_a_counter_energy_is_estimated_from_the_profile_and_said_to_be(worlds: dict[int, GlooWorld]) -> None:
    reports, energy = worlds[2].run(estimated, ROW, COSTS)
    assert energy.methods == ("profile",) and "estimated" in energy.how() and "measured" not in energy.how()
    assert 0 < reports[0]["total_joules"] < reports[-1]["total_joules"] < energy.joules
    assert worlds[2].run(estimated, ROW, None) == ([], Energy())
