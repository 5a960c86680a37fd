"""One stage of a run on a rank that has joined the others, from the checkpoint it begins with to its last.

A stage begins as a restart does: the process groups of its layout are made, its engine is built and loads the
checkpoint of the step before. So a run that is killed at any moment continues as the one that is not.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch
import torch.distributed as dist

from llmrecipes.checkpoint.saver import AsyncSaver
from llmrecipes.console import console
from llmrecipes.engine.backends import backend
from llmrecipes.engine.base import Backend, Progress, Rank, World
from llmrecipes.errors import ExitCode
from llmrecipes.hardware.cluster import Cluster
from llmrecipes.plan.derive import Plan
from llmrecipes.plan.table import stage_facts
from llmrecipes.recipe.features import value
from llmrecipes.recipe.load import recipe_hash
from llmrecipes.recipe.schema import Parallelism, Recipe
from llmrecipes.recipe.speed import Speed
from llmrecipes.recipe.stage_runs import stage_of
from llmrecipes.recipe.stages import span_of
from llmrecipes.tracking.energy import Energy
from llmrecipes.tracking.events import ENERGY, MEASURED, Note
from llmrecipes.tracking.run_tracker import RunTracker
from llmrecipes.train.evaluations import TaskEvaluations, evaluation_due
from llmrecipes.train.loaders import has_held_out, one_batch_forever, open_loaders
from llmrecipes.train.local import choose_from, open_local
from llmrecipes.train.loop import Loop, LoopOutcome
from llmrecipes.train.observers.debug import anomaly_mode
from llmrecipes.train.observers.exports import Exports, finish_exports
from llmrecipes.train.observers.folder import RunFolder
from llmrecipes.train.observers.hangs import hangs, watchdog
from llmrecipes.train.observers.measured import line, measured
from llmrecipes.train.observers.profile import profiled
from llmrecipes.train.observers.telemetry import measured_ranks
from llmrecipes.train.rank import first_step_reporter
from llmrecipes.train.resume import initial_weights, resized, resume, teach
from llmrecipes.train.rewind import Rewind, Rewinds, merged
from llmrecipes.train.spec import RunSpec
from llmrecipes.train.stopping import at_start, monitored, stop_reason
from llmrecipes.train.summary import describe, open_tracker, print_summary


@dataclass(frozen=True)
class Joined:
    """What the stages of a run share: a rank that has joined the others.

    Attributes:
        plan: plan of the run, with those of its stages.
        lay_out: see `layouts`.
        group: group of the savers.
        network: NCCL network; None: there is none.
    """

    spec: RunSpec
    plan: Plan
    cluster: Cluster
    platform: Any
    rank: Rank
    lay_out: Callable[[Recipe], World]
    prepared: Any
    store: Any
    stop: Any
    group: Any
    network: Any
    tasks: Any


@contextmanager
def layouts(engines: Backend) -> Iterator[Callable[[Recipe], World]]:
    """A block in which the ranks take the layout of one recipe after another, each a collective of all of them.

    The process groups stay while the layout is the same. Those of another are destroyed first, so that no device has
    the communicators of two layouts.
    """
    with ExitStack() as groups:
        now: list[tuple[Parallelism, Speed, World]] = []

        def lay_out(recipe: Recipe) -> World:
            if not now or now[0][:2] != (recipe.parallelism, recipe.speed):
                now.clear()
                groups.close()
                now.append((recipe.parallelism, recipe.speed, groups.enter_context(engines.lay_out(recipe))))
            return now[0][2]

        yield lay_out


def train_stages(joined: Joined) -> ExitCode:
    """Train from the newest checkpoint to the end of the run, stage by stage; a collective of all ranks."""
    spec = joined.spec
    with ExitStack() as stack:
        exports = None
        if spec.recipe.checkpoint.also_export is not None and joined.rank.is_first:
            exports = Exports(spec.recipe, spec.run, spec.data_dir, joined.store)
            stack.callback(exports.cancel)
        code, last = train_stage(joined, exports, from_scratch=spec.from_scratch, from_best=spec.from_best)
        while code is None:
            # What the last stage had is gone before the next one is built, also for what does not allocate by torch.
            gc.collect()
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            code, last = train_stage(joined, exports, from_scratch=False, from_best=False, ended_at=last)
        return code


def train_stage(
    joined: Joined, exports: Exports | None, *, from_scratch: bool, from_best: bool, ended_at: int | None = None
) -> tuple[ExitCode | None, int]:
    """Train the stage of the next step, or the whole of a run without stages; a collective of all ranks.

    Args:
        exports: of the first rank, if the recipe has them.
        from_scratch: first move the run's history aside.
        from_best: first delete the checkpoints after the one of the lowest held-out loss.
        ended_at: last step of the stage that these processes have just ended, with all its evaluations.

    Returns:
        The exit code of the run, None if another stage follows; and its last step.
    """
    spec, platform, rank, store = joined.spec, joined.platform, joined.rank, joined.store
    prepared, stop, engines = joined.prepared, joined.stop, backend(joined.spec.recipe)
    whole = joined.plan
    with ExitStack() as stack:
        rewinds = Rewinds(spec.recipe, spec.run, store, rank)
        went_back = () if from_scratch else rewinds.finish()
        start, local = choose_from(
            store, rank, lambda: open_local(whole, spec.run, joined.group), from_scratch, from_best
        )
        step = 0 if start.entry is None else start.entry.step
        if exports is not None and ended_at is None:
            exports.resumed()
        # An evaluation that a stop has left out is one of the stage that ended.
        ended = stage_of(spec.recipe, step, ending=True)
        is_due = (
            step != ended_at
            and not spec.overfit_batch
            and evaluation_due(step, ended, spec.run.metrics, rank, monitored(start.entry))
            and has_held_out(ended, prepared)
        )
        recipe = ended if is_due else stage_of(spec.recipe, step)
        span, plan = span_of(recipe), plan_of(whole, recipe)
        world = joined.lay_out(recipe)
        loaders = open_loaders(recipe, joined.prepared, world, pin_memory=platform.name == "cuda")
        if spec.overfit_batch:
            loaders = one_batch_forever(loaders, plan.num_microbatches)
        if local is not None:
            stack.enter_context(local)
        with initial_weights(spec, resumed=start.entry is not None) as weights:
            engine = (engines.build if start.entry is None else engines.construct)(plan, platform, weights)
        stack.callback(engine.close)
        teach(engine, spec)
        if local is not None:
            local.attach(engine)
        saver = stack.enter_context(
            AsyncSaver(
                store,
                joined.group,
                engine.checkpoint_format(),
                async_save=recipe.checkpoint.async_save,
                most_recent_k=recipe.checkpoint.most_recent_k,
                keep_interval=recipe.checkpoint.keep_interval,
                keep_best=recipe.checkpoint.keep_best,
                saved=None if exports is None else exports.saved,
            )
        )
        progress = Progress() if start.entry is None else resume(engine, start.entry, world)
        progress = replace(progress, skipped_samples=merged(progress.skipped_samples, rewinds.skipped()))
        if world.is_first:
            describe(
                recipe, plan, engine.implementation, joined.cluster, prepared, progress, spec.run_dir, joined.network
            )
        tracked = stack.enter_context(ExitStack())
        tracker = tracked.enter_context(open_tracker(spec, whole, engine.implementation, world, progress, prepared))
        if joined.network is not None:
            tracker.note(Note(step=progress.step, event="network", details={"network": joined.network}))
        if span is not None and progress.step == span.first_step:
            tracker.note(Note(step=progress.step, event="stage", details=stage_facts(plan)))
        for note in (*start.notes, *resized(start, plan, plan_of(whole, ended)), *went_back):
            tracker.note(note)
        profile_step = stack.enter_context(
            profiled(spec.profile_steps, spec.run.logs, world.rank, trace=spec.profile_trace)
        )
        if spec.anomaly:
            for module in engine.modules:
                stack.enter_context(anomaly_mode(module))
        folder = stack.enter_context(RunFolder(spec.run_dir, stop, world))
        report_first_step = first_step_reporter()

        steps = count(1)

        def note_hangs() -> None:
            if world.is_first:
                for note in hangs(spec.run, progress.step + len(loop.losses)):
                    tracker.note(note)

        def note_exports() -> None:
            for note in () if exports is None else exports.poll():
                tracker.note(note)

        def after_step() -> None:
            profile_step()
            folder.check()
            collect()
            report_first_step()
            note_exports()
            # The report of a start that hung may be written after the ranks have started again.
            number = next(steps)
            if number & (number - 1) == 0:
                note_hangs()

        profiling = bool(spec.profile_steps)
        watched, written = stack.enter_context(watchdog(recipe, spec.run, world, profiled=profiling))
        used = tracker.energy if isinstance(tracker, RunTracker) else Energy()
        telemetry = stack.enter_context(
            measured_ranks(plan, platform, world, watched, spec.run_dir, stop=stop, costs=spec.costs, energy=used)
        )
        beat = telemetry.beat
        gpus = joined.cluster.gpus
        peak = gpus[0].peak_tflops if gpus else None
        loop = Loop(
            plan=plan,
            engine=engine,
            world=world,
            loaders=loaders,
            tracker=tracker,
            saver=saver,
            stop=stop,
            recipe_hash=recipe_hash(spec.recipe),
            peak_flops=None if peak is None else peak * 1e12,
            after_step=after_step,
            tasks=TaskEvaluations(
                recipe,
                engine,
                world,
                prepared.tokenizer(),
                joined.tasks,
                tracker,
                stop,
                spec.run.metrics,
                beat,
            ),
            stop_after=spec.stop_after,
            evaluation_due=is_due,
            monitored=at_start(start.entry, recipe),
            rewinds=rewinds if recipe.faults.loss_spike_action == "rewind" else None,
            beat=beat,
            written=written,
            local=local,
            telemetry=telemetry,
        )
        note_hangs()
        collect = stack.enter_context(garbage_collected(plan))
        outcome = None
        while outcome is None:
            try:
                outcome = loop.run(progress)
            except Rewind as rewind:
                if exports is not None:
                    exports.cancel()
                # As a restart from that checkpoint: a sink drops what it has of later steps when it opens.
                loop.beat("rest")
                tracker.close("KILLED")
                tracked.close()
                progress = resume(engine, rewind.entry, world)
                progress = replace(progress, skipped_samples=merged(progress.skipped_samples, rewind.skipped))
                tracker = tracked.enter_context(
                    open_tracker(spec, whole, engine.implementation, world, progress, prepared)
                )
                tracker.note(rewind.note)
                held_out = monitored(rewind.entry)
                due = loaders.evaluates and evaluation_due(progress.step, recipe, spec.run.metrics, world, held_out)
                loop = loop.again(tracker, due, held_out)
        last = progress.step + len(loop.losses)
        telemetry.end(last)
        note_hangs()
        folder.require_exists(lambda: tracker.close("FAILED"))
        predicted = spec.predicted
        if predicted is not None and span is not None:
            predicted = predicted["stages"][span.number]
        if values := measured(loop.steady, platform, predicted):
            tracker.note(Note(step=last, event=MEASURED, details=values))
        samples = plan.batches.samples(last) - plan.batches.samples(progress.step)
        used, tokens = telemetry.energy, progress.consumed_tokens + samples * recipe.model.seq_length
        if loop.losses and used.joules:
            tracker.note(Note(step=last, event=ENERGY, details=used.details(tokens)))
        if local is not None and outcome is LoopOutcome.FINISHED:
            local.forget()
        more = outcome is LoopOutcome.FINISHED and span is not None and last < span.whole.train.train_iters
        more = more and stop_reason(loop.monitored, recipe.train) is None  # which ends the run, not the stage
        if more and not loop.losses and not is_due:
            raise RuntimeError(f"the stage that ends at step {last} had neither a step nor an evaluation to do")
        if more and any_rank(stop.requested or last == spec.stop_after, platform.device):
            more, outcome = False, loop.stopped(last)
        if outcome is LoopOutcome.FINISHED and not more and spec.recipe.checkpoint.also_export is not None:
            for note in finish_exports(exports, last, joined.group, lambda: stop.requested, saver.prune):
                tracker.note(note)
        # Close the progress display before printing anything else.
        tracker.close("FINISHED" if outcome is LoopOutcome.FINISHED and not more else "KILLED")
        with engine.params_synced():
            if world.is_first and values:
                console().print(line(values), markup=False)
            if world.is_first and loop.losses and used.joules:
                console().print(used.line(tokens), markup=False)
            if world.is_first and outcome is LoopOutcome.FINISHED and not more:
                print_summary(spec.model_copy(update={"recipe": recipe}), prepared, loop)
    return None if more else outcome.value, last


def any_rank(flag: bool, device: torch.device) -> bool:
    """Whether the flag is set on some rank; a collective of all ranks."""
    answer = torch.tensor(int(flag), device=device)
    dist.all_reduce(answer, dist.ReduceOp.MAX)
    return bool(answer.item())


def plan_of(plan: Plan, recipe: Recipe) -> Plan:
    """The plan of a stage's recipe; of the run, where it has no stages."""
    span = span_of(recipe)
    return plan if span is None else plan.stages[span.number]


@contextmanager
def garbage_collected(plan: Plan) -> Iterator[Callable[[], None]]:
    """A block in which garbage is collected as `speed.manual_gc` says; yields what is called after each step.

    All objects of its start live to its end: they are excluded, also from the collections that megatron-core runs at
    each save.
    """
    interval = value(plan.features, "manual_gc_interval") if value(plan.features, "manual_gc") else None
    steps = count(1)

    def after_step() -> None:
        if interval is not None and next(steps) % interval == 0:
            gc.collect()

    gc.collect()
    gc.freeze()
    enabled = gc.isenabled()
    if interval is not None:
        gc.disable()
    try:
        yield after_step
    finally:
        gc.unfreeze()
        if enabled:
            gc.enable()
