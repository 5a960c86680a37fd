"""How a trial begins: proposed, planned and submitted; refused by its plan; or recovered from its run."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import FrozenTrial, TrialState

from llmrecipes.errors import UserError
from llmrecipes.hardware.process import MachineIdentity, this_machine
from llmrecipes.launch import record
from llmrecipes.launch.base import JobHandle, JobState, JobStatus
from llmrecipes.launch.job import handle, statuses
from llmrecipes.launch.registry import launcher
from llmrecipes.plan.run_plan import RunPlan
from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.sections.search_section import Search
from llmrecipes.search.budget import EARLIER_SEEDS, RANK_SECONDS, RANKS, RUN_ID, TOKENS, recorded_seconds
from llmrecipes.search.metrics import MetricsReader, MlflowReader, Reader
from llmrecipes.search.space import Values, suggest, trial_recipe
from llmrecipes.search.study import Place
from llmrecipes.search.target import Infeasible, Target, headroom
from llmrecipes.search.trial import FINAL_CODES, Running, TrialOutcome, with_seed
from llmrecipes.search.trials import (
    FITS,
    OUTCOME,
    SEEDS,
    WORKER,
    Heartbeat,
    beat,
    continues,
    discard,
    is_infeasible,
    is_queued,
    own_trials,
    return_to_queue,
    this_worker,
)

logger = logging.getLogger(__name__)

INFEASIBLE_IN_A_ROW = 200
REASON, VALUES = "reason", "values"
"""Attributes of trials."""
MACHINE = "machine"
"""Attribute of a trial: where its local job was started; None if it has ended, or is one of a scheduler."""


@dataclass(frozen=True)
class NotStarted:
    """A trial without a job; `outcome` is None if it is none at all, because others have begun the last ones.

    `is_elsewhere`: its job may run on another machine, so that this one does not start it.
    """

    number: int
    values: Values = field(default_factory=Values)
    outcome: TrialOutcome | None = None
    reason: str = ""
    is_elsewhere: bool = False


@dataclass
class Starter:
    """Starts trials of a study.

    Attributes:
        study: the study.
        recipe: with the section `search`.
        goal: recipe that the best values are for: the same, or that of which `recipe` is a proxy.
        search: the section.
        place: place of the study.
        target: where trials run.
        with_retries: makes a call that uses the storage.
        heartbeat: heartbeat of running trials.
    """

    study: optuna.Study
    recipe: Recipe
    goal: Recipe
    search: Search
    place: Place
    target: Target
    with_retries: Callable[[Callable[[], Any]], Any]
    heartbeat: Heartbeat
    _infeasible: int = 0
    _submitted: bool = False
    _left: set[str] = field(default_factory=set)

    def start(self, slot: int) -> Running | NotStarted:
        """Ask for a trial, and start or find its job.

        Args:
            slot: its share of this machine.

        Raises:
            UserError: the first trial cannot be submitted, or too many in a row cannot run.
        """
        trial = self.with_retries(self._ask)
        started: Running | NotStarted | None = None
        try:
            started = self._begin(trial, slot)
            return started
        except UpdateFinishedTrialError:  # this process was away for longer than the grace period
            logger.warning("trial %d was taken over by another process", trial.number)
            return NotStarted(trial.number)
        finally:
            if not isinstance(started, Running):
                self.heartbeat.remove(trial.number)

    def submit(self, trial: optuna.Trial, recipe: Recipe, plan: RunPlan, run_id: str, slot: int) -> JobHandle:
        """Submit the job of a trial, and record the machine that a local one belongs to.

        Raises:
            UserError: it cannot be submitted.
        """
        # Before the job exists: another machine that knows nothing of it would start a second training.
        machine = this_machine().as_dict() if self.target.is_local else None
        self.with_retries(lambda: trial.set_user_attr(MACHINE, machine))
        return self.target.submit(recipe, plan, run_id, slot)

    def can_be_followed(self, trial: FrozenTrial) -> bool:
        """Whether a trial can be continued here without a second training beside its job.

        Not if its job is a process of another machine whose run cannot be seen from here: nothing tells whether it
        still trains, and it cannot be cancelled.
        """
        machine = trial.user_attrs.get(MACHINE)
        if machine is None or MachineIdentity.of(machine).is_this:
            return True
        run_id = trial.user_attrs[RUN_ID]
        if record.read(self.place.run_dir(run_id)) is not None:
            return True
        if run_id not in self._left:
            self._left.add(run_id)
            logger.warning(
                "trial %d is left to a search on %s: its job runs there, and this machine does not see %s",
                trial.number, machine.get("host", "another machine"), self.place.run_dir(run_id),
            )  # fmt: skip
        return False

    def cancel(self, trial: FrozenTrial) -> None:
        """Cancel the job of an abandoned trial, if it still runs."""
        run_id = trial.user_attrs.get(RUN_ID)
        try:
            known = None if run_id is None else record.read(self.place.run_dir(run_id))
            if known is not None:
                logger.warning("trial %d: cancelling its job", trial.number)
                launcher(known.ref.launcher).cancel(known.ref)
        except UserError as error:
            logger.warning("trial %d: its job could not be cancelled: %s", trial.number, error)

    def _begin(self, trial: optuna.Trial, slot: int) -> Running | NotStarted:
        attributes = trial.user_attrs
        # In this order: a trial that has a process but no heartbeat would never be taken for lost.
        self.with_retries(lambda: beat(self.study, trial))
        self.with_retries(lambda: trial.set_user_attr(WORKER, this_worker()))
        self.heartbeat.add(trial)
        if self._is_surplus(trial):
            return NotStarted(trial.number)
        if not self.can_be_followed(self._frozen(trial)):
            self.with_retries(lambda: return_to_queue(self.study, trial.number))
            return NotStarted(trial.number, outcome=TrialOutcome.RETURNED, is_elsewhere=True)
        values = self.with_retries(lambda: suggest(trial, self.recipe, self.search))
        # The last one is judged by its run, which may have ended before its search process could tell.
        seeds = list(attributes.get(SEEDS, ()))[: self.search.seeds_per_point - 1]
        try:
            recipe, plan = self._planned(values, len(seeds))
        except Infeasible as error:
            return self._tell_infeasible(trial, values, error)
        self._infeasible = 0
        self.with_retries(lambda: trial.set_constraint(FITS, min(0.0, headroom(plan))))
        run_id = self._run_id(attributes.get(RUN_ID) or self.place.run_id(trial.number), len(seeds))
        self.with_retries(lambda: trial.set_user_attr(RUN_ID, run_id))
        self.with_retries(lambda: trial.set_user_attr(RANKS, plan.world_size))
        run_dir = self.place.run_dir(run_id)
        known = record.read(run_dir)
        try:
            if known is None or _is_to_be_resumed(statuses([known.ref])[known.ref]):
                job = self.submit(trial, recipe, plan, run_id, slot)
            else:
                job = handle(known.ref)
        except UserError as error:
            return self._not_submitted(trial, values, error)
        frozen = self._frozen(trial)
        ranks = plan.world_size
        earlier = attributes.get(EARLIER_SEEDS, 0.0)
        self._submitted = True
        return Running(
            trial, values, recipe, plan, run_id, slot, job, self._reader(recipe, run_id),
            set(frozen.intermediate_values), continued=tuple(continues(frozen)),
            rank_seconds=max(attributes.get(RANK_SECONDS, 0.0), earlier + recorded_seconds(run_dir) * ranks),
            earlier_seeds=earlier, seeds=seeds, tokens=attributes.get(TOKENS, 0),
        )  # fmt: skip

    def next_seed(self, running: Running) -> None:
        """Start the training of the next seed of a trial, in a run of its own.

        Raises:
            UserError: it cannot be submitted.
        """
        number = len(running.seeds)
        recipe, plan = self._planned(running.values, number)
        run_id = self._run_id(running.run_id, number)
        running.earlier_seeds = running.rank_seconds
        self.with_retries(lambda: running.trial.set_user_attr(EARLIER_SEEDS, running.earlier_seeds))
        self.with_retries(lambda: running.trial.set_user_attr(RUN_ID, run_id))
        job = self.submit(running.trial, recipe, plan, run_id, running.slot)
        running.recipe = recipe
        running.plan = plan
        running.run_id = run_id
        running.job = job
        running.reader = self._reader(recipe, run_id)
        running.tracked, running.resumed = False, 0

    def _run_id(self, run_id: str, seed: int) -> str:
        return self.place.run_ids(run_id, self.search.seeds_per_point)[seed]

    def _frozen(self, trial: optuna.Trial) -> FrozenTrial:
        """A trial as it is in the storage."""
        frozen: FrozenTrial = self.with_retries(lambda: self.study.get_trials(deepcopy=False)[trial.number])
        return frozen

    def _reader(self, recipe: Recipe, run_id: str) -> Reader:
        """Reader of metrics.jsonl, or of MLflow where the run's directory is not on a disk of this machine."""
        uri = self.target.launcher_options.get("tracking-uri")
        if self.target.launcher.shares_disk or uri is None:
            return MetricsReader(self.place.run_dir(run_id))
        return MlflowReader(uri, recipe.tracking.experiment or recipe.name, run_id)

    def _not_submitted(self, trial: optuna.Trial, values: Values, error: UserError) -> NotStarted:
        """The trial waits for a scheduler that takes no job at the moment.

        Raises:
            UserError: the same error if it is the first trial of this process: something is wrong with its options.
        """
        self.with_retries(lambda: trial.set_user_attr(MACHINE, None))
        self.with_retries(lambda: return_to_queue(self.study, trial.number))
        if not self._submitted:
            raise error
        return NotStarted(trial.number, values, TrialOutcome.RETURNED, str(error))

    def _ask(self) -> optuna.Trial:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Optuna expects heartbeats from its own loop; here `Heartbeat` sends them
            return self.study.ask()

    def _is_surplus(self, trial: optuna.Trial) -> bool:
        """Whether other processes took the last trials at the same moment; the trial is then removed."""
        trials = self.with_retries(lambda: self.study.get_trials(deepcopy=False))
        was_queued = is_queued(trials[trial.number])
        study_trials = self.with_retries(lambda: list(own_trials(self.study)))
        is_repeated = all(each.number != trial.number for each in study_trials)
        if is_repeated or (self.search.sampler.type == "GridSampler" and not was_queued):
            self.with_retries(lambda: discard(self.study, trial))
            return True
        if self.search.n_trials is None:
            return False
        counted = [
            trial.number for trial in study_trials if trial.state != TrialState.WAITING and not is_infeasible(trial)
        ]
        if sum(number < trial.number for number in counted) < self.search.n_trials:
            return False
        self.with_retries(
            lambda: return_to_queue(self.study, trial.number) if was_queued else discard(self.study, trial)
        )
        return True

    def _planned(self, values: Values, seed: int) -> tuple[Recipe, RunPlan]:
        try:
            recipe = with_seed(trial_recipe(self.recipe, self.search, values), seed)
            if self.goal is not self.recipe:
                trial_recipe(self.goal, self.search, values)
        except UserError as error:
            raise Infeasible(str(error)) from error
        return recipe, self.target.plan(recipe)

    def _tell_infeasible(self, trial: optuna.Trial, values: Values, error: Infeasible) -> NotStarted:
        def tell() -> None:
            trial.set_constraint(FITS, error.violation)
            trial.set_user_attr(OUTCOME, TrialOutcome.INFEASIBLE)
            trial.set_user_attr(REASON, str(error))
            self.study.tell(trial, state=TrialState.PRUNED, skip_if_finished=True)

        self.with_retries(tell)
        self._infeasible += 1
        if self._infeasible >= INFEASIBLE_IN_A_ROW:
            raise UserError(
                f"{self._infeasible} trials in a row cannot run; the last one: {error}",
                where="search.space", rule="some values of the space must be able to run on this "
                "machine", fix="narrow search.space",
            )  # fmt: skip
        return NotStarted(trial.number, values, TrialOutcome.INFEASIBLE, str(error))


def _is_to_be_resumed(status: JobStatus) -> bool:
    """Whether the job of an earlier search process has ended without a result."""
    if status.state == JobState.FAILED:
        return status.exit_code not in FINAL_CODES
    return status.state.ended and status.state != JobState.COMPLETED
