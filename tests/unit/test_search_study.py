"""Studies: where they are kept, who continues them, what they are filled with, and when they end."""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
import sqlalchemy.orm
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import TrialState

from llmrecipes.errors import ExitCode
from llmrecipes.hardware import process as processes
from llmrecipes.launch.base import JobState, JobStatus
from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.sections.search_section import Search
from llmrecipes.search import starting, storage, study, trials
from llmrecipes.search.budget import used
from llmrecipes.search.trials import WORKER, own_trials
from llmrecipes.search.worker import Worker
from tests.refusals import refused
from tests.unit.search_lab import LR, Curves, bowl, curves, ran, searched, states, use_curves, worker

__all__ = ["curves"]

pytestmark = pytest.mark.usefixtures("curves")
FORK = multiprocessing.get_context("fork")
"""A new process would import torch."""
STORAGES = {"journal": None, "sqlite": "sqlite:///{}/study.db"}


def kept(kind: str, folder: Path) -> dict[str, str]:
    where = STORAGES[kind]
    return {} if where is None else {"storage": where.format(folder)}


def test_a_study_is_continued_only_if_asked_for_and_only_by_its_recipe(tmp_path: Path) -> None:
    first = [trial.params for trial in ran(searched(n_trials=3), tmp_path).trials]
    with refused(tmp_path / "runs/lab-search/lab/journal.log", rule="--resume"):
        ran(searched(n_trials=5), tmp_path)
    again = ran(searched(n_trials=5), tmp_path, resume=True)
    assert len(again.trials) == 5
    assert [trial.params for trial in again.trials[:3]] == first
    wider = {**LR, "high": 10.0}
    for changed, key in (
        (searched(wider, n_trials=9), "search.space.optimizer.lr.high"),
        (searched(n_trials=9, objectives=["valid_bits_per_byte"]), "search.objectives"),
        (searched(n_trials=9, trial_tokens=1024), "search.trial_tokens"),
    ):
        with refused(tmp_path / "runs/lab-search/lab/journal.log", rule=key):
            ran(changed, tmp_path, resume=True)
    other = searched(n_trials=9).model_copy(update={"optimizer": first_optimizer(weight_decay=0.5)})
    with refused(tmp_path / "runs/lab-search/lab/journal.log", rule="optimizer.weight_decay"):
        ran(other, tmp_path, resume=True)
    assert len(again.trials) == 5
    # Each trial has a value of its own, so that the recipe's may have become that of the best one.
    best = searched(n_trials=6).model_copy(update={"optimizer": first_optimizer(lr=again.best_params["optimizer.lr"])})
    assert len(ran(best, tmp_path, resume=True).trials) == 6


@pytest.mark.parametrize("objective", ["valid_loss", "train_seconds"])
def test_a_study_goes_on_in_another_layout_unless_it_measures_time(objective: str, tmp_path: Path) -> None:
    recipe = searched(n_trials=2, objectives=[objective])
    ran(recipe, tmp_path)
    other = searched(n_trials=3, objectives=[objective])
    other = other.with_layout(micro_batch_size=4)
    assert other.layout.micro_batch_size != recipe.layout.micro_batch_size
    if objective == "valid_loss":
        assert len(ran(other, tmp_path, resume=True).trials) == 3
    else:
        with refused(tmp_path / "runs/lab-search/lab/journal.log", rule="layout.micro_batch_size"):
            ran(other, tmp_path, resume=True)


def first_optimizer(**changes: Any) -> Any:
    return searched().optimizer.model_copy(update=changes)


def search_in_a_process(recipe: Recipe, folder: Path) -> None:
    made = worker(recipe, folder, resume=True)
    assert made.run() == ExitCode.DONE


