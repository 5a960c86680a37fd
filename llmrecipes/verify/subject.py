"""The recipe that is verified, and its one-process reference: pure functions of a recipe."""

from __future__ import annotations

from llmrecipes.errors import UserError
from llmrecipes.recipe.engines import without_zero
from llmrecipes.recipe.proxy import Device, proxy
from llmrecipes.recipe.schema import Parallelism, Recipe

MIN_ADAM_EPS = 1e-6
"""Some gradients are zero except for rounding (that of a key bias: the softmax cancels it). Adam normalizes a gradient
by its magnitude, so with a smaller eps rounding would move such weights, differently in every layout."""

PLAIN = Parallelism(use_distributed_optimizer=False)


def subject(recipe: Recipe, iters: int, device: Device) -> Recipe:
    """The scaled-down version of a recipe whose layout is verified, in fp32 and without random numbers.

    Raises:
        UserError: the recipe computes something different in another layout by design.
    """
    small = proxy(recipe, device)
    _require_same_meaning(small)
    lora = small.lora and small.lora.model_copy(update={"dropout": 0.0})
    return small.model_copy(
        update={
            "lora": lora,
            "model": small.model.model_copy(
                update={"hidden_dropout": 0.0, "attention_dropout": 0.0, "moe_input_jitter_eps": None}
            ),
            "train": small.train.model_copy(
                update={"precision": "fp32", "train_iters": max(iters, small.train.train_iters)}
            ),
            "optimizer": small.optimizer.model_copy(update={"adam_eps": max(small.optimizer.adam_eps, MIN_ADAM_EPS)}),
            "data": small.data.model_copy(update={"num_workers": 0}),
        }
    )


def reference(small: Recipe, data_parallel_size: int) -> Recipe:
    """The same training in one process: no parallelism, no ZeRO, no recomputation.

    Args:
        small: from `subject`.
        data_parallel_size: of the layout.
    """
    # Micro-batches have the same sequences in both, except with global_aux_loss, which balances experts over those of
    # all data-parallel ranks.
    together = data_parallel_size if small.model.moe_router_load_balancing_type == "global_aux_loss" else 1
    train = {
        "micro_batch_size": small.train.micro_batch_size * (together if small.model.num_moe_experts else 1),
        "recompute_granularity": None,
        "recompute_method": None,
        "recompute_num_layers": None,
        "recompute_modules": None,
    }
    return without_zero(small).model_copy(update={"parallelism": PLAIN, "train": small.train.model_copy(update=train)})


def _require_same_meaning(small: Recipe) -> None:
    parallel = small.parallelism
    split = parallel.tensor_model_parallel_size * parallel.context_parallel_size
    if small.model.num_moe_experts and small.model.moe_expert_capacity_factor is not None and split > 1:
        raise UserError(
            f"{small.model.moe_expert_capacity_factor:g} with sequences split over {split} ranks",
            where="model.moe_expert_capacity_factor",
            rule="each rank drops tokens within its own part of a sequence, and so different ones than one process: "
            "the training differs by design",
            fix="model.moe_expert_capacity_factor=null verifies everything else",
        )
