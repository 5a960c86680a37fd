"""Stages of a run: which steps, samples and learning rates are of which, and what is refused with its stage."""

from __future__ import annotations

from typing import Any

import pytest

from llmrecipes.engine.core.update import learning_rate
from llmrecipes.plan.derive import derive
from llmrecipes.plan.speed.search import fastest
from llmrecipes.recipe.batch_schedule import batch_schedule, samples_of, tokens_of
from llmrecipes.recipe.load import load_values, to_yaml
from llmrecipes.recipe.rules import check
from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.stage_runs import stage_of, stage_recipes
from llmrecipes.recipe.stage_section import Span
from llmrecipes.recipe.stages import span_of
from tests.helpers import ROOMY, tiny
from tests.refusals import refused

STAGES: list[dict[str, Any]] = [
    {"name": "s1", "train_iters": 20},
    {"name": "s2", "tokens": 20_000, "model": {"seq_length": 128}, "train": {"micro_batch_size": 1}},
    {
        "name": "s3",
        "train": {"global_batch_size": 4},
        "data": {"weights": [1, 3]},
        "optimizer": {"lr": 2e-4},
        "scheduler": {"lr_decay_style": "linear"},
    },
]
SOURCES = [{"type": "stdlib"}, {"type": "machine"}]


def staged(stages: list[dict[str, Any]] | None = None, **sections: Any) -> Recipe:
    train = {"train_iters": 80, "global_batch_size": 8, "rampup_batch_size": [4, 4, 100]}
    merged = {
        "train": train | sections.pop("train", {}),
        "data": {"sources": SOURCES},
        "model": {"position_embedding_type": "rope"},
        **sections,
    }
    values = tiny(**merged).model_dump(mode="json")
    return Recipe.model_validate({**values, "stages": STAGES if stages is None else stages})


def span(recipe: Recipe) -> Span:
    found = span_of(recipe)
    assert found is not None
    return found


def test_a_stage_has_what_it_and_the_earlier_ones_change() -> None:
    recipe = staged()
    begin, long, anneal = stage_recipes(recipe)
    assert [each.model.seq_length for each in (begin, long, anneal)] == [64, 128, 128]
    assert [each.train.micro_batch_size for each in (begin, long, anneal)] == [2, 1, 1]
    assert [each.train.global_batch_size for each in (begin, long, anneal)] == [8, 8, 4]
    assert anneal.train.rampup_batch_size is None
    # The ramp takes 25 steps of 4, across the boundary; 20,000 tokens are 157 samples: 5 steps of 4, and 18 of 8.
    assert [(span(each).first_step, span(each).last_step) for each in (begin, long, anneal)] == [
        (0, 20),
        (20, 43),
        (43, 80),
    ]
    batches = batch_schedule(recipe)
    assert batches == span(long).batches
    assert [batches.of_step(step) for step in (0, 24, 25, 42, 43)] == [4, 4, 8, 8, 4]
    assert sum(map(tokens_of, (begin, long, anneal))) == tokens_of(recipe)
    assert [samples_of(each) for each in (begin, long)] == [80, batches.samples(43) - 80]
    assert [stage_of(recipe, step).train.train_iters for step in (0, 19, 20, 42, 43, 80)] == [20, 20, 43, 43, 80, 80]
    assert stage_of(recipe, 20, ending=True).train.train_iters == 20
    assert to_yaml(recipe) == to_yaml(span(long).whole)


def test_a_warm_up_of_sequences_changes_their_length_only() -> None:
    lengths = (16, 32, 64)
    stages = [{"name": f"of-{length}", "model": {"seq_length": length}} for length in lengths]
    ends: list[dict[str, Any]] = [{"train_iters": 10}, {"train_iters": 20}, {}]
    recipe = Recipe.model_validate(
        {
            **tiny(train={"train_iters": 80, "global_batch_size": 8}).model_dump(mode="json"),
            "stages": [{**stage, **end} for stage, end in zip(stages, ends, strict=True)],
        }
    )
    assert not check(recipe)
    every = stage_recipes(recipe)
    assert [tokens_of(each) for each in every] == [8 * 10 * 16, 8 * 20 * 32, 8 * 50 * 64]
    assert {span(each).schedule for each in every} == {(0, 80)}
    plain = recipe.model_copy(update={"stages": ()})
    for number, step in enumerate((5, 25, 70)):
        assert learning_rate(every[number], step) == learning_rate(plain, step)


