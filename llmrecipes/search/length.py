"""The length of a trial: as many tokens and evaluations for each, whatever its batch."""

from __future__ import annotations

from collections.abc import Collection

from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.search import Search

SCALED = {
    "scheduler": ("lr_warmup_iters", "lr_decay_iters", "lr_wsd_decay_iters"),
    "checkpoint": ("save_interval", "keep_interval"),
}
"""Keys in steps that keep their share of the trial, besides those of `train`."""


def tokens_per_step(recipe: Recipe) -> int:
    """Tokens of one optimizer step."""
    return recipe.train.global_batch_size * recipe.model.seq_length


def trial_tokens(recipe: Recipe, search: Search) -> int:
    """Tokens that each trial trains on."""
    return search.trial_tokens or recipe.train.train_iters * tokens_per_step(recipe)


def tokens_of_point(recipe: Recipe, search: Search) -> int:
    """Tokens of a trial that is not pruned: of all its seeds."""
    return trial_tokens(recipe, search) * search.seeds_per_point


def evaluations(recipe: Recipe) -> int:
    """Evaluations of a run: at each multiple of `eval_interval`, and after the last step."""
    return -(-recipe.train.train_iters // recipe.train.eval_interval)


def evaluation(recipe: Recipe, step: int) -> int:
    """Number of the evaluation after a step, from 1; the same share of the tokens in all trials."""
    return -(-step // recipe.train.eval_interval)


def scale(trial: Recipe, base: Recipe, search: Search, searched: Collection[str]) -> Recipe:
    """The recipe of a trial with the number of steps that its tokens take.

    Evaluations, schedule and checkpoints keep their share of the run; searched keys keep their values.

    Args:
        trial: the recipe with the values of the trial.
        base: the recipe of the search.
        search: its section.
        searched: keys that the trial has values for.
    """
    before = base.train.train_iters
    steps = max(1, round(trial_tokens(base, search) / tokens_per_step(trial)))
    if steps == before:
        return trial

    def scaled(value: int | None) -> int | None:
        return None if value is None else (max(1, round(value * steps / before)) if value else 0)

    train = trial.train.model_copy(
        update={"train_iters": steps, "eval_interval": min(steps, -(-steps // evaluations(base)))}
    )
    sections = {
        section: getattr(trial, section).model_copy(
            update={
                key: scaled(getattr(getattr(trial, section), key)) for key in keys if f"{section}.{key}" not in searched
            }
        )
        for section, keys in SCALED.items()
    }
    return trial.model_copy(update={"train": train, **sections})
