"""megatron-core's optimizer of a recipe: its configuration, what it needs, and its state from the start."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from inspect import signature
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer

from llmrecipes.engine.core.model.config import DTYPES, optimizer_overrides
from llmrecipes.errors import UserError
from llmrecipes.recipe.rules.optimizer_kinds import OF_MATRICES
from llmrecipes.recipe.schema import Optimizer, Recipe


def create_optimizer(recipe: Recipe, modules: Sequence[Any], chunks: list[Any]) -> MegatronOptimizer:
    """megatron-core's optimizer of a recipe, with its state allocated; a collective of all ranks.

    Args:
        recipe: of the run.
        modules: this rank's chunks of the model.
        chunks: the same in megatron-core's data-parallel wrappers.

    Raises:
        UserError: see `require_fused_adam`, and `groups.overrides`.
    """
    require_fused_adam(recipe)
    if recipe.optimizer.optimizer in OF_MATRICES:
        _leave_positions_to_adam(modules)
    options = optimizer_config(recipe)
    optimizer: MegatronOptimizer = get_megatron_optimizer(
        options,
        chunks,
        config_overrides=optimizer_overrides(options, recipe, modules),
        use_gloo_process_groups=False,
    )
    allocate_state(optimizer)
    return optimizer


def optimizer_config(recipe: Recipe) -> OptimizerConfig:
    """megatron-core's configuration of the optimizer."""
    optimizer, train = recipe.optimizer, recipe.train
    return OptimizerConfig(
        optimizer=optimizer.optimizer,
        lr=optimizer.lr,
        min_lr=optimizer.min_lr,
        weight_decay=optimizer.weight_decay,
        adam_beta1=optimizer.adam_beta1,
        adam_beta2=optimizer.adam_beta2,
        adam_eps=optimizer.adam_eps,
        clip_grad=optimizer.clip_grad,
        bf16=train.precision == "bf16",
        fp16=train.precision == "fp16",
        params_dtype=DTYPES[train.precision],
        initial_loss_scale=train.initial_loss_scale,
        min_loss_scale=train.min_loss_scale,
        loss_scale_window=train.loss_scale_window,
        hysteresis=train.hysteresis,
        use_distributed_optimizer=recipe.layout.use_distributed_optimizer,
        overlap_param_gather=recipe.layout.overlap_param_gather,
        **_several_types(recipe),
        **keys_of_kind(optimizer),
    )


def keys_of_kind(optimizer: Optimizer) -> dict[str, Any]:
    """The keys of an optimizer besides AdamW, which have megatron-core's names."""
    kind = optimizer.optimizer
    return {name: value for name, value in optimizer if kind != "adam" and name.startswith(f"{kind}_")}


def _several_types(recipe: Recipe) -> dict[str, Any]:
    """Types of gradients and moments, where they are not all fp32."""
    optimizer = recipe.optimizer
    reduced = recipe.train.grad_reduce_in_fp32
    if not optimizer.use_precision_aware_optimizer:
        return {}
    return {
        "use_precision_aware_optimizer": True,
        "main_grads_dtype": torch.float32 if reduced else DTYPES[recipe.train.precision],
        "exp_avg_dtype": DTYPES[optimizer.exp_avg_dtype],
        "exp_avg_sq_dtype": DTYPES[optimizer.exp_avg_sq_dtype],
        # A master weight is whole: weights in bf16 and the other 16 bits would have to be put together in checkpoints.
        "store_param_remainders": False,
    }


def require_fused_adam(recipe: Recipe) -> None:
    """Refuse to build a precision-aware optimizer without TransformerEngine's.

    Raises:
        UserError: it is not installed or too old.
    """
    if not recipe.optimizer.use_precision_aware_optimizer:
        return
    try:
        from transformer_engine.pytorch.optimizers import FusedAdam  # hidden where it cannot be used
    except ImportError:
        missing: set[str] = {"FusedAdam"}
    else:
        missing = {"exp_avg_dtype", "exp_avg_sq_dtype", "use_decoupled_grad"} - set(signature(FusedAdam).parameters)
    if missing:
        raise UserError(
            f"TransformerEngine's FusedAdam is missing, or lacks {', '.join(sorted(missing))}",
            where="optimizer.use_precision_aware_optimizer",
            rule="only its kernel updates weights of one type with gradients and moments of others; a dry run has none",
            fix="optimizer.use_precision_aware_optimizer=false with moments in fp32, or the CUDA image",
        )


def allocate_state(optimizer: MegatronOptimizer) -> None:
    """Allocate moments, and master weights that the optimizer itself keeps."""
    # Otherwise the moments are allocated at the first update: too late for a save before it (every step can overflow in
    # fp16), and too late to detect that memory does not suffice.
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if part.optimizer is None:  # a stage may have no parameters of a kind
            continue
        if part.init_state_fn is None:  # SGD, of torch or TransformerEngine
            _allocate_momentum(part.optimizer)
            continue
        if not part.config.use_precision_aware_optimizer:
            part.init_state_fn(part.optimizer, part.config)
            continue
        # TransformerEngine asks for an argument that megatron-core does not pass.
        for parameter in part.get_parameters():
            part.optimizer.initialize_state(parameter, False)


def _allocate_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Momentum of SGD from its first step: 0 · `sgd_momentum` + the gradient is the gradient that torch begins with."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter)} if group["momentum"] else {}


def _leave_positions_to_adam(modules: Iterable[Any]) -> None:
    """Mark learned positions as an embedding: megatron-core marks that of words only, and Muon would take the other.

    Args:
        modules: this rank's chunks.
    """
    for module in modules:
        positions = getattr(getattr(module, "embedding", None), "position_embeddings", None)
        if positions is not None:
            positions.weight.is_embedding_or_output_parameter = True