def test_a_schedule_goes_on_until_a_stage_begins_another() -> None:
    begin, long, anneal = stage_recipes(staged())
    assert span(begin).schedule == span(long).schedule == (0, 43)
    assert learning_rate(begin, 21) == learning_rate(long, 21) > 0
    assert learning_rate(long, 44) == 0.0
    assert learning_rate(anneal, 44) == 2e-4
    assert learning_rate(anneal, 44 + 37) == 0.0
    # Steps of 4 samples each: as far as the steps.
    assert learning_rate(anneal, 44 + 10) == pytest.approx(2e-4 * 27 / 37)


def test_each_stage_is_planned_and_the_plan_is_that_of_the_largest() -> None:
    recipe = staged()
    plan = derive(recipe, 1, ROOMY)
    assert [span(stage.recipe).name for stage in plan.stages] == ["s1", "s2", "s3"]
    assert plan.memory.total == max(stage.memory.total for stage in plan.stages)
    assert plan.total_tokens == tokens_of(recipe)
    assert plan.run_recipe == recipe
    assert "s3" in str(plan)


def changed(number: int, **keys: Any) -> list[dict[str, Any]]:
    return [{**stage, **keys} if place == number else stage for place, stage in enumerate(STAGES)]


@pytest.mark.parametrize(
    ("stages", "sections", "key", "rule"),
    [
        (changed(1, name="s1"), {}, "stages.1.name", "s1"),
        (changed(1, train_iters=3), {}, "stages.1", "train_iters"),
        (changed(1, tokens=None), {}, "stages.1", "train_iters"),
        (changed(2, train_iters=3), {}, "train.train_iters", "train.train_iters=46"),
        (changed(0, train_iters=80), {}, "stages.2", "train.train_iters"),
        (changed(0, model={"hidden_size": 128}), {}, "stages.0.model.hidden_size", "seq_length"),
        (changed(0, train={"seed": 1}), {}, "stages.0.train.seed", "micro_batch_size"),
        (changed(0, train={"micro_batch_size": "two"}), {}, "stages.0.train.micro_batch_size", "s1"),
        (changed(1, train={"micro_batch_size": 3}), {}, "train.rampup_batch_size", ("s2", "3 or 6")),
        (changed(2, scheduler={"lr_decay_style": "WSD"}), {}, "scheduler.lr_decay_style", "s3"),
        (changed(2, optimizer={"lr": 1e-5, "min_lr": 1e-3}), {}, "optimizer.min_lr", "s3"),
        (changed(2, data={"weights": [1]}), {}, "stages.2.data.weights", "2"),
        (changed(2, data={"weights": [0, 0]}), {}, "stages.2.data.weights", "2"),
        (STAGES, {"faults": {"loss_spike_action": "rewind"}}, "faults.loss_spike_action", "train.rampup_batch_size"),
        (changed(1, model={"seq_length": 128}), {"model": {"position_embedding_type": "learned_absolute"}},
         "model.max_position_embeddings", "model.max_position_embeddings=128"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_what_cannot_be_a_stage_is_refused(
    stages: list[dict[str, Any]], sections: dict[str, Any], key: str, rule: Any, tmp_path: Any
) -> None:
    values = staged(stages, **sections).model_dump(mode="json")
    with refused(key, rule=rule):
        load_values(values, tmp_path / "tiny.yaml")


def test_layouts_are_not_searched_by_the_step_of_one_stage() -> None:
    with refused("--search", rule="stages=[]"):
        fastest(staged(), ROOMY, 1, None, 1)


def test_a_batch_that_the_ranks_cannot_share_names_its_stage() -> None:
    with refused("train.global_batch_size", rule=("s3", "4 or 8")):
        derive(staged(changed(2, train={"global_batch_size": 6}), train={"micro_batch_size": 1}), 4, ROOMY)
