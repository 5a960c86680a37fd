"""The search process: asks Optuna, starts trials as jobs, follows their reports, and ends bad ones and itself."""

from __future__ import annotations

import logging
import os
import select
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import TypeVar

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import FrozenTrial, TrialState

from llmrecipes.errors import ExitCode, UserError
from llmrecipes.faults.signals import STOPPING
from llmrecipes.hardware.process import Watch
from llmrecipes.launch.base import JobState, JobStatus
from llmrecipes.launch.job import PATIENCE_SECONDS, statuses
from llmrecipes.launch.programs import SchedulerUnavailable
from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.sections.search_section import Search
from llmrecipes.search.best import Keeper
from llmrecipes.search.budget import ENDED, RANK_SECONDS, TOKENS, Budget, Used, recorded_seconds, used
from llmrecipes.search.space import tokens_of_point
from llmrecipes.search.starting import MACHINE, REASON, VALUES, Starter
from llmrecipes.search.storage import address, with_retries
from llmrecipes.search.study import Place, require_section
from llmrecipes.search.target import Target
from llmrecipes.search.tracking import StudyTracker
from llmrecipes.search.trial import Running, TrialOutcome, mean_and_error, measured, shown
from llmrecipes.search.trials import (
    OUTCOME,
    SEEDS,
    STANDARD_ERRORS,
    Heartbeat,
    given_up,
    own_trials,
    return_to_queue,
    take_back,
    unbegun,
    unheard,
)


class Stop:
    """Whether a stop signal has arrived; waits for one."""

    def __init__(self) -> None:
        self.requested = False
        self._final = False
        self._read, self._written = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def receive(self, number: int, _frame: FrameType | None) -> None:
        """The signal handler."""
        if self._final and number == signal.SIGINT:
            os._exit(128 + number)  # jobs save by themselves, and are found by --resume
        self.requested = True
        with suppress(BlockingIOError):
            os.write(self._written, b"s")

    def wait(self, seconds: float) -> None:
        """Wait so long, or until a signal arrives."""
        poll = select.poll()  # select.select refuses descriptors above 1,023
        poll.register(self._read, select.POLLIN)
        poll.poll(seconds * 1000)

    def again(self) -> None:
        """Stop waiting for trials; another Ctrl-C ends this process."""
        self._final = True
        with suppress(BlockingIOError):
            os.read(self._read, 4096)

    def close(self) -> None:
        """Close the pipe."""
        os.close(self._read)
        os.close(self._written)


@contextmanager
def stop_signals() -> Iterator[Stop]:
    """Turn stop signals into a flag while the block runs."""
    stop = Stop()
    before = {number: signal.signal(number, stop.receive) for number in STOPPING}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        stop.close()


logger = logging.getLogger(__name__)

T = TypeVar("T")
LOOK_SECONDS = 0.5
"""Shortest time between looks at running trials; up to that between queries of the launcher if nothing changes."""
IDLE_SECONDS = 5.0
"""Seconds between looks for another trial while a limit is reached and trials still run."""
POSTPONED_SECONDS = 60.0
"""Seconds until a trial that the scheduler did not take is submitted again."""
FAILURES_IN_A_ROW = 5
"""Failures after which recipe or space are suspected, not the values."""