@pytest.mark.parametrize("kind", STORAGES)
def test_processes_share_a_study_and_never_a_trial(kind: str, tmp_path: Path) -> None:
    """All begin at the same moment; one of them creates the study."""
    recipe = searched(
        n_trials=8, enqueue_trials=[{"optimizer.lr": 0.5}, {"optimizer.lr": 0.02}], **kept(kind, tmp_path)
    )
    searches = [FORK.Process(target=search_in_a_process, args=(recipe, tmp_path)) for _ in range(3)]
    for process in searches:
        process.start()
    for process in searches:
        process.join(300)
    assert [process.exitcode for process in searches] == [0, 0, 0]
    made = worker(recipe, tmp_path, resume=True)
    trials = list(own_trials(made.study))
    assert len(trials) == 8
    assert {trial.state for trial in trials} <= {TrialState.COMPLETE, TrialState.PRUNED}
    # Each has a run of its own, started once, and the seeds of the processes differ.
    assert len({trial.user_attrs["run_id"] for trial in trials}) == 8
    assert len({trial.params["optimizer.lr"] for trial in trials}) == 8
    for trial in trials:
        lines = (made.place.run_dir(trial.user_attrs["run_id"]) / "metrics.jsonl").read_text().splitlines()
        assert len(lines) == 2 * len(trial.intermediate_values)


def take_all(address: str, search: Search, numbers: list[int], together: Any, taken: Any) -> None:
    opened = storage.open_storage(address, search)
    for number in numbers:
        together.wait(60)
        taken.put(number if opened.set_trial_state_values(number, TrialState.RUNNING) else None)


def test_a_waiting_trial_is_taken_by_one_process(tmp_path: Path) -> None:
    """Optuna's own statements let 118 of 180 such attempts succeed, for 60 trials."""
    address, search = f"sqlite:///{tmp_path}/study.db", study.require_section(searched())
    opened = storage.open_storage(address, search)
    made = optuna.create_study(storage=opened)
    for number in range(30):
        made.enqueue_trial({"x": number})
    numbers = [trial._trial_id for trial in made.trials]
    together, taken = FORK.Barrier(3), FORK.Queue()
    processes = [FORK.Process(target=take_all, args=(address, search, numbers, together, taken)) for _ in range(3)]
    for process in processes:
        process.start()
    answers = [taken.get(timeout=60) for _ in range(3 * len(numbers))]
    for process in processes:
        process.join(60)
    assert sorted(answer for answer in answers if answer is not None) == numbers
    opened.set_trial_state_values(numbers[0], TrialState.FAIL)
    with pytest.raises(UpdateFinishedTrialError):
        opened.set_trial_state_values(numbers[0], TrialState.RUNNING)


