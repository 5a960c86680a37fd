"""lm-evaluation-harness's tasks between two steps, on the engine that trains.

The resumed run first does those that a signal has interrupted, so that its curve has every point of an uninterrupted
one. metrics.jsonl shows which one is missing.
"""

from __future__ import annotations

import logging
import os

from llmrecipes.errors import UserError
from llmrecipes.evaluation import history
from llmrecipes.evaluation.lead import Interrupted, RankZeroScorer
from llmrecipes.evaluation.request import EvaluationResult
from llmrecipes.tracking.events import TASKS_EVALUATED, Note
from llmrecipes.train.agreement import of_first_rank
from llmrecipes.train.evaluations import has_record
from llmrecipes.train.observers.base import Observer
from llmrecipes.train.spec import RunSpec

logger = logging.getLogger(__name__)


class TaskEvaluations(Observer):
    """The evaluations of `train.eval_tasks`.

    Raises:
        UserError: a task that is unknown or corrupt, or whose data is missing.
    """

    def __init__(self, spec: RunSpec) -> None:
        self._wanted = wanted = spec.recipe.train.eval_tasks
        self._tasks = None
        if wanted is not None and os.environ.get("RANK", "0") == "0":
            from llmrecipes.evaluation.tasks import load_tasks

            self._tasks = load_tasks(wanted.tasks, where="train.eval_tasks.tasks")

    @classmethod
    def wanted(cls, spec: RunSpec) -> bool:
        """With the key."""
        return spec.recipe.train.eval_tasks is not None

    def due(self, step: int, *, ended: bool = False) -> bool:
        """Whether the tasks are evaluated after this step; `ended`: it is the last by the held-out loss."""
        last = ended or step == self.loop.plan.recipe.train.train_iters
        return self._wanted is not None and (step % self._wanted.interval == 0 or last)

    def missing(self, step: int, *, ended: bool = False) -> bool:
        """Whether the evaluation after the step to resume from was interrupted; a collective if the step has one."""
        is_start = step == 0 and not self.loop.plan.recipe.train.eval_at_start
        if is_start or not self.due(step, ended=ended):
            return False
        has = has_record(self.joined.spec.run.metrics, step, TASKS_EVALUATED, "tasks_failed")
        return of_first_rank(self.loop.world.is_first and not has)

    def catch_up(self, step: int, *, ended: bool) -> bool:
        """Evaluate what is missing; at step 0 there is nothing to save, so the first step follows."""
        return not self.missing(step, ended=ended) or self.run(step) or step == 0

    def evaluate(self, step: int, *, ended: bool, stopping: bool) -> bool:
        """If they are due."""
        return not self.due(step, ended=ended) or (not stopping and self.run(step))

    def run(self, step: int) -> bool:
        """Evaluate and report; False on every rank if one was asked to stop meanwhile.

        A task that fails is reported, and training continues.
        """
        loop = self.loop

        def stop() -> bool:
            loop.observers.beat("tasks", step)
            return loop.stop.requested

        loop.observers.beat("tasks", step)
        rows = loop.plan.recipe.layout.micro_batch_size
        tokenizer = self.joined.prepared.tokenizer()
        with loop.engine.params_synced():
            lead = RankZeroScorer(loop.engine.scorer(), loop.world, tokenizer, rows, stop)
            try:
                results = lead.run(self._results)
            except Interrupted:
                return False
            except UserError as error:
                logger.error("tasks after step %d: %s", step, error)
                details = {"error": error.what, "where": error.where}
                loop.tracker.note(Note(step=step, event="tasks_failed", details=details, alarm=True))
                return True
        names = [history.metric_names(record) for record in history.records(results or [], step, "")]
        if names:
            values = {name: value for metrics in names for name, value in metrics.items()}
            loop.tracker.note(Note(step=step, event=TASKS_EVALUATED, details=values))
        return True

    def _results(self, lead: RankZeroScorer) -> list[EvaluationResult]:
        if self._tasks is None or self._wanted is None:
            return []
        from llmrecipes.evaluation.harness import run_tasks

        return run_tasks(lead, self._tasks, limit=self._wanted.limit, num_fewshot=self._wanted.num_fewshot)
