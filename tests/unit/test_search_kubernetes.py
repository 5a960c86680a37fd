"""Trials as Kubernetes jobs: what kubectl is given, and losses that come back through MLflow."""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path

import pytest
import yaml

from llmrecipes.cli.app import run
from llmrecipes.search.command import quiet
from llmrecipes.tracking.mirror import tracker_name
from llmrecipes.tracking.mlflow.database import require_database, tracking_uri
from tests.helpers import write_recipe
from tests.refusals import require_message
from tests.unit.search_lab import searched

IMAGE = f"registry.example.com/llmrecipes@sha256:{'0' * 64}"
KUBECTL = """#!{python} -S
import json, re, sys
folder = "{folder}"
words = sys.argv[1:]
if "--dry-run=server" in words:
    pass
elif words[0] == "apply":
    with open(folder + "/applied", "a") as file:
        file.write(sys.stdin.read() + "---\\n")
else:
    name = re.search(r"\\((.*)\\)", " ".join(words))[1]
    done = {{"conditions": [{{"type": "Complete", "status": "True"}}]}}
    print(json.dumps({{"items": [{{"metadata": {{"name": name}}, "status": done}}]}}))
"""


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kubectl whose jobs have ended as soon as they are asked for; returns the folder of what it was given."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "kubectl"
    program.write_text(KUBECTL.format(python=sys.executable, folder=folder))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.mark.rotating
def test_a_trial_is_a_kubernetes_job(
    kubectl: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.tracking import MlflowClient

    quiet()
    server = tmp_path / "server"
    server.mkdir()
    uri = tracking_uri(server)
    require_database(uri, server.as_uri())
    client = MlflowClient(uri)
    monkeypatch.setattr("mlflow.tracking.MlflowClient", lambda _: client)  # the server that pods and search talk to
    trained = client.create_run(
        client.create_experiment("lab-search", server.as_uri()), run_name="lab-0000"
    ).info.run_id
    for step in range(1, 13):  # as the pods do
        client.log_metric(trained, tracker_name("loss"), 4.0, step=step)
        client.log_metric(trained, tracker_name("consumed_tokens"), 512.0 * step, step=step)
        if step % 3 == 0:
            client.log_metric(trained, tracker_name("valid_loss"), 4 - step / 12, step=step)
    recipe = searched(n_trials=1, enqueue_recipe=False, enqueue_trials=[{"optimizer.lr": 0.25}])
    recipe = recipe.model_copy(update={"tracking": recipe.tracking.model_copy(update={"mlflow": True})})
    command = ["search", write_recipe(recipe, tmp_path), "--to", "k8s", "--cluster", "laptop", "--json"]
    assert run([*command, "--submit", f"image={IMAGE}"]) == 2
    assert json.loads(capsys.readouterr().out)["where"] == "--submit"
    assert run([*command, "--submit", f"image={IMAGE}", "--submit", "tracking-uri=http://mlflow:5000"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["best"] == [{"number": 0, "valid_loss": 3.0, "values": {"optimizer.lr": 0.25}}]
    objects = [each for each in yaml.safe_load_all((kubectl / "applied").read_text()) if each]
    kinds = [object_["kind"] for object_ in objects]
    assert kinds.count("Job") == 1
    [text] = [object_["data"]["recipe.yaml"] for object_ in objects if object_["kind"] == "ConfigMap"]
    assert yaml.safe_load(text)["optimizer"]["lr"] == 0.25
    run_tags = client.get_run(trained).data.tags
    assert run_tags["search.outcome"] == "complete"
    assert client.get_run(run_tags["mlflow.parentRunId"]).data.metrics["best_valid_loss"] == 3.0


@pytest.mark.parametrize(
    ("options", "where"),
    [
        (["--to", "slurm"], "--cluster"),
        (["--nodes", "2"], "--nodes"),
        (["--cluster", "laptop"], "--cluster"),
        (["--to", "slurm", "--cluster", "laptop", "--submit", "image"], "--submit"),
        (["--to", "slurm", "--cluster", "laptop", "--submit", "namespace=x"], "--submit"),
        (["--report", "--ui"], "--report"),
    ],
)
def test_options_that_do_not_go_together(
    options: list[str], where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = ["--runs-dir", str(tmp_path / "runs")]
    assert run(["search", write_recipe(searched(), tmp_path), *options, *folders]) == 2
    require_message(capsys.readouterr().err, where)
    assert not (tmp_path / "runs").exists()


def test_a_recipe_without_a_space_is_told_what_it_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = searched().model_copy(update={"search": None})
    assert run(["search", write_recipe(recipe, tmp_path)]) == 2
    require_message(capsys.readouterr().err, "search", rule="optimizer.lr")
