"""A study in a real PostgreSQL: shared by processes, killed, and with the server away for a while."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from pathlib import Path

import pytest

from llmrecipes.errors import ExitCode
from llmrecipes.recipe.schema import Recipe
from llmrecipes.search import storage
from llmrecipes.search.trials import own_trials
from tests.refusals import refused
from tests.system.search.conftest import Server
from tests.unit.search_lab import Curves, bowl, curves, ran, searched, states, worker

__all__ = ["curves"]

pytestmark = pytest.mark.usefixtures("curves")
FORK = multiprocessing.get_context("fork")


def search_in_a_process(recipe: Recipe, folder: Path) -> None:
    assert worker(recipe, folder, resume=True).run() == ExitCode.DONE


def test_processes_share_a_study_and_never_a_trial(postgres: Server, tmp_path: Path) -> None:
    recipe = searched(n_trials=20, study_name="shared", storage=postgres.url)
    processes = [FORK.Process(target=search_in_a_process, args=(recipe, tmp_path)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(240)
    assert [process.exitcode for process in processes] == [0, 0, 0, 0]
    trials = list(own_trials(worker(recipe, tmp_path, resume=True).study))
    assert len(trials) == len({trial.user_attrs["run_id"] for trial in trials}) == 20
    assert len({trial.params["optimizer.lr"] for trial in trials}) == 20


def test_a_killed_search_is_continued(postgres: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(recipe: Recipe, evaluation: int) -> float:
        if len(Curves.submitted) == 2 and evaluation == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return bowl(recipe, evaluation)

    recipe = searched(n_trials=4, pruner={"type": "NopPruner"}, study_name="killed", storage=postgres.url)
    monkeypatch.setattr(Curves, "loss", staticmethod(dies))
    process = FORK.Process(target=search_in_a_process, args=(recipe, tmp_path))
    process.start()
    process.join(240)
    assert process.exitcode == -signal.SIGKILL
    monkeypatch.setattr(Curves, "loss", staticmethod(bowl))
    again = ran(recipe, tmp_path, resume=True)
    assert states(again) == ["COMPLETE", "FAIL", "COMPLETE", "COMPLETE", "COMPLETE"]
    assert Curves.submitted[0] == "killed-0001"


def test_the_server_is_away_for_half_a_minute(
    postgres: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = worker(searched(n_trials=3, study_name="away", storage=postgres.url), tmp_path)
    away: list[threading.Timer] = []

    def stops(recipe: Recipe, evaluation: int) -> float:
        if len(Curves.submitted) == 2 and evaluation == 2 and not away:
            postgres.stop()
            away.append(threading.Timer(30.0, postgres.start))
            away[0].start()
        return bowl(recipe, evaluation)

    monkeypatch.setattr(Curves, "loss", staticmethod(stops))
    assert made.run() == ExitCode.DONE
    away[0].join()
    assert len(Curves.submitted) == 3
    assert all(state in ("COMPLETE", "PRUNED") for state in states(made.study))


def test_a_server_that_stays_away_is_told_and_nothing_is_lost(
    postgres: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "OPEN_SECONDS", 1.0)
    recipe = searched(n_trials=3, pruner={"type": "NopPruner"}, study_name="gone", storage=postgres.url)
    ran(recipe.model_copy(update={"search": recipe.search.model_copy(update={"n_trials": 2})}), tmp_path)  # type: ignore[union-attr]
    postgres.stop()
    try:
        with refused("postgresql", rule="--resume"):
            worker(recipe, tmp_path, resume=True)
    finally:
        postgres.start()
    assert states(ran(recipe, tmp_path, resume=True)) == ["COMPLETE"] * 3


def test_a_database_that_does_not_exist_is_told_at_once(postgres: Server, tmp_path: Path) -> None:
    with refused("postgresql"):
        worker(searched(storage=postgres.url.replace("/postgres?", "/nothing?")), tmp_path)