def test_a_study_that_another_process_is_filling_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that fill it at the same moment would both add a point, and train it twice."""
    recipe = searched(enqueue_trials=[{"optimizer.lr": 0.5}, {"optimizer.lr": 0.02}])
    section, place = (
        study.require_section(recipe),
        study.place_of(recipe, study.require_section(recipe), tmp_path / "runs"),
    )
    where = storage.address(section, place.folder)
    created = study._create(storage.open_storage(where, section), place, section)
    created.enqueue_trial({"optimizer.lr": 1e-3})
    waits = []

    def the_other_continues(seconds: float) -> None:
        waits.append(seconds)
        study._fill(created, recipe, section, where)

    monkeypatch.setattr(study.time, "sleep", the_other_continues)
    assert len(study.open_study(recipe, place, resume=True).trials) == 3
    assert len(waits) == 1


def dies_at(evaluation: int) -> Callable[[Recipe, int], float]:
    def loss(recipe: Recipe, number: int) -> float:
        if len(Curves.submitted) == 2 and number == evaluation:
            os.kill(os.getpid(), signal.SIGKILL)
        return bowl(recipe, number)

    return loss


@pytest.mark.parametrize("kind", STORAGES)
def test_a_killed_search_is_continued_and_its_trial_resumed(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = searched(n_trials=4, pruner={"type": "NopPruner"}, **kept(kind, tmp_path))
    monkeypatch.setattr(Curves, "loss", staticmethod(dies_at(3)))
    process = FORK.Process(target=search_in_a_process, args=(recipe, tmp_path))
    process.start()
    process.join(240)
    assert process.exitcode == -signal.SIGKILL
    monkeypatch.setattr(Curves, "loss", staticmethod(bowl))
    again = ran(recipe, tmp_path, resume=True)
    assert states(again) == ["COMPLETE", "FAIL", "COMPLETE", "COMPLETE", "COMPLETE"]
    # The trial goes on in its run, with the losses that were already reported.
    assert Curves.submitted[0] == "lab-0001"
    resumed = again.trials[2]
    assert (resumed.user_attrs["run_id"], resumed.params) == ("lab-0001", again.trials[1].params)
    assert sorted(resumed.intermediate_values) == [1, 2, 3, 4]
    assert sum(1 for _ in own_trials(again)) == 4


def dies_at_write(recipe: Recipe, folder: Path, number: int) -> None:
    """A search that is killed at its n-th write to the storage: before it if n is odd, after it if n is even."""
    writes = 0

    def write(target: Any, *arguments: Any, original: Any) -> Any:
        nonlocal writes
        # Optuna also commits where it has only read, again and again while it waits for a heartbeat to expire.
        if isinstance(target, sqlalchemy.orm.Session) and not (
            target.info.pop("flushed", False) or target.dirty or target.new or target.deleted
        ):
            return original(target)
        writes += 1
        if writes == -(-number // 2) and number % 2:
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(target, *arguments)
        if writes == number // 2 and not number % 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    sqlalchemy.event.listen(sqlalchemy.orm.Session, "after_flush", lambda session, _: session.info.update(flushed=True))
    for owner, name in ((storage.Journal, "append_logs"), (sqlalchemy.orm.Session, "commit")):
        setattr(owner, name, functools.partialmethod(write, original=getattr(owner, name)))
    search_in_a_process(recipe, folder)


def killed_again_and_again(recipe: Recipe, folder: Path, stride: int) -> None:
    """Write the exit codes of a search that is killed again and again, later each time: before or after a write."""
    with pytest.MonkeyPatch.context() as patch:
        use_curves(patch)
        patch.setattr("llmrecipes.search.worker.IDLE_SECONDS", 0.05)
        patch.setattr(study, "FILLED_WITHIN", 0.1)
        codes: list[int | None] = []
        while len(codes) < 150 and 0 not in codes:
            process = FORK.Process(target=dies_at_write, args=(recipe, folder, stride * len(codes) + 1))
            process.start()
            process.join(300)
            codes.append(process.exitcode)
    (folder / "codes.json").write_text(json.dumps(codes))


@pytest.mark.rotating
@pytest.mark.parametrize(("kind", "stride"), [("journal", 1), pytest.param("sqlite", 3, marks=pytest.mark.slow)])
def test_a_search_may_be_killed_at_any_write(kind: str, stride: int, tmp_path: Path) -> None:
    """No trial is lost, none is trained twice, and their number is exact."""
    recipe = searched(
        n_trials=5, enqueue_trials=[{"optimizer.lr": 0.5}], pruner={"type": "NopPruner"}, max_retry=150,
        grace_period=1, **kept(kind, tmp_path),
    )  # fmt: skip
    # Its children would inherit the threads' locks of whatever ran before in this process, and crashed of them.
    clean = multiprocessing.get_context("spawn").Process(target=killed_again_and_again, args=(recipe, tmp_path, stride))
    clean.start()
    clean.join()
    codes = json.loads((tmp_path / "codes.json").read_text())
    assert codes[-1] == 0
    assert set(codes[:-1]) == {-signal.SIGKILL}
    assert len(codes) > 10
    made = worker(recipe, tmp_path, resume=True)
    trials = list(own_trials(made.study))
    assert [trial.state for trial in trials] == [TrialState.COMPLETE] * 5
    assert {1e-3, 0.5} < {trial.params["optimizer.lr"] for trial in trials}
    assert len({trial.user_attrs["run_id"] for trial in trials}) == 5
    for trial in trials:
        lines = (made.place.run_dir(trial.user_attrs["run_id"]) / "metrics.jsonl").read_text().splitlines()
        assert len(lines) == 8


def test_a_trial_that_is_put_back_twice_runs_once(tmp_path: Path) -> None:
    """Two processes do so at the same moment, or an answer of the storage was lost."""
    made = worker(searched(n_trials=2, pruner={"type": "NopPruner"}), tmp_path)
    trial = made.study.ask()
    trial.suggest_float("optimizer.lr", 1e-4, 1.0, log=True)
    trials.return_to_queue(made.study, trial.number)
    trials.return_to_queue(made.study, trial.number)
    assert made.run() == ExitCode.DONE
    assert [trial.state for trial in own_trials(made.study)] == [TrialState.COMPLETE] * 2
    assert len(Curves.submitted) == 2


def test_a_resumed_trial_is_not_stale_from_its_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last sign of life was that of the process that was lost."""
    made = worker(searched(n_trials=1, grace_period=100), tmp_path)
    now = [1000.0]
    monkeypatch.setattr(processes.time, "monotonic", lambda: now[0])
    trial = made.study.ask()
    trials.beat(made.study, trial)
    trial.set_user_attr(WORKER, {"host": "elsewhere", "pid": 1, "started": 0.0})
    now[0] += 101
    trials.take_back(made.study, 100, made._watch, made._starter)
    resumed = made.study.ask()
    trials.take_back(made.study, 100, made._watch, made._starter)
    assert made.study.trials[resumed.number].state == TrialState.RUNNING


