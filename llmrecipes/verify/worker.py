"""One rank of a verification."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING

from llmrecipes.errors import ExitCode
from llmrecipes.train.rank import rank_main
from llmrecipes.verify.scale import first_beyond
from llmrecipes.verify.spec import Record, Step, VerifySpec

if TYPE_CHECKING:
    from llmrecipes.engine.megatron.platform import Platform
    from llmrecipes.engine.megatron.world import World


def run(spec: VerifySpec) -> ExitCode:
    """Join the ranks a launcher started, or be a world of one, and `train`.

    Raises:
        UserError: what the user can mend.
    """
    # Imports are here, because a rank that was told nonsense should say so before torch is loaded.
    from llmrecipes.engine.megatron.platform import select
    from llmrecipes.engine.megatron.world import join

    platform = select(int(os.environ.get("LOCAL_RANK", "0")))
    platform.install()
    with join(platform, spec.recipe.train.seed, spec.recipe.parallelism) as world:
        train(spec, world, platform)
    return ExitCode.DONE


def train(spec: VerifySpec, world: World, platform: Platform) -> None:
    """Train as the spec says, and write this rank's part of the record."""
    from llmrecipes.data.prepared import open_prepared
    from llmrecipes.engine.megatron.engine import MegatronEngine
    from llmrecipes.engine.megatron.model.gpt import build
    from llmrecipes.hardware.cluster import detect
    from llmrecipes.plan.derive import derive
    from llmrecipes.train.loaders import open_loaders
    from llmrecipes.verify.observe import observe

    recipe = spec.recipe
    plan = derive(recipe, world.size, detect())
    loaders = open_loaders(recipe, open_prepared(recipe, spec.data_dir), world, pin_memory=False)
    built = build(recipe, plan, platform)
    engine = MegatronEngine(recipe, plan, built, platform)
    with closing(loaders.train(0)) as batches:
        record = observe(engine, built, plan, batches, spec.iters, spec.folder, _keep(spec))
    if world.is_first:
        record.write(spec.folder)


def _keep(spec: VerifySpec) -> Callable[[int, Step], bool]:
    if spec.reference is None:
        return lambda number, _step: number == spec.keep_step
    reference = Record.read(spec.reference).steps
    return lambda number, step: first_beyond(step, reference[number - 1], spec.tolerance) is not None


if __name__ == "__main__":
    rank_main(VerifySpec, run)
