"""`llmrecipes smoke`: it passes where resuming works, and says so where it does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmrecipes import cli
from llmrecipes.train import state
from tests.helpers import tiny_on, write_recipe


def smoke(corpus: Path, data_dir: Path, folder: Path, *options: str) -> int:
    recipe = tiny_on(corpus, "rehearsed", model={"hidden_dropout": 0.2}, train={"precision": "bf16"})
    places = ("--runs-dir", str(folder / "runs"), "--data-dir", str(data_dir))
    return cli.run(["smoke", write_recipe(recipe, folder), *options, *places])


def test_a_rehearsal_trains_saves_resumes_and_compares(
    corpus: Path, data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert smoke(corpus, data_dir, tmp_path, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["ok"], found["first_difference"], found["resumed_at"]) == (True, None, found["steps"] // 2)
    assert found["last_loss"] < found["first_loss"]
    assert {path.name for path in Path(found["run_dir"]).iterdir()} == {"uninterrupted", "resumed"}


@pytest.mark.slow
def test_a_resume_that_forgets_the_random_state_is_found_out(
    corpus: Path, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(state, "set_random_states", lambda states: None)
    assert smoke(corpus, data_dir, tmp_path) == 1
    printed = capsys.readouterr().out
    assert "smoke rehearsed: FAILED" in printed
    assert "DIFFERS from the uninterrupted run at step 11" in printed
