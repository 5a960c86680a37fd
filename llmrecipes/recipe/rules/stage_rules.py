"""Rules of the stages themselves; those of other keys are checked in each stage."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from pydantic import ValidationError

from llmrecipes.recipe.derived.batch_schedule import ends
from llmrecipes.recipe.derived.degrees import elastic_worlds, replica_ranks
from llmrecipes.recipe.derived.shape import shape
from llmrecipes.recipe.derived.stage_runs import stage_recipes
from llmrecipes.recipe.derived.stages import CHANGES, LOSSES, changed, merged
from llmrecipes.recipe.document import Problem
from llmrecipes.recipe.reading.explain import explain
from llmrecipes.recipe.rules.distill_rules import teacher_model
from llmrecipes.recipe.schema import Recipe

Rule = Callable[[Recipe], Iterator[Problem]]
MOST_NAMED = 8
"""Numbers of ranks of a stage that a message names."""


def check(recipe: Recipe) -> list[Problem]:
    """What is wrong with the stages; a later kind of problem only if there is none of an earlier one."""
    problems = list(_structure(recipe)) or list(_values(recipe))
    return problems or [*_length(recipe), *_positions(recipe), *_teacher(recipe)]


def in_stages(recipe: Recipe, rules: Iterable[Rule]) -> Iterator[Problem]:
    """Violations of the rules in the first stage that has some."""
    for stage, each in zip(recipe.stages, stage_recipes(recipe), strict=True):
        problems = [problem for rule in rules for problem in rule(each)]
        for problem in problems:
            yield replace(problem, what=f"stage {stage.name}: {problem.what}")
        if problems:
            return


def elastic(recipe: Recipe) -> Iterator[Problem]:
    """Some number of ranks that `train.elastic` allows is one of every stage, which each have some."""
    if recipe.train.elastic is None or elastic_worlds(recipe):
        return
    ranks = [
        f"{stage.name} on {', '.join(map(str, worlds[:MOST_NAMED]))}{', …' if len(worlds) > MOST_NAMED else ''}"
        for stage, worlds in zip(recipe.stages, map(elastic_worlds, stage_recipes(recipe)), strict=True)
    ]
    least, most = recipe.train.elastic
    size = replica_ranks(recipe)
    yield Problem(
        "train.elastic",
        f"[{least}, {most}] replicas of {size} rank{'s' * (size > 1)}, but no number of ranks works for all stages: "
        + "; ".join(ranks),
        "all stages must run on the same ranks",
        "a wider range, or layouts that divide the same numbers of ranks",
    )


def _structure(recipe: Recipe) -> Iterator[Problem]:
    """Names, ends, keys, and what does not go with stages."""
    names = [stage.name for stage in recipe.stages]
    for number, stage in enumerate(recipe.stages):
        where = f"stages.{number}"
        if names.index(stage.name) != number:
            yield Problem(
                f"{where}.name",
                f"{stage.name!r} is the name of an earlier stage",
                "stage names must be unique",
                "a different name",
            )
        last = number == len(names) - 1
        ends = (stage.train_iters is not None) + (stage.tokens is not None)
        if ends > 1 or (not ends and not last):
            yield Problem(
                where,
                f"stage {stage.name} has {'two ends' if ends else 'no end'}",
                "a stage needs either train_iters or tokens",
                "set one of train_iters and tokens",
            )
        for section, allowed in CHANGES.items():
            for key in getattr(stage, section):
                if key not in allowed:
                    yield Problem(
                        f"{where}.{section}.{key}",
                        f"set in stage {stage.name}",
                        f"a stage may only change these keys of {section}: " + ", ".join(allowed),
                        "remove it, or set it for the run",
                    )
        weights = stage.data.weights
        if weights is not None and (len(weights) != len(recipe.data.sources) or not any(weights)):
            yield Problem(
                f"{where}.data.weights",
                f"{list(weights)} in stage {stage.name}",
                f"one weight per source ({len(recipe.data.sources)}), not all of them 0",
                f"{[1.0] * len(recipe.data.sources)}",
            )
    if recipe.data.chat is not None:
        yield Problem(
            "stages", "set with data.chat", "stages do not support conversations", "remove stages or data.chat"
        )
    if recipe.faults.loss_spike_action == "rewind":
        yield Problem(
            "faults.loss_spike_action",
            "rewind with stages",
            "runs with stages cannot be rewound",
            "loss_spike_action: skip",
        )
    if recipe.checkpoint.non_persistent_save_interval is not None:
        yield Problem(
            "checkpoint.non_persistent_save_interval",
            "set with stages",
            "a stage starts from a checkpoint that all ranks can read",
            "remove it",
        )
    if recipe.distill is not None and recipe.distill.logits is not None:
        yield Problem(
            "distill.logits",
            "set with stages",
            "precomputed logits are for one order of samples, but a stage may start a new one",
            "remove distill.logits, to compute the teacher in every stage",
        )
    if recipe.search is not None:
        yield Problem("search", "set with stages", "trials do not support stages", "remove search")


def _values(recipe: Recipe) -> Iterator[Problem]:
    """Values that are not ones of their key, of the first stage that has some."""
    current = recipe.model_copy(update={"stages": ()})
    for number, stage in enumerate(recipe.stages):
        try:
            current = Recipe.model_validate(changed(current.model_dump(mode="json"), stage))
        except ValidationError as error:
            for problem in explain(error, {}):
                yield Problem(
                    f"stages.{number}.{problem.key}",
                    f"{problem.what} (stage {stage.name})",
                    problem.rule,
                    problem.fix,
                )
            return


def _length(recipe: Recipe) -> Iterator[Problem]:
    """Whether the stages are as long as the run."""
    last = ends(recipe)
    whole = recipe.train.train_iters
    stage = recipe.stages[-1]
    if last[-1] == whole and all(a < b for a, b in zip([0, *last], last, strict=False)):
        return
    if stage.train_iters is None and stage.tokens is None:
        yield Problem(
            f"stages.{len(last) - 1}",
            f"stage {stage.name} would start at step {last[-2] if len(last) > 1 else 0:,} of {whole:,}",
            "a last stage without an end takes the remaining steps of train.train_iters",
            f"train.train_iters greater than {last[-2] if len(last) > 1 else 0}",
        )
        return
    yield Problem(
        "train.train_iters",
        f"{whole:,}, but the stages have {last[-1]:,} steps",
        "the steps of all stages must add up to train.train_iters",
        f"train.train_iters={last[-1]}",
    )


def _positions(recipe: Recipe) -> Iterator[Problem]:
    """Whether a table of positions, which is a weight, has one size."""
    models = [stage.model for stage in merged(recipe)]
    tables = {
        shape(model).max_position_embeddings if model.position_embedding_type == "learned_absolute" else 0
        for model in models
    }
    if len(tables) == 1:
        return
    longest = max(model.max_position_embeddings or model.seq_length for model in models)
    one_kind = 0 not in tables
    yield Problem(
        "model.max_position_embeddings" if one_kind else "model.position_embedding_type",
        f"stages have learned positions for {', '.join(f'{size:,}' for size in sorted(tables - {0}))} tokens"
        + ("" if one_kind else ", and others rotary positions"),
        "a learned table must have a row for every position of the run, in all stages",
        f"model.max_position_embeddings={longest}" if one_kind else "the same kind of positions in all stages",
    )


def _teacher(recipe: Recipe) -> Iterator[Problem]:
    """Whether the teacher is one model in all stages, whatever their sequences are."""
    if recipe.distill is None:
        return
    try:
        of_run, *of_stages = (
            teacher_model(each).model_dump(mode="json", exclude={"seq_length", *LOSSES})
            for each in (recipe, *merged(recipe))
        )
    except ValidationError:  # which the rules of the section name
        return
    for number, (stage, teacher) in enumerate(zip(recipe.stages, of_stages, strict=True)):
        for key, value in teacher.items():
            if value != of_run[key]:
                yield Problem(
                    f"stages.{number}.model.{key}",
                    f"{value!r} in stage {stage.name} would also apply to the teacher, which has {of_run[key]!r}",
                    "the teacher cannot change between stages",
                    f"distill.model.{key}={of_run[key]}",
                )
                return
