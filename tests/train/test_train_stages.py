"""A run of several stages: boundaries, and that it goes on from any moment as if it had not been stopped."""

from __future__ import annotations

import os
import signal
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llmrecipes.checkpoint.store import CheckpointStore, best
from llmrecipes.data.prepare import open_prepared, prepare
from llmrecipes.engine.megatron.engine import MegatronEngine
from llmrecipes.recipe.derived.stage_runs import stage_recipes
from llmrecipes.recipe.schema import Recipe
from llmrecipes.rundir import Run
from llmrecipes.train.loaders import open_loaders
from tests.helpers import curve, lines, require_same_checkpoints, tiny_on, train_lines
from tests.train.test_train_faults import run_spec

STAGES: list[dict[str, Any]] = [
    {"name": "begin", "train_iters": 5, "data": {"weights": [1, 0]}, "train": {"freeze": ["embedding.*"]}},
    {
        "name": "long",
        "train_iters": 4,
        "model": {"seq_length": 128, "rotary_base": 5e4},
        "train": {"freeze": []},
        "layout": {"micro_batch_size": 1},
    },
    {
        "name": "anneal",
        "data": {"weights": [1, 2]},
        "train": {"global_batch_size": 4},
        "scheduler": {"lr_decay_style": "linear", "lr_warmup_iters": 1},
    },
]


class Killed(BaseException):
    """The process is gone: nothing is saved."""


