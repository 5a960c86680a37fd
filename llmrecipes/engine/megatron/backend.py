"""Factory of megatron-core engines."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import torch
import torch.distributed as dist

from llmrecipes.checkpoint.format import Written
from llmrecipes.checkpoint.store import Entry
from llmrecipes.engine.base import Platform, WeightSource, World
from llmrecipes.engine.megatron import ema, generate, update, world
from llmrecipes.engine.megatron.checkpoint import initial
from llmrecipes.engine.megatron.checkpoint.loader import load, read_index
from llmrecipes.engine.megatron.checkpoint.tensors import StoredWeights
from llmrecipes.engine.megatron.engine import MegatronEngine
from llmrecipes.engine.megatron.model.gpt import BuiltModel, RecipeGPTModel, build, construct
from llmrecipes.engine.megatron.platform import select
from llmrecipes.engine.megatron.score import MegatronScorer
from llmrecipes.engine.megatron.state import load_model, model_state
from llmrecipes.engine.sampling import Sampling
from llmrecipes.hardware.profile import Group
from llmrecipes.plan.derive import Plan
from llmrecipes.recipe.schema import Recipe


class MegatronBackend:
    """See `engine.base.MetaBackend`."""

    def platform(self, local_rank: int = 0) -> Platform:
        """See `Backend`."""
        platform = select(local_rank)
        platform.install()
        return platform

    def join(self, recipe: Recipe, platform: Platform) -> AbstractContextManager[World]:
        """See `Backend`."""
        return world.join(platform, recipe.train.seed, recipe.parallelism)

    def meta_platform(self, rank: int, world_size: int, kernels: str, skew: float) -> Platform:
        """See `MetaBackend`."""
        from llmrecipes.engine.megatron.platform.meta import MetaPlatform  # imports torch's test helpers

        platform = MetaPlatform(rank, world_size, kernels, skew)
        platform.install()
        return platform

    def build(self, plan: Plan, platform: Platform, weights: WeightSource | None = None) -> MegatronEngine:
        """See `Backend`."""
        return MegatronEngine(plan, build(plan, platform, weights), platform)

    def construct(self, plan: Plan, platform: Platform, base: WeightSource | None = None) -> MegatronEngine:
        """See `Backend`."""
        return MegatronEngine(plan, _to_be_loaded(plan, platform, base), platform)

    def construct_meta(self, plan: Plan, platform: Platform) -> MegatronEngine:
        """See `MetaBackend`."""
        return MegatronEngine(plan, construct(plan, platform), platform)

    def load_weights(
        self, plan: Plan, platform: Platform, entry: Entry, base: WeightSource | None = None, *, averaged: bool = False
    ) -> TextGPT:
        """See `Backend`."""
        return TextGPT(_loaded(plan, platform, entry, base, averaged=averaged), plan, platform)

    def load_given(self, plan: Plan, platform: Platform, weights: WeightSource) -> TextGPT:
        """See `Backend`."""
        return TextGPT(build(plan, platform, weights), plan, platform)

    def tensors(self, entry: Entry, *, averaged: bool = False) -> StoredWeights:
        """See `Backend`."""
        return StoredWeights(entry, averaged=averaged)

    def upcycle(self, dense: Plan, moe: Plan, platform: Platform, entry: Entry) -> MegatronEngine:
        """See `Backend`."""
        given = _loaded(dense, platform, entry)
        built = build(moe, platform, only=ROUTER)
        copy_into_experts(given.module, built.module)
        del given
        # The optimizer copies its master weights here, so the experts' weights must be set before.
        return MegatronEngine(moe, built, platform)

    def write_weights(self, plan: Plan, weights: WeightSource, directory: Path) -> tuple[Written, dict[str, str]]:
        """See `Backend`."""
        return initial.write(plan, weights, directory)

    def learning_rate(self, recipe: Recipe, step: int) -> float:
        """See `Backend`."""
        return update.learning_rate(recipe, step)

    def process_groups(self) -> Mapping[Group, dist.ProcessGroup]:
        """See `Backend`."""
        return world.process_groups()


class TextGPT:
    """See `engine.base.TextModel`."""

    def __init__(self, built: BuiltModel, plan: Plan, platform: Platform) -> None:
        self._built, self._plan, self._platform = built, plan, platform

    def scorer(self) -> MegatronScorer:
        """See `TextModel`."""
        return MegatronScorer(self._built.modules, self._plan, self._platform)

    def generate(
        self, prompt: list[int], *, max_new_tokens: int, sampling: Sampling, vocab_size: int, eod: int | None
    ) -> Iterator[int]:
        """See `TextModel`."""
        return generate.generate(
            self._built.module, prompt, max_new_tokens=max_new_tokens, sampling=sampling, vocab_size=vocab_size, eod=eod
        )


def _loaded(
    plan: Plan, platform: Platform, entry: Entry, base: WeightSource | None = None, *, averaged: bool = False
) -> BuiltModel:
    index = read_index(entry)
    if averaged:
        ema.require(index, entry)
    built = _to_be_loaded(plan, platform, base)
    wanted = model_state(built.modules)
    load_model(built.modules, load(entry, ema.in_place_of_weights(wanted) if averaged else wanted, index))
    return built


def _to_be_loaded(plan: Plan, platform: Platform, base: WeightSource | None) -> BuiltModel:
    """A model for a checkpoint to be loaded into: without values, but for a frozen base, which no checkpoint has."""
    return construct(plan, platform) if plan.recipe.lora is None else build(plan, platform, base)


EXPERT = re.compile(r"\.experts\.local_experts\.\d+\.")
ROUTER = ".router."


@torch.no_grad()
def copy_into_experts(dense: RecipeGPTModel, moe: RecipeGPTModel) -> None:
    """Copy the dense MLP of each layer to its experts, and all other weights but the routers from the dense model.

    Args:
        dense: a full model of megatron-core's local layers, on one rank.
        moe: the same with experts; its routers keep their initial weights, and nothing else.

    Raises:
        ValueError: the models differ in more than their experts.
    """
    given = dict(dense.named_parameters())
    used = set()
    for name, parameter in moe.named_parameters():
        if ROUTER in name:
            continue
        source = EXPERT.sub(".", name)
        if source not in given or given[source].shape != parameter.shape:
            raise ValueError(f"{name} {list(parameter.shape)} is not in the dense model")
        parameter.copy_(given[source])
        used.add(source)
    if unused := sorted(given.keys() - used):
        raise ValueError(f"the mixture of experts has no place for {', '.join(unused)}")
