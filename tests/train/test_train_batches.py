"""A run whose global batch grows: what it reports, and that it goes on from any step as if it had not been stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmrecipes.data.prepare import prepare
from llmrecipes.recipe.derived.batch_schedule import batch_schedule
from tests.helpers import curve, require_same_checkpoints, tiny_on, train_lines
from tests.train.test_train_faults import run_spec

STOPS = (3, 5, 9)
"""In the ramp, between two sizes, and after it."""


@pytest.mark.rotating
def test_a_run_with_a_growing_batch_goes_on_bit_for_bit(
    tmp_path: Path, corpus: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train: dict[str, Any] = {"global_batch_size": 8, "rampup_batch_size": [2, 2, 24]}
    recipe = tiny_on(
        corpus,
        model={"hidden_dropout": 0.1},
        train={**train, "eval_interval": 6},
        scheduler={"lr_warmup_iters": 2},
        data={"num_workers": 1, "multiple_validation_sets": True},
        tracking={"loss_by_source": True},
        checkpoint={"save_interval": 4, "most_recent_k": 6},
    )
    sizes, last = batch_schedule(recipe), recipe.train.train_iters
    assert sorted({sizes.of_step(step) for step in range(last)}) == [2, 4, 6, 8]
    prepare(recipe, data_dir)
    assert run_spec(recipe, tmp_path / "whole", data_dir) == 0
    whole = tmp_path / "whole/runs/tiny/r"
    steps = train_lines(whole)
    assert [line["global_batch_size"] for line in steps] == [sizes.of_step(step) for step in range(last)]
    assert [line["consumed_samples"] for line in steps] == [sizes.samples(step) for step in range(1, last + 1)]
    assert [line["step"] for line in steps if "source_loss" in line] == [1, 10, last]
    assert steps[0]["source_loss"] == {"corpus": pytest.approx(steps[0]["loss"])}
    numbers = [(sizes.of_step(n), steps[n]["loss"]) for n in range(1, 10)]  # of the steps since the first report
    mean = sum(size * loss for size, loss in numbers) / sum(size for size, _ in numbers)
    assert steps[9]["source_loss"]["corpus"] == pytest.approx(mean)
    assert steps[-1]["consumed_tokens"] == sizes.samples(last) * recipe.model.seq_length
    for step in STOPS:
        assert run_spec(recipe, tmp_path / "cut", data_dir, stop_after=step) == 75
    assert run_spec(recipe, tmp_path / "cut", data_dir) == 0
    cut = tmp_path / "cut/runs/tiny/r"
    assert curve(cut) == curve(whole)
    newest = f"checkpoints/step-{last:08}"
    require_same_checkpoints(cut / newest, whole / newest)
