"""One rank of a verification."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING

from llmrecipes.engine.requirements import require_packages
from llmrecipes.errors import ExitCode
from llmrecipes.train.rank import failure_reported, rank_main
from llmrecipes.verify.result import first_beyond
from llmrecipes.verify.verify_spec import StepRecord, TrainingRecord, VerifySpec

if TYPE_CHECKING:
    from llmrecipes.engine.base import Backend, Platform, World


def run(spec: VerifySpec) -> ExitCode:
    """Join the ranks that a launcher started, or form a world of one, and `train`.

    Raises:
        UserError: a problem the user can fix.
    """
    require_packages(spec.recipe)
    # Imported here so that a rank with an invalid spec fails before torch is loaded.
    from llmrecipes.engine.backends import backend

    engines = backend(spec.recipe)
    platform = engines.platform(int(os.environ.get("LOCAL_RANK", "0")))
    with engines.join(spec.recipe, platform) as world, failure_reported(spec.recipe):
        train(spec, engines, world, platform)
    return ExitCode.DONE


def train(spec: VerifySpec, engines: Backend, world: World, platform: Platform) -> None:
    """Train according to the spec, and write this rank's part of the record."""
    from llmrecipes.data.folder.prepared import open_prepared
    from llmrecipes.hardware.cluster import detect
    from llmrecipes.plan.derive import derive
    from llmrecipes.tracking.progress import Counted
    from llmrecipes.train.loaders import open_loaders
    from llmrecipes.verify.observe import observe

    recipe = spec.recipe
    plan = derive(recipe, world.size, detect())
    loaders = open_loaders(recipe, open_prepared(recipe, spec.data_dir), world, pin_memory=False)
    engine = engines.build(plan, platform)
    progress = Counted() if world.is_first else None
    if progress is not None:
        progress.begin("steps", spec.iters)
    try:
        with closing(loaders.train(0)) as batches:
            done = None if progress is None else progress.add
            record = observe(engine, plan, batches, spec.iters, spec.folder, _keep(spec), done)
    finally:
        if progress is not None:
            progress.close()
    if world.is_first:
        record.write(spec.folder)


def _keep(spec: VerifySpec) -> Callable[[int, StepRecord], bool]:
    if spec.reference is None:
        return lambda number, _step: number == spec.keep_step
    reference = TrainingRecord.read(spec.reference).steps
    return lambda number, step: first_beyond(step, reference[number - 1], spec.tolerance) is not None


if __name__ == "__main__":
    rank_main(VerifySpec, run)