def test_each_process_has_a_number_of_its_own() -> None:
    """Its seed: also if all register at the same moment, in another order than that of their clocks."""

    class Snapshot:
        def __init__(self, known: list[str]) -> None:
            self.user_attrs = dict.fromkeys(known, True)

        def set_user_attr(self, name: str, value: bool) -> None:
            """Visible to others at the same moment, and they to this one."""
            names.append(name)
            self.user_attrs |= dict.fromkeys([name, *seen], value)

    names: list[str] = []
    numbers, seen = [], list[str]()
    for others in ([], ["later"], ["earlier"], ["earlier", "later"]):
        seen[:] = [f"{study.WORKERS}{'9' if other == 'later' else '0'}" for other in others]
        numbers.append(study._register(Snapshot([])))  # type: ignore[arg-type]
    assert numbers == [0, 1, 2, 4]


def test_the_lock_of_a_killed_process_expires(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    storage.Journal(Path("journal.log"))._own_lock.acquire()
    made = storage.Journal(Path("journal.log"))
    monkeypatch.setattr(made._own_lock, "grace_period", 0.1)
    made.append_logs([{"op_code": 0}])
    assert (tmp_path / "journal.log").read_bytes() == b'{"op_code":0}\n'


def test_a_trial_without_signs_of_life_is_given_to_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process is on another machine; it is retried as often as the recipe says."""
    recipe = searched(n_trials=1, max_retry=1, grace_period=100)
    made = worker(recipe, tmp_path)
    now = [1000.0]
    monkeypatch.setattr(processes.time, "monotonic", lambda: now[0])
    for retried in (True, False):
        trial = made.study.ask()
        trial.set_user_attr(WORKER, {"host": "elsewhere", "pid": 1, "started": 0.0})
        trial.suggest_float("optimizer.lr", 1e-4, 1.0, log=True)
        trials.beat(made.study, trial)
        trials.take_back(made.study, 100, made._watch, made._starter)
        assert made.study.trials[trial.number].state == TrialState.RUNNING
        now[0] += 101
        trials.take_back(made.study, 100, made._watch, made._starter)
        assert made.study.trials[trial.number].state == TrialState.FAIL
        waiting = [trial for trial in made.study.trials if trial.state == TrialState.WAITING]
        assert [each.params for each in waiting] == ([made.study.trials[trial.number].params] if retried else [])


def test_a_stopped_search_gives_its_trials_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it does when a worker is preempted; the run is resumed, and nothing is counted twice."""

    def stopped(recipe: Recipe, evaluation: int) -> float:
        if evaluation == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return bowl(recipe, evaluation)

    monkeypatch.setattr(Curves, "loss", staticmethod(stopped))
    recipe = searched(n_trials=3, pruner={"type": "NopPruner"})
    assert worker(recipe, tmp_path, workers=2).run() == ExitCode.REQUEUE
    monkeypatch.setattr(Curves, "loss", staticmethod(bowl))
    again = ran(recipe, tmp_path, resume=True, workers=2)
    assert sorted(Curves.submitted) == ["lab-0000", "lab-0000", "lab-0001", "lab-0001", "lab-0004"]
    assert [trial.state.name for trial in own_trials(again)] == ["COMPLETE"] * 3


def test_a_storage_that_is_gone_for_a_while_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "LONGEST_PAUSE", 0.01)
    made = worker(searched(n_trials=2), tmp_path)
    journal, away = made.place.folder / "journal.log", made.place.folder / "away"
    tries = 0

    def append(self: storage.Journal, logs: list[dict[str, Any]], append: Any = storage.Journal.append_logs) -> None:
        nonlocal tries
        tries += 1
        if tries == 10:
            journal.rename(away)
        if tries == 14:
            away.rename(journal)
        append(self, logs)

    monkeypatch.setattr(storage.Journal, "append_logs", append)
    assert made.run() == ExitCode.DONE
    assert tries > 14
    assert states(made.study)[-1] == "COMPLETE"


