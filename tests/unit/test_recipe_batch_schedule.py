"""The global batch of each step where it grows: that of megatron-core, and refused where ranks cannot share it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from megatron.core import num_microbatches_calculator as calculator

from llmrecipes.data.read.batches import scheduled_ids
from llmrecipes.engine.core.update import learning_rate
from llmrecipes.plan.derive import derive
from llmrecipes.recipe.derived.batch_schedule import batch_schedule, tokens_of
from llmrecipes.recipe.load import load
from llmrecipes.recipe.schema import Recipe
from tests.helpers import ROOMY, tiny
from tests.refusals import refused

RAMPS = ((4, 4, 8, 96), (2, 2, 9, 14), (3, 1, 20, 1000), (8, 24, 32, 7), (16, 16, 80, 999), (4, 2, 8, 8))
"""First batch, increment, global batch and samples."""


def growing(start: int, increment: int, whole: int, samples: int, **train: Any) -> Recipe:
    sizes = {"global_batch_size": whole, "rampup_batch_size": [start, increment, samples]}
    return tiny(train={"train_iters": 60, **sizes, **train}, layout={"micro_batch_size": 1})


def of_megatron(counts: Any, steps: int) -> Iterator[int]:
    """Global batches of steps, as Megatron-LM's loop has them."""
    consumed = 0
    for _ in range(steps):
        counts.update(consumed, consistency_check=False)
        yield counts.get_current_global_batch_size()
        consumed += counts.get_current_global_batch_size()


@pytest.mark.parametrize("ramp", [ramp for ramp in RAMPS if (ramp[2] - ramp[0]) % ramp[1] == 0], ids=str)
def test_a_ramp_has_the_batches_of_megatron_core(ramp: tuple[int, int, int, int]) -> None:
    theirs = getattr(calculator, "RampupBatchsizeNumMicroBatchesCalculator", None)
    start, increment, whole, samples = ramp
    schedule = batch_schedule(growing(*ramp))
    sizes = [schedule.of_step(step) for step in range(300)]
    assert (sizes[0], sizes[-1]) == (start, whole)
    assert sizes == sorted(sizes)
    if theirs is not None:  # 0.19 has `step_batch_size_schedule` only
        assert sizes == list(of_megatron(theirs(whole, 1, 1, False, 1, start, increment, samples), 300))


def test_sizes_from_tokens_on_have_the_batches_of_megatron_core() -> None:
    text, length = "0:4 1K:6, 0.01M:10", 32
    recipe = tiny(
        model={"seq_length": length}, train={"global_batch_size": 10, "train_iters": 90,
                                             "step_batch_size_schedule": text},
    layout={"micro_batch_size": 1})  # fmt: skip
    schedule = batch_schedule(recipe)
    sizes = [schedule.of_step(step) for step in range(90)]
    # 1,000 tokens are 31 samples, after 8 steps of 4; 10,000 are 312, after 47 of 6 more.
    assert sizes == [4] * 8 + [6] * 47 + [10] * 35
    theirs = getattr(calculator, "StepBatchsizeNumMicroBatchesCalculator", None)
    if theirs is not None:
        assert sizes == list(of_megatron(theirs(1, 1, False, 1, text, length), 90))


@pytest.mark.parametrize("ramp", [(4, 4, 8, 96), (3, 1, 20, 1000)], ids=str)
def test_steps_and_samples_are_functions_of_each_other(ramp: tuple[int, int, int, int]) -> None:
    recipe = growing(*ramp)
    schedule, consumed = batch_schedule(recipe), 0
    for step in range(200):
        assert schedule.samples(step) == consumed
        assert schedule.steps(consumed) == step
        assert schedule.steps(consumed + 1) == step + 1
        assert schedule.of_sample(consumed) == schedule.of_step(step)
        consumed += schedule.of_step(step)
    assert tokens_of(recipe) == schedule.samples(60) * recipe.model.seq_length


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_read_each_sample_once_and_in_order(ranks: int) -> None:
    schedule = batch_schedule(growing(4, 4, 12, 40))
    options: dict[str, Any] = {"micro_batch_size": 2, "data_parallel_size": ranks}
    read = [
        list(scheduled_ids(100, schedule, consumed_samples=0, data_parallel_rank=rank, **options))
        for rank in range(ranks)
    ]
    whole = [each for step in zip(*read, strict=True) for part in step for each in part]
    assert whole == list(range(schedule.samples(schedule.steps(100 - 11))))
    half = schedule.samples(5)
    again = list(scheduled_ids(100, schedule, consumed_samples=half, data_parallel_rank=0, **options))
    assert again == read[0][half // (2 * ranks) :]


def test_learning_rates_change_with_samples() -> None:
    recipe = growing(4, 4, 8, 40)
    recipe = recipe.model_copy(
        update={"scheduler": recipe.scheduler.model_copy(update={"lr_decay_style": "linear", "lr_warmup_iters": 12})}
    )
    schedule, peak = batch_schedule(recipe), recipe.optimizer.lr
    assert [schedule.of_step(step) for step in (0, 9, 10, 59)] == [4, 4, 8, 8]
    warm, whole = schedule.samples(12), schedule.samples(60)
    assert learning_rate(recipe, 6) == pytest.approx(peak * 20 / warm)
    assert learning_rate(recipe, 13) == pytest.approx(peak)
    assert learning_rate(recipe, 31) == pytest.approx(peak * (whole - schedule.samples(30)) / (whole - warm))


@pytest.mark.parametrize(
    ("keys", "key", "fix"),
    [
        (["train.rampup_batch_size=[12,4,99]"], "train.rampup_batch_size", ("step 1", "8 or 16")),
        (["train.rampup_batch_size=[16,8,99]"], "train.rampup_batch_size", "16"),
        (["train.rampup_batch_size=[8,16,99]"], "train.rampup_batch_size", "24"),
        (["train.step_batch_size_schedule='0:8'"], "train.step_batch_size_schedule", "8"),
        (["train.step_batch_size_schedule='5K:8 9K:16'"], "train.step_batch_size_schedule", "0:SIZE"),
        (["train.step_batch_size_schedule=16"], "train.step_batch_size_schedule", ()),
        (["train.step_batch_size_schedule='0:8 many:16'"], "train.step_batch_size_schedule", "0:SIZE"),
        (
            ["train.rampup_batch_size=[8,8,99]", "train.step_batch_size_schedule='0:16'"],
            "train.step_batch_size_schedule",
            "train.rampup_batch_size",
        ),
        (
            ["train.rampup_batch_size=[8,8,99]", "faults.loss_spike_action=rewind"],
            "faults.loss_spike_action",
            "train.rampup_batch_size",
        ),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_a_batch_that_cannot_grow_so_is_refused(keys: list[str], key: str, fix: str | tuple[str, ...]) -> None:
    with refused(key, rule=fix):
        load("gpt-tiny", ["search=null", *keys])


def test_a_search_has_equal_steps() -> None:
    with refused("search", rule="train.rampup_batch_size"):
        load("gpt-tiny", ["train.rampup_batch_size=[8,8,99]"])


def test_the_step_whose_batch_the_ranks_cannot_share_is_named() -> None:
    recipe = growing(4, 2, 8, 20)
    assert derive(recipe, 2, ROOMY).num_microbatches_of(0) == 2
    # Batches of 4 up to sample 10, that is 3 steps; the 6 of step 4 are not whole for 4 ranks.
    with refused("train.rampup_batch_size", rule=("step 4", "4 or 8")):
        derive(recipe, 4, ROOMY)
