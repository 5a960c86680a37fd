"""Factory of megatron-core engines."""

from __future__ import annotations

import re

import torch

from llmrecipes.checkpoint.store import Entry
from llmrecipes.engine.base import Platform, WeightSource
from llmrecipes.engine.core.backend import CoreBackend, loaded, to_be_loaded
from llmrecipes.engine.core.model.gpt import RecipeModel, build, construct
from llmrecipes.engine.megatron.engine import MegatronEngine
from llmrecipes.engine.megatron.stored_passes import ReferenceLogProbs, TeacherLogits
from llmrecipes.plan.derive import Plan


class MegatronBackend(CoreBackend):
    """Implements `engine.base.MetaBackend`."""

    def build(self, plan: Plan, platform: Platform, weights: WeightSource | None = None) -> MegatronEngine:
        return MegatronEngine(plan, build(plan, platform, weights), platform)

    def construct(self, plan: Plan, platform: Platform, base: WeightSource | None = None) -> MegatronEngine:
        return MegatronEngine(plan, to_be_loaded(plan, platform, base), platform)

    def construct_meta(self, plan: Plan, platform: Platform) -> MegatronEngine:
        return MegatronEngine(plan, construct(plan, platform), platform)

    def precomputation(self, plan: Plan, platform: Platform, top_k: int | None) -> ReferenceLogProbs | TeacherLogits:
        return ReferenceLogProbs(plan, platform) if top_k is None else TeacherLogits(plan, platform, top_k)

    def upcycle(self, dense: Plan, moe: Plan, platform: Platform, entry: Entry) -> MegatronEngine:
        source = loaded(dense, platform, entry)
        built = build(moe, platform, only=ROUTER)
        copy_into_experts(source.module, built.module)
        del source
        # The optimizer copies its master weights here, so the experts' weights must be set before.
        return MegatronEngine(moe, built, platform)


EXPERT = re.compile(r"\.experts\.local_experts\.\d+\.")
ROUTER = ".router."


@torch.no_grad()
def copy_into_experts(dense: RecipeModel, moe: RecipeModel) -> None:
    """Copy the dense MLP of each layer to its experts, and all other weights but the routers from the dense model.

    Args:
        dense: a full model of megatron-core's local layers, on one rank.
        moe: the same with experts; its routers keep their initial weights, and nothing else.

    Raises:
        ValueError: the models differ in more than their experts.
    """
    weights = dict(dense.named_parameters())
    used = set()
    for name, parameter in moe.named_parameters():
        if ROUTER in name:
            continue
        source = EXPERT.sub(".", name)
        if source not in weights or weights[source].shape != parameter.shape:
            raise ValueError(f"{name} {list(parameter.shape)} is not in the dense model")
        parameter.copy_(weights[source])
        used.add(source)
    if unused := sorted(weights.keys() - used):
        raise ValueError(f"the mixture of experts has no place for {', '.join(unused)}")
