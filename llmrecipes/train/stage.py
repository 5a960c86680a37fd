"""One stage of a run on a rank that has joined the others, from the checkpoint it begins with to its last.

A stage begins as a restart does: the process groups of its layout are made, its engine is built and loads the
checkpoint of the step before. So a run that is killed at any moment continues as the one that is not.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import torch

from llmrecipes.checkpoint.saver import AsyncSaver
from llmrecipes.checkpoint.store import Entry
from llmrecipes.engine.backends import backend
from llmrecipes.engine.base import Backend, Progress, World
from llmrecipes.errors import ExitCode
from llmrecipes.plan.derive import Plan
from llmrecipes.plan.plan_table import stage_facts
from llmrecipes.recipe.derived.degrees import DEGREES, OF_GROUPS
from llmrecipes.recipe.load import recipe_hash
from llmrecipes.recipe.schema import Recipe
from llmrecipes.tracking.events import Note
from llmrecipes.train.agreement import any_rank
from llmrecipes.train.evaluations import evaluation_due
from llmrecipes.train.joined import Joined
from llmrecipes.train.loaders import has_held_out, one_batch_forever, open_loaders
from llmrecipes.train.local_checkpoints import LocalCheckpoints, choose_from, open_local
from llmrecipes.train.loop import Loop, LoopOutcome
from llmrecipes.train.resume import initial_weights, load_frozen_model, resized, resume
from llmrecipes.train.rewind import Rewind, Rewinds, merged
from llmrecipes.train.stopping import at_start, monitored, stop_reason
from llmrecipes.train.summary import describe, open_tracker, print_summary


@contextmanager
def layouts(engines: Backend) -> Iterator[Callable[[Recipe], World]]:
    """A block in which the ranks take the layout of one recipe after another, each a collective of all of them.

    The process groups stay while the layout is the same. Those of another are destroyed first, so that no device has
    the communicators of two layouts.
    """
    with ExitStack() as groups:
        now: list[tuple[list[object], World]] = []

        def lay_out(recipe: Recipe) -> World:
            wanted = [getattr(recipe.layout, name) for name in (*DEGREES, *OF_GROUPS)]
            if not now or now[0][0] != wanted:
                now.clear()
                groups.close()
                now.append((wanted, groups.enter_context(engines.lay_out(recipe))))
            return now[0][1]

        yield lay_out


def train_stages(joined: Joined) -> ExitCode:
    """Train from the newest checkpoint to the end of the run, stage by stage; a collective of all ranks."""
    spec = joined.spec
    with ExitStack() as stack:
        for observer in joined.observers:
            stack.callback(observer.close)
        code, last = train_stage(joined, from_scratch=spec.from_scratch, from_best=spec.from_best)
        while code is None:
            # What the last stage had is gone before the next one is built, also for what does not allocate by torch.
            gc.collect()
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            code, last = train_stage(joined, from_scratch=False, from_best=False, ended_at=last)
        return code


def train_stage(
    joined: Joined, *, from_scratch: bool, from_best: bool, ended_at: int | None = None
) -> tuple[ExitCode | None, int]:
    """Train the stage of the next step, or the whole of a run without stages; a collective of all ranks.

    Args:
        from_scratch: first move the run's history aside.
        from_best: first delete the checkpoints after the one of the lowest held-out loss.
        ended_at: last step of the stage that these processes have just ended, with all its evaluations.

    Returns:
        The exit code of the run, None if another stage follows; and its last step.
    """
    with ExitStack() as stack:
        begun = begin_stage(joined, from_scratch=from_scratch, from_best=from_best, ended_at=ended_at)
        loop, trackers = build_loop(joined, begun, stack)
        joined.observers.begin(joined, loop, stack)
        outcome = run_loop(joined, begun, loop, trackers)
        for observer in joined.observers:
            observer.end()
        if loop.local is not None and outcome is LoopOutcome.FINISHED:
            loop.local.forget()
        more = outcome is LoopOutcome.FINISHED and follows(begun, loop)
        last = loop.progress.step
        if more and any_rank(joined.stop.requested or last == joined.spec.stop_after, joined.platform.device):
            more = False
            outcome = loop.stopped(last)
        is_finished = outcome is LoopOutcome.FINISHED and not more
        if is_finished:
            for observer in joined.observers:
                observer.finish()
        # Close the progress display before printing anything else.
        loop.tracker.close("FINISHED" if is_finished else "KILLED")
        with loop.engine.params_synced():
            if loop.world.is_first:
                for observer in joined.observers:
                    observer.lines()
            if loop.world.is_first and is_finished:
                print_summary(joined.spec, joined.prepared, loop)
    return None if more else outcome.value, last


@dataclass(frozen=True)
class StageStart:
    """Where a stage starts.

    Attributes:
        plan: of the stage.
        is_due: whether the step to start from still has to be evaluated.
        notes: what the start has to say.
    """

    plan: Plan
    entry: Entry | None
    local: LocalCheckpoints | None
    rewinds: Rewinds
    is_due: bool
    notes: tuple[Note, ...]


def begin_stage(joined: Joined, *, from_scratch: bool, from_best: bool, ended_at: int | None) -> StageStart:
    """Choose the checkpoint and with it the stage; arguments as of `train_stage`, a collective of all ranks."""
    spec, rank, store = joined.spec, joined.rank, joined.store
    rewinds = Rewinds(spec.recipe, spec.run, store, rank)
    went_back = () if from_scratch else rewinds.finish()
    start, local = choose_from(
        store, rank, lambda: open_local(joined.plan.largest, spec.run, joined.group), from_scratch, from_best
    )
    step = 0 if start.entry is None else start.entry.step
    # An evaluation that a stop has left out is one of the stage that ended.
    ended = joined.plan.of_step(step, ending=True)
    is_due = (
        step != ended_at
        and not spec.overfit_batch
        and evaluation_due(step, ended.recipe, spec.run.metrics, rank, monitored(start.entry))
        and has_held_out(ended.recipe, joined.prepared)
    )
    plan = ended if is_due else joined.plan.of_step(step)
    notes = (*start.notes, *resized(start, plan, ended), *went_back)
    return StageStart(plan, start.entry, local, rewinds, is_due, notes)


def build_loop(joined: Joined, begun: StageStart, stack: ExitStack) -> tuple[Loop, ExitStack]:
    """Build a stage's engine, loaders, saver and tracker, which `stack` closes.

    Returns:
        The loop, and the stack that closes only the tracker.
    """
    spec = joined.spec
    plan = begun.plan
    local = begun.local
    recipe = plan.recipe
    engines = backend(spec.recipe)
    platform = joined.platform
    world = joined.lay_out(recipe)
    loaders = open_loaders(recipe, joined.prepared, world, pin_memory=platform.name == "cuda")
    if spec.overfit_batch:
        loaders = one_batch_forever(loaders, plan.num_microbatches)
    if local is not None:
        stack.enter_context(local.saver)
    with initial_weights(spec, resumed=begun.entry is not None) as weights:
        engine = (engines.build if begun.entry is None else engines.construct)(plan, platform, weights)
    stack.callback(engine.close)
    load_frozen_model(engine, spec)
    if local is not None:
        local.attach(engine)
    saver = stack.enter_context(
        AsyncSaver(
            joined.store,
            joined.group,
            engine.checkpoint_format(),
            async_save=recipe.checkpoint.async_save,
            most_recent_k=recipe.checkpoint.most_recent_k,
            keep_interval=recipe.checkpoint.keep_interval,
            keep_best=recipe.checkpoint.keep_best,
            saved=joined.observers.saved,
            shared=joined.observers.shared,
        )
    )
    progress = Progress() if begun.entry is None else resume(engine, begun.entry, world)
    progress = replace(progress, skipped_samples=merged(progress.skipped_samples, begun.rewinds.skipped()))
    if world.is_first:
        describe(joined, plan, engine.implementation, progress)
    trackers = stack.enter_context(ExitStack())
    tracker = trackers.enter_context(open_tracker(joined, engine, world, progress))
    for note in first_notes(joined, begun, progress.step):
        tracker.note(note)
    peak = joined.cluster.gpus[0].peak_tflops if joined.cluster.gpus else None
    loop = Loop(
        plan=plan,
        engine=engine,
        world=world,
        loaders=loaders,
        tracker=tracker,
        saver=saver,
        stop=joined.stop,
        recipe_hash=recipe_hash(spec.recipe),
        peak_flops=None if peak is None else peak * 1e12,
        observers=joined.observers,
        stop_after=spec.stop_after,
        evaluation_due=begun.is_due,
        monitored=at_start(begun.entry, plan),
        rewinds=begun.rewinds if recipe.faults.loss_spike_action == "rewind" else None,
        local=local,
        progress=progress,
    )
    return loop, trackers


def first_notes(joined: Joined, begun: StageStart, step: int) -> Iterator[Note]:
    """The notes that a stage begins with."""
    if joined.network is not None:
        yield Note(step=step, event="network", details={"network": joined.network})
    span = begun.plan.span
    if span is not None and step == span.first_step:
        yield Note(step=step, event="stage", details=stage_facts(begun.plan))
    yield from begun.notes


def run_loop(joined: Joined, begun: StageStart, loop: Loop, trackers: ExitStack) -> LoopOutcome:
    """Run it to its end, as often as it goes back."""
    while True:
        try:
            return loop.run(loop.progress)
        except Rewind as rewind:
            for observer in joined.observers:
                observer.rewind()
            # As a restart from that checkpoint: a sink drops what it has of later steps when it opens.
            joined.observers.beat("rest")
            loop.tracker.close("KILLED")
            trackers.close()
            progress = resume(loop.engine, rewind.entry, loop.world)
            progress = replace(progress, skipped_samples=merged(progress.skipped_samples, rewind.skipped))
            tracker = trackers.enter_context(open_tracker(joined, loop.engine, loop.world, progress))
            tracker.note(rewind.note)
            held_out = monitored(rewind.entry)
            metrics = joined.spec.run.metrics
            due = loop.loaders.evaluates and evaluation_due(
                progress.step, begun.plan.recipe, metrics, loop.world, held_out
            )
            loop.back(tracker, progress, due, held_out)


def follows(begun: StageStart, loop: Loop) -> bool:
    """Whether another stage follows the one that `loop` has finished."""
    if loop.progress.step >= begun.plan.run_recipe.train.train_iters:
        return False
    if stop_reason(loop.monitored, begun.plan.recipe.train) is not None:  # which ends the run, not the stage
        return False
    if not loop.losses and not begun.is_due:
        raise RuntimeError(f"the stage that ends at step {loop.progress.step} had no step and no evaluation to do")
    return True
