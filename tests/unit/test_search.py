"""A study from beginning to end: its trials, pruning, what cannot run, failures, and what is left of it."""

from __future__ import annotations

import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from optuna.trial import TrialState

from llmrecipes.cli.app import run
from llmrecipes.errors import ExitCode, UserError
from llmrecipes.hardware.machine import planned
from llmrecipes.launch.base import JobState, JobStatus
from llmrecipes.recipe.load import load
from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.variants.width import base_width
from llmrecipes.search import starting, worker
from llmrecipes.search.command import search
from llmrecipes.search.target import local_target
from llmrecipes.search.trials import own_trials
from llmrecipes.workflow.run import Paths
from tests.helpers import curve, finish, start_command, tiny_on, train_lines, wait_for_step, write_recipe
from tests.refusals import refused
from tests.unit.search_lab import LR, Curves, bowl, curves, ran, searched, states
from tests.unit.search_lab import worker as made_worker

__all__ = ["curves"]

pytestmark = pytest.mark.usefixtures("curves")


def test_the_recipe_itself_comes_first_and_the_best_trial_is_a_recipe_that_trains(tmp_path: Path) -> None:
    study = ran(searched(n_trials=15), tmp_path)
    assert study.trials[0].params == {"optimizer.lr": 1e-3}
    assert study.best_value < 3 + 1 / 4 + 0.05
    path = tmp_path / "runs/lab-search/lab/lab-best.yaml"
    best = load(str(path)).recipe
    assert best.optimizer.lr == study.best_params["optimizer.lr"]
    assert (best.name, best.search) == ("lab-best", None)
    assert bowl(best, 4) == study.best_value
    # The runs are those of the trials; only the best one keeps its checkpoints.
    assert Curves.submitted == [f"lab-{number:04d}" for number in range(15)]
    kept = [folder.parent.name for folder in (tmp_path / "runs/lab-search").glob("lab-*/checkpoints")]
    assert kept == [f"lab-{study.best_trial.number:04d}"]


def test_a_pruned_trial_ends_before_its_last_step_and_its_job_is_cancelled(tmp_path: Path) -> None:
    pruner = {"type": "MedianPruner", "n_startup_trials": 2}
    study = ran(searched(n_trials=12, pruner=pruner), tmp_path)
    pruned = [trial for trial in study.trials if trial.state == TrialState.PRUNED]
    assert pruned
    for trial in pruned:
        assert trial.user_attrs["outcome"] == "pruned"
        assert max(trial.intermediate_values) < 4
        run_dir = tmp_path / "runs/lab-search" / trial.user_attrs["run_id"]
        job = next(job for job in Curves.jobs.values() if job.run_dir == run_dir)
        assert job.status.exit_code == ExitCode.REQUEUE
        assert trial.user_attrs["tokens"] == max(trial.intermediate_values) * 3 * 8 * 64


def test_what_the_plan_refuses_is_never_started(tmp_path: Path) -> None:
    """By the rules of a recipe, or because it does not fit; the sampler learns how far it was off."""
    heads = {"key": "model.num_attention_heads", "choices": [4, 3]}
    width = {"key": "model.hidden_size", "choices": [64, 1 << 20]}
    study = ran(searched(heads, width, sampler={"type": "GridSampler"}, n_trials=None), tmp_path)
    assert len(study.trials) == 4
    infeasible = [trial for trial in study.trials if trial.user_attrs["outcome"] == "infeasible"]
    assert len(infeasible) == 3
    assert len(Curves.submitted) == 1
    by_width = {
        trial.params["model.hidden_size"]: trial
        for trial in infeasible
        if trial.params["model.num_attention_heads"] == 4
    }
    assert by_width[1 << 20].constraints["fits"] > 1
    assert "does not fit" in by_width[1 << 20].user_attrs["reason"]


def test_the_layout_that_is_chosen_for_trials_is_said_when_it_changes(tmp_path: Path) -> None:
    lengths = {"key": "model.seq_length", "choices": [64, 32]}
    plain = searched(lengths, sampler={"type": "GridSampler"}, n_trials=None)
    recipe = plain.model_copy(update={"train": plain.train.model_copy(update={"precision": "bf16"})})
    made = made_worker(recipe, tmp_path, site=planned("h100-ib", 1, 1), ranks=8)
    said: list[str] = []
    made.log = said.append
    assert made.run() == ExitCode.DONE
    layouts = [line.partition(": ")[2] for line in said if line.startswith("layout auto: ")]
    trials = [json.loads(path.read_text("utf-8")) for path in (tmp_path / "runs").glob("*/*/logs/layout.json")]
    assert {trial["chosen"]["text"] for trial in trials} == set(layouts)
    assert len(trials) == 2
    assert all("MFU predicted" in layout for layout in layouts)


