"""Balance of experts in metrics.jsonl, TensorBoard and a real MLflow store."""

from __future__ import annotations

import io
import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from llmrecipes.recipe.schema import Model, Optimizer, Recipe, Tracking, Train
from llmrecipes.tracking.events import LayerBalance, StepMetrics, expert_metrics, is_measured
from llmrecipes.tracking.histograms import MOST_SAMPLES, HistogramFiles, edges
from llmrecipes.tracking.mlflow.database import tracking_uri
from llmrecipes.tracking.run_tracker import RunTracker


def layer(number: int, *tokens: int, **changes: Any) -> LayerBalance:
    values: dict[str, Any] = {"imbalance": 1.5, "dropped": 3, "entropy": 1.25, "z_loss": 4.0}
    return LayerBalance(layer=number, tokens_per_expert=tokens, **(values | changes))


BINS = {"low": -2, "negative": [5, 0], "zero": 1, "positive": [2, 3]}


def step(number: int, experts: tuple[LayerBalance, ...] | None) -> StepMetrics:
    return StepMetrics(
        step=number,
        loss=5.0,
        grad_norm=1.0,
        lr=1e-3,
        consumed_samples=number,
        consumed_tokens=8 * number,
        step_seconds=0.1,
        tokens_per_second=80.0,
        moe_aux_loss=None if experts is None else 1.1,
        experts=experts,
        token_accuracy=None if experts is None else 0.25,
        source_loss=None if experts is None else {"web": 2.5},
        layers=None if experts is None else {"attention_logit": {"max": [3.5]}},
        histograms=None if experts is None else {"weight": {"mlp_fc1": BINS}},
    )


def record(runs_dir: Path, *steps: StepMetrics, **tracking: Any) -> Path:
    """A finished run's directory."""
    run_dir = runs_dir / "tiny" / "one"
    recipe = Recipe(
        name="tiny",
        model=Model(num_layers=1, hidden_size=8, num_attention_heads=1, seq_length=8, vocab_size=64),
        train=Train(train_iters=20, global_batch_size=1),
        optimizer=Optimizer(lr=1e-3),
        tracking=Tracking(system_metrics_interval=None, **tracking),
    )
    with RunTracker.open(
        recipe,
        plan={},
        environment={},
        run_dir=run_dir,
        runs_dir=runs_dir,
        resumed_step=0,
        total_steps=20,
        console=Console(file=io.StringIO()),
    ) as tracker:
        for metrics in steps:
            tracker.step(metrics)
    return run_dir


