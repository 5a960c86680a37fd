"""Evaluation in every kind of layout: the numbers of one process, a training that goes on bit for bit, and a stop."""

from __future__ import annotations

import json
import random
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from llmrecipes.data.folder.prepared import open_prepared
from llmrecipes.data.prepare import prepare
from llmrecipes.data.tokens.tokenizer import TextTokenizer, train
from llmrecipes.engine.sampling import Sampling
from llmrecipes.evaluation.lead import Interrupted, RankZeroScorer
from llmrecipes.faults.signals import StopRequest
from llmrecipes.faults.watchdog import unwatched
from llmrecipes.recipe.schema import Recipe
from llmrecipes.train.evaluations import SPLIT, held_out_losses
from llmrecipes.train.loaders import open_loaders
from tests.dist.table import BOUND, Row
from tests.dist.training import loaders, training
from tests.dist.worlds import GlooWorld

pytestmark = pytest.mark.dist

DROPOUT = {"model": {"hidden_dropout": 0.1, "attention_dropout": 0.1}}
LARGE = {"model": {"init_method_std": 0.2}}
"""So that greedy continuations do not hang on the last bit."""
ROWS = [
    Row("gpt", "tp2"),
    Row("gpt", "pp2"),
    *(
        pytest.param(row, marks=pytest.mark.slow)
        for row in (
            Row("llama", "tp2 sp pp2 vpp2"),
            Row("llama", "cp2 dp2"),
            Row("moe", "ep2 dp2"),
            Row("deepseek", "tp2 sp ep2 etp1"),
        )
    ),
]


def questions() -> tuple[list[tuple[list[int], int]], list[list[int]]]:
    """Rows of several lengths with the number of tokens to score, and prompts."""
    draw = random.Random(5)
    rows = [[draw.randrange(1, 300) for _ in range(size)] for size in (33, 2, 17, 33, 9, 21, 30)]
    return [(row, min(4, len(row) - 1)) for row in rows], [row[:12] for row in rows if len(row) > 12]


def led(engine: Any, world: Any, **options: Any) -> RankZeroScorer:
    backend, eod = train(["a few words of text " * 5], 300)
    return RankZeroScorer(engine.scorer(), world, TextTokenizer(backend, eod, ""), 2, **options)


def asked(lead: RankZeroScorer) -> tuple[list[float], list[bool], list[list[int]]]:
    rows, prompts = questions()
    found = list(lead.score(rows))
    greedy = Sampling(temperature=0.0)
    written = lead.extend(prompts, [6, 3, *[6] * (len(prompts) - 2)], greedy)
    return [value for row in found for value in row.logprobs], [row.greedy for row in found], written


def evaluated(row: Row, alone: bool) -> Any:
    """What the first rank finds out. Like the others here, to be called on every rank."""
    recipe = row.reference_recipe if alone else row.recipe
    recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update=LARGE["model"])})
    with training(recipe) as (engine, world), engine.params_synced():
        return led(engine, world).run(asked)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
@pytest.mark.rotating
def test_a_layout_finds_what_one_process_finds(row: Row, worlds: dict[int, GlooWorld]) -> None:
    logprobs, greedy, written = worlds[row.ranks].run(evaluated, row, False)
    expected = worlds[1].run(evaluated, row, True)
    assert logprobs == pytest.approx(expected[0], rel=BOUND, abs=BOUND)
    assert (greedy, written) == (expected[1], expected[2])
    assert all(0 < len(new) <= 6 for new in written)


def trained(row: Row, evaluating: bool) -> list[tuple[float, float | None]]:
    """Losses and norms of some steps, with or without an evaluation between them."""
    found = []
    with training(row.recipe) as (engine, world):
        batches = loaders(row.recipe, world)
        for _ in range(3):
            result = engine.train_step(batches)
            found.append((result.loss, result.grad_norm))
            if evaluating:
                with engine.params_synced():
                    led(engine, world).run(asked)
    return found


@pytest.mark.parametrize(
    "row",
    [
        Row("gpt", "tp2", DROPOUT),
        pytest.param(
            Row("gpt", "dp2", {**DROPOUT, "layout": {"overlap_grad_reduce": True, "overlap_param_gather": True}}),
            marks=pytest.mark.slow,
        ),
        pytest.param(Row("deepseek", "tp2 sp ep2 etp1", DROPOUT), marks=pytest.mark.slow),
    ],
    ids=lambda row: row.name,
)
def test_training_goes_on_bit_for_bit(row: Row, worlds: dict[int, GlooWorld]) -> None:
    world = worlds[row.ranks]
    assert world.run(trained, row, True) == world.run(trained, row, False)


