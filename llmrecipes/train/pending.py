"""Evaluations that were interrupted by a signal: the resumed run does them first.

So the curve of a resumed run has every point of an uninterrupted one. metrics.jsonl shows which one is missing.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from llmrecipes.engine.base import World
from llmrecipes.recipe.schema import Recipe
from llmrecipes.tracking.jsonl import parse
from llmrecipes.untrusted import lines


def is_evaluated(step: int, recipe: Recipe) -> bool:
    """Whether a run evaluates after this step."""
    return step % recipe.train.eval_interval == 0 or step == recipe.train.train_iters


def evaluation_due(step: int, recipe: Recipe, metrics: Path, world: World) -> bool:
    """Whether the evaluation of the step to resume from is missing; the same on every rank.

    Args:
        step: the step to resume from; 0 for a new run.
        recipe: the resolved recipe.
        metrics: the run's metrics.jsonl, read on the first rank.
        world: this rank.
    """
    if step == 0 or not is_evaluated(step, recipe):
        return False
    answer: list[Any] = [world.is_first and not _has_evaluation(metrics, step)]
    dist.broadcast_object_list(answer, src=0)
    return bool(answer[0])


def _has_evaluation(metrics: Path, step: int) -> bool:
    with suppress(FileNotFoundError):
        evaluations = (parse(line) for line in lines(metrics, root=metrics.parent) if b'"valid_loss"' in line)
        return any(values is not None and values["step"] == step for values in evaluations)
    return False
