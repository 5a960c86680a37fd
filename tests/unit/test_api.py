"""llmrecipes as a library: light to import, and the example of docs/reference/python.md as it stands there."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import llmrecipes
from llmrecipes.cli import app as cli
from llmrecipes.recipe.load import load, to_yaml
from llmrecipes.workflow import train as workflow
from tests.helpers import ROOT, environment, tiny, tiny_on, write_recipe
from tests.refusals import refused
from tests.unit.search_lab import curves, searched

__all__ = ["curves"]

HEAVY = ("torch", "megatron", "mlflow", "datasets", "transformers", "tokenizers", "pandas", "numpy")


def test_what_is_public_is_there_and_the_rest_is_an_error() -> None:
    for name in llmrecipes.__all__:
        assert getattr(llmrecipes, name) is not None
        assert name in dir(llmrecipes)
    with pytest.raises(AttributeError):
        _ = llmrecipes.no_such_name


def test_importing_and_planning_load_nothing_heavy() -> None:
    """And a subpackage that is imported first or later hides no public name."""
    code = f"""
import sys
import llmrecipes
assert not [name for name in sys.modules if name.startswith(("llmrecipes.", "pydantic"))]
llmrecipes.plan_recipe(llmrecipes.load_recipe("gpt-1b"), cluster="h100-ib")
print([name for name in {HEAVY!r} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_overrides_are_those_of_the_command_line() -> None:
    changes = {"optimizer.min_lr": 1e-5, "tracking.mlflow": False, "data.split": [90, 5, 5], "train.train_iters": 700}
    words = ["optimizer.min_lr=1e-5", "tracking.mlflow=false", "data.split=[90, 5, 5]", "train.train_iters=700"]
    assert llmrecipes.load_recipe("gpt-tiny", changes) == llmrecipes.load_recipe("gpt-tiny", words)
    assert llmrecipes.load_recipe(ROOT / "recipes" / "gpt-tiny.yaml") == load("gpt-tiny").recipe
    for wrong in ({"train.lr": 1}, ["train.lr=1"], "optimizer.lr=1"):
        with pytest.raises(llmrecipes.UserError):
            llmrecipes.load_recipe("gpt-tiny", wrong)


def test_a_plan_that_does_not_fit_is_returned() -> None:
    assert llmrecipes.plan_recipe("llama3-405b", cluster="h100-ib", nodes=64).fits
    assert not llmrecipes.plan_recipe("gpt-175b", cluster="laptop").fits
    with pytest.raises(llmrecipes.UserError):
        llmrecipes.plan_recipe("gpt-tiny", nproc=3)


def test_mistakes_are_raised_and_nothing_is_begun(tmp_path: Path) -> None:
    runs_dir = tmp_path / "runs"
    for wrong in ({"run_id": "../escape"}, {"nproc": 3}, {"nproc": 0}):
        with pytest.raises(llmrecipes.UserError):
            llmrecipes.train_recipe("gpt-tiny", runs_dir=runs_dir, data_dir=tmp_path, **wrong)
    with pytest.raises(llmrecipes.UserError):
        llmrecipes.open_run("no-such-run", runs_dir=runs_dir)
    raised: list[BaseException] = []

    def elsewhere() -> None:
        try:
            llmrecipes.train_recipe("gpt-tiny", runs_dir=runs_dir, data_dir=tmp_path)
        except llmrecipes.UserError as error:
            raised.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert len(raised) == 1
    assert not runs_dir.exists()


def test_a_run_is_read_from_its_files_while_it_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = tmp_path / "runs" / "tiny" / "one"
    run_dir.mkdir(parents=True)
    recipe = tiny()
    (run_dir / "recipe.yaml").write_text(to_yaml(recipe))
    monkeypatch.setenv("LLMRECIPES_RUNS", str(tmp_path / "runs"))
    run = llmrecipes.open_run("one")
    assert (run.path, run.recipe) == (run_dir, recipe)
    assert (run.status.state, run.status.step, run.checkpoint) == ("unknown", None, None)
    assert run.records() == [] and run.metrics().empty
    lines = [{"step": 1, "loss": 6.5, "lr": 0.1}, {"step": 1, "event": "checkpoint_saved", "details": {}}]
    lines += [{"step": 2, "loss": None, "non_finite": ["loss"], "lr": 0.2}, {"step": 2, "valid_loss": 6.25}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (run_dir / "metrics.jsonl").write_text(text + '{"step": 3, "loss": 6')  # the line of step 3 is being written
    assert [record["loss"] for record in run.records()] == [6.5, None]
    assert run.records("evaluations") == [{"step": 2, "valid_loss": 6.25}]
    assert [record["event"] for record in run.records("notes")] == ["checkpoint_saved"]
    table = run.metrics()
    assert list(table.index) == [1, 2] and list(table["lr"]) == [0.1, 0.2] and table["loss"].isna().sum() == 1
    with pytest.raises(llmrecipes.UserError):
        run.records("losses")  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(llmrecipes.UserError) as caught:
        run.metrics()
    assert "records()" in caught.value.fix


def test_a_plan_prints_as_the_details_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["plan", "gpt-7b", "--cluster", "h100-ib", "--nodes", "2", "--details"]) == 0
    shown = {" ".join(line.split()) for line in capsys.readouterr().out.splitlines()}
    plan = llmrecipes.plan_recipe("gpt-7b", cluster="h100-ib", nodes=2)
    title, *lines = str(plan).splitlines()
    assert "gpt-7b" in title and "2 nodes of h100-ib: 16" in title
    rows = [" ".join(line.split()) for line in lines if line]
    assert len(rows) > 20 and set(rows) <= shown
    assert f"{plan.num_parameters.total:,}" in lines[0]
    assert plan.cluster.nodes == 2 and "cluster" not in plan.as_dict()


def test_layouts_are_those_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    found = llmrecipes.layout_recipe("gpt-7b", cluster="h100-ib", nodes=2)
    assert cli.run(["plan", "gpt-7b", "--placement", "--cluster", "h100-ib", "--nodes", "2", "--json"]) == 0
    ranks = json.loads(capsys.readouterr().out)["ranks"]
    assert json.loads(json.dumps([each.as_dict() for each in found])) == ranks
    assert [each.rank for each in llmrecipes.layout_recipe(tiny(), nproc=2)] == [0, 1]
    with refused("train.global_batch_size"):
        llmrecipes.layout_recipe(tiny(), nproc=3)


def test_runs_are_listed_and_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert llmrecipes.list_runs(tmp_path / "missing") == []
    for name, lr in (("one", 1e-3), ("two", 1e-2)):
        folder = tmp_path / "tiny" / name
        folder.mkdir(parents=True)
        (folder / "recipe.yaml").write_text(to_yaml(tiny(optimizer={"lr": lr})))
        (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": lr, "consumed_tokens": 8}) + "\n")
    listed = llmrecipes.list_runs(tmp_path, data_dir=tmp_path)
    assert sorted(run.path.name for run in listed) == ["one", "two"] and listed[0].data_dir == tmp_path
    found = llmrecipes.compare_runs(listed[0], "tiny/two" if listed[0].path.name == "one" else "one", runs_dir=tmp_path)
    assert set(found.differences["optimizer.lr"]) == {1e-3, 1e-2} and len(found.runs) == 2
    names = [str(run.path) for run in found.runs]
    assert cli.run(["compare", *names, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(found.as_dict()))
    with refused("RUN"):
        llmrecipes.compare_runs(listed[0])
    page = llmrecipes.report_run(listed[0], out=tmp_path / "page.html", data_dir=tmp_path)
    assert page["run"] in ("tiny/one", "tiny/two") and Path(page["page"]).read_text().startswith("<!doctype html>")
    both = llmrecipes.report_run("tiny/one", listed[0], runs_dir=tmp_path, data_dir=tmp_path)
    assert both["page"] == str(tmp_path / "tiny/one/comparison.html") and len(both["runs"]) == 2
    with refused("report_run"):
        llmrecipes.report_run()


def test_data_is_prepared_once(corpus: Path, data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tiny_on(corpus)
    prepared = llmrecipes.prepare_recipe(recipe, data_dir=data_dir, workers=1, quiet=True)
    assert prepared.path.parent == data_dir and prepared.manifest.counts("train").tokens > 1000
    assert not capsys.readouterr().out
    assert llmrecipes.prepare_recipe(recipe, data_dir=data_dir).path == prepared.path
    assert str(prepared.path) in capsys.readouterr().out


def test_what_would_be_submitted_is_that_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders: dict[str, Any] = {"runs_dir": tmp_path / "runs", "data_dir": tmp_path / "data"}
    changes = {"train.global_batch_size": 64}
    made = llmrecipes.submit_recipe(
        "gpt-7b", changes, to="slurm", cluster="h100-ib", nodes=2, dry_run=True, run_id="r", prepare_partition="cpu",
        **folders,
    )  # fmt: skip
    assert made.job is None and made.submission.run_dir == tmp_path / "runs" / "gpt-7b" / "r"
    words = ["submit", "gpt-7b", "train.global_batch_size=64", "--to", "slurm", "--cluster", "h100-ib", "--nodes", "2"]
    words += ["--dry-run", "--run-id", "r", "--prepare-partition", "cpu"]
    words += ["--runs-dir", str(folders["runs_dir"]), "--data-dir", str(folders["data_dir"])]
    assert cli.run(words) == 0
    assert capsys.readouterr().out == made.rendering.shown
    with refused("namespace", rule="prepare-partition"):
        llmrecipes.submit_recipe("gpt-7b", to="slurm", cluster="h100-ib", dry_run=True, namespace="x", **folders)
    with refused("--cluster"):
        llmrecipes.submit_recipe("gpt-7b", to="slurm", dry_run=True, **folders)
    assert not (tmp_path / "runs").exists()


@pytest.mark.usefixtures("curves")
def test_a_search_returns_its_best_trials(corpus: Path, data_dir: Path, tmp_path: Path) -> None:
    recipe = searched(n_trials=3).model_copy(update={"data": tiny_on(corpus).data})
    folders: dict[str, Any] = {"runs_dir": tmp_path / "runs", "data_dir": data_dir}
    result = llmrecipes.search_recipe(recipe, to="curves", nproc=1, quiet=True, **folders)
    assert (result.code, result.trials) == (0, {"complete": 3}) and len(result.recipes) == 1
    assert llmrecipes.load_recipe(result.recipes[0]).optimizer.lr == result.best[0]["values"]["optimizer.lr"]
    with refused("time"):
        llmrecipes.search_recipe(recipe, to="curves", time="1:00:00", **folders)
    with refused("--cluster"):
        llmrecipes.search_recipe(recipe, to="slurm", resume=True, **folders)


@pytest.mark.parametrize(("code", "outcome"), [(0, "finished"), (75, "saved"), (93, "failed"), (137, "failed")])
def test_how_the_ranks_ended_is_a_result(
    code: int, outcome: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workflow, "train", lambda *_: code)
    result = llmrecipes.train_recipe(tiny(), runs_dir=tmp_path, data_dir=tmp_path)
    assert (result.outcome, result.exit_code, result.final) == (outcome, code, {})
    assert result.run.path.parent == tmp_path / "tiny"


@pytest.mark.slow
def test_several_ranks_train_resume_and_generate(corpus: Path, data_dir: Path, tmp_path: Path) -> None:
    """In a script without `if __name__ == "__main__"`; the second call resumes."""
    recipe = write_recipe(tiny_on(corpus, train={"train_iters": 4, "eval_interval": 2}), tmp_path)
    script = tmp_path / "script.py"
    script.write_text(f"""
import llmrecipes

where = {{"run_id": "one", "runs_dir": "runs", "data_dir": {str(data_dir)!r}, "quiet": True}}
first = llmrecipes.train_recipe({recipe!r}, nproc=2, **where)
assert (first.outcome, first.exit_code, first.final["step"]) == ("finished", 0, 4), first
assert 0 < first.final["valid_loss"] < 10
longer = llmrecipes.load_recipe({recipe!r}, {{"train.train_iters": 6}})
try:
    llmrecipes.train_recipe(longer, **where)
    raise SystemExit("not refused")
except llmrecipes.UserError:
    pass
second = llmrecipes.train_recipe(longer, accept_changes=True, **where)
assert second.outcome == "finished" and [each.step for each in second.run.checkpoints][-1] == 6, second
assert list(second.run.metrics().index) == [1, 2, 3, 4, 5, 6]
text = second.run.generate("word", max_new_tokens=8, temperature=0)
assert text == second.run.generate("word", max_new_tokens=8, temperature=0)
for path in second.run.checkpoints:
    (path.path / "manifest.json").unlink()
try:
    llmrecipes.train_recipe(longer, **where)
    raise SystemExit("started again at step 0")
except llmrecipes.UserError as error:
    assert error.code == 93, error
""")
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_the_example_of_the_page_prints_what_the_page_says(data_dir: Path, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "reference" / "python.md").read_text("utf-8")
    (example,), (printed,) = (
        re.findall(rf"^```{kind}\n(.*?)^```", page, re.DOTALL | re.MULTILINE) for kind in ("python", "text")
    )
    done = subprocess.run(
        [sys.executable, "-c", example],
        cwd=tmp_path,
        env=environment() | {"LLMRECIPES_DATA": str(data_dir)},
        capture_output=True,
        text=True,
        check=True,
    )
    lines = iter([without_figures(line) for line in done.stdout.splitlines()])
    missing = [line for line in printed.splitlines() if without_figures(line) not in lines]
    assert not missing, done.stdout


def without_figures(line: str) -> str:
    """A line without losses, which differ in their last digits between machines, and without generated text."""
    return "text" if line.startswith(("'", '"')) else re.sub(r"\d\.\d+", "#", line.rstrip())
