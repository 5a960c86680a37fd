"""What is seen of a study: its report, its dashboard, and its runs in MLflow."""

from __future__ import annotations

import html.parser
import json
import os
import re
import sqlite3
import urllib.request
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from llmrecipes.cli.app import run
from llmrecipes.launch.base import JobState, JobStatus
from llmrecipes.recipe.load import load
from llmrecipes.recipe.schema import Recipe
from llmrecipes.search import command, metrics
from llmrecipes.search.command import require_library
from llmrecipes.search.metrics import MetricsReader
from llmrecipes.search.storage import open_storage
from llmrecipes.search.study_report import plots, write_report
from llmrecipes.search.trials import return_to_queue
from llmrecipes.search.worker import Worker
from llmrecipes.tracking.mirror import tracker_name
from llmrecipes.tracking.mlflow.database import tracking_uri
from tests.helpers import tiny_on, write_recipe
from tests.refusals import refused, require_message
from tests.unit.search_lab import LR, Curves, bowl, curves, searched, worker

__all__ = ["curves"]

pytestmark = pytest.mark.usefixtures("curves")
HEADS = {"key": "model.num_attention_heads", "choices": [4, 3, 2]}


class Page(html.parser.HTMLParser):
    """Headings, and everything that a browser would load from elsewhere."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.headings: list[str] = []
        self._heading = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._heading = tag == "h2"
        self.loaded += [value for name, value in attrs if name in ("src", "href", "data") and value]

    def handle_data(self, data: str) -> None:
        if self._heading:
            self.headings.append(data.strip())
            self._heading = False


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Worker:
    """A study with trials of every kind: complete, pruned, failed and infeasible."""

    def loss(recipe: Recipe, evaluation: int) -> float | JobStatus:
        if len(Curves.submitted) == 4:
            return JobStatus(JobState.FAILED, 137, "killed <by> hand")
        return bowl(recipe, evaluation) + (recipe.model.num_attention_heads == 2)

    monkeypatch.setattr(Curves, "loss", staticmethod(loss))
    pruner = {"type": "MedianPruner", "n_startup_trials": 2}
    points = [{"optimizer.lr": 1e-2, "model.num_attention_heads": heads} for heads in (4, 3, 2)]
    found = worker(searched(LR, HEADS, n_trials=10, pruner=pruner, enqueue_trials=points), tmp_path)
    found.run()
    return found


def test_the_report_is_one_page_with_optunas_plots(made: Worker, tmp_path: Path) -> None:
    outcomes = {trial.user_attrs["outcome"] for trial in made.study.trials}
    assert outcomes == {"complete", "pruned", "failed", "infeasible"}
    path = tmp_path / "report.html"
    write_report(made.study, made.recipe, path)
    text = path.read_text("utf-8")
    page = Page(text)
    assert page.loaded == []
    titles = [plot.title for plot in plots(made.study)]
    assert page.headings == ["Study", *titles, "Trials"]
    assert len(titles) == 6
    assert text.count("Plotly.newPlot(") >= 6
    assert "killed <by>" not in text
    for trial in made.study.trials:
        assert f"<td>{trial.number}</td><td>{trial.user_attrs['outcome']}</td>" in text


def test_the_report_of_several_objectives_and_of_too_few_trials(tmp_path: Path) -> None:
    layers = {"key": "model.num_layers", "low": 1, "high": 3}
    several = worker(searched(LR, layers, objectives=["valid_loss", "num_parameters"], n_trials=5), tmp_path)
    several.run()
    write_report(several.study, several.recipe, tmp_path / "several.html")
    assert "Trade-offs" in Page((tmp_path / "several.html").read_text()).headings
    single = worker(searched(study_name="one", n_trials=1), tmp_path)
    single.run()
    write_report(single.study, single.recipe, tmp_path / "single.html")
    assert "Trials" in Page((tmp_path / "single.html").read_text()).headings


def test_report_of_the_command(made: Worker, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write_recipe(made.recipe, tmp_path)
    assert run(["search", recipe, "--report", "--runs-dir", str(tmp_path / "runs")]) == 0
    assert Path(capsys.readouterr().out.strip()) == tmp_path / "runs/lab-search/lab/report.html"
    for option in ("--report", "--ui"):
        assert run(["search", recipe, option, "--runs-dir", str(tmp_path / "nothing")]) == 2
        require_message(
            capsys.readouterr().err, tmp_path / "nothing/lab-search/lab/journal.log", rule="llmrecipes search"
        )


def facts(text: str) -> dict[str, str]:
    """The table about the study."""
    return dict(re.findall(r"<tr><th>([a-z, ]+)</th><td>([^<]*)</td></tr>", text))


def test_a_study_knows_its_own_overrides(
    tmp_path: Path, corpus: Path, data_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--report` and `--resume` need none of them, and a limit may change, which is said."""
    section = {"space": [LR], "n_trials": 16, "pruner": {"type": "NopPruner"}}
    recipe = write_recipe(tiny_on(corpus, train={"eval_interval": 3}, search=section), tmp_path)
    folders = ["--runs-dir", str(tmp_path / "runs"), "--data-dir", str(data_dir)]
    search = ["search", recipe, "--to", "curves", "--nproc", "1", *folders]
    page = tmp_path / "runs/tiny-search/tiny/report.html"
    overrides = ["search.n_trials=3", "search.trial_tokens=3072", "optimizer.weight_decay=0.25"]
    assert run([*search, *overrides]) == 0
    assert run(["search", recipe, *folders, "--report"]) == 0
    shown = facts(page.read_text("utf-8"))
    assert shown["each trial"].startswith("3.1k tokens, ")
    assert shown["limits"] == "search.n_trials 3 is used up"
    assert "recipe has changed" not in shown
    assert len(Curves.submitted) == 3
    assert run([*search, "--resume"]) == 0
    assert len(Curves.submitted) == 3
    capsys.readouterr()
    assert run([*search, "--resume", "search.n_trials=4"]) == 0
    assert "search.n_trials is now 4, was 3" in capsys.readouterr().out
    assert len(Curves.submitted) == 4
    last = load(str(tmp_path / "runs/tiny-search/tiny-0003/recipe.yaml")).recipe
    assert (last.optimizer.weight_decay, last.train.train_iters) == (0.25, 6)
    assert run([*search, "--resume", "optimizer.weight_decay=0.5", "search.n_trials=9"]) == 2
    require_message(capsys.readouterr().err, page.with_name("journal.log"), rule="optimizer.weight_decay")


