"""The program as users run it."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from llmrecipes import __version__, cli
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
    assert "2,458,752" in out
    assert "\nfits " in out
    shown = json.loads(run(capsys, "show", "gpt-tiny", "optimizer.lr=1e-3", "--nproc", "1", "--json")[1])
    assert shown["hash"] == load("gpt-tiny", ["optimizer.lr=1e-3"]).hash
    assert shown["plan"]["num_microbatches"] * shown["recipe"]["train"]["micro_batch_size"] == 16
    assert shown["plan"]["fits"] is True


def test_version_names_what_a_bug_report_needs_and_loads_nothing_heavy() -> None:
    heavy = f"print([m for m in {HEAVY!r} if m in sys.modules])"
    code = f"import sys; from llmrecipes import cli; cli.run(['--version']); {heavy}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *lines, loaded = done.stdout.splitlines()
    assert loaded == "[]"
    assert lines[0] == f"llmrecipes {__version__}"
    assert dict(line.split() for line in lines[1:3]) == {name: version(name) for name in ("megatron-core", "torch")}


def test_show_plan_leaves_the_recipe_out_and_the_time_open(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "show", "gpt-tiny", "--nproc", "1", "--plan")
    assert code == 0
    assert "num_layers:" not in out
    rows = {line.split("  ")[0]: line for line in out.splitlines()}
    assert "unknown" in rows["time of a step"] and "llmrecipes bench step gpt-tiny" in rows["time of a step"]
    assert "38 MiB" in rows["checkpoint"]
    measured = run(capsys, "show", "gpt-tiny", "--nproc", "1", "--plan", "--step-seconds", "2")[1]
    assert "26m40s" in measured and "unknown" not in measured
    assert json.loads(run(capsys, "show", "gpt-tiny", "--nproc", "1", "--json")[1])["step_seconds"] is None


def test_show_warns_where_little_memory_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("show", "llama3-70b", "--cluster", "h100-ib", "--nodes", "8")
    assert "warning: memory headroom is 2.0%" in run(capsys, *asked, "--plan")[1]
    plan = json.loads(run(capsys, *asked, "--json")[1])["plan"]
    assert plan["fits"] and len(plan["warnings"]) == 1
    assert not json.loads(run(capsys, *asked[:-1], "16", "--json")[1])["plan"]["warnings"]


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
