"""Steps and recipes of a run's stages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from llmrecipes.errors import UserError
from llmrecipes.recipe.derived.batch_schedule import GROWING, batch_schedule, ends
from llmrecipes.recipe.derived.stages import Span, StageRecipe, begins, merged, span_of
from llmrecipes.recipe.schema import Recipe


def stage_recipes(recipe: Recipe) -> tuple[Recipe, ...]:
    """The recipe of each stage with its span, or the recipe itself if it has none.

    Their `train_iters` are the last step of the stage, counted from the beginning of the run.
    """
    if not recipe.stages:
        return (recipe,)
    batches = batch_schedule(recipe)
    last = ends(recipe)
    first = [0, *last[:-1]]
    begun = [begins(stage) for stage in recipe.stages]
    orders = _groups([order for order, _, _ in begun])
    schedules = _groups([schedule for _, _, schedule in begun])
    weights, recipes = None, []
    for number, (stage, each) in enumerate(zip(recipe.stages, merged(recipe), strict=True)):
        weights = weights if stage.data.weights is None else stage.data.weights
        order, schedule = ((first[groups[number][0]], last[groups[number][1]]) for groups in (orders, schedules))
        train = each.train.model_copy(update={"train_iters": last[number]})
        span = Span(number, stage.name, first[number], last[number], order, schedule, weights, batches, recipe)
        recipes.append(StageRecipe.model_construct(each.model_fields_set, **{**dict(each), "train": train}, span=span))
    return tuple(recipes)


def stage_of(recipe: Recipe, step: int, *, ending: bool = False) -> Recipe:
    """The recipe of the stage that the step after this many belongs to; after the last one, that of the last stage.

    Args:
        ending: of two stages that meet here the first.
    """
    stages = stage_recipes(recipe)
    for stage in stages[:-1]:
        span = span_of(stage)
        if span is not None and (step < span.last_step or (ending and step == span.last_step)):
            return stage
    return stages[-1]


def stage_named(recipe: Recipe, name: str) -> Recipe:
    """The recipe of the stage with this name.

    Raises:
        UserError: there is none.
    """
    names = [stage.name for stage in recipe.stages]
    if name not in names:
        raise UserError(
            f"{recipe.name} has no stage {name}",
            where="--in",
            rule="--in needs the name of a stage in the recipe",
            fix=f"--in {' or '.join(names)}" if names else "remove it: the recipe has no stages",
        )
    return stage_recipes(recipe)[names.index(name)]


def as_run(stage: Recipe) -> Recipe:
    """The recipe of a stage as that of a run without stages, with a batch of one size."""
    values = stage.model_dump(mode="json")
    return Recipe.model_validate({**values, "train": {**values["train"], **dict.fromkeys(GROWING)}})


@contextmanager
def in_stage(recipe: Recipe) -> Iterator[None]:
    """A block whose errors name the stage of a recipe."""
    try:
        yield
    except UserError as error:
        span = span_of(recipe)
        if span is None:
            raise
        raise UserError(
            f"stage {span.name}: {error.what}", where=error.where, rule=error.rule, fix=error.fix, code=error.code
        ) from error


def _groups(begin: list[bool]) -> list[tuple[int, int]]:
    """For each stage the first and the last of those that share something, of which `begin` says where another is."""
    starts = [number for number, new in enumerate(begin) if new or number == 0]
    groups = []
    for number in range(len(begin)):
        first = max(start for start in starts if start <= number)
        last = min((start for start in starts if start > number), default=len(begin)) - 1
        groups.append((first, last))
    return groups