def test_the_report_says_which_trials_continue_others(tmp_path: Path) -> None:
    made = worker(searched(n_trials=1), tmp_path)
    for number in (0, 1):
        made.study.ask()
        return_to_queue(made.study, number)
    made.run()
    write_report(made.study, made.recipe, tmp_path / "report.html")
    assert "<td>2 (continues 0)</td>" in (tmp_path / "report.html").read_text("utf-8")


def damaged(journal: bytes) -> dict[str, bytes]:
    """A journal as a broken disk leaves it, by what happened."""
    lines = journal.splitlines(keepends=True)
    number = next(place for place, line in enumerate(lines) if b'"trial_id"' in line)

    def instead(line: bytes) -> bytes:
        return b"".join([*lines[:number], line, *lines[number + 1 :]])

    return {
        "cut": instead(lines[number][:9] + b"\n"), "no text": instead(b"\xff" + lines[number][1:]),
        "zeros": instead(bytes(512) + b"\n"), "no entry": instead(b"[1]\n"),
        "other key": instead(lines[number].replace(b"trial_id", b"trial_ie")), "not a journal": bytes(range(256)),
        "nested": instead(b'{"op_code": ' + b"[" * 100_000 + b"\n"),
    }  # fmt: skip


def test_a_damaged_journal_is_reported_and_left_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = worker(searched(n_trials=1), tmp_path)
    made.run()
    recipe, journal = write_recipe(made.recipe, tmp_path), made.place.folder / "journal.log"
    command = ["search", recipe, "--report", "--runs-dir", str(tmp_path / "runs")]
    whole = journal.read_bytes()
    for what, data in damaged(whole).items():
        journal.write_bytes(data)
        assert run(command) == 2, what
        require_message(capsys.readouterr().err, journal, rule="search.study_name")
        assert journal.read_bytes() == data
    journal.unlink()
    os.mkfifo(journal)
    assert made.recipe.search is not None
    with refused(journal, rule="FIFO"):
        open_storage(str(journal), made.recipe.search)
    journal.unlink()
    journal.write_bytes(whole + b'{"op_code":4,"worker')  # of a process that was killed while it wrote
    assert run(command) == 0
    (made.place.folder / "report.html").unlink()
    (made.place.folder / "report.html").mkdir()
    capsys.readouterr()
    assert run(command) == 2
    require_message(capsys.readouterr().err, made.place.folder / "report.html")


