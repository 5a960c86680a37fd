"""What a run says of itself: what it reads, and what is printed at its end."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from llmrecipes.data.prepare import prepare
from llmrecipes.train.spec import RunSpec
from llmrecipes.train.summary import datasets_of, generate_command, sample_prompt
from tests.helpers import tiny, tiny_on


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


def test_what_a_run_reads_is_a_dataset_for_each_source_and_use(corpus: Path, data_dir: Path, tmp_path: Path) -> None:
    recipe = tiny_on(corpus)
    prepared = prepare(recipe, data_dir)
    training, validation = datasets_of(recipe, prepared)
    assert (training.name, training.use, training.kind, training.source) == ("corpus", "training", "text", str(corpus))
    counts = prepared.manifest.counts("train").model_dump()
    assert training.counts == {**counts, "weight": 1.0}
    assert (validation.use, validation.counts) == ("validation", prepared.manifest.counts("valid").model_dump())
    assert len(training.digest) == 32 and training.digest != validation.digest
    (tmp_path / "other").mkdir()
    for path in list(corpus.iterdir())[:200]:
        (tmp_path / "other" / path.name).write_bytes(path.read_bytes())
    other = tiny_on(tmp_path / "other")
    assert next(datasets_of(other, prepare(other, tmp_path / "data"))).digest != training.digest
