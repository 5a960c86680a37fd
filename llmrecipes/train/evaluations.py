"""Evaluations of held-out text between two steps: which are due, and their losses.

The resumed run first does those that a signal has interrupted, so that its curve has every point of an uninterrupted
one. metrics.jsonl shows which one is missing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from llmrecipes.checkpoint.manifest import Monitored
from llmrecipes.engine.base import Engine, Progress, Rank
from llmrecipes.errors import UserError
from llmrecipes.faults.signals import StopRequest
from llmrecipes.faults.watchdog import Beat
from llmrecipes.recipe.schema import Recipe
from llmrecipes.tracking.events import EvalMetrics
from llmrecipes.tracking.jsonl import parse
from llmrecipes.train.agreement import of_first_rank
from llmrecipes.train.loaders import DataLoaders, HeldOutBatches, first_failure
from llmrecipes.train.stopping import SPLIT, monitors
from llmrecipes.untrusted import lines

if TYPE_CHECKING:
    pass


logger = logging.getLogger(__name__)


def is_evaluated(step: int, recipe: Recipe) -> bool:
    """Whether a run evaluates after this step."""
    return step % recipe.train.eval_interval == 0 or step == recipe.train.train_iters


def evaluation_due(step: int, recipe: Recipe, metrics: Path, rank: Rank, monitored: Monitored) -> bool:
    """Whether the evaluation of the step to resume from is missing; the same on every rank.

    Args:
        step: the step to resume from; 0 for a new run.
        recipe: the resolved recipe.
        metrics: the run's metrics.jsonl, read on the first rank.
        rank: this one.
        monitored: monitored loss of the checkpoint; a run that goes by it needs the evaluation there too, but for that
            at the start, which does not count.
    """
    if not (is_evaluated(step, recipe) if step else recipe.train.eval_at_start):
        return False
    if step and monitors(recipe) and monitored.step != step:
        return True
    return of_first_rank(rank.is_first and not has_record(metrics, step, "valid_loss"))


def has_record(metrics: Path, step: int, *names: str) -> bool:
    """Whether metrics.jsonl has a record of a step with one of these words."""
    marks = [f'"{name}"'.encode() for name in names]
    with suppress(FileNotFoundError):
        records = (parse(line) for line in lines(metrics, root=metrics.parent) if any(mark in line for mark in marks))
        return any(values is not None and values["step"] == step for values in records)
    return False


class HeldOutSet(NamedTuple):
    """Result of a held-out set."""

    loss: float
    """Mean, in nats per token."""
    accuracy: float | None
    """See `EvalMetrics.valid_token_accuracy`."""
    rewards: Mapping[str, float] | None = None
    """See `EvalMetrics.valid_rewards`."""


def held_out_losses(
    engine: Engine, loaders: DataLoaders, recipe: Recipe, stop: StopRequest, beat: Beat
) -> tuple[dict[str, HeldOutSet] | None, UserError | None]:
    """Mean losses of the valid split (`SPLIT`), of each set of `data.valid_sources` and with
    `data.multiple_validation_sets` of each source's valid split, and their token accuracy.

    A collective of all ranks, with the same result on each.

    Returns:
        Both, None if a rank was asked to stop meanwhile or could not read its data; and why it could not.
    """
    every = ({} if loaders.valid is None else {SPLIT: loaders.valid}) | dict(loaders.valid_sources)
    losses: dict[str, HeldOutSet] = {}
    for name, read in every.items():
        batches = HeldOutBatches(read(), (recipe.layout.micro_batch_size, recipe.model.seq_length))

        def interrupted(batches: HeldOutBatches = batches) -> bool:
            beat("evaluate")
            return stop.requested or batches.failure is not None

        engine.parts.start()
        loss = engine.evaluate(batches, loaders.eval_iters.get(name, recipe.train.eval_iters), interrupted)
        counted = engine.parts.fields(Progress(), evaluation=True)
        unread = first_failure(batches.failure, engine.platform.device)
        if loss is None or unread is not None:
            return None, unread
        losses[name] = HeldOutSet(loss, counted.get("token_accuracy"), counted.get("rewards"))
    return losses, None


def held_out_metrics(losses: dict[str, HeldOutSet], loaders: DataLoaders) -> dict[str, Any]:
    """The fields of `EvalMetrics` that are measured. Without a valid split, the first set stands for it."""
    sets = {name: loss for name, loss in losses.items() if name != SPLIT}
    bits = {name: loaders.bits_per_byte_of(name, each.loss) for name, each in sets.items() if loaders.bits_per_byte}
    counted = {name: each.accuracy for name, each in sets.items() if each.accuracy is not None}
    if SPLIT in losses:
        split = losses[SPLIT]
        whole = loaders.bits_per_byte and loaders.bits_per_byte(split.loss)
    else:
        first, split = next(iter(sets.items()))
        whole = bits[first]
    return {
        "valid_loss": split.loss,
        "valid_bits_per_byte": whole,
        "valid_token_accuracy": split.accuracy,
        "valid_rewards": split.rewards,
        "valid_source_loss": {name: each.loss for name, each in sets.items()} or None,
        "valid_source_bits_per_byte": bits or None,
        "valid_source_token_accuracy": counted or None,
    }


def evaluated(progress: Progress, losses: dict[str, HeldOutSet], loaders: DataLoaders, started: float) -> EvalMetrics:
    """What is reported of an evaluation that began at `started`, by `time.perf_counter`."""
    return EvalMetrics(
        step=progress.step,
        consumed_samples=progress.consumed_samples,
        consumed_tokens=progress.consumed_tokens,
        eval_seconds=time.perf_counter() - started,
        **held_out_metrics(losses, loaders),
    )
