"""A slow rank is reported in every layout, where all ranks take the same time for a step; others are not."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.dist.slowing import STEPS, measured
from tests.dist.table import Row, Sections
from tests.dist.worlds import GlooWorld

pytestmark = [pytest.mark.dist, pytest.mark.slow]

CHANGES: Sections = {"train": {"train_iters": STEPS}, "faults": {"straggler_threshold": 0.75}}
HEALTHY: Sections = {**CHANGES, "faults": {"straggler_threshold": 0.4}}
"""Beside other tests on the same cores."""
LAYOUTS = [
    pytest.param("dp4", 1),
    pytest.param("tp2 dp2", 2),
    pytest.param("tp2 pp2", 3),
]


@pytest.mark.parametrize(("layout", "slow"), LAYOUTS)
def test_a_slow_rank_is_reported_within_two_reports(layout: str, slow: int, worlds: dict[int, GlooWorld]) -> None:
    seen = worlds[4].run(measured, Row("gpt", layout, CHANGES), slow)
    # Ranks and other tests share two cores: one that waits for a core may be slow by chance, but not as much.
    note = max(seen.notes, key=lambda note: note.details["factor"])
    assert note.details["rank"] == slow
    assert (note.event, note.step, note.alarm) == ("straggler", 20, True)
    assert note.details["factor"] > 1.3
    assert note.details["node"] in note.details["text"]
    for report in seen.reports:
        assert report["compute_seconds"]["max_rank"] == slow, "the others wait for it, which is not their own time"
        assert report["communication_seconds"]["min_rank"] == slow


def test_the_node_of_a_lasting_straggler_is_left_out_by_its_job(worlds: dict[int, GlooWorld], tmp_path: Path) -> None:
    changes = {**CHANGES, "faults": {"straggler_threshold": 0.75, "straggler_exclude_reports": 2}}
    record = tmp_path / "bad-nodes"
    seen = worlds[4].run(measured, Row("gpt", "dp4", changes), 1, record)
    (note,) = [note for note in seen.notes if note.event == "straggler_left_out"]
    assert "n1" in note.details["nodes"]
    assert seen.stopped
    # As slurm/train.sbatch reads it.
    words = [line.split() for line in record.read_text().splitlines()]
    assert [node for _, node in words] == note.details["nodes"]
    assert all(0 <= time.time() - int(seconds) < 600 for seconds, _ in words)


def test_a_job_without_nodes_to_spare_keeps_a_straggler(worlds: dict[int, GlooWorld], tmp_path: Path) -> None:
    changes = {**CHANGES, "faults": {"straggler_threshold": 0.75, "straggler_exclude_reports": 1}}
    record = tmp_path / "bad-nodes"
    seen = worlds[4].run(measured, Row("gpt", "dp4", changes), 1, record, 0)
    assert not seen.stopped
    assert not record.exists()
    assert not [note for note in seen.notes if note.event == "straggler_left_out"]
    assert "n1" in {node for note in seen.notes if note.event == "straggler_kept" for node in note.details["nodes"]}


def test_healthy_ranks_are_not_reported_and_their_times_add_up_to_the_step(worlds: dict[int, GlooWorld]) -> None:
    seen = worlds[4].run(measured, Row("gpt", "tp2 dp2", HEALTHY), None)
    assert seen.notes == []
    assert len(seen.reports) == 2
    for report, seconds in zip(seen.reports, seen.seconds, strict=True):
        times = [report[name] for name in ("data_seconds", "compute_seconds", "communication_seconds")]
        assert sum(time["min"] for time in times) <= 1.001 * seconds
        assert sum(time["max"] for time in times) >= 0.999 * seconds
        assert all(0 < time["min"] <= time["median"] <= time["max"] for time in times[1:])
        assert report["memory_resident_bytes"]["min"] > 1 << 26
        assert report["save_seconds"] == dict.fromkeys(("min", "median", "max", "min_rank", "max_rank"), 0)
