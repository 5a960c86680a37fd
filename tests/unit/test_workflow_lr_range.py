"""The learning-rate range test: its sweep, what it says of a curve, and the command."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from llmrecipes.cli import app as cli
from llmrecipes.engine.core.update import learning_rate
from llmrecipes.recipe.load import load
from llmrecipes.recipe.rules.recipe_rules import check
from llmrecipes.workflow.lr_range import judged, range_recipe, smooth
from tests.helpers import tiny_on, write_recipe
from tests.refusals import refused, require_message

LOW, HIGH, STEPS = 1e-5, 1.0, 101


@pytest.mark.parametrize("name", ["gpt-tiny", "llama3-405b", "deepseek-v3", "sft-tiny"])
def test_the_sweep_multiplies_the_rate_by_the_same_factor(name: str) -> None:
    sweep = range_recipe(load(name).recipe, LOW, HIGH, STEPS)
    assert not check(sweep)
    rates = [learning_rate(sweep, step) for step in range(1, STEPS + 1)]
    assert rates == pytest.approx([LOW * (HIGH / LOW) ** (n / (STEPS - 1)) for n in range(STEPS)])
    assert sweep.name.endswith("-lr-range") and not sweep.tracking.mlflow and sweep.train.early_stop is None


def curve(loss: Any, high: float = HIGH) -> list[tuple[float, float]]:
    """(rate, loss) of a sweep; the loss as a function of the decimal logarithm of the rate."""
    rates = [LOW * (high / LOW) ** (n / (STEPS - 1)) for n in range(STEPS)]
    return [(rate, loss(math.log10(rate))) for rate in rates]


def test_a_tenth_of_the_rate_with_the_lowest_loss_is_suggested() -> None:
    # It falls up to a rate of 1e-2 and then rises steeply; the moving average is a few steps behind.
    result = judged("r", LOW, HIGH, curve(lambda at: 4 - at if at < -2 else 6 + 8 * (at + 2)), "run")
    assert result.lowest == pytest.approx(1e-2, rel=0.3)
    assert result.suggestion == pytest.approx(result.lowest / 10)
    assert result.diverged is not None and 1e-2 < result.diverged < 1.0
    assert len(result.rates) == len(result.losses) == len(result.smoothed) < STEPS


@pytest.mark.parametrize(("loss", "option"), [(lambda at: 4 - at, "--high"), (lambda at: 9 + 0.1 * at, "--low")])
def test_no_rate_is_suggested_where_the_sweep_has_not_seen_the_lowest_loss(loss: Any, option: str) -> None:
    result = judged("r", LOW, HIGH, curve(loss), "run")
    assert result.suggestion is None and option in result.advice


def test_the_moving_average_has_no_bias() -> None:
    assert smooth([3.0] * 5, 10.0) == pytest.approx([3.0] * 5)
    kept = math.exp(-1 / 2)
    assert smooth([1.0, 2.0], 2.0) == pytest.approx([1.0, (kept * 1 + 2) / (kept + 1)])


def test_a_sweep_that_is_none_is_refused() -> None:
    recipe = load("gpt-tiny").recipe
    for low, high, steps, option in ((1.0, 1e-3, 100, "--low"), (0.0, 1.0, 100, "--low"), (1e-6, 1.0, 2, "--steps")):
        with refused(option):
            range_recipe(recipe, low, high, steps)


def test_the_command(tmp_path: Path, corpus: Path, data_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    recipe = write_recipe(tiny_on(corpus, "r"), tmp_path)
    paths = ["--runs-dir", str(tmp_path / "runs"), "--data-dir", str(data_dir)]
    figure = tmp_path / "lr.svg"
    words = ["lr-range", recipe, "--steps", "6", "--low", "1e-4", "--high", "1e-2", "--plot", str(figure), *paths]
    assert cli.run([*words, "--json"]) == 0
    values = json.loads(capfd.readouterr().out)
    assert values["rates"][0] == pytest.approx(1e-4) and values["rates"][-1] == pytest.approx(1e-2)
    assert figure.read_text().startswith("<?xml")
    assert not (Path(values["run_dir"]) / "checkpoints").exists()
    assert cli.run(words) == 0
    assert "suggestion" in capfd.readouterr().out
    assert cli.run([*words, "--plot", str(tmp_path / "lr.txt")]) == 2
    require_message(capfd.readouterr().err, "--plot", rule=".svg")