def test_a_step_names_every_layer(tmp_path: Path) -> None:
    broken = layer(4, 0, 8, entropy=math.nan)
    run_dir = record(tmp_path, step(1, None), step(2, (layer(2, 5, 3), broken)), mlflow=False)
    lines = [json.loads(line, parse_constant=pytest.fail) for line in (run_dir / "metrics.jsonl").open()]
    assert lines[0].keys().isdisjoint({"experts", "moe_aux_loss", "token_accuracy"})
    assert lines[1]["moe_aux_loss"] == 1.1
    assert lines[1]["experts"][0] == {
        "layer": 2,
        "tokens_per_expert": [5, 3],
        "imbalance": 1.5,
        "dropped": 3,
        "entropy": 1.25,
        "z_loss": 4.0,
    }
    assert lines[1]["experts"][1]["entropy"] == "nan"
    board = EventAccumulator(str(run_dir / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in board.Scalars("moe/layer_02/imbalance")] == [(2, 1.5)]
    assert [event.value for event in board.Scalars("moe/dropped")] == [6.0]
    assert [(event.step, event.value) for event in board.Scalars("train/token_accuracy")] == [(2, 0.25)]
    assert [event.value for event in board.Scalars("source_loss/web")] == [2.5]
    assert [event.value for event in board.Scalars("layers/attention_logit/layer_01/max")] == [3.5]
    assert lines[1]["histograms"] == {"weight": {"mlp_fc1": BINS}}
    (drawn,) = (event.histogram_value for event in board.Histograms("histograms/weight/mlp_fc1"))
    assert (drawn.min, drawn.max, drawn.num) == (-1.0, 1.0, 11)
    assert list(drawn.bucket_limit) == [-0.5, -0.25, 0.25, 0.5, 1.0] and list(drawn.bucket) == [0, 5, 1, 2, 3]
    assert math.isnan(board.Scalars("moe/layer_04/entropy")[0].value)


def test_a_histogram_of_zeros_has_one_bin() -> None:
    assert edges({"low": -48, "negative": [], "zero": 4, "positive": []}) == ([2.0**-48], [4])


def test_files_of_histograms_do_not_grow_with_the_run() -> None:
    files = HistogramFiles(pytest.fail)
    many = 100 * MOST_SAMPLES + 7
    for number in [*range(1, many + 1), many - 1]:  # a batch that could not be sent is read again
        files.add({"step": number, "histograms": {"weight": {"mlp_fc1": BINS}}})
    steps = list(files.samples())
    assert steps == sorted(steps) and (steps[0], steps[-1]) == (1, many)
    assert MOST_SAMPLES / 2 <= len(steps) <= MOST_SAMPLES + 1
    apart = [after - before for before, after in pairwise(steps[:-1])]
    assert len(set(apart)) == 1, "spread evenly over the run"


def test_experts_have_curves_of_their_own_as_long_as_they_are_few() -> None:
    few = expert_metrics([{"layer": 1, "tokens_per_expert": [5, 3], **dict.fromkeys(NUMBERS, 0.0)}])
    assert few["moe/layer_01/expert_00/tokens"] == 5 and few["moe/layer_01/expert_01/tokens"] == 3
    many = expert_metrics([{"layer": 1, "tokens_per_expert": list(range(256)), **dict.fromkeys(NUMBERS, 0.0)}])
    assert many["moe/layer_01/tokens_min"] == 0 and many["moe/layer_01/tokens_max"] == 255
    assert len(many) < 10
    assert expert_metrics([]) == {}


NUMBERS = ("imbalance", "dropped", "entropy", "z_loss")


@pytest.mark.slow
def test_a_step_with_more_values_than_one_mlflow_request_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.tracking import MlflowClient

    from llmrecipes.tracking.mlflow.client import METRICS_IN_A_BATCH

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    deep = tuple(layer(number, *range(16), imbalance=float(number)) for number in range(1, 61))
    assert 60 * 16 + 60 * len(NUMBERS) > METRICS_IN_A_BATCH
    record(tmp_path, step(1, deep), tensorboard=False)
    client = MlflowClient(tracking_uri(tmp_path))
    experiment = client.get_experiment_by_name("tiny")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    metrics = run.data.metrics
    assert metrics["moe/imbalance_max"] == 60.0 and metrics["moe/dropped"] == 180.0
    assert metrics["moe/layer_60/expert_15/tokens"] == 15.0
    assert metrics["train/loss"] == 5.0 and metrics["train/moe_aux_loss"] == 1.1
    assert metrics["train/token_accuracy"] == 0.25 and metrics["source_loss/web"] == 2.5
    assert metrics["layers/attention_logit/layer_01/max"] == 3.5
    assert not [name for name in metrics if "histogram" in name]
    assert sum(name.startswith("moe/layer_") for name in metrics) == 60 * (16 + len(NUMBERS))


@pytest.mark.parametrize(
    ("interval", "measured"),
    [(1, [1, 10, 20, 25]), (3, [3, 12, 24, 25]), (10, [10, 20, 25]), (100, [25])],
)
def test_the_first_the_last_and_every_tenth_step_are_measured_if_they_are_logged(
    interval: int, measured: list[int]
) -> None:
    train = Train(train_iters=25, global_batch_size=1, log_interval=interval)
    shape = Model(num_layers=1, hidden_size=8, num_attention_heads=1, seq_length=8, vocab_size=512)
    recipe = Recipe(name="t", model=shape, train=train, optimizer=Optimizer(lr=1e-3))
    assert [step for step in range(1, 26) if is_measured(step, recipe)] == measured