def test_a_space_in_which_nothing_runs_ends_the_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starting, "INFEASIBLE_IN_A_ROW", 5)
    heads = {"key": "model.num_attention_heads", "choices": [3, 5]}
    with refused("search.space"):
        ran(searched(heads), tmp_path)
    assert not Curves.submitted


def test_a_death_is_one_failed_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(recipe: Recipe, evaluation: int) -> float | JobStatus:
        dying = len(Curves.submitted) in (2, 4) and evaluation == 2
        return JobStatus(JobState.FAILED, 137, "its process was killed") if dying else bowl(recipe, evaluation)

    monkeypatch.setattr(Curves, "loss", staticmethod(dies))
    study = ran(searched(n_trials=6, pruner={"type": "NopPruner"}), tmp_path)
    assert states(study) == ["COMPLETE", "FAIL", "COMPLETE", "FAIL", "COMPLETE", "COMPLETE"]
    assert "killed" in study.trials[1].user_attrs["reason"]


def test_a_search_in_which_every_trial_fails_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Curves, "loss", staticmethod(lambda *_: JobStatus(JobState.FAILED, 1)))
    with refused("lab"):
        ran(searched(n_trials=100), tmp_path)
    assert len(Curves.submitted) == worker.FAILURES_IN_A_ROW


