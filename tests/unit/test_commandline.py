"""Commands that users are told to run: the program's own parser reads them as they were meant."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.core import TyperGroup

from llmrecipes.cli.app import build
from llmrecipes.commandline import command_line, resume_command
from tests.helpers import ROOT

HOSTILE = [
    "plain", "two words", "it's", '"quoted"', "$HOME", "`id`", "a\nb", "-x", "--run-id", "--", "*", "ö", "a=b", "\\",
]  # fmt: skip


def parsed(command: str) -> tuple[str, dict[str, Any]]:
    """The command's name and what the parser gives it, after a shell has split the line."""
    program, *words = shlex.split(command)
    assert program == "llmrecipes"
    node = typer.main.get_command(build())
    context = node.make_context(program, words)
    while isinstance(node, TyperGroup):
        name, found, words = node.resolve_command(context, [*context._protected_args, *context.args])
        assert found is not None
        node, context = found, found.make_context(name, words, parent=context)
    return context.command_path.removeprefix("llmrecipes "), context.params


@pytest.mark.parametrize("text", HOSTILE)
def test_any_text_comes_back_from_the_parser(text: str) -> None:
    name, values = parsed(
        command_line("train", text, overrides=[f"model.x={text}", text], options={"run-id": text, "nproc": 2})
    )
    assert name == "train"
    assert (values["recipe"], values["overrides"]) == (text, [f"model.x={text}", text])
    assert (values["run_id"], values["nproc"]) == (text, 2)
    _, values = parsed(command_line("generate", text, options={"prompt": text}, data_dir=Path(text)))
    assert (values["run"], values["prompt"], values["data_dir"]) == (text, text, Path(text))


def test_commands_of_groups_and_flags() -> None:
    assert parsed(command_line("bench step", "gpt-tiny", options={"json": True, "nproc": None})) == (
        "bench step",
        {"recipe": "gpt-tiny", "overrides": [], "nproc": None, "repeats": 5, "as_json": True},
    )


@pytest.mark.parametrize("run_dir", ["runs/a/b", "/elsewhere/my runs/a/b", "-odd/a/b", "$x/a/b"])
def test_a_run_is_resumed_where_it_is(run_dir: str) -> None:
    name, values = parsed(resume_command(Path(run_dir)))
    assert (name, values["recipe"], values["run_id"]) == ("train", f"{run_dir}/recipe.yaml", "b")
    assert values["runs_dir"] / "a" / values["run_id"] == Path(run_dir)


def test_default_directories_are_left_out_where_every_shell_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LLMRECIPES_RUNS", raising=False)
    monkeypatch.delenv("LLMRECIPES_DATA", raising=False)
    assert command_line("ui", runs_dir=Path("runs")) == "llmrecipes ui"
    assert command_line("prepare", "a", data_dir=Path("data")) == "llmrecipes prepare a"
    monkeypatch.setenv("LLMRECIPES_RUNS", "/scratch/runs")
    for runs_dir in (Path("runs"), Path("/scratch/runs")):  # the reader's shell may have the variable, or not
        assert parsed(command_line("ui", runs_dir=runs_dir))[1]["runs_dir"] == runs_dir


def test_no_other_module_writes_a_command_with_values_in_it() -> None:
    written = re.compile(
        r"""f["'].*\bllmrecipes (train|prepare|show|generate|compare|bench|ui|submit|upcycle|convert)\b.*\{"""
    )
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in (ROOT / "llmrecipes").rglob("*.py")
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if written.search(line)
    ]
    assert not found