@dataclass
class Worker:
    """Runs trials of a study until a limit is reached or it is stopped by a signal.

    Attributes:
        study: the study.
        recipe: with the section `search`.
        place: place of the study.
        target: where trials run.
        log: receives a line for each trial.
        keeper: keeper of the best recipe and of checkpoints.
        tracker: tracker of the study in MLflow.
    """

    study: optuna.Study
    recipe: Recipe
    place: Place
    target: Target
    log: Callable[[str], None]
    keeper: Keeper
    tracker: StudyTracker
    running: list[Running] = field(default_factory=list)
    failures: int = 0
    ended: int = 0

    def __post_init__(self) -> None:
        self.search: Search = require_section(self.recipe)
        self.budget = Budget(self.search, tokens_of_point(self.recipe, self.search))
        self._address = address(self.search, self.place.folder)
        self._heartbeat = Heartbeat(self.study, self.search.heartbeat_interval)
        self._watch = Watch()
        self._starter = Starter(
            self.study,
            self.recipe,
            self.keeper.recipe,
            self.search,
            self.place,
            self.target,
            self._with_retries,
            self._heartbeat,
        )
        self._spent = ""
        self._layout = ""
        self._not_before = 0.0
        self._pause = LOOK_SECONDS
        self._answered = time.monotonic()

    def run(self) -> ExitCode:
        """Search; returns 75 if it was stopped by a signal, so that `--resume` continues it.

        Raises:
            UserError: trials fail one after another, none can run, or the storage does not respond.
        """
        with stop_signals() as stop, self._heartbeat:
            try:
                while not stop.requested:
                    self._start_trials(stop)
                    if self._spent and not self.running:
                        if not self._may_be_lost():
                            break
                        stop.wait(IDLE_SECONDS)
                        continue
                    stop.wait(self._pause)
                    self._look()
                if self.running:
                    self._stop(stop)
            except BaseException:
                self._leave()
                raise
        if stop.requested:
            self.log("stopped; repeat the command with --resume to continue the study")
            return ExitCode.REQUEUE
        self.log(f"search finished: {self._spent}")
        return ExitCode.DONE

    @property
    def _grace(self) -> float:
        return self.search.grace_period or 2 * self.search.heartbeat_interval

    def _with_retries(self, call: Callable[[], T]) -> T:
        return with_retries(call, self._address)

    def _used(self) -> Used:
        return self._used_by(own_trials(self.study))

    def _used_by(self, trials: Iterable[FrozenTrial]) -> Used:
        shared = self.place.run_dir if self.target.launcher.shares_disk else None
        return used(trials, self.budget.trial_tokens, self.search.min_improvement, shared)

    # -- starting ------------------------------------------------------------------------------------------------

    def _start_trials(self, stop: Stop) -> None:
        if len(self.running) == self.target.workers or time.monotonic() < self._not_before:
            return
        self._with_retries(lambda: take_back(self.study, self._grace, self._watch, self._starter))
        while len(self.running) < self.target.workers and not stop.requested and time.monotonic() >= self._not_before:
            now = self._with_retries(self._used)
            self._spent = self.budget.spent(now) or self._exhausted()
            if self._spent:
                self._not_before = time.monotonic() + IDLE_SECONDS
                return
            self._start_one()

    def _may_be_lost(self) -> bool:
        """Whether a limit is reached only by trials of other processes, never started or without a process."""
        unsure = self._with_retries(
            lambda: unbegun(self.study) | unheard(self.study, self._watch, self._grace + self.search.heartbeat_interval)
        )
        trials = self._with_retries(lambda: list(own_trials(self.study)))
        sure = (trial for trial in trials if trial.number not in unsure)
        return bool(unsure) and not self.budget.spent(self._used_by(sure))

    def _start_one(self) -> None:
        slot = min(set(range(self.target.workers)) - {running.slot for running in self.running})
        started = self._starter.start(slot)
        if isinstance(started, Running):
            self.running.append(started)
            self._pause = LOOK_SECONDS
            how = f"continues trial {max(started.continued)}" if started.continued else "started"
            self.log(f"trial {started.number} {how}  {shown(started.values)}")
            layout = "" if started.plan.chosen is None else started.plan.chosen["text"]
            if layout not in ("", self._layout):
                self.log(f"layout auto: {layout}")
            self._layout = layout
        elif started.is_elsewhere:
            self._not_before = time.monotonic() + POSTPONED_SECONDS
        elif started.outcome == TrialOutcome.RETURNED:
            logger.warning("trial %d could not be submitted: %s", started.number, started.reason)
            self._not_before = time.monotonic() + POSTPONED_SECONDS
            self._count_failures(TrialOutcome.FAILED, started.reason)
        elif started.outcome is not None:
            first, _, _ = started.reason.partition("\n")
            self.log(f"trial {started.number} {started.outcome}  {shown(started.values)}: {first}")
            run_dir = self.place.run_dir(self.place.run_id(started.number))
            self.tracker.trial_ended(run_dir, started.number, started.values, started.outcome, {})
            self._count_failures(started.outcome, started.reason)

    def _exhausted(self) -> str:
        """Why a grid has no further point; empty for other samplers."""
        if self.search.sampler.type != "GridSampler":
            return ""
        waiting = self._with_retries(lambda: self.study.get_trials(deepcopy=False, states=(TrialState.WAITING,)))
        return "" if waiting else "every point of the grid has been tried"

    # -- following -----------------------------------------------------------------------------------------------

    def _look(self) -> None:
        self._pause = min(2 * self._pause, max(LOOK_SECONDS, self.target.launcher.poll_seconds))
        try:
            by_ref = statuses([running.job.ref for running in self.running])
            self._answered = time.monotonic()
        except SchedulerUnavailable as error:
            if time.monotonic() - self._answered > PATIENCE_SECONDS:
                raise
            logger.warning("%s; still waiting for trials", error)
            by_ref = {}
        for running in list(self.running):
            try:
                self._look_at(running, by_ref.get(running.job.ref))
            except UpdateFinishedTrialError:
                # This process was away for longer than the grace period. The other one follows the same job, unless
                # the trial had been retried often enough.
                logger.warning("trial %d was taken over by another process", running.number)
                self._drop(running)
                trial = self._with_retries(lambda running=running: given_up(self.study, running.number))  # type: ignore[misc]
                if trial is not None:
                    self._starter.cancel(trial)

    def _drop(self, running: Running) -> None:
        """Stop following a trial."""
        self._heartbeat.remove(running.number)
        self.running = [other for other in self.running if other is not running]

    def _look_at(self, running: Running, status: JobStatus | None) -> None:
        if not running.tracked and running.reported:
            running.tracked = self.tracker.trial_began(
                self.place.run_dir(running.run_id), running.number, running.values
            )
        self._report(running)
        if status is None:
            return
        running.clock(status)
        if status.state.ended:
            self._ended(running, status)
        elif time.monotonic() - running.counted >= self.search.heartbeat_interval:
            self._count(running)
            self._note(running, {RANK_SECONDS: running.rank_seconds})
            running.counted = time.monotonic()

    def _report(self, running: Running) -> None:
        """Report new evaluations, and cancel the job if the pruner says so."""
        objective = self.search.objectives[0]
        new = running.new_values(objective)
        if new:
            self._pause = LOOK_SECONDS
        if len(self.search.objectives) > 1:  # Optuna takes no curves of several objectives
            return
        for number, value in new:
            self._with_retries(lambda number=number, value=value: running.trial.report(value, number))  # type: ignore[misc]
        if not running.may_be_pruned:
            return
        if new:
            running.is_bad = self._with_retries(running.trial.should_prune)
        if running.is_bad:
            try:
                running.job.cancel()
            except UserError as error:  # tried again at the next look
                logger.warning("trial %d could not be pruned: %s", running.number, error)
            else:
                running.ending = TrialOutcome.PRUNED
                self._pause = LOOK_SECONDS

    def _ended(self, running: Running, status: JobStatus) -> None:
        self._report(running)
        outcome, values = running.outcome(status, self.search.objectives)
        if outcome == TrialOutcome.LOST and running.resumed < self.search.max_retry:
            running.resumed += 1
            logger.warning("trial %d: its job has ended (%s); resuming it", running.number, status.state)
            try:
                running.job = self._starter.submit(
                    running.trial, running.recipe, running.plan, running.run_id, running.slot
                )
            except UserError as error:
                status = replace(status, reason=str(error))
            else:
                return
        if status.state == JobState.UNKNOWN and self.target.is_local:  # it has lost its lease, and may still run
            self._starter.cancel(self._with_retries(lambda: self.study.trials[running.number]))
        self._count(running)
        if outcome == TrialOutcome.COMPLETE and len(running.seeds) + 1 < self.search.seeds_per_point:
            if self._next_seed(running, values):
                return
            outcome = TrialOutcome.RETURNED
        self._drop(running)
        if outcome == TrialOutcome.RETURNED:
            self._note(running, {RANK_SECONDS: running.rank_seconds, MACHINE: None})
            self._with_retries(lambda: return_to_queue(self.study, running.number))
            return
        reason = running.reason(status)
        if outcome == TrialOutcome.COMPLETE and running.seeds:
            running.seeds.append(values)
            values, running.errors = mean_and_error(running.seeds)
        attributes = {
            OUTCOME: TrialOutcome.FAILED if outcome == TrialOutcome.LOST else outcome,
            TOKENS: running.tokens + running.reader.progress.tokens,
            **({SEEDS: running.seeds, STANDARD_ERRORS: running.errors} if running.errors else {}),
            RANK_SECONDS: running.rank_seconds,
            VALUES: dict(running.values),
            MACHINE: None,
            ENDED: sum(other.state.is_finished() for other in self._with_retries(lambda: list(own_trials(self.study)))),
            **({} if outcome in (TrialOutcome.COMPLETE, TrialOutcome.PRUNED) else {REASON: reason}),
        }
        self._note(running, attributes)
        self._with_retries(lambda: self._tell(running, outcome, values))
        improved = self._with_retries(lambda: self.keeper.keep(self.study))
        self._track(running, outcome, values, improved=improved)
        self._say(running, outcome, values, reason)
        self._count_failures(outcome, reason)

    def _next_seed(self, running: Running, values: list[float]) -> bool:
        """Train the next seed of a trial; False if this process cannot, and the trial has to return to the queue."""
        running.seeds.append(values)
        running.tokens += running.reader.progress.tokens
        self._note(running, {SEEDS: running.seeds, TOKENS: running.tokens})
        if not running.tracked:
            self.tracker.trial_began(self.place.run_dir(running.run_id), running.number, running.values)
        self.tracker.trial_ended(
            self.place.run_dir(running.run_id), running.number, running.values, TrialOutcome.COMPLETE, {}
        )
        if running.ending is not None:
            return False
        try:
            self._starter.next_seed(running)
        except UserError as error:
            logger.warning("trial %d: its next seed could not be submitted: %s", running.number, error)
            self._not_before = time.monotonic() + POSTPONED_SECONDS
            return False
        named = zip(self.search.objectives, values, strict=True)
        done = f"seed {len(running.seeds)} of {self.search.seeds_per_point}"
        self.log(f"trial {running.number} {done}  {', '.join(f'{name} {value:.5g}' for name, value in named)}")
        return True

    def _tell(self, running: Running, outcome: TrialOutcome, values: list[float]) -> FrozenTrial:
        if outcome == TrialOutcome.COMPLETE:
            return self.study.tell(running.trial, values, skip_if_finished=True)
        pruned = outcome in (TrialOutcome.PRUNED, TrialOutcome.DIVERGED, TrialOutcome.INFEASIBLE)
        state = TrialState.PRUNED if pruned else TrialState.FAIL
        return self.study.tell(running.trial, state=state, skip_if_finished=True)

    def _note(self, running: Running, attributes: Mapping[str, object]) -> None:
        for name, value in attributes.items():
            self._with_retries(lambda name=name, value=value: running.trial.set_user_attr(name, value))  # type: ignore[misc]

    def _track(self, running: Running, outcome: TrialOutcome, values: list[float], *, improved: bool) -> None:
        run_dir = self.place.run_dir(running.run_id)
        results: dict[str, float] = dict(zip(self.search.objectives, values, strict=False))
        if not running.tracked:
            self.tracker.trial_began(run_dir, running.number, running.values)
        self.tracker.trial_ended(run_dir, running.number, running.values, outcome, results)
        if improved:
            self.tracker.improved(results, running.number, self.keeper.files())

    def _say(self, running: Running, outcome: TrialOutcome, values: list[float], reason: str) -> None:
        now = self._with_retries(self._used)
        parts = [f"trial {running.number} {outcome}", shown(running.values)]
        if values:
            named = zip(self.search.objectives, measured(values, running.errors), strict=True)
            parts.append(", ".join(f"{name} {value}" for name, value in named))
        elif outcome == TrialOutcome.PRUNED:
            parts.append(f"at step {running.reader.progress.step}/{running.recipe.train.train_iters}")
        else:
            parts.append(reason)
        if now.best is not None and len(self.search.objectives) == 1:
            parts.append(f"best {now.best:.5g}")
        self.ended += 1
        if left := self.budget.left(now, self.ended):
            parts.append(f"left {left}")
        self.log("  ".join(parts))

    def _count_failures(self, outcome: TrialOutcome, reason: str) -> None:
        self.failures = self.failures + 1 if outcome in (TrialOutcome.FAILED, TrialOutcome.LOST) else 0
        if self.failures >= FAILURES_IN_A_ROW:
            raise UserError(
                f"{self.failures} trials in a row have failed; the last one: {reason}",
                where=f"study {self.study.study_name}",
                rule="a search stops if trial after trial fails",
                fix="find the cause in its log, then repeat the command with --resume",
            )

    def _count(self, running: Running) -> None:
        """Bring its GPU-hours up to date: what its run has recorded also counts the time when nobody looked."""
        seconds = running.reader.progress.seconds
        if self.target.launcher.shares_disk:
            seconds = max(seconds, recorded_seconds(self.place.run_dir(running.run_id)))
        running.rank_seconds = max(running.rank_seconds, running.earlier_seeds + seconds * running.plan.world_size)

    # -- stopping ------------------------------------------------------------------------------------------------

    def _stop(self, stop: Stop) -> None:
        """Save local trials and wait for them; leave those of a scheduler running. All are returned to the queue."""
        self.log(f"stopping: {len(self.running)} running trials are returned to the queue")
        for running in list(self.running):
            running.ending = running.ending or TrialOutcome.RETURNED
            if self.target.is_local:
                running.job.cancel()
            else:
                self._drop(running)
                with suppress(UpdateFinishedTrialError):  # taken over by another process
                    self._count(running)
                    self._note(running, {RANK_SECONDS: running.rank_seconds})
                    self._with_retries(lambda running=running: return_to_queue(self.study, running.number))  # type: ignore[misc]
        stop.again()
        while self.running:
            stop.wait(self._pause)
            self._look()

    def _leave(self) -> None:
        """After an error: local jobs save and end; `--resume` resumes all of them."""
        for running in self.running:
            if self.target.is_local:
                with suppress(UserError, OSError):
                    running.job.cancel()
