"""The program as users run it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from llmrecipes import cli
from llmrecipes.recipe.load import load, names

HEAVY = ("torch", "megatron", "mlflow", "datasets", "transformers", "tokenizers", "numpy", "rich.console")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.run(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "list")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[1:]] == names()
    rows = json.loads(run(capsys, "list", "--json")[1])
    assert {row["name"]: row["parameters"] for row in rows}["llama3-8b"] == 8_030_261_248


def test_a_broken_recipe_does_not_hide_the_others(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMRECIPES_RECIPES", str(tmp_path))
    (tmp_path / "bad.yaml").write_text("name: [")
    (tmp_path / "gpt-tiny.yaml").write_text((Path(__file__).parents[2] / "recipes/gpt-tiny.yaml").read_text())
    _, out, _ = run(capsys, "list")
    assert "broken: " in out.splitlines()[1]
    assert out.splitlines()[2].startswith("gpt-tiny ")


def test_list_imports_nothing_heavy() -> None:
    code = (
        f"import sys; from llmrecipes import cli; cli.run(['list']); print([m for m in {HEAVY!r} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_show_prints_the_resolved_recipe_and_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "show", "gpt-tiny", "optimizer.lr=1e-3", "--nproc", "1")
    assert code == 0
    assert "\n  lr: 0.001\n" in out
    assert "4,273,664" in out
    assert "\nfits " in out
    shown = json.loads(run(capsys, "show", "gpt-tiny", "optimizer.lr=1e-3", "--nproc", "1", "--json")[1])
    assert shown["hash"] == load("gpt-tiny", ["optimizer.lr=1e-3"]).hash
    assert shown["plan"]["num_microbatches"] * shown["recipe"]["train"]["micro_batch_size"] == 16
    assert shown["plan"]["fits"] is True


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["show", "nothing"], "no recipe named 'nothing'"),
        (["show", "gpt-tiny", "train.lr=1"], "did you mean optimizer.lr?"),
        (["show", "gpt-tiny", "--nproc", "many"], "--nproc"),
        (["show"], "RECIPE"),
        (["show", "gpt-tiny", "--wrong"], "No such option: --wrong"),
        (["shwo"], "No such command 'shwo'"),
        ([], "Missing command"),
    ],
)
def test_wrong_use_gets_one_message_and_exit_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str
) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert expected in err
    assert "Traceback" not in err


def test_errors_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "show", "gpt-tiny", "train.lr=1", "--json")
    answer = json.loads(out)
    assert (code, err) == (2, "")
    assert (answer["exit_code"], answer["fix"]) == (2, "did you mean optimizer.lr?")


def test_schema_is_json_for_editors(capsys: pytest.CaptureFixture[str]) -> None:
    schema = json.loads(run(capsys, "schema")[1])
    assert schema["properties"]["name"]["type"] == "string"
    assert run(capsys, "docs", "--check")[0] == 0


def test_a_closed_pipe_needs_no_words() -> None:
    program = [sys.executable, "-m", "llmrecipes.cli", "schema"]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(timeout=60) == 1
