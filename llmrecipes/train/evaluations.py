"""Evaluations between two steps: which are due, and lm-evaluation-harness's tasks on the engine that trains.

The resumed run first does those that a signal has interrupted, so that its curve has every point of an uninterrupted
one. metrics.jsonl shows which one is missing.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist

from llmrecipes.checkpoint.manifest import Monitored
from llmrecipes.data.tokenizer import TextTokenizer
from llmrecipes.engine.base import Engine, Progress, Rank, World
from llmrecipes.errors import UserError
from llmrecipes.evaluation import history
from llmrecipes.evaluation.lead import Interrupted, RankZeroScorer
from llmrecipes.evaluation.request import EvaluationResult
from llmrecipes.faults.signals import StopRequest
from llmrecipes.faults.watchdog import Beat, unwatched
from llmrecipes.recipe.schema import Recipe
from llmrecipes.tracking.events import TASKS_EVALUATED, EvalMetrics, Note, Tracker
from llmrecipes.tracking.jsonl import parse
from llmrecipes.train.loaders import DataLoaders, HeldOutBatches, first_failure
from llmrecipes.train.stopping import SPLIT, monitors
from llmrecipes.untrusted import lines

if TYPE_CHECKING:
    from llmrecipes.evaluation.tasks import Tasks


logger = logging.getLogger(__name__)


def load_tasks(recipe: Recipe) -> Tasks | None:
    """The recipe's tasks with their data, on the first rank; None on the others, and for a recipe without.

    Raises:
        UserError: a task that is unknown or corrupt, or whose data is missing.
    """
    wanted = recipe.train.eval_tasks
    if wanted is None or os.environ.get("RANK", "0") != "0":
        return None
    from llmrecipes.evaluation.tasks import load_tasks as load

    return load(wanted.tasks, where="train.eval_tasks.tasks")


@dataclass
class TaskEvaluations:
    """When the tasks are due, and their evaluation; without effect for a recipe without tasks.

    Args:
        recipe: has the tasks.
        engine: whose model is evaluated.
        world: this rank.
        tokenizer: tokenizer of the model.
        tasks: loaded; on the first rank.
        tracker: receives the results.
        stop: set by signals.
        metrics: the run's metrics.jsonl.
        beat: called before each batch of a task.
    """

    recipe: Recipe
    engine: Engine
    world: World
    tokenizer: TextTokenizer
    tasks: Tasks | None
    tracker: Tracker
    stop: StopRequest
    metrics: Path
    beat: Beat = unwatched

    def due(self, step: int, ended: bool = False) -> bool:
        """Whether the tasks are evaluated after this step; `ended`: it is the last by the held-out loss."""
        wanted = self.recipe.train.eval_tasks
        return wanted is not None and (step % wanted.interval == 0 or step == self.recipe.train.train_iters or ended)

    def missing(self, step: int, ended: bool = False) -> bool:
        """Whether the evaluation after the step to resume from was interrupted; a collective if the step has one."""
        if (step == 0 and not self.recipe.train.eval_at_start) or not self.due(step, ended):
            return False
        answer: list[Any] = [self.world.is_first and not _has(self.metrics, step)]
        dist.broadcast_object_list(answer, src=0)
        return bool(answer[0])

    def catch_up(self, step: int, ended: bool = False) -> bool:
        """Evaluate what is missing at the start; False on every rank if one was asked to stop meanwhile.

        At step 0 there is nothing to save, so the first step follows.
        """
        return not self.missing(step, ended) or self.run(step) or step == 0

    def run(self, step: int) -> bool:
        """Evaluate and report; False on every rank if one was asked to stop meanwhile.

        A task that fails is reported, and training continues.
        """

        def stop() -> bool:
            self.beat("tasks", step)
            return self.stop.requested

        self.beat("tasks", step)
        rows = self.recipe.train.micro_batch_size
        with self.engine.params_synced():
            lead = RankZeroScorer(self.engine.scorer(), self.world, self.tokenizer, rows, stop)
            try:
                results = lead.run(self._results)
            except Interrupted:
                return False
            except UserError as error:
                logger.error("tasks after step %d: %s", step, error)
                details = {"error": error.what, "where": error.where}
                self.tracker.note(Note(step=step, event="tasks_failed", details=details, alarm=True))
                return True
        names = [history.metric_names(record) for record in history.records(results or [], step, "")]
        if names:
            values = {name: value for metrics in names for name, value in metrics.items()}
            self.tracker.note(Note(step=step, event=TASKS_EVALUATED, details=values))
        return True

    def _results(self, lead: RankZeroScorer) -> list[EvaluationResult]:
        wanted = self.recipe.train.eval_tasks
        if self.tasks is None or wanted is None:
            return []
        from llmrecipes.evaluation.harness import run_tasks

        return run_tasks(lead, self.tasks, limit=wanted.limit, num_fewshot=wanted.num_fewshot)


def _has(metrics: Path, step: int) -> bool:
    events = (b'"' + TASKS_EVALUATED.encode() + b'"', b'"tasks_failed"')
    with suppress(FileNotFoundError):
        notes = (parse(line) for line in lines(metrics, root=metrics.parent) if any(event in line for event in events))
        return any(values is not None and values["step"] == step for values in notes)
    return False


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
    answer: list[Any] = [rank.is_first and not _has_evaluation(metrics, step)]
    dist.broadcast_object_list(answer, src=0)
    return bool(answer[0])


def _has_evaluation(metrics: Path, step: int) -> bool:
    with suppress(FileNotFoundError):
        evaluations = (parse(line) for line in lines(metrics, root=metrics.parent) if b'"valid_loss"' in line)
        return any(values is not None and values["step"] == step for values in evaluations)
    return False


class HeldOut(NamedTuple):
    """Of a held-out set."""

    loss: float
    """Mean, in nats per token."""
    accuracy: float | None
    """See `EvalMetrics.valid_token_accuracy`."""
    rewards: Mapping[str, float] | None = None
    """See `EvalMetrics.valid_rewards`."""


def held_out_losses(
    engine: Engine, loaders: DataLoaders, recipe: Recipe, stop: StopRequest, beat: Beat
) -> tuple[dict[str, HeldOut] | None, UserError | None]:
    """Mean losses of the valid split (`SPLIT`), of each set of `data.valid_sources` and with
    `data.multiple_validation_sets` of each source's valid split, and their token accuracy.

    A collective of all ranks, with the same result on each.

    Returns:
        Both, None if a rank was asked to stop meanwhile or could not read its data; and why it could not.
    """
    every = ({} if loaders.valid is None else {SPLIT: loaders.valid}) | dict(loaders.valid_sources)
    losses: dict[str, HeldOut] = {}
    for name, read in every.items():
        batches = HeldOutBatches(read(), (recipe.train.micro_batch_size, recipe.model.seq_length))

        def interrupted(batches: HeldOutBatches = batches) -> bool:
            beat("evaluate")
            return stop.requested or batches.failure is not None

        engine.parts.start()
        loss = engine.evaluate(batches, loaders.eval_iters.get(name, recipe.train.eval_iters), interrupted)
        counted = engine.parts.fields(Progress(), evaluation=True)
        unread = first_failure(batches.failure, engine.platform.device)
        if loss is None or unread is not None:
            return None, unread
        losses[name] = HeldOut(loss, counted.get("token_accuracy"), counted.get("rewards"))
    return losses, None


def held_out_metrics(losses: dict[str, HeldOut], loaders: DataLoaders) -> dict[str, Any]:
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


def evaluated(progress: Progress, losses: dict[str, HeldOut], loaders: DataLoaders, started: float) -> EvalMetrics:
    """What is reported of an evaluation that began at `started`, by `time.perf_counter`."""
    return EvalMetrics(
        step=progress.step,
        consumed_samples=progress.consumed_samples,
        consumed_tokens=progress.consumed_tokens,
        eval_seconds=time.perf_counter() - started,
        **held_out_metrics(losses, loaders),
    )
