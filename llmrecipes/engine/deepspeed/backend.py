"""Factory of DeepSpeed engines, and the files in which offload to NVMe keeps a rank's state."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path

import torch.distributed as dist

from llmrecipes.checkpoint.store import Entry
from llmrecipes.engine.base import Engine, MetaEngine, Platform, WeightSource, World
from llmrecipes.engine.core.backend import CoreBackend
from llmrecipes.engine.core.checkpoint.slices import ShardedParameter
from llmrecipes.engine.core.model.gpt import BuiltModel
from llmrecipes.engine.deepspeed.build import build, construct, zero
from llmrecipes.engine.deepspeed.engine import DeepSpeedEngine
from llmrecipes.engine.deepspeed.runtime import communication
from llmrecipes.errors import UserError
from llmrecipes.plan.derive import Plan
from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.sections.zero import Zero


class DeepSpeedBackend(CoreBackend):
    """Implements `engine.base.MetaBackend`."""

    @contextmanager
    def lay_out(self, recipe: Recipe) -> Iterator[World]:
        with super().lay_out(recipe) as world:
            partitioned = zero(recipe).stage == 3 and world.data_parallel_size > 1
            yield replace(world, holds_whole_model=world.holds_whole_model and not partitioned)

    def build(self, plan: Plan, platform: Platform, weights: WeightSource | None = None) -> DeepSpeedEngine:
        return _engine(plan, platform, partial(build, weights=weights))

    def construct(self, plan: Plan, platform: Platform, base: WeightSource | None = None) -> DeepSpeedEngine:
        return _engine(plan, platform, construct)

    def construct_meta(self, plan: Plan, platform: Platform) -> MetaEngine:
        with ExitStack() as stack:
            stack.enter_context(communication(platform))
            # Else the first operation that is seen imports it, where stage 3 has replaced constructors of tensors.
            import_module("torch._dynamo")
            # Its import is DeepSpeed's, which guesses an accelerator unless it has been named.
            from llmrecipes.engine.deepspeed.meta_engine import MetaDeepSpeedEngine

            built, sharded_parameters = construct(plan, platform)
            return MetaDeepSpeedEngine(plan, built, sharded_parameters, platform, stack.pop_all())

    def upcycle(self, dense: Plan, moe: Plan, platform: Platform, entry: Entry) -> Engine:
        """The checkpoint is written by the other engine, which needs no partitions."""
        from llmrecipes.engine.megatron.backend import MegatronBackend

        return MegatronBackend().upcycle(dense, moe, platform, entry)


def _engine(
    plan: Plan, platform: Platform, model: Callable[[Plan, Platform], tuple[BuiltModel, list[ShardedParameter]]]
) -> DeepSpeedEngine:
    with ExitStack() as stack:
        stack.enter_context(swap_files(zero(plan.recipe), dist.get_rank()))
        stack.enter_context(communication(platform))
        built, sharded_parameters = model(plan, platform)
        return DeepSpeedEngine(plan, built, sharded_parameters, platform, stack.pop_all())


@contextmanager
def swap_files(zero: Zero, rank: int) -> Iterator[None]:
    """A block in which only this process has the files of its rank; they are removed at its end.

    DeepSpeed names them only by rank, so a second run with the same `nvme_path` on a node would overwrite the
    optimizer state of the first. What a killed run has left, the next one overwrites.

    Raises:
        UserError: another process has them.
    """
    if zero.nvme_path is None:
        yield
        return
    folder = Path(zero.nvme_path) / "zero_stage_3"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"rank{rank}.flock").open("w") as mutex:
        try:
            fcntl.flock(mutex, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"another run on this node uses {folder}",
                where="layout.zero.nvme_path",
                rule="concurrent runs on a node must use different folders",
                fix=f"layout.zero.nvme_path={zero.nvme_path}/NAME, or wait until the other run has ended",
            ) from None
        try:
            yield
        finally:
            shutil.rmtree(folder / "optimizer" / f"rank{rank}", ignore_errors=True)
