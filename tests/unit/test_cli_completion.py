"""Completion as the shells ask for it."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from llmrecipes.cli import app as cli
from llmrecipes.hardware.load import names as cluster_names
from llmrecipes.recipe.load import names as recipe_names
from tests.helpers import environment

Complete = Callable[..., list[str]]
HEAVY = ("torch", "megatron", "mlflow", "datasets", "transformers", "tokenizers", "numpy", "rich.console", "psutil")


@pytest.fixture
def complete(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Complete:
    """What bash is answered for the words of a line, the last of which is being written."""
    monkeypatch.chdir(tmp_path)

    def ask(*words: str) -> list[str]:
        monkeypatch.setenv("_LLMRECIPES_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", "\n".join(("llmrecipes", *words)))
        monkeypatch.setenv("COMP_CWORD", str(len(words)))
        with pytest.raises(SystemExit) as ended:
            cli.run([])
        assert ended.value.code == 0
        return capsys.readouterr().out.split()

    return ask


def test_names_of_commands_recipes_and_clusters(complete: Complete) -> None:
    assert complete("tra") == ["train"]
    assert complete("bench", "st") == ["step"]
    assert complete("completion", "") == ["bash", "zsh", "fish"]
    for command in ("train", "show", "plan", "prepare", "smoke", "verify", "submit", "doctor"):
        assert complete(command, "") == recipe_names()
    assert complete("bench", "step", "gpt-tiny-") == [
        "gpt-tiny-3d",
        "gpt-tiny-clean",
        "gpt-tiny-continual",
        "gpt-tiny-distil",
        "gpt-tiny-minitron",
        "gpt-tiny-stages",
        "gpt-tiny-zero",
    ]
    for command in ("plan", "train"):
        assert complete(command, "gpt-1b", "--cluster", "") == cluster_names()
    assert complete("train", "recipes/gpt") == []  # paths are the shell's own
    assert "--run-id" in complete("train", "--run")


def test_keys_and_values_of_overrides(complete: Complete) -> None:
    assert complete("train", "gpt-tiny", "train.prec") == ["train.precision="]
    assert "data.sources.0.path=" in complete("train", "gpt-tiny", "data.")
    # bash takes `=` for a word of its own
    assert complete("train", "gpt-tiny", "train.precision", "=") == ["fp32", "bf16", "fp16"]
    assert complete("train", "gpt-tiny", "train.precision", "=", "b") == ["bf16"]
    assert complete("train", "gpt-tiny", "train.precision", "=", "bf16", "optimizer.lr=") == []
    assert complete("show", "gpt-tiny", "model.share_emb", "=") == []
    assert complete("show", "gpt-tiny", "tracking.mlflow", "=", "") == ["true", "false"]
    assert complete("train", "gpt-tiny", "no.such.key", "=", "") == []
    # zsh and fish do not
    assert complete("train", "gpt-tiny", "'train.precision=b'") == ["train.precision=bf16"]


def test_runs(complete: Complete, tmp_path: Path) -> None:
    assert complete("generate", "") == []
    for runs_dir, run in (("runs", "gpt-tiny/a1"), ("runs", "gpt-tiny/a2"), ("other", "gpt-1b/b")):
        (tmp_path / runs_dir / run).mkdir(parents=True)
        (tmp_path / runs_dir / run / "recipe.yaml").touch()
    (tmp_path / "runs/gpt-tiny/no-run").mkdir()
    assert complete("generate", "") == ["gpt-tiny/a1", "gpt-tiny/a2"]
    assert complete("generate", "a") == ["a1", "a2"]
    assert complete("compare", "gpt-tiny/a1", "") == ["gpt-tiny/a1", "gpt-tiny/a2"]
    assert complete("tensorboard", "--runs-dir", "other", "") == ["gpt-1b/b"]
    assert complete("upcycle", "gpt-tiny/a2") == ["gpt-tiny/a2"]
    assert complete("convert", "gpt-tiny/a2") == ["gpt-tiny/a2"]
    assert complete("convert", "gpt-tiny/a2", "--to", "d") == ["deepspeed"]


def test_bash_completes(tmp_path: Path) -> None:
    """The script, in bash: a name, a key without a space behind it, and what must not be loaded for them."""
    program = tmp_path / "llmrecipes"
    report = f"print(*[name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)"
    code = f"import sys, atexit; atexit.register(lambda: {report}); from llmrecipes.cli.app import main; main()"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -c {shlex.quote(code)} "$@"\n')
    program.chmod(0o755)
    lines = """
        source <(llmrecipes completion bash)
        compopt() { echo "compopt $1 $2"; }
        complete -p llmrecipes
        for line in "train gpt-tiny-3" "train gpt-tiny train.prec"; do
            COMP_WORDS=(llmrecipes $line) COMP_CWORD=$(wc -w <<< "$line") && _llmrecipes_completion llmrecipes
            echo "${COMPREPLY[@]}"
        done"""
    path = f"{tmp_path}:{environment()['PATH']}"
    done = subprocess.run(
        ["bash", "-c", lines], env=environment() | {"PATH": path}, capture_output=True, text=True, check=True
    )
    registered, *answers = done.stdout.splitlines()
    assert registered == "complete -o default -F _llmrecipes_completion llmrecipes"
    assert answers == ["gpt-tiny-3d", "compopt -o nospace", "train.precision="]
    assert done.stderr.split() == []


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_have_a_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["completion", shell]) == 0
    assert f"_LLMRECIPES_COMPLETE=complete_{shell}" in capsys.readouterr().out
    assert cli.run(["completion", "tcsh"]) == 2
