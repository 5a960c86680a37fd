"""`llmrecipes scaling`: known coefficients are recovered, and runs that do not determine a law are refused."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.optimize import minimize_scalar

from llmrecipes.cli.app import run
from llmrecipes.cli.comparison import scaling_lines
from llmrecipes.plan.parameters import count
from llmrecipes.recipe.derived.shape import shape
from llmrecipes.recipe.load import to_yaml
from llmrecipes.recipe.schema import Recipe
from llmrecipes.scaling import fit as fitting
from llmrecipes.scaling.fit import fit
from llmrecipes.scaling.law import Law, Point
from llmrecipes.scaling.points import Selection
from llmrecipes.tracking.mirror import tracker_name
from llmrecipes.tracking.mlflow.database import artifact_root, require_database, tracking_uri
from llmrecipes.tracking.mlflow.sink import flatten
from llmrecipes.workflow.scaling import COEFFICIENTS, ScalingLaw
from tests.helpers import tiny
from tests.refusals import refused, require_message

CHINCHILLA = Law(E=1.69, A=406.4, B=410.7, alpha=0.34, beta=0.28)
"""The coefficients that Hoffmann et al. report."""
SMALL = Law(E=2.0, A=60.0, B=200.0, alpha=0.35, beta=0.4)


def points(law: Law, noise: float, seed: int = 0) -> list[Point]:
    drawn = random.Random(seed)
    return [
        Point(size, size * ratio, law.loss(size, size * ratio) * math.exp(drawn.gauss(0, noise)))
        for size in (1e8, 3e8, 1e9, 3e9, 1e10)
        for ratio in (5, 20, 80, 320)
    ]


def test_coefficients_are_recovered_from_noisy_losses() -> None:
    exact = fit(points(CHINCHILLA, 0.0), resamples=1)
    assert exact.residual < 1e-5
    found = fit(points(CHINCHILLA, 0.002), resamples=25)
    for name, tolerance in (("E", 0.05), ("alpha", 0.15), ("beta", 0.15)):
        true = getattr(CHINCHILLA, name)
        assert getattr(exact.law, name) == pytest.approx(true, rel=2e-3), name
        assert getattr(found.law, name) == pytest.approx(true, rel=tolerance), name
        low, high = found.interval(name)
        assert low < high
        assert low - 0.1 * true < true < high + 0.1 * true, name
    assert 0.0005 < found.residual < 0.004
    best, expected = (law.optimum(6e21).parameters for law in (found.law, CHINCHILLA))
    assert best == pytest.approx(expected, rel=0.3)
    assert fit(points(CHINCHILLA, 0.002), resamples=2).resampled == found.resampled[:2], "the bootstrap has a seed"


def test_an_outlier_does_not_move_the_fit() -> None:
    given = points(CHINCHILLA, 0.0)
    spoilt = [*given[:7], Point(given[7].parameters, given[7].tokens, given[7].loss * 1.5), *given[8:]]
    assert fit(spoilt, resamples=1).law.alpha == pytest.approx(CHINCHILLA.alpha, rel=0.02)


def test_the_optimum_is_the_minimum_for_its_budget() -> None:
    for flops in (1e18, 5.76e23):
        best = CHINCHILLA.optimum(flops)
        assert best.flops == pytest.approx(flops)
        found = minimize_scalar(
            lambda x, flops=flops: CHINCHILLA.loss(math.exp(x), flops / 6 / math.exp(x)),
            bounds=(1, 40),
            method="bounded",
        )
        assert math.log(best.parameters) == pytest.approx(found.x, abs=1e-3)
        assert best.loss == pytest.approx(found.fun)


def test_coefficients_that_are_not_determined_are_said() -> None:
    below = Law(E=-0.15, A=406.4, B=410.7, alpha=0.34, beta=0.28)  # falls faster than a law that levels off at 0
    found = fit(points(below, 0.002), resamples=10)
    assert not found.has_offset
    assert found.at_bound("E") > 0.5
    determined = fit(points(CHINCHILLA, 0.002), resamples=10)
    assert determined.has_offset
    assert [determined.at_bound(name) for name in COEFFICIENTS] == [0.0] * 5
    law = ScalingLaw(found, Selection(("run",) * 20, found.points, ()), ())
    assert law.as_dict()["law"]["E"]["at_bound"] == found.at_bound("E")
    assert sum(str(line).startswith(("E is 0", "E: ")) for line in scaling_lines(law)) == 2


def test_the_gradient_is_that_of_the_objective() -> None:
    data = fitting._Data.of(points(CHINCHILLA, 0.1))
    at = np.array([-1.0, -1.2, 0.5, 0.3, 0.4])
    _, gradient = data.objective(at)
    for number in range(5):
        step = np.eye(5)[number] * 1e-7
        slope = (data.objective(at + step)[0] - data.objective(at - step)[0]) / 2e-7
        assert gradient[number] == pytest.approx(slope, rel=1e-4)


@pytest.mark.parametrize(
    ("given", "token"),
    [
        (points(CHINCHILLA, 0)[:5], "5"),
        ([Point(1e8, 1e9 * n, 3 - n / 10) for n in range(1, 9)], "1"),
        ([Point(1e8 * n, 2e9 * n, 3 - n / 10) for n in range(1, 9)], "1.000"),
        ([Point(p.parameters, p.tokens, 3.0) for p in points(CHINCHILLA, 0)], "3"),
        ([Point(p.parameters, p.tokens, CHINCHILLA.loss(1e9, p.tokens)) for p in points(CHINCHILLA, 0)], "A/N^alpha"),
        (
            [Point(p.parameters, p.tokens, CHINCHILLA.loss(p.parameters, 1e9)) for p in points(CHINCHILLA, 0)],
            "B/D^beta",
        ),
    ],
    ids=["too few", "one size", "tokens follow size", "one loss", "size has no effect", "tokens have no effect"],
)
def test_runs_that_do_not_determine_a_law(given: list[Point], token: str) -> None:
    with refused("RUN", rule=token):
        fit(given, resamples=1)


# -- tracked runs ----------------------------------------------------------------------------------------------------


def recipes(**sections: Any) -> Iterator[Recipe]:
    for width in (32, 64, 128):
        for iters in (10, 40, 160):
            yield tiny(model={"hidden_size": width}, train={"train_iters": iters}, **sections)


def figures(recipe: Recipe) -> tuple[int, int, float]:
    """Parameters, tokens and loss of a run that follows the law."""
    size = count(recipe.model, shape(recipe.model)).total
    tokens = recipe.train.train_iters * recipe.train.global_batch_size * recipe.model.seq_length
    return size, tokens, SMALL.loss(size, tokens)


def write_run(run_dir: Path, recipe: Recipe, state: str = "finished", worse: float = 0.0) -> None:
    run_dir.mkdir(parents=True)
    (run_dir / "recipe.yaml").write_text(to_yaml(recipe), "utf-8")
    _, _, loss = figures(recipe)
    steps = recipe.train.train_iters
    (run_dir / "status.json").write_text(json.dumps({"state": state, "step": steps, "total": steps}), "utf-8")
    rows = [{"step": steps, "loss": loss}, {"step": steps, "valid_loss": loss + worse}]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in rows), "utf-8")


@pytest.fixture
def runs_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(fitting, "RESAMPLES", 10)
    for number, recipe in enumerate(recipes()):
        write_run(tmp_path / "runs" / "tiny" / f"run-{number}", recipe)
    return tmp_path / "runs"


def scaling(runs_dir: Path, *arguments: str) -> int:
    return run(["scaling", *arguments, "--runs-dir", str(runs_dir)])


def test_runs_in_directories(runs_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    all_recipes = list(recipes())
    write_run(runs_dir / "tiny" / "stopped", all_recipes[0], state="saved")
    write_run(runs_dir / "tiny" / "worse", all_recipes[1], worse=0.5)
    figure = tmp_path / "law.svg"
    assert scaling(runs_dir, "tiny", "--json", "--plot", str(figure), "--flops", "1e12", "--flops", "1e15") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["law"]["alpha"]["value"] == pytest.approx(SMALL.alpha, rel=0.05)
    assert found["law"]["alpha"]["at_bound"] == 0.0
    expected = sorted(figures(recipe)[:2] for recipe in all_recipes)
    assert [(each["parameters"], each["tokens"]) for each in found["runs"]] == expected
    assert {each["run"] for each in found["left_out"]} == {"tiny/stopped", "tiny/worse"}
    assert [each["flops"] for each in found["optima"]] == [1e12, 1e15]
    assert figure.read_text("utf-8").startswith("<?xml")
    assert scaling(runs_dir, "tiny", "--no-embeddings") == 0
    assert "compute-optimal" in capsys.readouterr().out


def test_what_is_refused(runs_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def message(*arguments: str) -> str:
        assert scaling(runs_dir, *arguments) == 2
        return capsys.readouterr().err

    require_message(message(), "RUN")
    require_message(message("tiny", "--experiment", "tiny"), "RUN")
    require_message(message("tiny/run-0", "tiny/run-1"), "RUN", rule="6")
    require_message(message("tiny", "--flops", "-1"), "--flops")
    require_message(message("tiny", "--plot", "law.gif"), "--plot")
    require_message(message("tiny", "--plot", str(tmp_path / "none" / "law.svg")), "--plot")
    require_message(message("--experiment", "tiny"), tracking_uri(runs_dir))
    other = next(recipes(data={"split": [90.0, 5.0, 5.0]}))
    write_run(runs_dir / "other" / "run", other)
    require_message(message("tiny", "other"), "RUN", rule="data.split")


@pytest.mark.slow
def test_runs_in_mlflow(tmp_path: Path, runs_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from mlflow.entities import Metric, Param
    from mlflow.tracking import MlflowClient

    uri = tracking_uri(runs_dir)
    require_database(uri, artifact_root(runs_dir))
    client = MlflowClient(uri)
    experiment = client.create_experiment("sweep-1")
    for number, recipe in enumerate(recipes()):
        _, tokens, loss = figures(recipe)
        tracked = client.create_run(experiment, run_name=f"run-{number}")
        values = {"consumed_tokens": tokens, "valid_loss": loss}
        metrics = [Metric(tracker_name(key), value, 0, 1) for key, value in values.items()]
        params = [Param(key, value) for key, value in flatten(recipe).items()]
        client.log_batch(tracked.info.run_id, metrics=metrics, params=params[:100])
        client.log_batch(tracked.info.run_id, params=params[100:])
        client.set_terminated(tracked.info.run_id, "FINISHED" if number else "KILLED")
    assert scaling(runs_dir, "--experiment", "sweep-1", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    expected = sorted(figures(recipe)[:2] for recipe in list(recipes())[1:])
    assert [(each["parameters"], each["tokens"]) for each in found["runs"]] == expected
    assert [each["run"] for each in found["left_out"]] == ["run-0"]
    assert scaling(runs_dir, "--experiment", "none") == 2
    require_message(capsys.readouterr().err, "--experiment", rule="sweep-1")
