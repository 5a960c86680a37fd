"""What the backends of megatron-core and DeepSpeed share: device, process groups, and models without an optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from llmrecipes.checkpoint.state_format import Written
from llmrecipes.checkpoint.store import Entry
from llmrecipes.engine.base import Platform, Rank, WeightSource, World
from llmrecipes.engine.core import ema, generation, update, world
from llmrecipes.engine.core.checkpoint import initial
from llmrecipes.engine.core.checkpoint.loader import load
from llmrecipes.engine.core.checkpoint.reading import read_index, require_average
from llmrecipes.engine.core.importance import measure
from llmrecipes.engine.core.model.fake_quantize import renew_rounded
from llmrecipes.engine.core.model.gpt import BuiltModel, build, construct, software
from llmrecipes.engine.core.platform import select
from llmrecipes.engine.core.rank_weights import load_model, model_state
from llmrecipes.engine.core.score import GPTScorer
from llmrecipes.engine.core.sparsegpt import sparsify
from llmrecipes.engine.meters import Importance, Sparsified
from llmrecipes.engine.sampling import Sampling
from llmrecipes.hardware.profile import Group
from llmrecipes.plan.derive import Plan
from llmrecipes.recipe.derived.stage_runs import in_stage
from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.speedups.graphs import GRAPHS
from llmrecipes.recipe.speedups.overlap import OVERLAP
from llmrecipes.recipe.variants.pruned_models import PruneOptions
from llmrecipes.tracking.progress import Counted


class CoreBackend:
    """The methods of `engine.base.MetaBackend` that construct no engine."""

    def platform(self, local_rank: int = 0) -> Platform:
        platform = select(local_rank)
        platform.install()
        return platform

    def connect(self, platform: Platform) -> AbstractContextManager[Rank]:
        return world.connect(platform)

    def lay_out(self, recipe: Recipe) -> AbstractContextManager[World]:
        return world.model_parallel(recipe.train.seed, recipe.layout, after_errors=world.is_alone())

    @contextmanager
    def join(self, recipe: Recipe, platform: Platform) -> Iterator[World]:
        with self.connect(platform), self.lay_out(recipe) as laid_out:
            yield laid_out

    def require(self, plan: Plan, platform: Platform) -> None:
        with in_stage(plan.recipe):
            software(plan, platform)
            if (settings := plan.recipe.layout.nccl_communicator_config_path) is not None:
                world.require_communicators(Path(settings))

    def meta_platform(self, rank: int, world_size: int, kernels: str, skew: float) -> Platform:
        from llmrecipes.engine.core.platform.meta import MetaPlatform  # imports torch's test helpers

        platform = MetaPlatform(rank, world_size, kernels, skew)
        platform.install()
        return platform

    def load_weights(
        self, plan: Plan, platform: Platform, entry: Entry, base: WeightSource | None = None, *, averaged: bool = False
    ) -> TextGPT:
        plan = _for_any_shape(plan)
        return TextGPT(loaded(plan, platform, entry, base, averaged=averaged), plan, platform)

    def load_given(self, plan: Plan, platform: Platform, weights: WeightSource) -> TextGPT:
        plan = _for_any_shape(plan)
        return TextGPT(build(plan, platform, weights), plan, platform)

    def write_weights(self, plan: Plan, weights: WeightSource, directory: Path) -> tuple[Written, dict[str, str]]:
        return initial.write(plan, weights, directory)

    def importance(self, plan: Plan, platform: Platform, entry: Entry, batches: Iterable[torch.Tensor]) -> Importance:
        built = loaded(plan, platform, entry)
        return measure(built.module, batches, plan.shape, platform.device)

    def sparsify(
        self,
        plan: Plan,
        platform: Platform,
        entry: Entry,
        batches: Sequence[torch.Tensor],
        options: PruneOptions,
        progress: Counted | None = None,
    ) -> Sparsified:
        return sparsify(loaded(plan, platform, entry).module, batches, options, platform.device, progress)

    def learning_rate(self, recipe: Recipe, step: int) -> float:
        return update.learning_rate(recipe, step)

    def process_groups(self) -> Mapping[Group, dist.ProcessGroup]:
        return world.process_groups()


class TextGPT:
    """Implements `engine.base.TextModel`."""

    def __init__(self, built: BuiltModel, plan: Plan, platform: Platform) -> None:
        self._built = built
        self._plan = plan
        self._platform = platform

    def scorer(self) -> GPTScorer:
        return GPTScorer(self._built.modules, self._plan, self._platform)

    def generate(
        self, prompt: list[int], *, max_new_tokens: int, sampling: Sampling, vocab_size: int, eod: int | None
    ) -> Iterator[int]:
        return generation.generate(
            self._built.module, prompt, max_new_tokens=max_new_tokens, sampling=sampling, vocab_size=vocab_size, eod=eod
        )


def _for_any_shape(plan: Plan) -> Plan:
    """Without user buffers and CUDA graphs, which have the shape of a micro-batch of training."""
    none = {name: None for name in (*OVERLAP, *GRAPHS) if name.startswith(("tp_comm", "cuda_graph"))}
    return replace(plan, recipe=plan.recipe.with_layout(**none))


def loaded(
    plan: Plan, platform: Platform, entry: Entry, base: WeightSource | None = None, *, averaged: bool = False
) -> BuiltModel:
    """A model with the weights of a checkpoint; arguments as `Backend.load_weights`."""
    index = read_index(entry)
    if averaged:
        require_average(index, entry)
    built = to_be_loaded(plan, platform, base)
    wanted = model_state(built.modules)
    load_model(built.modules, load(entry, ema.in_place_of_weights(wanted) if averaged else wanted, index))
    renew_rounded(built.modules, entry.step)
    return built


def to_be_loaded(plan: Plan, platform: Platform, base: WeightSource | None) -> BuiltModel:
    """A model for a checkpoint to be loaded into: without values, but for a frozen base, which no checkpoint has."""
    return construct(plan, platform) if plan.recipe.lora is None else build(plan, platform, base)