def stopped(row: Row) -> list[str]:
    """What each rank hears when the last one is told to stop."""
    with training(row.recipe) as (engine, world):
        calls: list[int] = []

        def stop() -> bool:
            calls.append(1)
            return world.rank == world.size - 1 and len(calls) == 2

        said = "nothing"
        with engine.params_synced():
            try:
                led(engine, world, stop=stop).run(asked)
            except Interrupted:
                said = "stop"
        engine.train_step(loaders(row.recipe, world))  # no message is left between the ranks
        everyones: list[str] = [""] * world.size
        dist.all_gather_object(everyones, said)
        return everyones


def failed(row: Row) -> list[str]:
    """What each rank hears when the task fails on the first."""
    with training(row.recipe) as (engine, world), engine.params_synced():
        said = "nothing"
        try:
            led(engine, world).run(_fail)
        except ArithmeticError:
            said = "failed"
        everyones: list[str] = [""] * world.size
        dist.all_gather_object(everyones, said)
        return everyones


def _fail(lead: RankZeroScorer) -> None:
    list(lead.score(questions()[0][:1]))
    raise ArithmeticError


def test_all_ranks_leave_an_evaluation_together(worlds: dict[int, GlooWorld]) -> None:
    assert worlds[2].run(stopped, Row("gpt", "tp2")) == ["stop", "stop"]
    assert worlds[2].run(failed, Row("gpt", "tp2")) == ["failed", "nothing"]


def too_much(row: Row) -> bool:
    with training(row.recipe) as (engine, _world):
        try:
            engine.scorer().score(torch.zeros(1, row.recipe.model.seq_length + 2, dtype=torch.long))
        except ValueError:
            return True
    return False


def test_a_row_that_is_too_long_is_no_silent_cut(worlds: dict[int, GlooWorld]) -> None:
    assert worlds[1].run(too_much, Row("gpt", "dp1"))


def with_sets(recipe: Recipe, folder: Path) -> Recipe:
    """The recipe on small files, with two held-out sets and two sources, and two batches of an evaluation."""
    draw, sources = random.Random(2), {}
    for name, words in (("train", "a b c d e f g h"), ("other", "m n"), ("near", "a b c d"), ("far", "w x y z")):
        sources[name] = folder / f"{name}.jsonl"
        rows = [{"text": " ".join(draw.choices(words.split(), k=200)) + f" {n}"} for n in range(60)]
        sources[name].write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {
        "sources": [{"type": "jsonl", "path": str(sources[each])} for each in ("train", "other")],
        "multiple_validation_sets": True,
        "valid_sources": [{"type": "jsonl", "path": str(sources[each]), "label": each} for each in ("near", "far")],
        "split": [80.0, 20.0, 0.0],
        "num_workers": 0,  # ranks are daemons, which have no children
    }
    train = {**recipe.train.model_dump(), "eval_iters": 2}
    return Recipe.model_validate({**recipe.model_dump(), "data": data, "train": train})


def held_out(recipe: Recipe, data_dir: Path) -> dict[str, float] | None:
    """Losses of the valid split and the sets, after a step of training."""
    with training(recipe) as (engine, world):
        opened = open_loaders(recipe, open_prepared(recipe, data_dir), world, pin_memory=False)
        with closing(opened.train(0)) as batches:
            engine.train_step(batches)
        with engine.params_synced():
            measured, _ = held_out_losses(engine, opened, recipe, StopRequest(), unwatched)
            return None if measured is None else {name: each.loss for name, each in measured.items()}


@pytest.mark.parametrize("row", [Row("gpt", "tp2"), Row("gpt", "pp2 dp2")], ids=lambda row: row.name)
@pytest.mark.rotating
def test_held_out_sets_have_the_losses_of_one_process(row: Row, worlds: dict[int, GlooWorld], tmp_path: Path) -> None:
    recipe, alone = (with_sets(each, tmp_path) for each in (row.recipe, row.reference_recipe))
    prepare(recipe, tmp_path / "data", workers=1)
    losses = worlds[row.ranks].run(held_out, recipe, tmp_path / "data")
    expected = worlds[1].run(held_out, alone, tmp_path / "data")
    assert list(losses) == [SPLIT, "near", "far", "train", "other"]
    assert len({round(loss, 3) for loss in losses.values()}) == 5
    assert losses == pytest.approx(expected, rel=BOUND)


@pytest.mark.rotating
def test_the_set_of_the_only_source_is_the_valid_split(worlds: dict[int, GlooWorld], tmp_path: Path) -> None:
    recipe = with_sets(Row("gpt", "dp2").recipe, tmp_path)
    update = {"sources": recipe.data.sources[:1], "valid_sources": ()}
    recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update=update)})
    prepare(recipe, tmp_path / "data", workers=1)
    losses = worlds[2].run(held_out, recipe, tmp_path / "data")
    assert list(losses) == [SPLIT, "train"] and losses[SPLIT] == losses["train"]