def test_a_report_creates_no_database(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "study.db"
    recipe = write_recipe(searched(storage=f"sqlite:///{path}"), tmp_path)
    command = ["search", recipe, "--report", "--runs-dir", str(tmp_path / "runs")]
    assert run(command) == 2
    require_message(capsys.readouterr().err, path, rule="llmrecipes search")
    assert not path.exists()
    path.write_bytes(b"something else" * 100)
    assert run(command) == 2  # at once: no retry helps
    require_message(capsys.readouterr().err, path)


def test_the_report_of_a_recipe_that_has_changed(made: Worker, tmp_path: Path) -> None:
    """The model is another one, the range is narrower, and one key is not searched any more."""
    changed = searched({**LR, "low": 1e-3}, n_trials=10)
    changed = changed.model_copy(update={"model": changed.model.model_copy(update={"num_layers": 3})})
    write_report(made.study, changed, tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    assert "model.num_layers: 2" in text
    assert "<th>model.num_attention_heads</th>" in text
    assert "rank_seconds" not in text  # Optuna's own timeline shows all attributes of trials, the machine among them


@pytest.mark.slow
@pytest.mark.rotating
def test_the_dashboard_shows_the_study(made: Worker) -> None:
    with (
        command.server(str(made.place.folder / "journal.log"), 0) as (address, process),
        urllib.request.urlopen(f"{address}/api/studies", timeout=30) as answer,  # noqa: S310 - our own address
    ):
        assert [study["study_name"] for study in json.load(answer)["study_summaries"]] == ["lab"]
    assert process.poll() is not None


def rows(runs_dir: Path, query: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(runs_dir / "mlflow.db")) as database:
        return database.execute(query).fetchall()


def test_a_study_is_a_run_in_mlflow_with_its_trials_below(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a trial that never ran; and what could not be sent arrives later."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    recipe = searched(LR, HEADS, n_trials=3, enqueue_trials=[{"model.num_attention_heads": 3}])
    recipe = recipe.model_copy(update={"tracking": recipe.tracking.model_copy(update={"mlflow": True})})
    made = worker(recipe, tmp_path)
    tracker, away = made.tracker, [True]
    connected = type(tracker)._connected

    def connect(self: Any) -> Any:
        if away.pop() if away else False:
            raise ConnectionError("refused")
        return connected(self)

    monkeypatch.setattr(type(tracker), "_connected", connect)
    made.run()
    assert tracker.waiting
    tracker.close(finished=True, files=made.keeper.files())
    runs_dir = tmp_path / "runs"
    [[parent, status]] = rows(runs_dir, "select run_uuid, status from runs where name = 'lab'")
    assert status == "FINISHED"
    parents = dict(rows(runs_dir, "select run_uuid, value from tags where key = 'mlflow.parentRunId'"))
    assert set(parents.values()) == {parent}
    outcomes = dict(rows(runs_dir, "select run_uuid, value from tags where key = 'search.outcome'"))
    assert set(outcomes) == set(parents)
    assert sorted(outcomes.values()) == sorted(trial.user_attrs["outcome"] for trial in made.study.trials)
    assert "infeasible" in outcomes.values()
    best = rows(runs_dir, "select min(value) from metrics where key = 'best_valid_loss'")
    assert best == [(made.study.best_value,)]
    assert list((runs_dir / ".mlflow-artifacts").rglob("lab-best.yaml"))


def test_losses_come_back_through_mlflow_where_the_disk_is_not_shared(tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    from llmrecipes.tracking.mlflow.database import require_database

    uri = tracking_uri(tmp_path)
    require_database(uri, tmp_path.as_uri())
    client = MlflowClient(uri)
    experiment = client.create_experiment("lab-search", tmp_path.as_uri())
    reader = metrics.MlflowReader(uri, "lab-search", "lab-0000")
    assert reader.read().evaluations == {}
    run_id = client.create_run(experiment, run_name="lab-0000").info.run_id
    for step in (1, 2, 3):
        for key, value in (("loss", 3.0), ("step_seconds", 0.5), ("consumed_tokens", 100.0 * step)):
            client.log_metric(run_id, tracker_name(key), value, step=step)
    client.log_metric(run_id, tracker_name("valid_loss"), 2.5, step=3)
    reader._looked = -metrics.LOOK_SECONDS
    progress = reader.read()
    assert (progress.step, progress.tokens, progress.seconds, progress.diverged) == (3, 300, 1.5, False)
    assert progress.evaluations[3].valid_loss == 2.5
    client.log_metric(run_id, tracker_name("loss"), float("nan"), step=4)
    reader._looked = -metrics.LOOK_SECONDS
    assert reader.read().diverged


def test_metrics_of_a_resumed_run_are_read_again(tmp_path: Path) -> None:
    reader, path = MetricsReader(tmp_path), tmp_path / "metrics.jsonl"
    assert reader.read().step == 0

    def step(number: int) -> str:
        return json.dumps({"step": number, "loss": 1.0, "step_seconds": 2.0, "consumed_tokens": number * 10}) + "\n"

    path.write_text(step(1) + step(2) + '{"step": 2, "valid_loss": 5.0}\n' + step(3)[:-9])
    assert (reader.read().step, reader.read().seconds) == (2, 4.0)
    path.write_text(path.read_text() + step(3)[-9:])
    assert (reader.read().step, reader.read().tokens) == (3, 30)
    # A resume replaces the file, without the steps after the checkpoint.
    new = tmp_path / "new"
    new.write_text(step(1))
    new.rename(path)
    assert (reader.read().step, reader.read().evaluations) == (1, {})


@pytest.mark.parametrize(
    ("recipe", "more", "missing"),
    [
        (searched(), ("plotly",), "plotly"),
        (searched(), ("optuna_dashboard",), "optuna_dashboard"),
        (searched(storage="postgresql://me@host/studies"), (), "psycopg2"),
    ],
)
def test_a_package_is_required_only_where_it_is_used(
    recipe: Recipe, more: tuple[str, ...], missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images have Optuna for the workers, and nothing that draws."""
    monkeypatch.setattr(command, "find_spec", lambda name: None if name == missing else True)
    with refused("search") as caught:
        require_library(recipe, *more)
    assert caught.value.what.split()[0] == missing
    require_library(searched())
