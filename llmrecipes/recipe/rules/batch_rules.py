"""Rules of the global batch: of whole micro-batches in every step, also where it grows."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from llmrecipes.errors import UserError
from llmrecipes.recipe.derived.batch_schedule import Stretch, stretches, thresholds, varies
from llmrecipes.recipe.derived.degrees import multiples
from llmrecipes.recipe.document import Problem
from llmrecipes.recipe.schema import Recipe

MOST_SIZES = 10_000
"""Sizes of a schedule: each is checked."""


def rules(recipe: Recipe) -> Iterator[Problem]:
    """Whether each global batch is one of whole micro-batches; for ranks, the plan checks it."""
    if problem := _malformed(recipe):
        yield problem
        return
    for stretch in stretches(recipe):
        size = stretch.global_batch_size
        if size % recipe.layout.micro_batch_size:
            yield not_divisible(
                recipe, stretch, recipe.layout.micro_batch_size, f"micro_batch_size {recipe.layout.micro_batch_size}"
            )
            break
    if not varies(recipe):
        return
    if recipe.faults.loss_spike_action == "rewind":
        yield Problem(
            "faults.loss_spike_action",
            f"rewind with {key(recipe)}",
            "a rewind skips whole global batches, which must all have the same size",
            "loss_spike_action skip",
        )
    if recipe.search is not None:
        yield Problem(
            "search",
            f"with {key(recipe)}",
            "the steps of a trial must have equal batches",
            f"remove {key(recipe)}; set it later, for the run with the best values",
        )
    if recipe.layout.cuda_graph_impl is not None:
        yield Problem(
            "layout.cuda_graph_impl",
            f"{recipe.layout.cuda_graph_impl} with {key(recipe)}",
            "CUDA graphs are captured for a fixed number of micro-batches",
            "cuda_graph_impl null",
        )


def key(recipe: Recipe) -> str:
    """The key that determines the global batch."""
    if recipe.train.rampup_batch_size is not None:
        return "train.rampup_batch_size"
    return (
        "train.global_batch_size"
        if recipe.train.step_batch_size_schedule is None
        else ("train.step_batch_size_schedule")
    )


def not_divisible(recipe: Recipe, at: Stretch, of: int, words: str) -> Problem:
    """The global batch of a stretch is not a multiple of `of`, which `words` describe."""
    size = at.global_batch_size
    near = multiples(at.global_batch_size, of)
    step = "" if not varies(recipe) else f"the global batch of step {at.first_step + 1}, "
    return Problem(
        key(recipe),
        f"{step}{size} is not a multiple of {words}",
        "global_batch_size must be a multiple of micro_batch_size × data-parallel size",
        f"global_batch_size {near}" if not step else f"a start and an increment that are multiples of {of}: {near}",
    )


def require_divisible(recipe: Recipe, of: int, words: str) -> None:
    """Refuse a global batch that is not a multiple of `of`, which `words` describe.

    Raises:
        UserError: with the first step that has such a batch.
    """
    for stretch in stretches(recipe):
        if stretch.global_batch_size % of:
            problem = not_divisible(recipe, stretch, of, f"{words} = {of}")
            raise UserError(problem.what, where=problem.key, rule=problem.rule, fix=problem.fix)


def _malformed(recipe: Recipe) -> Problem | None:
    train = recipe.train
    if train.rampup_batch_size is not None:
        if train.step_batch_size_schedule is not None:
            return Problem(
                "train.step_batch_size_schedule",
                "set with train.rampup_batch_size",
                "use only one of them to grow the batch",
                "remove one of them",
            )
        start, increment, _ = train.rampup_batch_size
        grows = train.global_batch_size - start
        if grows <= 0:
            return Problem(
                "train.rampup_batch_size",
                f"the first batch, {start}, is not less than global_batch_size {train.global_batch_size}",
                "the first batch must be smaller than global_batch_size",
                "a smaller first batch, or remove rampup_batch_size",
            )
        if grows % increment:
            ends = start + grows // increment * increment, start + -(-grows // increment) * increment
            return Problem(
                "train.rampup_batch_size",
                f"global_batch_size {train.global_batch_size} is not {start} plus a multiple of {increment}",
                "the batch must reach global_batch_size in equal increments",
                f"global_batch_size {ends[0]} or {ends[1]}",
            )
        if grows // increment > MOST_SIZES:
            return Problem(
                "train.rampup_batch_size",
                f"{grows // increment:,} increments",
                f"at most {MOST_SIZES:,}",
                f"an increment of {-(-grows // MOST_SIZES)} or more",
            )
        return None
    if train.step_batch_size_schedule is None:
        return None
    where = "train.step_batch_size_schedule"
    form = '"0:768 250B:1536": pairs of tokens and batch size, with increasing tokens from 0'
    try:
        pairs = thresholds(train.step_batch_size_schedule, recipe.model.seq_length)
    except ValueError as error:
        return Problem(where, str(error), form, '"0:SIZE TOKENS:SIZE"')
    starts = [first for first, _ in pairs]
    if not pairs or starts[0] != 0 or any(a >= b for a, b in pairwise(starts)):
        return Problem(where, f"starts are at samples {starts}", form, '"0:SIZE TOKENS:SIZE"')
    if min(size for _, size in pairs) < 1 or pairs[-1][1] != train.global_batch_size:
        return Problem(
            where,
            f"ends with {pairs[-1][1]}, but global_batch_size is {train.global_batch_size}",
            "the last size must be global_batch_size, and none may be 0",
            f"global_batch_size {pairs[-1][1]}",
        )
    return None
