"""`python -m lab punish` on real runs, with the faults that no other test injects into a whole run."""

from __future__ import annotations

import json
import random
import statistics
import time
from dataclasses import replace
from pathlib import Path

import pytest

import lab.__main__ as lab
from benchmarks.former import ADAMW
from lab.punish import faults, report
from lab.punish.campaign import Campaign
from llmrecipes.workflow.run import Paths
from tests.helpers import tiny, tiny_on, write_recipe
from tests.refusals import require_message

pytestmark = pytest.mark.dist
INSIDE = ("collective left out", "exception in evaluation", "flipped weight bit")


@pytest.mark.slow
def test_faults_inside_ranks_are_noticed_and_change_nothing(
    tmp_path: Path, corpus: Path, data_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    recipe = write_recipe(tiny_on(corpus, "hard", model={"hidden_dropout": 0.1}), tmp_path)
    chosen = [word for name in INSIDE for word in ("--fault", name)]
    paths = ["--runs-dir", str(tmp_path / "runs"), "--data-dir", str(data_dir)]
    code = lab.run(["punish", recipe, "--nproc", "2", "--steps", "80", "--once", "--json", *chosen, *paths])
    printed = capfd.readouterr()
    answer = json.loads(printed.out)
    assert code == 0, printed.out + printed.err
    assert answer.keys() == {
        "injected", "detected", "recovered", "false_alarms", "effective_time", "effective_time_of_allowed",
        "detection_seconds", "recovery_seconds", "equal_to_uninterrupted", "missed",
    }  # fmt: skip
    assert answer["missed"] == []
    assert answer["injected"] == answer["detected"] == answer["recovered"] == len(INSIDE)
    assert answer["false_alarms"] == 0
    assert answer["equal_to_uninterrupted"] is True
    assert 0 < answer["effective_time"] < 1


@pytest.mark.parametrize(
    ("words", "where", "rule"),
    [
        (["--fault", "earthquake"], "--fault", ()),
        (["--nproc", "1"], "--nproc", "2"),
        (["--steps", "79", "--save-interval", "20"], "--steps", "--steps 80"),
        ([*ADAMW, "layout.engine=deepspeed", "layout.zero.stage=1"], "engine", "layout.engine=megatron"),
    ],
)
def test_what_cannot_be_punished_is_refused(
    words: list[str], where: str, rule: str | tuple[str, ...], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    paths = ["--runs-dir", str(tmp_path / "runs"), "--data-dir", str(tmp_path / "data")]
    assert lab.run(["punish", "gpt-tiny", *words, *paths]) == 2
    require_message(capfd.readouterr().err, where, rule=rule)
    assert not list(tmp_path.iterdir())


def test_what_was_not_noticed_or_recovered_counts() -> None:
    fault = faults.FAULTS[0]
    fine = report.Injection(0, fault, 1, "r", 5, injected_at=10.0, noticed_at=11.0, recovered_at=15.0, step_seconds=1.0)
    hidden = report.Injection(1, fault, 1, "r", 9, injected_at=20.0)
    left = report.Injection(2, fault, 0, "r", 12, injected_at=30.0, noticed_at=31.0, recovered_at=33.0, orphans=1)
    result = report.Punished([fine], [], 20.0, 12.0, 14.4, 1, 30, True, None, "folder")
    assert result.ok
    # 5 s of the 20 are down, 1 of which is the step that shows the recovery
    assert (result.effective_time, result.of_allowed) == (0.6, 0.9)
    worse = report.Punished([fine, hidden, left], ["exit: 1"], 20.0, 12.0, 14.4, 1, 30, True, None, "folder")
    assert not worse.ok
    values = worse.as_dict()
    assert (values["injected"], values["detected"], values["recovered"], values["false_alarms"]) == (3, 2, 1, 1)
    assert [worse.summary().count(f"step {one.step}, rank {one.rank}") for one in (fine, hidden, left)] == [0, 1, 1]
    assert [len(text) > 20 and text in worse.summary() for text in values["missed"]] == [True, True]
    unequal = replace(fine, number=3, step=17, equal=False)
    assert report.Punished([fine, unequal], [], 20.0, 12.0, 14.4, 1, 30, False, None, "folder").missed == [unequal]
    assert values["detection_seconds"] == {"p50": 1.0, "p95": 1.0}
    assert not report.Punished([fine], ["exit: 1"], 20.0, 12.0, 14.4, 1, 30, True, None, "folder").ok
    assert not report.Punished([fine], [], 20.0, 12.0, 14.4, 1, 30, False, None, "folder").ok


def test_a_fault_whose_run_ends_meanwhile_is_settled(tmp_path: Path) -> None:
    fault = faults.FAULTS[0]
    paths = Paths(tmp_path, tmp_path)
    several = Campaign(tiny(), paths, 2, faults.Pace(), faults.FAULTS, lambda _: None)
    ordered, had, noticed = (report.Injection(number, fault, 1, "r", 5) for number in range(3))
    had.injected_at = noticed.injected_at = time.monotonic()
    noticed.noticed_at = time.monotonic()
    several.injections = [ordered, had, noticed]
    assert [several._ended_with(one) for one in (ordered, had, noticed)] == [fault, None, None]
    assert several.injections == [had, noticed], "what did not happen does not count"
    assert (had.recovering, noticed.recovering is not None) == (None, True)


def test_a_fault_that_shows_between_replicas_needs_some(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    paths = ["--runs-dir", str(tmp_path / "runs"), "--data-dir", str(tmp_path / "data")]
    words = ["gpt-tiny", "layout.tensor_model_parallel_size=2", "--nproc", "2", "--fault", "flipped weight bit"]
    assert lab.run(["punish", *words, *paths]) == 2
    require_message(capfd.readouterr().err, "--fault", rule="--nproc 4")


def test_faults_come_at_a_mean_interval() -> None:
    source = random.Random(1)
    pauses = [faults.Pace(every=150.0).pause(source) for _ in range(4000)]
    # exponential: the mean and the standard deviation are the interval
    assert statistics.mean(pauses) == pytest.approx(150.0, rel=0.05)
    assert statistics.stdev(pauses) == pytest.approx(150.0, rel=0.05)
    assert faults.Pace().pause(source) == 0.0


def test_an_order_is_carried_out_once_and_where_it_can_be(tmp_path: Path) -> None:
    faults.give(tmp_path, 2, "NaN", 7)
    assert faults.take(tmp_path, 1, frozenset({"NaN"})) is None
    assert faults.take(tmp_path, 2, frozenset({"exception"})) is None
    assert faults.taken_at(tmp_path, 7) is None
    assert faults.take(tmp_path, 2, frozenset({"NaN"})) == "NaN"
    assert faults.taken_at(tmp_path, 7) is not None
    assert faults.take(tmp_path, 2, frozenset({"NaN"})) is None
