"""What samplers and pruners learn from the trials of a study, and what they never do with its storage."""

from __future__ import annotations

import os
import pickle
from itertools import pairwise
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState, create_trial

from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.sections.search_section import Search
from llmrecipes.search import trials
from llmrecipes.search.samplers import FINITE, Learnt, pruner, sampler, violations
from llmrecipes.search.space import distribution
from llmrecipes.search.study import require_section
from llmrecipes.search.trial import TrialOutcome
from tests.unit.search_lab import LR, curves, ran, searched, worker

__all__ = ["curves"]

pytestmark = pytest.mark.usefixtures("curves")
DECAY = {"key": "optimizer.weight_decay", "low": 0.0, "high": 0.2}
STEPS = {"key": "optimizer.adam_beta2", "low": 0.75, "high": 0.95, "step": 0.05}
STORAGES = {"journal": None, "sqlite": "sqlite:///{}/study.db"}
MARGINS = pytest.mark.parametrize("with_margin", [False, True], ids=["plain", "with_margin"])


class Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def evolution(*, with_margin: bool = False, **keys: Any) -> Recipe:
    evolved = {"type": "CmaEsSampler", "seed": 1, "popsize": 4, "with_margin": with_margin}
    return searched(LR, DECAY, STEPS, sampler=evolved, pruner={"type": "NopPruner"}, **keys)


@MARGINS
@pytest.mark.parametrize("kind", STORAGES)
def test_a_study_that_is_resumed_runs_no_code_of_its_storage(kind: str, with_margin: bool, tmp_path: Path) -> None:
    """Optuna's CMA-ES unpickles its state from attributes of trials, which whoever shares the storage can write."""
    where = STORAGES[kind]
    recipe = evolution(
        n_trials=6, with_margin=with_margin, **({} if where is None else {"storage": where.format(tmp_path)})
    )
    made = worker(recipe, tmp_path)
    space = {each.key: distribution(each) for each in require_section(recipe).space}
    bomb = pickle.dumps(Evil(tmp_path / "ran")).hex()
    made.study.add_trial(
        create_trial(
            params={"optimizer.lr": 0.1, "optimizer.weight_decay": 0.1, "optimizer.adam_beta2": 0.8},
            distributions=space, value=1.0,
            system_attrs={f"{name}:optimizer:0": bomb for name in ("cma", "cmawm", "sepcma")},
        )
    )  # fmt: skip
    assert made.study.trials[-1].system_attrs["cma:optimizer:0"] == bomb
    study = ran(recipe, tmp_path, resume=True)
    assert not (tmp_path / "ran").exists()
    prefix = "cmawm" if with_margin else "cma"
    assert [trial.system_attrs.get(f"{prefix}:generation") for trial in study.trials[2:]] == [0, 0, 0, 0]


@MARGINS
@pytest.mark.rotating
def test_evolution_continues_as_if_it_had_not_been_interrupted(with_margin: bool, tmp_path: Path) -> None:
    """In another process, between two generations and within one; the storage has numbers only."""
    whole = ran(evolution(n_trials=11, with_margin=with_margin), tmp_path / "whole")
    for number in (3, 6, 11):
        parts = ran(evolution(n_trials=number, with_margin=with_margin), tmp_path / "parts", resume=True)
    assert [trial.params for trial in parts.trials] == [trial.params for trial in whole.trials]
    generations = [
        value for trial in whole.trials for name, value in trial.system_attrs.items() if "generation" in name
    ]
    assert generations == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2]
    assert not any("optimizer" in name for trial in whole.trials for name in trial.system_attrs)


def outcomes_of(section: Search, number: int) -> tuple[optuna.Study, list[TrialOutcome]]:
    """A study in which a learning rate is the better the higher it is, until it diverges, and a large model cannot run.

    The higher the rate, the sooner it diverges.
    """
    study = optuna.create_study(sampler=sampler(section, 0))
    space = {each.key: distribution(each) for each in section.space}
    found = []
    for _ in range(number):
        trial = study.ask(space)
        rate, is_large = trial.params["optimizer.lr"], trial.params.get("model.hidden_size", 64) > 64
        trial.set_constraint(trials.FITS, 9.0 if is_large else -0.9)
        stable = [step for step in range(1, 5) if rate * step < 0.012 and not is_large]
        for step in stable:
            trial.report(3 - rate + 1 / step, step)
        outcome = (
            TrialOutcome.INFEASIBLE
            if is_large
            else TrialOutcome.COMPLETE
            if len(stable) == 4
            else TrialOutcome.DIVERGED
        )
        trial.set_user_attr(trials.OUTCOME, outcome)
        if outcome == TrialOutcome.COMPLETE:
            study.tell(trial, 3.25 - rate)
        else:
            study.tell(trial, state=TrialState.PRUNED)
        found.append(outcome)
    return study, found