def test_a_storage_that_stays_away_is_told_once_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "PATIENCE_SECONDS", 0.2)
    recipe = searched(n_trials=3, pruner={"type": "NopPruner"})
    ended = FORK.Process()
    ended.start()
    ended.join()
    with monkeypatch.context() as patch:  # afterwards this process is another one
        patch.setattr(starting, "this_worker", lambda: {**trials.this_worker(), "pid": ended.pid})
        made = worker(recipe, tmp_path)
        with_storage_unmounted(made, tmp_path, patch)
    again = ran(recipe, tmp_path, resume=True)
    assert [trial.state.name for trial in own_trials(again)] == ["COMPLETE"] * 3


def with_storage_unmounted(made: Worker, tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    folder, away = made.place.folder, tmp_path / "away"

    def unmounted(recipe: Recipe, evaluation: int) -> float:
        if len(Curves.submitted) == 2 and folder.exists():
            folder.rename(away)
        return bowl(recipe, evaluation)

    patch.setattr(Curves, "loss", staticmethod(unmounted))
    with refused(folder / "journal.log", rule="--resume"):
        made.run()
    away.rename(folder)


@pytest.mark.parametrize("where", ["sqlite:////nowhere/at/all/study.db", "/proc/nowhere/journal.log"])
def test_a_storage_that_cannot_be_opened(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "OPEN_SECONDS", 0.2)
    with refused(where):
        worker(searched(storage=where), tmp_path)


def test_a_locked_database_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sqlite3

    monkeypatch.setattr(storage, "OPEN_SECONDS", 0.1)
    monkeypatch.setattr(storage, "LOCK_SECONDS", 0.1)
    recipe = searched(storage=f"sqlite:///{tmp_path}/study.db")
    worker(recipe, tmp_path)
    with sqlite3.connect(tmp_path / "study.db") as locked:
        locked.execute("BEGIN EXCLUSIVE")
        with refused(f"sqlite:///{tmp_path}/study.db"):
            worker(recipe, tmp_path, resume=True)


def test_a_line_that_a_killed_process_left_behind_is_removed(tmp_path: Path) -> None:
    recipe = searched(n_trials=2)
    ran(recipe, tmp_path)
    journal = tmp_path / "runs/lab-search/lab/journal.log"
    with journal.open("ab") as file:
        file.write(b'{"op_code": 4, "worker_')
    assert len(ran(searched(n_trials=4), tmp_path, resume=True).trials) == 4
    assert b'"worker_{' not in journal.read_bytes()


def test_earlier_studies_and_known_points(tmp_path: Path) -> None:
    earlier = ran(searched(n_trials=5), tmp_path)
    narrow = {**LR, "low": 1e-3, "high": 0.1}
    inside = [trial for trial in earlier.trials if 1e-3 <= trial.params["optimizer.lr"] <= 0.1]
    source = {"study_name": "lab", "storage": str(tmp_path / "runs/lab-search/lab/journal.log")}
    points = [{"optimizer.lr": 0.01}, {}]
    later = ran(
        searched(narrow, study_name="later", n_trials=4, source_studies=[source], enqueue_trials=points), tmp_path
    )
    known = [trial for trial in later.trials if trial.user_attrs.get("source_study")]
    assert 0 < len(known) == len(inside) < 5
    assert [trial.values for trial in known] == [trial.values for trial in inside]
    own = list(own_trials(later))
    assert own[0].params["optimizer.lr"] == 0.01  # the recipe's own rate was tried in the earlier study
    assert len(own) == 4
    with refused("search.source_studies"):
        worker(searched(study_name="x", source_studies=[{**source, "study_name": "nothing"}]), tmp_path)
    for changed, key in (
        (searched(study_name="y", source_studies=[source], objectives=["valid_bits_per_byte"]), "search.objectives"),
        (searched(study_name="y", source_studies=[source], trial_tokens=1024), "search.trial_tokens"),
        (with_layers(searched(study_name="y", source_studies=[source]), 3), "model.num_layers"),
    ):
        with refused("search.source_studies", rule=key):
            worker(changed, tmp_path)


def with_layers(recipe: Recipe, number: int) -> Recipe:
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"num_layers": number})})


