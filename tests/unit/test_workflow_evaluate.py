"""`llmrecipes eval` and `train.eval_tasks` on trained runs: what is kept, where, and what is refused."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from llmrecipes.api import open_run
from llmrecipes.cli import app as cli
from llmrecipes.errors import UserError
from llmrecipes.evaluation import isolation
from llmrecipes.recipe.schema import Recipe
from llmrecipes.tracking.events import TASKS_EVALUATED
from llmrecipes.tracking.mlflow.database import KEY_TAG, artifact_root, require_database, sqlite_uri
from tests.helpers import curve, lines, start_command, tiny_on, write_recipe
from tests.refusals import refused, require_message

LENGTH = {"seq_length": 64, "max_position_embeddings": 128}


def task_file(folder: Path, number: int = 6) -> Path:
    rows = [{"q": f"word {n} döcument", "c": [f" {n}", " word"], "a": n % 2} for n in range(number)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = folder / "task.yaml"
    path.write_text(f"""task: words
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder / "rows.jsonl"}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{q}}}}"
doc_to_choice: "{{{{c}}}}"
doc_to_target: "{{{{a}}}}"
target_delimiter: ""
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}, {{metric: acc_norm}}]
""")
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("evaluated")


@pytest.fixture(scope="module")
def recipe(corpus: Path) -> Recipe:
    train = {"train_iters": 4, "eval_interval": 2, "eval_iters": 1}
    tracking = {"mlflow": False, "tensorboard": False}
    return tiny_on(
        corpus, model={**LENGTH, "hidden_dropout": 0.1}, train=train, tracking=tracking,
        checkpoint={"save_interval": 2, "most_recent_k": 5},
    )  # fmt: skip


@pytest.fixture(scope="module")
def run_dir(folder: Path, recipe: Recipe, data_dir: Path) -> Path:
    """A run with tasks after its second and fourth step, as its recipe has them, and an MLflow run."""
    path = write_recipe(recipe, folder)
    wanted = json.dumps({"tasks": [str(task_file(folder))], "interval": 2})
    where = ["--runs-dir", str(folder / "runs"), "--data-dir", str(data_dir)]
    assert cli.run(["train", path, "--run-id", "one", f"train.eval_tasks={wanted}", *where]) == 0
    assert cli.run(["train", path, "--run-id", "plain", *where]) == 0
    return folder / "runs" / recipe.name / "one"


def evaluate(run_dir: Path, data_dir: Path, *arguments: str) -> int:
    where = ["--runs-dir", str(run_dir.parents[1]), "--data-dir", str(data_dir)]
    return cli.run(["eval", *arguments, *where])


def test_training_is_the_same_with_tasks_and_reports_them(run_dir: Path) -> None:
    assert curve(run_dir) == curve(run_dir.with_name("plain"))
    notes = [line for line in lines(run_dir) if line.get("event") == TASKS_EVALUATED]
    assert [note["step"] for note in notes] == [2, 4]
    assert all({"eval/words/acc", "eval/words/acc_norm"} <= note["details"].keys() for note in notes)


@pytest.mark.rotating
def test_a_run_is_evaluated_as_it_was_in_training_and_everything_is_kept(
    run_dir: Path, folder: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from mlflow.tracking import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    runs_dir = run_dir.parents[1]
    uri = sqlite_uri(runs_dir.resolve() / "mlflow.db")
    require_database(uri, artifact_root(runs_dir))
    client = MlflowClient(uri)
    known = client.create_run(client.create_experiment("known"), tags={KEY_TAG: "k"})
    client.set_terminated(known.info.run_id)
    identity = {"tracking_uri": uri, "run_id": known.info.run_id, "key": "k"}
    (run_dir / "mlflow.json").write_text(json.dumps(identity))
    recorded = run_dir / "recipe.yaml"
    recorded.write_text(recorded.read_text("utf-8").replace("mlflow: false", "mlflow: true"), "utf-8")
    file = str(folder / "task.yaml")
    assert evaluate(run_dir, data_dir, "tiny/one", "--task", file, "--data", "valid", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["step"], found["warnings"]) == (4, [])
    results = {record["task"]: record["metrics"] for record in found["results"]}
    (note,) = (line for line in lines(run_dir) if line.get("event") == TASKS_EVALUATED and line["step"] == 4)
    assert note["details"] == pytest.approx({f"eval/words/{key}": value for key, value in results["words"].items()})
    assert 0 < results["valid"]["bits_per_byte"] < 8

    logged = client.get_run(known.info.run_id)
    assert logged.info.status == "FINISHED"
    assert logged.data.metrics["eval/words/acc"] == results["words"]["acc"]
    assert logged.data.metrics["eval/valid/bits_per_byte"] == pytest.approx(results["valid"]["bits_per_byte"])
    (point,) = client.get_metric_history(known.info.run_id, "eval/words/acc")
    assert point.step == 4

    run = open_run(run_dir, data_dir=data_dir)
    (earlier,) = run.evaluate(data=["valid"], step=2, limit=3)
    assert (earlier["step"], earlier["settings"]["documents"]) == (2, 3)
    assert [record["step"] for record in run.evaluations] == [4, 4, 2]
    with refused("limit"):
        run.evaluate(limit=0)
    assert evaluate(run_dir, data_dir, "tiny/one", "--compare") == 0
    table = capsys.readouterr().out
    assert "step 2" in table and "step 4" in table and "bits_per_byte" in table


def test_an_unreachable_tracker_loses_no_result(
    run_dir: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://user:secret@127.0.0.1:9")
    other = run_dir.with_name("plain")
    values = {"tracking_uri": "http://127.0.0.1:9", "run_id": "x", "key": "x"}
    (other / "mlflow.json").write_text(json.dumps(values))
    recorded = other / "recipe.yaml"
    recorded.write_text(recorded.read_text("utf-8").replace("mlflow: false", "mlflow: true"), "utf-8")
    assert evaluate(other, data_dir, str(other), "--limit", "1") == 0
    printed = capsys.readouterr().out
    assert "MLflow" in printed and "secret" not in printed
    assert len((other / "evaluations.jsonl").read_text().splitlines()) == 1


def test_what_cannot_be_evaluated_is_refused(
    run_dir: Path, tmp_path: Path, data_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*arguments: str) -> str:
        assert evaluate(run_dir, data_dir, *arguments) == 2
        return capsys.readouterr().err

    require_message(said("tiny/two"), run_dir.parents[1])
    require_message(said("tiny/one@3"), run_dir / "checkpoints")
    require_message(said("tiny/one", "--check", "bais"), "--check", rule="--check bias")
    require_message(said("tiny/one", "--tp", "3"), "--tp", rule="--tp 2")
    require_message(said("tiny/one", "--tp", "2", "--nproc", "3"), "--nproc")
    require_message(said("tiny/one", "--window", "129"), "--window", rule="128")
    require_message(said("tiny/one", "--data", "text:none-*"), "data.sources")
    empty = run_dir.with_name("empty")
    empty.mkdir(exist_ok=True)
    (empty / "recipe.yaml").write_text((run_dir / "recipe.yaml").read_text())
    require_message(said(str(empty)), empty / "checkpoints")

    pickled = tmp_path / "pickled"
    pickled.mkdir()
    config = {"model_type": "gpt2", "vocab_size": 300, "n_embd": 64, "n_layer": 1, "n_head": 2, "n_positions": 64}
    (pickled / "config.json").write_text(json.dumps({**config, "architectures": ["GPT2LMHeadModel"]}))
    (pickled / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n")
    assert str(pickled) in said(str(pickled), "--data", "stdlib")
    (tmp_path / "nothing").mkdir()
    assert str(tmp_path / "nothing") in said(str(tmp_path / "nothing"), "--data", "stdlib")


@pytest.mark.slow
def test_code_of_a_task_file_runs_only_if_it_is_trusted_and_alone(
    run_dir: Path, tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = task_file(tmp_path)
    path.write_text(path.read_text() + "process_docs: !function code.first\n")
    (tmp_path / "code.py").write_text(f"""
