"""One rank of a run, from joining the others to the last checkpoint."""

from __future__ import annotations

import gc
import logging
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib import import_module
from itertools import count

from llmrecipes.engine.backends import backend
from llmrecipes.engine.requirements import require_packages
from llmrecipes.errors import ExitCode, UserError
from llmrecipes.hardware.builds import import_megatron
from llmrecipes.hardware.cluster import Cluster, detect
from llmrecipes.plan.derive import Plan, derive
from llmrecipes.recipe.features import value
from llmrecipes.train.rank import failure_reported, first_step_reporter, nodes, rank_main
from llmrecipes.train.spec import RunSpec

logger = logging.getLogger(__name__)


IMPORTED_LATER = ("debug", "folder", "hangs", "loop", "measured", "network", "profile", "resume", "rewind", "summary")
"""Modules of this package that a rank imports after its spec was read; with them come all others."""


def import_all(spec: RunSpec) -> None:
    """Import what a rank of a run needs, so that a spare has it before it is the rank; no device is used."""
    require_packages(spec.recipe)
    backend(spec.recipe)
    for name in IMPORTED_LATER:
        import_module(f"llmrecipes.train.{name}")


def run(spec: RunSpec) -> ExitCode:
    """Train, and return the exit code.

    Raises:
        UserError: a problem the user can fix.
    """
    require_packages(spec.recipe)
    import_megatron()
    gc.freeze()  # modules live to the end, and the first collection would take a tenth of the start to look at them
    # Imported here so that a rank with an invalid spec fails before torch is loaded.
    from llmrecipes.checkpoint.saver import AsyncSaver, claim, saver_group
    from llmrecipes.console import console
    from llmrecipes.data.prepared import open_prepared
    from llmrecipes.engine.base import Progress
    from llmrecipes.faults.signals import catch_signals
    from llmrecipes.hardware.nics import ports
    from llmrecipes.recipe.load import recipe_hash
    from llmrecipes.tracking.events import MEASURED, Note
    from llmrecipes.train.debug import anomaly_mode
    from llmrecipes.train.evaluations import TaskEvaluations, evaluation_due, load_tasks
    from llmrecipes.train.folder import require_exists, stop_when_deleted
    from llmrecipes.train.hangs import hangs, watchdog
    from llmrecipes.train.loaders import one_batch_forever, open_loaders
    from llmrecipes.train.loop import Loop, LoopOutcome
    from llmrecipes.train.measured import line, measured
    from llmrecipes.train.network import leave_out_other_adapters, nccl_output, report_on_error, require_fabric
    from llmrecipes.train.profile import profiled
    from llmrecipes.train.resume import choose, initial_weights, resume
    from llmrecipes.train.rewind import Rewind, Rewinds, merged
    from llmrecipes.train.summary import describe, open_tracker, print_summary
    from llmrecipes.train.telemetry import measured_ranks

    recipe = spec.recipe
    tasks = load_tasks(recipe)
    engines = backend(recipe)
    platform = engines.platform(int(os.environ.get("LOCAL_RANK", "0")))
    if spec.on_gpus:
        _require_gpu(platform.name)
    cluster = detect().times(nodes())
    plan = _as_planned(spec, cluster)  # before the ranks wait for each other
    leave_out_other_adapters(ports())
    # Errors are reported before anything is closed; the process group is left last.
    with (
        nccl_output() as output,
        engines.join(recipe, platform) as world,
        ExitStack() as stack,
        failure_reported(recipe),
        report_on_error(output),
    ):
        network = require_fabric(platform, output, allow_socket=spec.allow_socket)
        prepared = open_prepared(recipe, spec.data_dir)
        loaders = open_loaders(recipe, prepared, world, pin_memory=platform.name == "cuda")
        if spec.overfit_batch:
            loaders = one_batch_forever(loaders, plan.num_microbatches)
        store = spec.run.store()
        stop = stack.enter_context(catch_signals(lambda: _newest(store)))
        # A run that still writes here is refused before its checkpoints are judged.
        group = saver_group()
        stack.callback(store.release)
        claim(store, group)
        rewinds = Rewinds(recipe, spec.run, store, world)
        went_back = () if spec.from_scratch else rewinds.finish()
        start = choose(store, world, from_scratch=spec.from_scratch)
        with initial_weights(spec, resumed=start.entry is not None) as weights:
            engine = (engines.build if start.entry is None else engines.construct)(plan, platform, weights)
        stack.callback(engine.close)
        saver = stack.enter_context(
            AsyncSaver(
                store,
                group,
                engine.checkpoint_format(),
                async_save=recipe.checkpoint.async_save,
                most_recent_k=recipe.checkpoint.most_recent_k,
                keep_interval=recipe.checkpoint.keep_interval,
            )
        )
        progress = Progress() if start.entry is None else resume(engine, start.entry, world)
        progress = replace(progress, skipped_samples=merged(progress.skipped_samples, rewinds.skipped()))
        if world.is_first:
            describe(recipe, plan, engine.implementation, cluster, prepared, progress, spec.run_dir, network)
        tracked = stack.enter_context(ExitStack())
        tracker = tracked.enter_context(open_tracker(spec, plan, engine.implementation, world, progress))
        if network is not None:
            tracker.note(Note(step=progress.step, event="network", details={"network": network}))
        for note in (*start.notes, *went_back):
            tracker.note(note)
        profile_step = stack.enter_context(
            profiled(spec.profile_steps, spec.run.logs, world.rank, trace=spec.profile_trace)
        )
        if spec.anomaly:
            for module in engine.modules:
                stack.enter_context(anomaly_mode(module))
        check_folder = stop_when_deleted(spec.run_dir, stop, world)
        report_first_step = first_step_reporter()

        steps = count(1)

        def note_hangs() -> None:
            if world.is_first:
                for note in hangs(spec.run, progress.step + len(loop.losses)):
                    tracker.note(note)

        def after_step() -> None:
            profile_step()
            check_folder()
            collect()
            report_first_step()
            # The report of a start that hung may be written after the ranks have started again.
            number = next(steps)
            if number & (number - 1) == 0:
                note_hangs()

        watched = stack.enter_context(watchdog(recipe, spec.run, world))
        telemetry = stack.enter_context(measured_ranks(plan, platform, world, watched, spec.run_dir))
        beat = telemetry.beat
        peak = cluster.gpus[0].peak_tflops if cluster.gpus else None
        loop = Loop(
            plan=plan,
            engine=engine,
            world=world,
            loaders=loaders,
            tracker=tracker,
            saver=saver,
            stop=stop,
            recipe_hash=recipe_hash(recipe),
            peak_flops=None if peak is None else peak * 1e12,
            after_step=after_step,
            tasks=TaskEvaluations(
                recipe,
                engine,
                world,
                prepared.tokenizer(),
                tasks,
                tracker,
                stop,
                spec.run.metrics,
                beat,
            ),
            stop_after=spec.stop_after,
            evaluation_due=evaluation_due(progress.step, recipe, spec.run.metrics, world),
            rewinds=rewinds if recipe.faults.loss_spike_action == "rewind" else None,
            beat=beat,
            telemetry=telemetry,
        )
        note_hangs()
        collect = stack.enter_context(garbage_collected(plan))
        outcome = None
        while outcome is None:
            try:
                outcome = loop.run(progress)
            except Rewind as rewind:
                # As a restart from that checkpoint: a sink drops what it has of later steps when it opens.
                loop.beat("rest")
                tracker.close("KILLED")
                tracked.close()
                progress = resume(engine, rewind.entry, world)
                progress = replace(progress, skipped_samples=merged(progress.skipped_samples, rewind.skipped))
                tracker = tracked.enter_context(open_tracker(spec, plan, engine.implementation, world, progress))
                tracker.note(rewind.note)
                loop = loop.again(tracker, evaluation_due(progress.step, recipe, spec.run.metrics, world))
        telemetry.settle()
        note_hangs()
        require_exists(spec.run_dir, world, lambda: tracker.close("FAILED"))
        if values := measured(loop.steady, platform, spec.predicted):
            tracker.note(Note(step=progress.step + len(loop.losses), event=MEASURED, details=values))
        # Close the progress display before printing anything else.
        tracker.close("FINISHED" if outcome is LoopOutcome.FINISHED else "KILLED")
        with engine.params_synced():
            if world.is_first and values:
                console().print(line(values), markup=False)
            if world.is_first and outcome is LoopOutcome.FINISHED:
                print_summary(spec, prepared, loop)
    return outcome.value


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