def test_an_earlier_study_of_fewer_keys_has_the_values_that_were_fixed(tmp_path: Path) -> None:
    """Without them, samplers would no longer model the new key together with the others."""
    ran(with_layers(searched(n_trials=3), 3), tmp_path)
    source = {"study_name": "lab", "storage": str(tmp_path / "runs/lab-search/lab/journal.log")}
    layers = {"key": "model.num_layers", "low": 1, "high": 4}
    wider = worker(searched(LR, layers, study_name="wider", source_studies=[source]), tmp_path).study
    assert [trial.params["model.num_layers"] for trial in wider.trials if trial.values] == [3, 3, 3]
    fewer = worker(searched(LR, {**layers, "high": 2}, study_name="fewer", source_studies=[source]), tmp_path).study
    assert not [trial for trial in fewer.trials if trial.values]


def test_a_recipe_outside_of_its_space_is_not_tried(tmp_path: Path) -> None:
    study = ran(searched({**LR, "low": 0.1}, n_trials=1), tmp_path)
    assert study.trials[0].params["optimizer.lr"] >= 0.1
    study = ran(searched(n_trials=1, study_name="without", enqueue_recipe=False), tmp_path)
    assert study.trials[0].params["optimizer.lr"] != 1e-3


@pytest.mark.parametrize(
    ("limits", "trials"),
    [
        ({"n_trials": 5}, 5),
        ({"max_tokens": 3 * 6144 + 1}, 3),
        # A quarter of a second for each step that the clock is asked, on one rank.
        ({"max_gpu_hours": 1e-9}, 1),
        ({"timeout": 1e-9}, 0),
        ({"target": 10.0, "n_trials": 50}, 1),
        ({"patience": 3, "min_improvement": 100.0, "n_trials": 50}, 4),
    ],
)
def test_a_study_ends_at_the_first_limit(limits: dict[str, Any], trials: int, tmp_path: Path) -> None:
    recipe = searched(pruner={"type": "NopPruner"}, **{"n_trials": None, **limits})
    made = worker(recipe, tmp_path)
    said: list[str] = []
    made.log = said.append
    assert made.run() == ExitCode.DONE
    assert sum(trial.state.is_finished() for trial in made.study.trials) == trials
    name = next(iter(limits))
    assert f"search.{name}" in said[-1]


