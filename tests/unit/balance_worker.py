"""One training step of a small mixture of experts, and what its routers did."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from llmrecipes.engine.core.model.gpt import build
from llmrecipes.engine.core.platform import select
from llmrecipes.engine.core.world import model_parallel
from llmrecipes.engine.megatron.engine import Batch, MegatronEngine
from llmrecipes.engine.parts.router_balance import Balance, RouterBalance
from llmrecipes.hardware.cluster import Cluster
from llmrecipes.plan.derive import derive
from llmrecipes.recipe.schema import LayoutKeys, Model, Optimizer, Recipe, Train

EXPERTS, TOPK, SEQUENCE, VOCABULARY = 4, 2, 16, 128
ROOMY = Cluster(gpus=(), cpu_cores=1, memory_bytes=1 << 40, memory_available_bytes=1 << 40, disk_free_bytes=1 << 40)


def moe_recipe(layout: dict[str, Any] | None = None, train: dict[str, Any] | None = None, **model: Any) -> Recipe:
    """Two layers of four experts; a step has four micro-batches of two sequences."""
    shape = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "seq_length": SEQUENCE,
        "vocab_size": VOCABULARY,
        "add_bias_linear": False,
        "num_moe_experts": EXPERTS,
        "moe_router_topk": TOPK,
        "init_method_std": 0.2,
    }
    steps = {"train_iters": 10, "global_batch_size": 8, "precision": "fp32"}
    return Recipe(
        name="t",
        model=Model(**{**shape, **model}),
        layout=LayoutKeys(**{"micro_batch_size": 2, **(layout or {})}),
        train=Train(**{**steps, **(train or {})}),
        optimizer=Optimizer(lr=1e-3),
    )


def make_engine(recipe: Recipe, ranks: int = 1) -> MegatronEngine:
    """The engine of this rank; its groups have to be there."""
    platform = select()
    plan = derive(recipe, ranks, ROOMY)
    return MegatronEngine(plan, build(plan, platform), platform)


def micro_batches(count: int = 4, rank: int = 0, ranks: int = 1) -> Iterator[Batch]:
    """A data-parallel rank's micro-batches of the global batch, which are the same in every layout."""
    random = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCABULARY, (count, 2, SEQUENCE + 1), generator=random)
    for sample in tokens[rank::ranks]:
        yield {
            "tokens": sample[:, :-1],
            "labels": sample[:, 1:],
            "loss_mask": torch.ones(2, SEQUENCE),
            "position_ids": torch.arange(SEQUENCE).expand(2, -1),
        }


def one_step(engine: MegatronEngine, rank: int = 0, ranks: int = 1) -> Balance:
    """What the routers did in one training step."""
    engine.parts.the(RouterBalance).start()
    engine.train_step(micro_batches(rank=rank, ranks=ranks))
    return engine.parts.the(RouterBalance).collect()


def balances(layouts: dict[str, dict[str, Any]]) -> dict[str, Balance]:
    """Job of ranks: what the routers did in a step of each layout (name to `parallelism` keys)."""
    found = {}
    for name, degrees in layouts.items():
        recipe = moe_recipe(degrees, moe_aux_loss_coeff=0.01)
        with model_parallel(1, recipe.layout) as world:
            engine = make_engine(recipe, world.size)
            found[name] = one_step(engine, world.data_parallel_rank, world.data_parallel_size)
    return found
