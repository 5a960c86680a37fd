"""The search process: asks Optuna, starts trials as jobs, follows what they report, and ends those that do badly."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TypeVar

import optuna
from optuna.trial import FrozenTrial, TrialState

from llmrecipes.errors import ExitCode, UserError
from llmrecipes.launch import record
from llmrecipes.launch.base import JobState, JobStatus
from llmrecipes.launch.job import handle, statuses
from llmrecipes.launch.programs import SchedulerUnavailable
from llmrecipes.plan.derive import Plan
from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.search import Search
from llmrecipes.search.best import Keeper
from llmrecipes.search.budget import RANK_SECONDS, TOKENS, Budget, Used, used
from llmrecipes.search.length import trial_tokens
from llmrecipes.search.metrics import MetricsReader
from llmrecipes.search.space import Values, suggest, trial_recipe
from llmrecipes.search.stop import Stop, stop_signals
from llmrecipes.search.storage import address, patiently
from llmrecipes.search.study import (
    WORKER,
    Place,
    discard,
    give_back,
    heartbeats,
    is_infeasible,
    own_trials,
    require_section,
    take_back,
    this_worker,
)
from llmrecipes.search.target import Infeasible, Target, headroom
from llmrecipes.search.trial import FINAL_CODES, Outcome, Running

logger = logging.getLogger(__name__)

T = TypeVar("T")
LOOK_SECONDS = 0.5
"""Seconds between looks at the metrics of running trials."""
INFEASIBLE_IN_A_ROW = 200
FAILURES_IN_A_ROW = 5
"""Then something is wrong with the recipe or the space, not with the values."""
OUTCOME, REASON, RUN_ID, VALUES, FITS = "outcome", "reason", "run_id", "values", "fits"
"""Attributes of trials, and the name of the constraint."""


@dataclass
class Worker:
    """Runs trials of a study until a limit is reached or it is told to stop.

    Attributes:
        study: the study.
        recipe: with the section `search`.
        place: of the study.
        target: where trials run.
        log: receives a line for each trial.
        keeper: of the best recipe and of checkpoints.
    """

    study: optuna.Study
    recipe: Recipe
    place: Place
    target: Target
    log: Callable[[str], None]
    keeper: Keeper
    running: list[Running] = field(default_factory=list)
    failures: int = 0
    infeasible: int = 0
    submitted: int = 0

    def __post_init__(self) -> None:
        self.search: Search = require_section(self.recipe)
        self.budget = Budget(self.search, trial_tokens(self.recipe, self.search))
        self._address = address(self.search, self.place.folder)
        self._spent = ""

    def run(self) -> ExitCode:
        """Search; returns 75 if it was told to stop, so that `--resume` continues it.

        Raises:
            UserError: trials fail one after another, none can run, or the storage does not respond.
        """
        with stop_signals() as stop:
            try:
                while not stop.requested:
                    self._patiently(lambda: take_back(self.study, self._grace))
                    self._start_trials(stop)
                    if not self.running:
                        break
                    stop.wait(LOOK_SECONDS)
                    self._look()
                if self.running:
                    self._stop(stop)
            except UserError:
                self._leave()
                raise
        if stop.requested:
            self.log("stopped; the same command with --resume continues the study")
            return ExitCode.REQUEUE
        self.log(f"the search has ended: {self._spent}")
        return ExitCode.DONE

    @property
    def _grace(self) -> float:
        return self.search.grace_period or 2 * self.search.heartbeat_interval

    def _patiently(self, call: Callable[[], T]) -> T:
        return patiently(call, self._address)

    def _used(self) -> Used:
        return used(own_trials(self.study), self.budget.trial_tokens, self.search.min_improvement)

    # -- starting ------------------------------------------------------------------------------------------------

    def _start_trials(self, stop: Stop) -> None:
        while len(self.running) < self.target.workers and not stop.requested:
            now = self._patiently(self._used)
            self._spent = self.budget.spent(now) or self._exhausted()
            if self._spent:
                return
            self._start_one()

    def _exhausted(self) -> str:
        """Why a grid has no other point; empty for other samplers."""
        if self.search.sampler.type != "GridSampler":
            return ""
        waiting = self._patiently(lambda: self.study.get_trials(deepcopy=False, states=(TrialState.WAITING,)))
        return "" if waiting else "every point of the grid has been tried"

    def _start_one(self) -> None:
        trial = self._patiently(self._ask)
        attributes = trial.user_attrs
        self._patiently(lambda: trial.set_user_attr(WORKER, this_worker()))
        self._beat(trial)
        if self._is_surplus(trial):
            self._spent = "all trials are running"
            return
        values = self._patiently(lambda: suggest(trial, self.recipe, self.search))
        try:
            recipe, plan = self._planned(values)
        except Infeasible as error:
            self._tell_infeasible(trial, values, error)
            return
        self.infeasible = 0
        self._patiently(lambda: trial.set_constraint(FITS, min(0.0, headroom(plan))))
        run_id = attributes.get(RUN_ID) or self.place.run_id(trial.number)
        self._patiently(lambda: trial.set_user_attr(RUN_ID, run_id))
        slot = min(set(range(self.target.workers)) - {each.slot for each in self.running})
        run_dir = self.place.run_dir(run_id)
        known = record.read(run_dir)
        try:
            if known is None or _is_to_be_resumed(statuses([known.ref])[known.ref]):
                job = self.target.submit(recipe, plan, run_id, slot)
            else:
                job = handle(known.ref)
        except UserError as error:
            self._not_submitted(trial, error)
            return
        reported = self._patiently(lambda: set(self.study.get_trials(deepcopy=False)[trial.number].intermediate_values))
        self.running.append(
            Running(
                trial, values, recipe, plan, run_id, slot, job, MetricsReader(run_dir), reported,
                rank_seconds=attributes.get(RANK_SECONDS, 0.0),
            )
        )  # fmt: skip
        self.submitted += 1
        self.log(f"trial {trial.number} started  {shown(values)}")

    def _not_submitted(self, trial: optuna.Trial, error: UserError) -> None:
        """A failed trial; but if it is the first of this process, something is wrong with its options.

        Raises:
            UserError: the same error, once the trial is given back.
        """
        if not self.submitted:
            self._patiently(lambda: give_back(self.study, trial.number))
            raise error
        self._patiently(lambda: trial.set_user_attr(OUTCOME, Outcome.FAILED))
        self._patiently(lambda: trial.set_user_attr(REASON, str(error)))
        self._patiently(lambda: self.study.tell(trial, state=TrialState.FAIL, skip_if_finished=True))
        self.log(f"trial {trial.number} {Outcome.FAILED}  {error}")
        self._count_failures(Outcome.FAILED, str(error))

    def _ask(self) -> optuna.Trial:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # Optuna expects signs of life from its own loop; here they are sent by _beat
            return self.study.ask()

    def _is_surplus(self, trial: optuna.Trial) -> bool:
        """Whether other processes have asked for the last trials at the same moment; it is ended then."""
        trials = self._patiently(lambda: self.study.get_trials(deepcopy=False))
        is_queued = bool(trials[trial.number].params or "fixed_params" in trials[trial.number].system_attrs)
        if self.search.sampler.type == "GridSampler" and not is_queued:
            self._patiently(lambda: discard(self.study, trial))
            return True
        if self.search.n_trials is None:
            return False
        own = self._patiently(lambda: list(own_trials(self.study)))
        counted = [each.number for each in own if each.state != TrialState.WAITING and not is_infeasible(each)]
        if sum(number < trial.number for number in counted) < self.search.n_trials:
            return False
        self._patiently(lambda: give_back(self.study, trial.number) if is_queued else discard(self.study, trial))
        return True

    def _planned(self, values: Values) -> tuple[Recipe, Plan]:
        try:
            recipe = trial_recipe(self.recipe, self.search, values)
        except UserError as error:
            raise Infeasible(str(error)) from error
        return recipe, self.target.plan(recipe)

    def _tell_infeasible(self, trial: optuna.Trial, values: Values, error: Infeasible) -> None:
        def tell() -> None:
            trial.set_constraint(FITS, error.violation)
            trial.set_user_attr(OUTCOME, Outcome.INFEASIBLE)
            trial.set_user_attr(REASON, str(error))
            self.study.tell(trial, state=TrialState.PRUNED, skip_if_finished=True)

        self._patiently(tell)
        first, _, _ = str(error).partition("\n")
        self.log(f"trial {trial.number} cannot run  {shown(values)}: {first}")
        self.infeasible += 1
        if self.infeasible >= INFEASIBLE_IN_A_ROW:
            raise UserError(
                f"{self.infeasible} trials in a row cannot run; the last one: {error}",
                where="search.space", rule="some values of the space run on this machine", fix="a smaller space",
            )  # fmt: skip

    # -- following -----------------------------------------------------------------------------------------------

    def _look(self) -> None:
        try:
            found = statuses([each.job.ref for each in self.running])
        except SchedulerUnavailable as error:
            logger.warning("%s; trials are still waited for", error)
            found = {}
        for each in list(self.running):
            self._report(each)
            status = found.get(each.job.ref)
            if status is None:
                continue
            each.clock(status)
            if status.state.ended:
                self._ended(each, status)
            elif time.monotonic() - each.beaten >= self.search.heartbeat_interval:
                self._beat_running(each)

    def _report(self, each: Running) -> None:
        """Report new evaluations, and cancel the job if the pruner says so."""
        objective = self.search.objectives[0]
        for number, value in each.new_values(objective):
            self._patiently(lambda number=number, value=value: each.trial.report(value, number))  # type: ignore[misc]
        if len(self.search.objectives) > 1 or not each.reported or not each.may_be_pruned:
            return
        if self._patiently(each.trial.should_prune):
            each.ending = Outcome.PRUNED
            each.job.cancel()

    def _ended(self, each: Running, status: JobStatus) -> None:
        self._report(each)
        outcome, values = each.outcome(status, self.search.objectives)
        if outcome == Outcome.LOST and each.resumed < self.search.max_retry:
            each.resumed += 1
            logger.warning("trial %d: its job has ended (%s); it is resumed", each.number, status.state)
            try:
                each.job = self.target.submit(each.recipe, each.plan, each.run_id, each.slot)
            except UserError as error:
                status = replace(status, reason=str(error))
            else:
                return
        self.running.remove(each)
        if outcome == Outcome.GIVEN_BACK:
            self._note(each, {RANK_SECONDS: each.rank_seconds})
            self._patiently(lambda: give_back(self.study, each.number))
            return
        reason = (
            status.reason or f"exit code {status.exit_code}, see {each.job.logs().files or each.job.logs().command}"
        )
        attributes = {
            OUTCOME: Outcome.FAILED if outcome == Outcome.LOST else outcome, TOKENS: each.reader.progress.tokens,
            RANK_SECONDS: each.rank_seconds, VALUES: dict(each.values),
            **({} if outcome in (Outcome.COMPLETE, Outcome.PRUNED) else {REASON: reason}),
        }  # fmt: skip
        self._note(each, attributes)
        self._patiently(lambda: self._tell(each, outcome, values))
        self._patiently(lambda: self.keeper.keep(self.study))
        self._say(each, outcome, values, reason)
        self._count_failures(outcome, reason)

    def _tell(self, each: Running, outcome: Outcome, values: list[float]) -> FrozenTrial:
        if outcome == Outcome.COMPLETE:
            return self.study.tell(each.trial, values, skip_if_finished=True)
        pruned = outcome in (Outcome.PRUNED, Outcome.DIVERGED)
        state = TrialState.PRUNED if pruned else TrialState.FAIL
        return self.study.tell(each.trial, state=state, skip_if_finished=True)

    def _note(self, each: Running, attributes: Mapping[str, object]) -> None:
        for name, value in attributes.items():
            self._patiently(lambda name=name, value=value: each.trial.set_user_attr(name, value))  # type: ignore[misc]

    def _say(self, each: Running, outcome: Outcome, values: list[float], reason: str) -> None:
        now = self._patiently(self._used)
        parts = [f"trial {each.number} {outcome}", shown(each.values)]
        if values:
            named = zip(self.search.objectives, values, strict=True)
            parts.append(", ".join(f"{name} {value:.5g}" for name, value in named))
        elif outcome == Outcome.PRUNED:
            parts.append(f"at step {each.reader.progress.step}/{each.recipe.train.train_iters}")
        else:
            parts.append(reason)
        if now.best is not None and len(self.search.objectives) == 1:
            parts.append(f"best {now.best:.5g}")
        if left := self.budget.left(now):
            parts.append(f"left {left}")
        self.log("  ".join(parts))

    def _count_failures(self, outcome: Outcome, reason: str) -> None:
        self.failures = self.failures + 1 if outcome in (Outcome.FAILED, Outcome.LOST) else 0
        if self.failures >= FAILURES_IN_A_ROW:
            raise UserError(
                f"{self.failures} trials in a row have failed; the last one: {reason}",
                where=f"study {self.study.study_name}",
                rule="a failed trial does not end a search, unless every trial fails",
                fix="read its log; then the same command with --resume",
            )

    def _beat_running(self, each: Running) -> None:
        self._note(each, {RANK_SECONDS: each.rank_seconds})
        self._beat(each.trial)
        each.beaten = time.monotonic()

    def _beat(self, trial: optuna.Trial) -> None:
        storage = heartbeats(self.study)
        if storage is not None:
            self._patiently(lambda: storage.record_heartbeat(trial._trial_id))

    # -- stopping ------------------------------------------------------------------------------------------------

    def _stop(self, stop: Stop) -> None:
        """Save local trials and wait for them; leave those of a scheduler running. All are given back."""
        self.log(f"stopping: {len(self.running)} running trials are given back")
        for each in list(self.running):
            each.ending = each.ending or Outcome.GIVEN_BACK
            if self.target.is_local:
                each.job.cancel()
            else:
                self.running.remove(each)
                self._note(each, {RANK_SECONDS: each.rank_seconds})
                self._patiently(lambda each=each: give_back(self.study, each.number))  # type: ignore[misc]
        stop.again()
        while self.running:
            stop.wait(LOOK_SECONDS)
            self._look()

    def _leave(self) -> None:
        """After an error: local jobs save and end; `--resume` finds all jobs again."""
        for each in self.running:
            if self.target.is_local:
                with suppress(UserError, OSError):
                    each.job.cancel()


def shown(values: Values) -> str:
    """Values in short."""
    return " ".join(f"{key}={f'{value:.4g}' if isinstance(value, float) else value}" for key, value in values.items())


def _is_to_be_resumed(status: JobStatus) -> bool:
    """Whether the job of an earlier search process has ended without a result."""
    if status.state == JobState.FAILED:
        return status.exit_code not in FINAL_CODES
    return status.state.ended and status.state != JobState.COMPLETED
