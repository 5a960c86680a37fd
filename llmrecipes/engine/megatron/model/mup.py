"""Maximal-update parametrisation (arXiv 2203.03466) for the versions of megatron-core that do not have it.

The numbers are those of megatron-core 0.19. Initial values are in `init` for all versions.
"""

from __future__ import annotations

from typing import Any

from megatron.core import optimizer as megatron_optimizer
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.optimizer_config import ParamKey, ParamWithNamePredicate

from llmrecipes.engine.megatron import versions
from llmrecipes.recipe.schema import Model, Optimizer
from llmrecipes.recipe.shape import Mup, mup


def own_mup(model: Model) -> Mup | None:
    """The factors that have to be applied here; None where megatron-core does it, or without `use_mup`."""
    return None if versions.MUP_IS_BUILT_IN else mup(model)


def scale_activations(module: GPTModel, factors: Mup) -> None:
    """Multiply the output of the embedding and the logits, those of multi-token prediction too.

    Args:
        module: a pipeline stage may have neither.
        factors: of its recipe.
    """
    if hasattr(module, "embedding") and factors.embedding_mult != 1.0:
        module.embedding.register_forward_hook(lambda _module, _inputs, output: output * factors.embedding_mult)
    if hasattr(module, "output_layer") and factors.output_mult != 1.0:
        module.output_layer.register_forward_hook(
            lambda _module, _inputs, output: (output[0] * factors.output_mult, *output[1:])
        )


def is_hidden(name: str, dimensions: int) -> bool:
    """Whether a parameter is a matrix between hidden layers, whose learning rate is divided by the width multiplier."""
    return dimensions > 1 and "embedding" not in name.lower() and not name.endswith("output_layer.weight")


def hidden_group(optimizer: Optimizer, factors: Mup) -> dict[str, float]:
    """Options of the parameter group of hidden matrices, by megatron-core's names.

    Its scheduler reads `max_lr` and `min_lr`. `lr_mult` has no effect on the rate: 0.16 tells groups of a checkpoint
    apart by it.
    """
    width = factors.width_mult
    return {
        "max_lr": optimizer.lr / width,
        "min_lr": optimizer.min_lr / width,
        "eps": optimizer.adam_eps / width,
        "lr_mult": 1.0 / width,
    }


def optimizer_overrides(config: OptimizerConfig, model: Model, optimizer: Optimizer) -> dict[ParamKey, Any] | None:
    """Overrides of megatron-core's parameter groups; None without the parametrisation.

    Args:
        config: of the optimizer.
        model, optimizer: sections of the recipe.
    """
    factors = mup(model)
    if factors is None:
        return None
    overrides: dict[ParamKey, Any] = megatron_optimizer.get_standard_config_overrides(config)
    if versions.MUP_IS_BUILT_IN:
        return overrides | megatron_optimizer.get_mup_config_overrides(config, factors.width_mult)
    if factors.width_mult == 1.0:
        return overrides
    hidden = ParamWithNamePredicate("mup_hidden", lambda parameter, name: is_hidden(name, parameter.dim()))
    return {**overrides, ParamKey(with_name_predicate=hidden): hidden_group(optimizer, factors)}