@pytest.mark.parametrize("loss", [math.nan, math.inf], ids=["training", "validation"])
def test_a_loss_that_is_not_finite_is_a_result(loss: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the training, which ends with it, or of the validation after its last step."""
    rates = [{"optimizer.lr": rate} for rate in (0.5, 0.6, 0.7, 0.8, 0.9)]
    monkeypatch.setattr(
        Curves, "loss", staticmethod(lambda recipe, n: loss if recipe.optimizer.lr > 0.4 and n > 2 else bowl(recipe, n))
    )
    study = ran(searched(n_trials=6, enqueue_trials=rates, pruner={"type": "NopPruner"}), tmp_path)
    assert [trial.user_attrs["outcome"] for trial in study.trials] == ["complete"] + ["diverged"] * 5
    assert study.trials[1].state == TrialState.PRUNED
    assert sorted(study.trials[1].intermediate_values) == [1, 2]
    assert study.best_trial.number == 0


def test_a_trial_that_runs_out_of_memory_is_infeasible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although its plan fitted. It has used the machine, so that it counts."""

    def runs_out(recipe: Recipe, evaluation: int) -> float | JobStatus:
        if recipe.model.hidden_size == 64:
            return bowl(recipe, evaluation)
        run_id = Curves.submitted[-1]
        if run_id == "lab-0001":
            return JobStatus(JobState.FAILED, reason="OUT_OF_MEMORY")
        log = tmp_path / "runs/lab-search" / run_id / "log"
        log.write_text("step 3\n[rank 1] error: out of GPU memory: tried to allocate 2 GiB\n  fix: a smaller batch\n")
        return JobStatus(JobState.FAILED, int(ExitCode.STOP))

    monkeypatch.setattr(Curves, "loss", staticmethod(runs_out))
    width = {"key": "model.hidden_size", "choices": [64, 128]}
    points = [{"model.hidden_size": 128, "optimizer.lr": rate} for rate in (0.1, 0.2)]
    study = ran(searched(LR, width, n_trials=3, enqueue_trials=points), tmp_path)
    assert [trial.user_attrs["outcome"] for trial in study.trials] == ["complete", "infeasible", "infeasible"]
    assert "OUT_OF_MEMORY" in study.trials[1].user_attrs["reason"]
    assert "allocate 2 GiB" in study.trials[2].user_attrs["reason"]
    assert study.trials[2].state == TrialState.PRUNED


def by_seed(recipe: Recipe, evaluation: int) -> float:
    return bowl(recipe, evaluation) + {1234: 0.0, 1235: 0.3, 1236: 0.6}[recipe.train.seed]


def test_a_point_with_several_seeds_has_their_mean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each seed is a run; the pruner sees the first one only."""
    monkeypatch.setattr(Curves, "loss", staticmethod(by_seed))
    recipe = searched(n_trials=2, seeds_per_point=3, enqueue_trials=[{"optimizer.lr": 0.01}])
    assert recipe.train.seed == 1234
    made = made_worker(recipe, tmp_path)
    lines: list[str] = []
    made.log = lines.append
    assert made.run() == ExitCode.DONE
    assert Curves.submitted == [f"lab-{trial:04d}{seed}" for trial in (0, 1) for seed in ("", "-seed1", "-seed2")]
    best = made.study.best_trial
    assert best.number == 1
    assert best.value == pytest.approx(3.25 + 0.3)
    assert best.user_attrs["seeds"] == [pytest.approx([3.25 + extra]) for extra in (0, 0.3, 0.6)]
    assert best.user_attrs["standard_errors"] == [pytest.approx(0.3 / 3**0.5)]
    assert best.user_attrs["tokens"] == 3 * 12 * 8 * 64
    assert best.intermediate_values == {n: pytest.approx(3 + 1 / n) for n in range(1, 5)}
    assert any("3.55 ± 0.17" in line for line in lines)
    kept = {path.parent.name for path in (tmp_path / "runs/lab-search").glob("*/checkpoints")}
    assert kept == {"lab-0001", "lab-0001-seed1", "lab-0001-seed2"}
    assert load(str(tmp_path / "runs/lab-search/lab/lab-best.yaml")).recipe.train.seed == 1234


def test_a_point_with_several_seeds_is_resumed_at_the_seed_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(recipe: Recipe, evaluation: int) -> float:
        if recipe.train.seed == 1235 and evaluation == 2 and len(Curves.submitted) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return by_seed(recipe, evaluation)

    monkeypatch.setattr(Curves, "loss", staticmethod(stopped))
    recipe = searched(n_trials=1, seeds_per_point=3)
    assert made_worker(recipe, tmp_path).run() == ExitCode.REQUEUE
    study = ran(recipe, tmp_path, resume=True)
    assert Curves.submitted == ["lab-0000", "lab-0000-seed1", "lab-0000-seed1", "lab-0000-seed2"]
    (trial,) = own_trials(study)
    assert trial.value == pytest.approx(bowl(recipe, 4) + 0.3)
    assert trial.user_attrs["tokens"] == 3 * 12 * 8 * 64


def test_a_seed_that_diverges_is_the_end_of_its_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Curves, "loss", staticmethod(lambda recipe, n: math.nan if recipe.train.seed == 1235 else bowl(recipe, n))
    )
    study = ran(searched(n_trials=1, seeds_per_point=3), tmp_path)
    assert study.trials[0].user_attrs["outcome"] == "diverged"
    assert Curves.submitted == ["lab-0000", "lab-0000-seed1"]


def test_data_without_a_validation_split_is_refused_before_anything_trains(tmp_path: Path, corpus: Path) -> None:
    """By the recipe, or because all of its documents are in the other splits."""
    space = {"space": [LR], "n_trials": 2}
    with refused("data.split"):
        load(write_recipe(tiny_on(corpus, search=space), tmp_path), ["data.split=[99,0,1]"])
    path = write_recipe(tiny_on(corpus, data={"split": [1e6, 1e-6, 1e-6]}, search=space), tmp_path)
    paths = Paths(tmp_path / "runs", tmp_path / "data")
    with refused("data.split"):
        search(load(path).recipe, lambda: local_target(Curves(), {}, paths, 1, 1), resume=False, log=print)
    assert not Curves.submitted


def test_a_job_that_was_interrupted_is_resumed_in_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def preempted(recipe: Recipe, evaluation: int) -> float | JobStatus:
        first = len(Curves.submitted) == 1 and evaluation == 3
        return JobStatus(JobState.SAVED, int(ExitCode.REQUEUE)) if first else bowl(recipe, evaluation)

    monkeypatch.setattr(Curves, "loss", staticmethod(preempted))
    study = ran(searched(n_trials=1), tmp_path)
    assert states(study) == ["COMPLETE"]
    assert Curves.submitted == ["lab-0000", "lab-0000"]
    assert sorted(study.trials[0].intermediate_values) == [1, 2, 3, 4]


def test_a_scheduler_that_takes_no_job_for_a_while_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But an error at the first trial is one of the options, and ends the search."""
    monkeypatch.setattr(worker, "POSTPONED_SECONDS", 0.0)
    submit, refusals = Curves.submit, [1, 2]

    def refuses(self: Curves, *arguments: Any) -> Any:
        if len(Curves.submitted) == 1 and refusals:
            refusals.pop()
            raise UserError("slurmctld is away", where="sbatch")
        return submit(self, *arguments)

    monkeypatch.setattr(Curves, "submit", refuses)
    study = ran(searched(n_trials=3, pruner={"type": "NopPruner"}), tmp_path)
    assert [trial.state.name for trial in own_trials(study)] == ["COMPLETE"] * 3
    assert not refusals

    def never(*_: Any) -> Any:
        raise UserError("no such partition", where="sbatch")

    monkeypatch.setattr(Curves, "submit", never)
    with refused("sbatch"):
        ran(searched(n_trials=3, study_name="other"), tmp_path)


def test_workers_run_as_many_trials_at_a_time_and_no_more_than_the_limit(tmp_path: Path) -> None:
    study = ran(searched(n_trials=7, pruner={"type": "NopPruner"}), tmp_path, workers=3)
    assert (len(study.trials), Curves.most_at_once) == (7, 3)


@pytest.mark.parametrize("queued", [False, True], ids=["sampled", "queued"])
def test_a_trial_that_is_one_too_many_is_not_trained(
    queued: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process takes the last one between the check of the limit and the storage's answer."""
    made = made_worker(searched(n_trials=1, enqueue_recipe=False), tmp_path)
    ask = starting.Starter._ask

    def after_another(self: starting.Starter) -> Any:
        other = self.study.ask()
        other.suggest_float("optimizer.lr", 1e-4, 1.0, log=True)
        self.study.tell(other, 1.0)
        if queued:
            self.study.enqueue_trial({"optimizer.lr": 0.5})
        return ask(self)

    monkeypatch.setattr(starting.Starter, "_ask", after_another)
    assert made.run() == ExitCode.DONE
    assert not Curves.submitted
    assert [trial.state.name for trial in own_trials(made.study)] == ["COMPLETE"] + ["WAITING"] * queued


def test_a_point_outside_of_the_grid_is_not_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process takes the last point, and Optuna answers with a random one."""
    layers = {"key": "model.num_layers", "choices": [1, 2]}
    made = made_worker(searched(layers, sampler={"type": "GridSampler"}, n_trials=None), tmp_path)
    ask = starting.Starter._ask

    def after_another(self: starting.Starter) -> Any:
        while self.study.get_trials(states=(TrialState.WAITING,)):
            self.study.tell(self.study.ask(), 1.0)
        return ask(self)

    monkeypatch.setattr(starting.Starter, "_ask", after_another)
    assert made.run() == ExitCode.DONE
    assert not Curves.submitted
    assert [trial.state.name for trial in own_trials(made.study)] == ["COMPLETE"] * 2


@pytest.mark.rotating
def test_a_search_on_this_machine(
    tmp_path: Path, corpus: Path, data_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Real trainings, each in a process of its own; the best recipe is one that `show` takes."""
    space = {"space": [{"key": "optimizer.lr", "low": 1e-3, "high": 1e-2, "log": True}], "n_trials": 2}
    recipe = tiny_on(corpus, train={"train_iters": 4, "eval_interval": 2}, search=space)
    options = ["--runs-dir", str(tmp_path / "runs"), "--data-dir", str(data_dir), "--json"]
    assert run(["search", write_recipe(recipe, tmp_path), "--workers", "2", *options]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["trials"] == {"complete": 2}
    best = answer["best"][0]
    run_dir = tmp_path / "runs/tiny-search" / f"tiny-{best['number']:04d}"
    assert curve(run_dir)[-1][-1] == best["valid_loss"]
    assert load(answer["recipes"][0]).recipe.optimizer.lr == best["values"]["optimizer.lr"]


MUP = {"use_mup": True, "mup_base_hidden_size": 32, "mup_base_head_dim": 16.0}


def wide(corpus: Path, **search: Any) -> Recipe:
    """A recipe of four times the width of its proxy, over two tensor-parallel ranks."""
    model = {"hidden_size": 128, "num_attention_heads": 8, "ffn_hidden_size": 512, **MUP}
    section = {"space": [LR], "n_trials": 4, "enqueue_recipe": False, "sampler": {"seed": 1}, **search}
    tensor = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    return tiny_on(corpus, model=model, layout=tensor, train={"eval_interval": 3}, search=section)


def test_a_proxy_is_tuned_and_the_recipe_gets_its_values(
    tmp_path: Path, corpus: Path, data_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layers = {"key": "model.num_layers", "choices": [2, 4]}
    seen = []

    def loss(recipe: Recipe, evaluation: int) -> float:
        seen.append(recipe)
        return bowl(recipe, evaluation)

    Curves.loss = staticmethod(loss)
    path = write_recipe(wide(corpus, space=[LR, layers]), tmp_path)
    folders = ["--runs-dir", str(tmp_path / "runs"), "--data-dir", str(data_dir)]
    assert run(["search", path, "--proxy", "--to", "curves", "--nproc", "1", *folders, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    shapes = {(each.model.hidden_size, each.model.num_attention_heads, each.model.ffn_hidden_size) for each in seen}
    assert shapes == {(32, 2, 128)}
    assert {each.layout.tensor_model_parallel_size for each in seen} == {1}
    found = load(answer["recipes"][0]).recipe
    assert (found.model.hidden_size, found.layout.tensor_model_parallel_size) == (128, 2)
    assert found.optimizer.lr == answer["best"][0]["values"]["optimizer.lr"]
    assert found.model.mup_base_hidden_size == 32
    # The study of the recipe itself is another one.
    assert run(["search", path, *folders, "--report"]) == 2
    assert run(["search", path, "--proxy", *folders, "--report"]) == 0


def test_a_trial_of_a_proxy_that_the_recipe_cannot_use_is_not_started(
    tmp_path: Path, corpus: Path, data_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = wide(
        corpus, space=[{"key": "model.num_layers", "choices": [3, 4]}], sampler={"type": "GridSampler"}, n_trials=None
    )
    layout = recipe.layout.model_copy(update={"pipeline_model_parallel_size": 2})
    recipe = recipe.model_copy(update={"layout": layout})
    folders = ["--runs-dir", str(tmp_path / "runs"), "--data-dir", str(data_dir)]
    command = ["search", write_recipe(recipe, tmp_path), "--proxy", "--to", "curves", "--nproc", "1"]
    assert run([*command, *folders, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["trials"] == {"complete": 1, "infeasible": 1}


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["use_mup=false", "mup_base_hidden_size=null", "mup_base_head_dim=null"], "model.use_mup"),
        (["mup_base_hidden_size=null"], "model.mup_base_hidden_size"),
        (["mup_base_hidden_size=128"], "model.mup_base_hidden_size"),
        (["mup_base_hidden_size=40"], "model.num_attention_heads"),
    ],
)
def test_a_proxy_needs_a_narrower_base(overrides: list[str], key: str, tmp_path: Path, corpus: Path) -> None:
    path = write_recipe(wide(corpus), tmp_path)
    with refused(key):
        base_width(load(path, [f"model.{override}" for override in overrides]).recipe)


@pytest.mark.parametrize("key", ["model.ffn_hidden_size", "layout.tensor_model_parallel_size"])
def test_a_proxy_has_a_width_and_a_layout_of_its_own(key: str, corpus: Path) -> None:
    with refused("--proxy"):
        base_width(wide(corpus, space=[{"key": key, "choices": [1, 2]}]))


@pytest.mark.slow
def test_a_killed_search_finds_its_job_again(tmp_path: Path, corpus: Path, data_dir: Path) -> None:
    """The training outlives the search process, and is followed by the next one from where it is."""
    space = {"space": [{"key": "optimizer.lr", "low": 1e-3, "high": 1e-2, "log": True}], "n_trials": 1}
    recipe = tiny_on(corpus, train={"train_iters": 100, "eval_interval": 50}, search=space)
    command = [
        "search",
        write_recipe(recipe, tmp_path),
        "--runs-dir",
        str(tmp_path / "runs"),
        "--data-dir",
        str(data_dir),
    ]
    run_dir = tmp_path / "runs/tiny-search/tiny-0000"
    first = start_command(*command)
    wait_for_step(first, run_dir, 20)
    first.kill()
    first.wait()
    printed = finish(start_command(*command, "--resume", "--json"), 0)
    answer = json.loads(printed[printed.index("{") :])
    assert answer["trials"] == {"complete": 1}
    assert [line["step"] for line in train_lines(run_dir)] == list(range(1, 101))
    assert len(list((run_dir / "logs").glob("local-*.out"))) == 1
