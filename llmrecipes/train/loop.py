"""The training loop: step, check, log, evaluate, save, stop. It owns the order; the engine owns the arithmetic."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from llmrecipes.checkpoint.manifest import Monitored
from llmrecipes.checkpoint.saver import AsyncSaver
from llmrecipes.engine.base import Engine, Progress, StepResult, World
from llmrecipes.errors import ExitCode, UserError
from llmrecipes.faults.numerics import StepSpike
from llmrecipes.faults.out_of_memory import trim_heap
from llmrecipes.faults.signals import StopRequest
from llmrecipes.plan.derive import Plan
from llmrecipes.tracking.events import Note, StepMetrics, Tracker
from llmrecipes.train import guard
from llmrecipes.train.evaluations import evaluated, held_out_losses, is_evaluated
from llmrecipes.train.loaders import DataLoaders, ReadAhead, first_failure
from llmrecipes.train.local_checkpoints import LocalCheckpoints
from llmrecipes.train.observers.base import Observers, StepDone
from llmrecipes.train.rewind import Rewinds
from llmrecipes.train.saves import Saves
from llmrecipes.train.stopping import SPLIT, after_evaluation, ended_early, monitors, stop_reason

logger = logging.getLogger(__name__)


FIRST_STEPS = 2
"""Steps of a start that compile kernels, connect ranks and allocate memory."""


class LoopOutcome(Enum):
    """How a loop ended; its state is saved in both cases."""

    FINISHED = ExitCode.DONE
    STOPPED = ExitCode.REQUEUE


@dataclass
class Loop:
    """The training loop of one rank.

    Args:
        plan: the plan of the stage, or of a run without stages.
        engine: runs the steps.
        world: this rank.
        loaders: training and validation batches.
        tracker: receives all metrics and notes; a `NoTracker` on all ranks but one.
        saver: writes checkpoints.
        stop: set by signals.
        recipe_hash: goes into checkpoints' manifests.
        peak_flops: dense FLOP/s of one GPU, for MFU; None if unknown.
        observers: what watches it.
        stop_after: save and stop after this step, as after a signal.
        evaluation_due: whether the step to resume from still has to be evaluated (see `evaluations.evaluation_due`).
        rewinds: rewinds of a run that goes back from spikes; None: their updates are left out.
        local: local checkpoints of this rank; None: the recipe wants none.
        progress: after the last step.
        losses: training loss of every step of this start.
        valid_loss: the last one, in nats per token.
        unread: why the last evaluation could not read its data, on some rank.
        monitored: the held-out loss that decides when the run ends; of the checkpoint that it starts from.
    """

    plan: Plan
    engine: Engine
    world: World
    loaders: DataLoaders
    tracker: Tracker
    saver: AsyncSaver
    stop: StopRequest
    recipe_hash: str
    peak_flops: float | None
    observers: Observers = field(default_factory=Observers)
    stop_after: int | None = None
    evaluation_due: bool = False
    rewinds: Rewinds | None = None
    local: LocalCheckpoints | None = None
    progress: Progress = field(default_factory=Progress)
    losses: list[float] = field(default_factory=list)
    valid_loss: float | None = None
    unread: UserError | None = None
    monitored: Monitored = field(default_factory=Monitored)
    spikes: guard.SpikeGuard | None = field(default=None, init=False)

    def run(self, progress: Progress) -> LoopOutcome:
        """Train from `progress` to the last step, or until a stop is requested.

        Raises:
            NonFinite: a loss or gradient norm is not finite.
            UserError: too many checkpoints in a row, or the last one, could not be written; or a rank could not read
                its data; in that case the last complete step is saved. Or too many rewinds.
            Rewind: a spike was reported, and the run goes back to a checkpoint.
        """
        train = self.plan.recipe.train
        self.progress = progress
        self.spikes = guard.spike_guard(self.plan, progress)
        loaders = self.loaders.leaving_out(progress.skipped_samples)
        with closing(loaders.train(progress.consumed_samples)) as batches:
            numbers = map(self.plan.num_microbatches_of, range(progress.step, train.train_iters))
            ahead = ReadAhead(batches, numbers, self.observers.beat)
            self._require_read(progress.step, ahead.failure)
            outcome, last = self._run(progress, ahead)
            self.observers.beat("rest")
            self._require_read(last, ahead.failure or self.unread)
            return outcome

    def back(self, tracker: Tracker, progress: Progress, evaluation_due: bool, monitored: Monitored) -> None:
        """Prepare to run from an earlier step of the same engine on."""
        self.tracker = tracker
        self.progress = progress
        self.evaluation_due = evaluation_due
        self.monitored = monitored
        self.losses = []

    def _run(self, progress: Progress, batches: ReadAhead) -> tuple[LoopOutcome, int]:
        train = self.plan.recipe.train
        saves = Saves(self)
        if self.evaluation_due:
            if not self._evaluate(progress) and (progress.step or self.unread):  # at step 0 nothing is saved yet
                return self.stopped(progress.step), progress.step
            if monitors(self.plan.recipe) and progress.step:
                saves.save(progress)  # once more: the checkpoint does not have this evaluation
        ended = stop_reason(self.monitored, train) is not None
        if not all(observer.catch_up(progress.step, ended=ended) for observer in self.observers):
            return self.stopped(progress.step), progress.step
        first = progress.step
        while progress.step < train.train_iters and not ended:
            began = guard.first_sample(progress, self.plan)
            steady = progress.step >= first + FIRST_STEPS and not saves.writing
            progress, stopping = self._step(progress, batches, steady=steady)
            if self.spikes is not None and (spike := self.spikes.take()) is not None:
                self._rewind(saves, progress, began, spike)
            if progress.step == first + 1 and self.engine.platform.name == "cuda":
                saves.reserve(progress)
            last = progress.step == train.train_iters
            evaluating = self.loaders.evaluates and is_evaluated(progress.step, self.plan.recipe)
            saving = last or progress.step % self.plan.recipe.checkpoint.save_interval == 0
            guard.compare_replicas(
                progress.step, self.engine, self.tracker, self.observers.beat, saving=saving or stopping
            )
            if evaluating and not stopping:
                stopping = evaluating = not self._evaluate(progress)
            ended = stop_reason(self.monitored, train) is not None
            last = last or ended
            saving = saving or ended
            for observer in self.observers:
                if not observer.evaluate(progress.step, ended=ended, stopping=stopping):
                    stopping = evaluating = True
            if saving or stopping:
                self.observers.beat("save")
                saves.save(progress)
            if not last and not stopping:
                saves.save_locally(progress)
            saves.poll()
            if (evaluating or saving) and self.engine.platform.device.type == "cpu":
                trim_heap()
            # When a stop is requested, an evaluation is left for the resumed run, even that of the last step.
            if stopping and (evaluating or not last):
                saves.require(progress)
                return self.stopped(progress.step), progress.step
        saves.require(progress)
        return LoopOutcome.FINISHED, progress.step

    def stopped(self, step: int) -> LoopOutcome:
        """Say that the run stops after a step, which is saved."""
        logger.info("stopped after step %d of %d; the state is saved", step, self.plan.run_recipe.train.train_iters)
        return LoopOutcome.STOPPED

    def _require_read(self, step: int, failure: UserError | None) -> None:
        failure = first_failure(failure, self.engine.platform.device)
        if failure is not None:
            details = {"where": failure.where, "error": failure.what}
            self.tracker.note(Note(step=step, event="unreadable", details=details, alarm=True))
            raise failure

    def _step(self, progress: Progress, batches: ReadAhead, *, steady: bool) -> tuple[Progress, bool]:
        self.engine.parts.start(progress.step + 1)
        started = time.perf_counter()
        self.observers.beat("step", progress.step + 1)
        result = self.engine.train_step(
            batches,
            num_microbatches=self.plan.num_microbatches_of(progress.step),
            stop=lambda: self.stop.requested or batches.failure is not None,
            accept=guard.acceptance(progress.step + 1, self.engine, self.tracker, self.spikes),
            redo=lambda: self.observers.beat("step"),
        )
        seconds = time.perf_counter() - started
        counts = self.engine.parts.fields(progress)
        before = progress
        batch = self.plan.batches.of_step(progress.step)
        progress = Progress(
            step=progress.step + 1,
            consumed_samples=guard.first_sample(progress, self.plan) + batch,
            consumed_tokens=progress.consumed_tokens + batch * self.plan.recipe.model.seq_length,
            skipped_steps=progress.skipped_steps + (result.skipped or result.rejected),
            skipped_samples=progress.skipped_samples,
            **self.engine.parts.progress(),
            **({} if self.spikes is None else self.spikes.recent()),
        )
        self.progress = progress
        self.losses.append(result.loss)
        self._report(progress, result, seconds, {**self.observers.fields(progress.step, seconds), **counts})
        done = StepDone(before=before, progress=progress, result=result, seconds=seconds, steady=steady)
        for observer in self.observers:
            observer.after_step(done)
        guard.require_finite(before, result, self.engine, self.world)
        guard.require_right_gradients(progress.step, self.engine, self.tracker)
        if suspect := guard.hardware_suspect(before, result, self.engine, self.world):
            self.tracker.note(suspect)
        guard.require_loss_scale(progress.step, result, self.plan.recipe.train)
        return progress, result.stop or progress.step == self.stop_after

    def _rewind(self, saves: Saves, progress: Progress, began: int, spike: StepSpike) -> None:
        """Go back from a spike, whose update was left out, if the run does so and a checkpoint is old enough."""
        if self.rewinds is not None:
            self.observers.beat("save")  # which may have to end first; then the first rank deletes checkpoints
            saves.settle()
            if self.local is not None:
                self.local.forget()
            self.rewinds.require(spike, progress, began)
        details = {**asdict(spike), "samples": [began, progress.consumed_samples]}
        self.tracker.note(Note(step=progress.step, event="spike_skipped", details=details, alarm=True))

    def _report(self, progress: Progress, result: StepResult, seconds: float, counts: Mapping[str, Any]) -> None:
        rate = (batch := self.plan.batches.of_step(progress.step - 1)) * self.plan.recipe.model.seq_length / seconds
        self.tracker.step(
            StepMetrics(
                step=progress.step,
                loss=result.loss,
                grad_norm=math.nan if result.grad_norm is None else result.grad_norm,
                lr=result.lr,
                global_batch_size=None if self.plan.batches.is_constant else batch,
                stage=None if (span := self.plan.span) is None else span.number + 1,
                consumed_samples=progress.consumed_samples,
                consumed_tokens=progress.consumed_tokens,
                step_seconds=seconds,
                tokens_per_second=rate,
                loss_scale=result.loss_scale,
                skipped=result.skipped or result.rejected,
                memory_bytes=self.engine.platform.peak_memory(),
                mfu=self._utilisation(rate, self.plan.flops_per_token_full),
                mfu_causal=self._utilisation(rate, self.plan.flops_per_token_causal),
                **counts,
            )
        )

    def _utilisation(self, tokens_per_second: float, flops_per_token: float) -> float | None:
        if self.peak_flops is None:
            return None
        return tokens_per_second * flops_per_token / (self.peak_flops * self.world.size)

    def _evaluate(self, progress: Progress) -> bool:
        """Evaluate and report; False if a rank was asked to stop meanwhile, or could not read its data."""
        if not self.loaders.evaluates:
            return True
        started = time.perf_counter()
        self.observers.beat("evaluate", progress.step)
        with self.engine.params_synced():
            losses, self.unread = held_out_losses(
                self.engine, self.loaders, self.plan.recipe, self.stop, self.observers.beat
            )
        if losses is None:
            return False
        self.valid_loss = losses[SPLIT].loss if SPLIT in losses else None
        if progress.step:  # no loss of training
            by_set = {name: each.loss for name, each in losses.items()}
            self.monitored = after_evaluation(self.monitored, progress.step, by_set, self.plan.recipe.train)
        self.tracker.eval(evaluated(progress, losses, self.loaders, started))
        for note in ended_early(self.monitored, self.plan.run_recipe.train):
            self.tracker.note(note)
        return True
