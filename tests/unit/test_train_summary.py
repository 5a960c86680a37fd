"""What a run says at its end."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from llmrecipes.train.spec import RunSpec
from llmrecipes.train.summary import generate_command, sample_prompt
from tests.helpers import tiny


@pytest.mark.parametrize(("kind", "prompt"), [("stdlib", "def "), ("text", "The ")])
def test_the_command_at_the_end_repeats_the_prompt_of_the_sample(kind: str, prompt: str, tmp_path: Path) -> None:
    source = {"type": kind} if kind == "stdlib" else {"type": kind, "path": "texts"}
    run_dir = tmp_path / "with a space" / "run"
    spec = RunSpec(
        recipe=tiny(data={"sources": [source]}), run_dir=run_dir, runs_dir=run_dir.parent, data_dir=Path("data")
    )
    assert sample_prompt(spec.recipe) == prompt
    words = ["llmrecipes", "generate", str(run_dir), "--prompt", prompt]
    assert shlex.split(generate_command(spec)) == words
    elsewhere = spec.model_copy(update={"data_dir": tmp_path})
    assert shlex.split(generate_command(elsewhere)) == [*words, "--data-dir", str(tmp_path)]