def test_what_a_study_has_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Curves, "loss", staticmethod(lambda recipe, n: JobStatus(JobState.FAILED, 1) if n == 3 else bowl(recipe, n))
    )
    made = worker(searched(n_trials=2, max_tokens=10**6, patience=9), tmp_path)
    said: list[str] = []
    made.log = said.append
    made.run()
    now = used(own_trials(made.study), made.budget.trial_tokens)
    assert (now.trials, now.tokens, now.best) == (2, 2 * 6 * 8 * 64, None)
    assert any("1 of 2 trials (about " in line for line in said), "as long as those that ended"
    assert "0 of 2 trials" in said[-2]
    assert "993.9k tokens" in said[-2]


def test_several_objectives_have_several_best_recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More layers are better and larger."""
    monkeypatch.setattr(Curves, "loss", staticmethod(lambda recipe, n: bowl(recipe, n) - 9 * recipe.model.num_layers))
    layers = {"key": "model.num_layers", "low": 1, "high": 2}
    recipe = searched(LR, layers, objectives=["valid_loss", "num_parameters"], n_trials=8)
    study = ran(recipe, tmp_path)
    assert set(states(study)) == {"COMPLETE"}
    best = {trial.number for trial in study.best_trials}
    files = {path.stem for path in (tmp_path / "runs/lab-search/lab").glob("*.yaml")}
    assert files == {f"lab-best-{number}" for number in best}
    assert len({trial.values[1] for trial in study.best_trials}) == 2


def test_a_retry_of_a_lost_answer_does_no_harm(tmp_path: Path) -> None:
    """The storage did what it was asked, and the answer was lost."""
    made = worker(searched(n_trials=1), tmp_path)
    trial = made.study.ask()
    lost = [True]

    def tell() -> optuna.trial.FrozenTrial:
        found = made.study.tell(trial, 1.0, skip_if_finished=True)
        if lost.pop() if lost else False:
            raise OSError(5, "Input/output error")
        return found

    assert storage.with_retries(tell, "x").value == 1.0


def test_a_trial_that_was_taken_over_is_left_to_the_other_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This process did not run for longer than the grace period: a laptop that slept."""
    made = worker(searched(n_trials=2, pruner={"type": "NopPruner"}), tmp_path)

    def taken(recipe: Recipe, evaluation: int) -> float:
        if len(Curves.submitted) == 1 and evaluation == 2:
            trials.return_to_queue(made.study, 0)
        return bowl(recipe, evaluation)

    monkeypatch.setattr(Curves, "loss", staticmethod(taken))
    assert made.run() == ExitCode.DONE
    assert [trial.state.name for trial in own_trials(made.study)] == ["COMPLETE"] * 2
    assert Curves.submitted.count("lab-0000") == 1


@pytest.mark.parametrize("queued", [False, True])
def test_a_trial_that_was_asked_for_and_never_began_does_not_count(
    queued: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process died between Optuna's answer and its first sign of life. A known point waits again."""
    made = worker(searched(n_trials=1, grace_period=100, enqueue_recipe=queued), tmp_path)
    made.study.ask()
    trials.take_back(made.study, 100, made._watch, made._starter)
    assert states(made.study) == ["RUNNING"]
    later = time.monotonic() + 101
    monkeypatch.setattr(processes.time, "monotonic", lambda: later)
    trials.take_back(made.study, 100, made._watch, made._starter)
    assert states(made.study) == ["FAIL", "WAITING"][: 1 + queued]
    assert [trial.system_attrs["fixed_params"] for trial in own_trials(made.study)] == [{"optimizer.lr": 1e-3}] * queued
    assert made.study.ask().number == 1