def test_a_gaussian_process_learns_from_what_diverges_and_from_what_cannot_run() -> None:
    """Without these trials it proposes the same region again and again: its model says that nothing was tried there."""
    width = {"key": "model.hidden_size", "choices": [64, 1 << 20]}
    gaussian = {"type": "GPSampler", "seed": 3, "n_startup_trials": 6}
    _, outcomes = outcomes_of(require_section(searched(LR, width, sampler=gaussian)), 12)
    assert set(outcomes[:6]) == {TrialOutcome.COMPLETE, TrialOutcome.DIVERGED, TrialOutcome.INFEASIBLE}
    assert outcomes[-6:].count(TrialOutcome.COMPLETE) >= 4


def test_evolution_learns_from_what_diverges() -> None:
    """A generation of four is complete with them, and later ones are further from them."""
    study, outcomes = outcomes_of(require_section(evolution()), 33)
    assert [trial.system_attrs["cma:generation"] for trial in study.trials[1:]] == [number // 4 for number in range(32)]
    diverged = [outcomes[:17].count(TrialOutcome.DIVERGED), outcomes[17:].count(TrialOutcome.DIVERGED)]
    assert diverged[0] > 10 > 6 > diverged[1]


ENDS: dict[str, tuple[TrialState, dict[int, float], float]] = {
    # how it ended: its state, its curve, and the value that a sampler of completed trials is shown
    "best": (TrialState.COMPLETE, {1: 5.0, 2: 3.0}, 3.0),
    "middle": (TrialState.COMPLETE, {1: 5.0, 2: 4.0}, 4.0),
    "worst": (TrialState.COMPLETE, {1: 5.0, 2: 5.0}, 5.0),
    "pruned at once": (TrialState.PRUNED, {1: 9.0}, 5.0),
    "pruned later": (TrialState.PRUNED, {1: 5.0, 2: 4.5}, 4.5),
    "pruned while it rose": (TrialState.PRUNED, {1: 2.0}, 4.0),
    "diverged later": (TrialState.PRUNED, {1: 1.0}, 5.0 + 2 / 3),
    "diverged at once": (TrialState.PRUNED, {}, 6.0),
    "a little too large": (TrialState.PRUNED, {}, 5.0 + 2 / 11),
    "much too large": (TrialState.PRUNED, {}, 5.0 + 2 * 9 / 10),
    "out of memory": (TrialState.PRUNED, {}, 6.0),
}


@pytest.fixture
def ended() -> optuna.Study:
    """A study with a trial of every end."""
    study = optuna.create_study()
    violation = {"a little too large": 0.1, "much too large": 9.0}
    for name, (state, curve, _) in ENDS.items():
        trial = study.ask()
        trial.suggest_float("optimizer.lr", 1e-4, 1.0)
        for step, value in curve.items():
            trial.report(value, step)
        trial.set_constraint(trials.FITS, violation.get(name, -0.5))
        kinds = {
            "diverged": TrialOutcome.DIVERGED,
            "too large": TrialOutcome.INFEASIBLE,
            "memory": TrialOutcome.INFEASIBLE,
        }
        outcome = next((kind for word, kind in kinds.items() if word in name), state.name.lower())
        trial.set_user_attr(trials.OUTCOME, outcome)
        study.tell(trial, list(curve.values())[-1] if state == TrialState.COMPLETE else None, state=state)
    return study


def test_a_sampler_of_completed_trials_sees_penalties_that_nobody_else_does(ended: optuna.Study) -> None:
    shown = Learnt(ended, completed=True).get_trials()
    assert {name: trial.value for name, trial in zip(ENDS, shown, strict=True)} == pytest.approx(
        {name: value for name, (_, _, value) in ENDS.items()}
    )
    assert {trial.state for trial in shown} == {TrialState.COMPLETE}
    feasible = [name for name, trial in zip(ENDS, shown, strict=True) if max(trial.constraints.values()) <= 0]
    assert feasible == list(ENDS)[:6]
    assert len({tuple(trial.constraints) for trial in shown}) == 1  # a model of each needs them of every trial
    # The study itself has neither: pruners, the report and the best trial use what was measured.
    assert [trial.state for trial in ended.trials] == [state for state, _, _ in ENDS.values()]
    assert ended.best_trial.number == 0
    assert not any(FINITE in trial.constraints for trial in ended.trials)


def test_tpe_ranks_a_trial_that_diverged_behind_those_that_were_pruned(ended: optuna.Study) -> None:
    """By its last loss it would be in front of them."""
    from optuna.samplers._tpe.sampler import _split_trials

    shown = Learnt(ended, completed=False).get_trials()
    assert [trial.state for trial in shown] == [state for state, _, _ in ENDS.values()]
    below, _ = _split_trials(ended, shown, 6)
    assert [list(ENDS)[trial.number] for trial in below] == list(ENDS)[:6]


def test_several_objectives_have_a_penalty_each() -> None:
    study = optuna.create_study(directions=["minimize", "minimize"])
    for values in ([1.0, 30.0], [3.0, 10.0]):
        study.tell(study.ask(), values)
    trial = study.ask()
    trial.set_user_attr(trials.OUTCOME, TrialOutcome.DIVERGED)
    study.tell(trial, state=TrialState.PRUNED)
    shown = Learnt(study, completed=True).get_trials()[-1]
    assert shown.values == [4.0, 40.0]
    assert violations(shown)[FINITE] > 0


def test_what_samplers_make_of_running_and_pruned_trials_is_fixed(tmp_path: Path) -> None:
    """These are Optuna's defaults of today; another one would change every search that is resumed."""
    assert vars(sampler(require_section(searched()), 0))["_constant_liar"] is True
    assert vars(sampler(require_section(evolution()), 0))["_consider_pruned_trials"] is False


def test_trials_at_the_same_time_differ() -> None:
    """TPE takes the values of running trials for bad ones; otherwise it proposes its best guess to each of them."""
    section = require_section(searched(sampler={"seed": 1, "n_startup_trials": 5, "n_ei_candidates": 200}))
    study = optuna.create_study(sampler=sampler(section, 0))
    space = {"optimizer.lr": distribution(section.space[0])}
    for number in range(30):
        study.add_trial(
            create_trial(
                params={"optimizer.lr": 10 ** (-4 + 4 * number / 29)}, distributions=space, value=abs(number - 15)
            )
        )
    values = sorted(study.ask(space).params["optimizer.lr"] for _ in range(8))
    assert all(after > 1.1 * before for before, after in pairwise(values))


# -- pruners ---------------------------------------------------------------------------------------------------------


def lost_and_resumed(study: optuna.Study, trial: optuna.Trial) -> optuna.Trial:
    trials.return_to_queue(study, trial.number)
    return study.ask()


@pytest.mark.parametrize("kind", ["SuccessiveHalvingPruner", "HyperbandPruner"])
def test_a_trial_that_was_resumed_is_one_competitor(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It had the best loss of its rung; counted twice, it would have pruned the second best of four."""
    monkeypatch.setattr(optuna.pruners.HyperbandPruner, "_get_bracket_id", lambda *_: 0)
    section = require_section(searched(pruner={"type": kind, "min_resource": 1, "reduction_factor": 2}))
    study = optuna.create_study(pruner=pruner(section, 4))

    def survives(loss: float, *, resumed: bool = False) -> bool:
        trial = study.ask()
        trial.report(loss, 1)
        survived = not trial.should_prune()
        if resumed:
            for _ in range(3):
                trial = lost_and_resumed(study, trial)
        study.tell(trial, loss)
        return survived

    for loss, resumed in ((1.0, True), (3.0, False), (4.0, False)):
        survives(loss, resumed=resumed)
    assert len(study.trials) == 6
    assert survives(2.0)


def test_a_trial_that_was_resumed_stays_in_its_bracket() -> None:
    section = require_section(searched(pruner={"type": "HyperbandPruner", "min_resource": 1}))
    made: Any = pruner(section, 27)
    study = optuna.create_study(study_name="lab", pruner=made)  # brackets are drawn by name
    trial = study.ask()
    trial.report(1.0, 1)
    trial.should_prune()  # its brackets are made
    expected = made._get_bracket_id(study, study.trials[0])
    for _ in range(12):
        trial = lost_and_resumed(study, trial)
        assert made._get_bracket_id(study, study.trials[trial.number]) == expected
    later = [study.ask() for _ in range(12)]
    fresh = {made._get_bracket_id(study, study.trials[each.number]) for each in later}
    assert len(fresh) > 1