@pytest.fixture(scope="module")
def recipe(corpus: Path, data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    other = tmp_path_factory.mktemp("other")
    for number in range(20):
        (other / f"{number}.txt").write_text(f"{number} " + "another text of few words " * 100)
    one = tiny_on(
        corpus,
        model={"hidden_dropout": 0.1, "layer_drop": 0.3, "position_embedding_type": "rope"},
        train={"train_iters": 13, "rampup_batch_size": [4, 4, 24], "eval_interval": 4},
        data={
            "sources": [{"type": "text", "path": str(corpus)}, {"type": "text", "path": str(other)}],
            "num_workers": 1,
            "curriculum": {"score": "length", "windows": 2},
        },
        checkpoint={"save_interval": 2, "most_recent_k": 8},
    )
    made = Recipe.model_validate({**one.model_dump(mode="json"), "stages": STAGES})
    prepare(made, data_dir)
    return made


@pytest.fixture(scope="module")
def whole(recipe: Recipe, data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    assert run_spec(recipe, folder, data_dir) == 0
    return folder / "runs/tiny/r"


@pytest.mark.rotating("stages")  # all read what one run leaves
def test_a_run_has_its_stages(whole: Path) -> None:
    steps = train_lines(whole)
    assert [line["stage"] for line in steps] == [1] * 5 + [2] * 4 + [3] * 4
    assert [line["global_batch_size"] for line in steps] == [4] * 6 + [8] * 3 + [4] * 4
    tokens = [line["consumed_tokens"] for line in steps]
    assert [b - a for a, b in zip([0, *tokens], tokens, strict=False)] == [256] * 5 + [512] + [1024] * 3 + [512] * 4
    assert steps[9]["lr"] == 0.0
    assert steps[10]["lr"] == 1e-3 > steps[11]["lr"] > 0
    assert [line["step"] for line in lines(whole) if "valid_loss" in line] == [4, 5, 8, 9, 12, 13]
    found = [line["details"]["name"] for line in lines(whole) if line.get("event") == "stage"]
    assert found == ["begin", "long", "anneal"]


@pytest.mark.slow
@pytest.mark.rotating("stages")  # all read what one run leaves
def test_a_run_that_is_stopped_at_every_step_goes_on_bit_for_bit(
    recipe: Recipe, whole: Path, data_dir: Path, tmp_path: Path
) -> None:
    for step in range(1, 13):
        # A run that is asked to stop leaves the evaluation of a boundary to the next start.
        assert run_spec(recipe, tmp_path, data_dir, stop_after=step) == 75
    assert run_spec(recipe, tmp_path, data_dir) == 0
    require_same(tmp_path / "runs/tiny/r", whole)


@pytest.mark.rotating("stages")  # all read what one run leaves
def test_a_run_that_is_killed_in_every_stage_goes_on_bit_for_bit(
    recipe: Recipe, whole: Path, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, left = MegatronEngine.train_step, [0]

    def step(engine: MegatronEngine, *arguments: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise Killed
        return real(engine, *arguments, **options)

    monkeypatch.setattr(MegatronEngine, "train_step", step)
    for steps in (4, 2, 5):  # in step 4, in the first of the second stage, and in the third
        left[0] = steps
        with pytest.raises(Killed):
            run_spec(recipe, tmp_path, data_dir)
    assert run_spec(recipe, tmp_path, data_dir) == 0
    require_same(tmp_path / "runs/tiny/r", whole)


@pytest.mark.slow
@pytest.mark.rotating("stages")  # all read what one run leaves
def test_patience_counts_evaluations_of_the_same_sequences_and_ends_the_run(
    recipe: Recipe, whole: Path, data_dir: Path, tmp_path: Path
) -> None:
    def stopping(eval_interval: int) -> Recipe:
        values = recipe.model_dump(mode="json")
        values["train"] |= {"early_stop": {"patience": 2, "min_delta": 50.0}, "eval_interval": eval_interval}
        values["checkpoint"] |= {"keep_best": True}
        return Recipe.model_validate(values)

    # Two evaluations in each stage: the second of the first stage and the first of the next are of other sequences.
    assert run_spec(stopping(4), tmp_path / "whole", data_dir) == 0
    ended = tmp_path / "whole/runs/tiny/r"
    assert curve(ended) == curve(whole)
    entries = CheckpointStore(ended / "checkpoints").entries()
    kept = [entry.manifest.monitored for entry in entries if entry.step in (5, 13)]
    assert [state and state.since for state in kept] == [0, 9]
    lowest = best(entries)
    assert lowest is not None and lowest.step in (12, 13)
    # Three in the first: its last step is the last of the run, also of one that was stopped there.
    for folder, ends in (("early", ()), ("stopped", (2, 5))):
        for step in ends:
            assert run_spec(stopping(2), tmp_path / folder, data_dir, stop_after=step) == 75
        assert run_spec(stopping(2), tmp_path / folder, data_dir) == 0
        early = tmp_path / folder / "runs/tiny/r"
        assert [line["step"] for line in train_lines(early)] == [1, 2, 3, 4, 5]
        assert [line["step"] for line in lines(early) if line.get("event") == "ended_early"] == [5]
        assert Run(early).is_finished(stopping(2).train)


@pytest.mark.rotating
def test_stages_without_held_out_text_end_and_stop_at_their_boundary(
    corpus: Path, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of(split: list[float]) -> Recipe:
        train = {"train_iters": 4, "eval_interval": 2}
        one = tiny_on(corpus, train=train, data={"split": split, "num_workers": 0})
        stages = [{"name": "one", "train_iters": 2}, {"name": "two"}]
        made = Recipe.model_validate({**one.model_dump(mode="json"), "stages": stages})
        prepare(made, data_dir)
        return made

    recipe = of([100.0, 0.0, 0.0])
    assert run_spec(recipe, tmp_path, data_dir) == 0
    whole = tmp_path / "runs/tiny/r"
    assert [line["step"] for line in train_lines(whole)] == [1, 2, 3, 4]
    assert [line["step"] for line in lines(whole) if line.get("event") == "started"] == [0, 2]
    # Asked to stop in the last step of a stage, by an option or by a signal, it does not begin the next one.
    assert run_spec(recipe, tmp_path / "option", data_dir, stop_after=2) == 75
    real = MegatronEngine.train_step

    def signalled(engine: MegatronEngine, *arguments: Any, **options: Any) -> Any:
        result = real(engine, *arguments, **options)
        if len(train_lines(tmp_path / "signal/runs/tiny/r")) == 1:
            os.kill(os.getpid(), signal.SIGTERM)  # after the loss of the step, which has carried no flag
        return result

    monkeypatch.setattr(MegatronEngine, "train_step", signalled)
    assert run_spec(recipe, tmp_path / "signal", data_dir) == 75
    monkeypatch.undo()
    for folder in ("option", "signal"):
        run = tmp_path / folder / "runs/tiny/r"
        assert [line["step"] for line in train_lines(run)] == [1, 2]
        assert run_spec(recipe, tmp_path / folder, data_dir) == 0
        assert curve(run) == curve(whole)
    # Held-out text that a rehearsal leaves out is not evaluated either.
    run_spec(of([90.0, 5.0, 5.0]), tmp_path / "overfit", data_dir, overfit_batch=True)
    assert [line["step"] for line in train_lines(tmp_path / "overfit/runs/tiny/r")] == [1, 2, 3, 4]


def require_same(run: Path, other: Path) -> None:
    assert curve(run) == curve(other)
    newest = "checkpoints/step-00000013"
    require_same_checkpoints(run / newest, other / newest)


def test_the_samples_of_a_step_are_a_function_of_the_recipe(recipe: Recipe, data_dir: Path) -> None:
    here: Any = SimpleNamespace(data_parallel_rank=0, data_parallel_size=1)
    prepared = open_prepared(recipe, data_dir)
    first, long, anneal = (
        open_loaders(stage_recipe, prepared, here, pin_memory=False) for stage_recipe in stage_recipes(recipe)
    )
    of_long = [batch["tokens"] for batch in islice(long.train(20), 28)]
    assert [tuple(tokens.shape) for tokens in of_long] == [(1, 128)] * 28
    again = [batch["tokens"] for batch in islice(long.train(20 + 4 + 8), 16)]
    assert all(torch.equal(one, other) for one, other in zip(of_long[12:], again, strict=True))
    # The second source is only in the last stage.
    marked = set(prepared.tokenizer().encode(" another text of few words"))
    shares = [
        sum(len(marked & set(batch["tokens"].flatten().tolist())) == len(marked) for batch in read)
        for read in (islice(first.train(0), 10), islice(anneal.train(48), 16))
    ]
    assert shares[0] == 0 < shares[1]
