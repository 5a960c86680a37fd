"""MoE weights from a dense model (sparse upcycling, arXiv 2212.05055)."""

from __future__ import annotations

import re

import torch

from llmrecipes.engine.megatron.model.gpt import RecipeGPTModel

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