import os, socket
from pathlib import Path
Path({str(tmp_path / "ran")!r}).write_text(str([dict(os.environ), socket.if_nameindex()]))


def first(docs):
    return docs.select(range(2))
""")
    monkeypatch.setenv("MY_TOKEN", "canary")
    assert evaluate(run_dir, data_dir, "tiny/one", "--task", str(path)) == 2
    require_message(capsys.readouterr().err, path, rule="--trust-code")
    assert evaluate(run_dir, data_dir, "tiny/one", "--task", str(path), "--trust-code", "--tp", "2") == 2
    require_message(capsys.readouterr().err, "--trust-code", rule="--tp 1")
    assert not (tmp_path / "ran").exists()
    code = evaluate(run_dir, data_dir, "tiny/one", "--task", str(path), "--trust-code", "--json")
    output = capsys.readouterr()
    try:
        isolation.command(["true"])
    except UserError:  # no user namespaces here
        assert code == 2
        require_message(output.err, "--trust-code")
        return
    assert code == 0
    (record,) = json.loads(output.out)["results"]
    assert (record["task"], record["settings"]["documents"]) == ("words", 2)
    seen = (tmp_path / "ran").read_text()
    assert "canary" not in seen and "(1, 'lo')]" in seen
    (tmp_path / "code.py").write_text("raise RuntimeError('x')\n")
    assert evaluate(run_dir, data_dir, "tiny/one", "--task", str(path), "--trust-code") == 2
    require_message(capsys.readouterr().err, "--task", rule=str(path))


def test_a_damaged_checkpoint_gives_no_numbers(run_dir: Path, data_dir: Path) -> None:
    plain = run_dir.with_name("plain") / "checkpoints" / "step-00000002"
    weights = max(plain.glob("*.distcp"), key=lambda path: path.stat().st_size)
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 1
    weights.write_bytes(data)
    with refused(plain, rule=f"{plain.parents[1]}@4"):
        open_run(plain.parents[1], data_dir=data_dir).evaluate(step=2)


@pytest.mark.slow
def test_a_signal_leaves_no_half_result(run_dir: Path, data_dir: Path) -> None:
    other = run_dir.with_name("plain")
    before = (other / "evaluations.jsonl").read_bytes() if (other / "evaluations.jsonl").exists() else b""
    process = start_command(
        "eval", str(other), "--data", "train", "--stride", "1", "--data-dir", str(data_dir),
        "--runs-dir", str(run_dir.parents[1]),
    )  # fmt: skip
    assert process.stdout is not None
    for line in process.stdout:
        if "perplexity" in line:
            break
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=240)
    assert process.returncode != 0
    after = (other / "evaluations.jsonl").read_bytes() if (other / "evaluations.jsonl").exists() else b""
    assert after == before
