"""Pruned weights stay zero in every layout, and the others are trained as in one process."""

from __future__ import annotations

import pytest
import torch

from llmrecipes.engine.core.model.gpt import build
from llmrecipes.engine.core.platform import select
from llmrecipes.engine.core.world import model_parallel
from llmrecipes.engine.megatron.engine import MegatronEngine
from llmrecipes.engine.parts.zeros import MATRIX
from llmrecipes.plan.derive import derive
from tests.dist.worlds import GlooWorld
from tests.unit.balance_worker import ROOMY, micro_batches, moe_recipe

pytestmark = pytest.mark.dist

LAYOUTS = {
    "tp2 ep2": {"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_tensor_parallel_size": 1,
            "expert_model_parallel_size": 2},
    "pp2": {"pipeline_model_parallel_size": 2},
    "dp2": {"overlap_grad_reduce": True, "overlap_param_gather": True},
    "ep2": {"expert_model_parallel_size": 2},
    "whole": {"use_distributed_optimizer": False},
}  # fmt: skip
BOUND = 0.15
"""Weights below it are removed: about half of each matrix."""


def trained(degrees: dict[str, object], precision: str) -> tuple[list[float], float]:
    """Losses and gradient norms of three steps, and the share of a rank's matrices that is zero."""
    recipe = moe_recipe(degrees, {"precision": precision, "keep_zeros": True})
    platform = select()
    with model_parallel(1, recipe.layout) as world:
        plan = derive(recipe, world.size, ROOMY)
        built = build(plan, platform)
        matrices = {
            name: weight
            for module in built.modules
            for name, weight in module.named_parameters()
            if MATRIX.fullmatch(name)
        }
        for weight in matrices.values():
            weight.data[weight.data.abs() < BOUND] = 0
        zeros = {name: weight.detach() == 0 for name, weight in matrices.items()}
        engine = MegatronEngine(plan, built, platform)
        replicas = plan.layout.data_parallel_size
        replica = torch.distributed.get_rank() if replicas > 1 else 0
        numbers = []
        for _ in range(3):
            result = engine.train_step(micro_batches(rank=replica, ranks=replicas))
            numbers += [result.loss, result.grad_norm or 0.0]
        with engine.params_synced():
            for name, weight in matrices.items():
                assert (weight.detach() == 0).equal(zeros[name]), name
        engine.close()
    assert matrices
    return numbers, sum(int(zero.sum()) for zero in zeros.values()) / sum(zero.numel() for zero in zeros.values())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.rotating
def test_zeros_stay_and_losses_are_those_of_one_process(layout: str, worlds: dict[int, GlooWorld]) -> None:
    alone, share = worlds[1].run(trained, {}, "fp32")
    assert 0.3 < share < 0.7
    numbers, _ = worlds[2].run(trained, LAYOUTS[layout], "fp32")
    assert numbers == pytest.approx(alone, rel=1e-5)
    assert alone[0] > alone[-2]


def test_master_weights_in_fp32_keep_the_zeros_of_bf16(worlds: dict[int, GlooWorld]) -> None:
    worlds[2].run(trained, LAYOUTS["dp2"], "bf16")