def _require_gpu(device: str) -> None:
    if device != "cuda":
        raise UserError(
            f"the run is planned for GPUs, and torch sees none on {socket.gethostname()}",
            where="torch.cuda",
            rule="a run that is planned for GPUs never trains on a CPU",
            fix="llmrecipes doctor on that node; a container needs docker run --gpus all, or apptainer exec --nv",
        )


def _as_planned(spec: RunSpec, cluster: Cluster) -> Plan:
    """The plan as this rank derives it.

    Raises:
        UserError: it is not the one that was checked before the start.
    """
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    planned, cluster = spec.planned or {}, replace(cluster, nvlink_domain=spec.nvlink_domain)
    # A different number of ranks may not have a plan at all.
    plan = derive(spec.recipe, ranks, cluster) if planned.get("world_size", ranks) == ranks else None
    facts = {"world_size": ranks} if plan is None else plan.facts()
    differing = [f"{name} {facts[name]}, not {then}" for name, then in planned.items() if facts.get(name, then) != then]
    if plan is None or differing:
        raise UserError(
            f"this rank derives a different plan: {'; '.join(differing)}",
            where=f"rank {os.environ.get('RANK', '0')} on {socket.gethostname()}",
            rule="all ranks train according to the plan that was checked before the start",
            fix="as many ranks as planned, nodes of one kind, and the same version of llmrecipes on all nodes",
        )
    return plan


def _newest(store: object) -> str:
    entries = store.entries()  # type: ignore[attr-defined]
    return str(entries[-1].path) if entries else "none"


if __name__ == "__main__":
    rank_main(RunSpec, run, import_all)
