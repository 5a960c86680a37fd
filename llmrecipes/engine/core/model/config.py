"""recipe -> megatron-core `TransformerConfig`: keys of the same name are passed on, the others translated here.

megatron-core has the maximal-update parametrisation (arXiv 2203.03466) but for its initial values, which are in `init`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import optimizer as megatron_optimizer
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.optimizer_config import ParamKey
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from llmrecipes.engine.core.model import groups
from llmrecipes.engine.core.refusal import ERRORS, Errors, accepted
from llmrecipes.errors import UserError
from llmrecipes.plan.derive import Plan
from llmrecipes.recipe.derived import stage_layout
from llmrecipes.recipe.derived.shape import Mup, mup
from llmrecipes.recipe.reading.core_fields import converted, fields_of_model
from llmrecipes.recipe.rules.extra_rules import CLASS, KEY, LACKED_BY_LOCAL_LAYERS
from llmrecipes.recipe.schema import Model, Optimizer, Recipe
from llmrecipes.recipe.speedups.features import FEATURES, SpeedTarget, resolve, values


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    """Squared ReLU (arXiv 2109.08668); megatron-core's is a torch.compile'd function, so it would need a compiler."""
    return F.relu(x).square()


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """GELU by its approximation with tanh (arXiv 1606.08415, section 2)."""
    return F.gelu(x, approximate="tanh")


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """GELU by its approximation with a sigmoid (arXiv 1606.08415, section 2); not megatron-core's, as above."""
    return x * torch.sigmoid(1.702 * x)


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ACTIVATIONS = {
    "gelu": F.gelu, "gelu_tanh": gelu_tanh, "quick_gelu": quick_gelu, "silu": F.silu, "squared_relu": squared_relu,
}  # fmt: skip


# Every key of model, layout and train that is also a field of megatron-core's configuration is passed on
# unchanged, except features and these: they are set below, or not at all.
TRANSLATED = frozenset(
    {
        "ffn_hidden_size",  # these three: from the plan, if unset in the recipe
        "num_query_groups",
        "kv_channels",
        "activation_func",  # the function of that name
        "recompute_granularity",  # both: from the plan, which knows the kernels of the device
        "recompute_modules",
        "init_method",  # `init` fills the parameters
        "moe_aux_loss_coeff",  # both: scaled to have the same weight in every layout
        "moe_z_loss_coeff",
    }
)
NOT_PASSED = frozenset(
    {
        "num_layers_in_first_pipeline_stage",  # both: set below as a layout, the only form beside a pattern of layers
        "num_layers_in_last_pipeline_stage",
        "transformer_impl",  # resolved by `spec.choose`, and set below: `auto` is not a value of megatron-core's field
    }
)


def transformer_config(
    plan: Plan, *, on_gpu: bool, transformer_engine: bool, target: SpeedTarget | None = None
) -> TransformerConfig:
    """megatron-core's configuration of a recipe.

    Args:
        plan: of the recipe, with its derived sizes.
        on_gpu: create parameters on the GPU and allow its fused kernels.
        transformer_engine: layers are TransformerEngine's.
        target: what decides on the features; None: as in the CUDA image, or on a CPU with a compiler.

    Raises:
        UserError: megatron-core refuses what `model.extra` sets.
    """
    recipe = plan.recipe
    model, train = recipe.model, recipe.train
    dtype = DTYPES[train.precision]
    # The plan expects TransformerEngine on GPUs; layers without it have no activation of experts by itself.
    recomputed = [name for name in plan.recompute_modules if transformer_engine or name != "moe_act"]
    target = target or replace(plan.target, device="cuda" if on_gpu else "cpu", transformer_engine=transformer_engine)
    kind = MLATransformerConfig if model.multi_latent_attention else TransformerConfig
    options: dict[str, Any] = {
        **_same_name(recipe, kind),
        "num_query_groups": plan.shape.num_query_groups,
        "kv_channels": plan.shape.kv_channels,
        "pipeline_model_parallel_layout": stage_layout.written(recipe),
        "ffn_hidden_size": plan.shape.ffn_hidden_size,
        "activation_func": ACTIVATIONS[model.activation_func],
        "recompute_granularity": plan.recompute_granularity,
        "recompute_modules": recomputed or None,
        # `init` fills the parameters. They are still "initialised", because megatron-core marks the sharded ones only
        # then, and its gradient norm relies on the mark.
        "init_method": _leave,
        "output_layer_init_method": _leave,
        "embedding_init_method": _leave,
        "use_cpu_initialization": not on_gpu,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": train.precision == "bf16",
        "fp16": train.precision == "fp16",
        # Two stages with several chunks each send to each other in both directions at once; batched messages between
        # one pair of ranks would be mixed up.
        "overlap_p2p_comm": recipe.layout.virtual_pipeline_model_parallel_size is not None,
        "batch_p2p_comm": recipe.layout.virtual_pipeline_model_parallel_size is None,
        # It waits for the device after each message, for a fault of old versions of torch.
        "batch_p2p_sync": False,
        # A stage's output is freed once it is sent: the backward pass needs its graph alone.
        "deallocate_pipeline_outputs": recipe.layout.pipeline_model_parallel_size > 1,
        # The loss is a mean over the tokens of the global batch, however it was cut into micro-batches and ranks.
        "calculate_per_token_loss": True,
        "masked_softmax_fusion": False,
        **_speed(recipe, target),
        "persist_layer_norm": transformer_engine,
        "transformer_impl": "transformer_engine" if transformer_engine else "local",
    }
    if model.num_moe_experts:
        options |= _balance_coefficients(plan)
        options["moe_grouped_gemm"] = transformer_engine
        if recipe.lora is not None:
            options["moe_router_bias_update_rate"] = 0.0  # routers are frozen, biases included
    options |= _extra(model)
    with accepted_by_core(model.extra), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "use_mup is enabled, but custom", UserWarning)  # `init` scales the values
        config = kind(**options)
    if model.position_embedding_type == "yarn":
        # megatron-core reads these from attributes that its configuration does not declare; attention scales by YaRN's
        # factor wherever the first of them exists.
        for name, value in model:
            if name.startswith("yarn_"):
                setattr(config, name, value)
    return config


def accepted_by_core(extra: Mapping[str, Any], errors: Errors = ERRORS) -> AbstractContextManager[None]:
    """A block in which megatron-core reads `model.extra`: see `accepted`."""
    return accepted("megatron-core", KEY, extra, f"megatron-core checks how fields of its {CLASS} go together", errors)


def require_in_local_layers(model: Model) -> None:
    """Refuse fields of `model.extra` that have no effect in local layers.

    Raises:
        UserError: there is one.
    """
    lacking = [name for name in model.extra if name in LACKED_BY_LOCAL_LAYERS]
    if lacking:
        raise UserError(
            f"set for megatron-core's own layers: {', '.join(lacking)}",
            where=KEY,
            rule="only TransformerEngine's layers, which need a GPU, have them",
            fix="remove them, or train where model.transformer_impl auto selects TransformerEngine",
        )


def _extra(model: Model) -> dict[str, Any]:
    """Fields that `model.extra` sets."""
    declared = fields_of_model(latent=model.multi_latent_attention) if model.extra else {}
    return {name: converted(value, declared[name]) for name, value in model.extra.items()}


def _speed(recipe: Recipe, target: SpeedTarget) -> dict[str, Any]:
    """What the features of `speed` set."""
    chosen = values(resolve(recipe, target), "TransformerConfig")
    if "attention_backend" in chosen:
        chosen["attention_backend"] = AttnBackend[chosen["attention_backend"]]
    if "cuda_graph_impl" in chosen:
        chosen["cuda_graph_modules"] = list(chosen.get("cuda_graph_modules", ()))  # empty: whole layers
        chosen["use_te_rng_tracker"] = True
    return chosen


def _same_name(recipe: Recipe, kind: type[TransformerConfig]) -> dict[str, Any]:
    """Values of the keys with the same name in both; those of experts only for MoE models."""
    accepted = {field.name for field in fields(kind)} - TRANSLATED - NOT_PASSED - FEATURES.keys()
    sections = (recipe.model, recipe.layout, recipe.train)
    return {
        name: value
        for section in sections
        for name, value in section
        if name in accepted and (recipe.model.num_moe_experts or not name.startswith("moe_"))
    }


def _balance_coefficients(plan: Plan) -> dict[str, float | None]:
    """Coefficients that give the routers' losses the same weight in every layout.

    Each rank adds its part of such a loss, times a number of tokens, to a sum that is divided by the tokens of the
    global batch. The parts add up to one loss, so that number must be the tokens of all ranks that share it.
    megatron-core uses those of the tensor- and context-parallel ranks, which is correct except for the loss that
    data-parallel ranks share too.
    """
    model = plan.recipe.model
    auxiliary = model.moe_aux_loss_coeff
    if model.moe_router_load_balancing_type == "global_aux_loss":
        auxiliary *= plan.layout.data_parallel_size
    return {"moe_aux_loss_coeff": auxiliary, "moe_z_loss_coeff": model.moe_z_loss_coeff}


def _leave(_weight: torch.Tensor) -> None: ...


def is_hidden(name: str, dimensions: int) -> bool:
    """Whether a parameter is a matrix between hidden layers, whose learning rate is divided by the width multiplier."""
    return dimensions > 1 and "embedding" not in name.lower() and not name.endswith("output_layer.weight")


def hidden_group(optimizer: Optimizer, factors: Mup) -> dict[str, float]:
    """Options of the parameter group of hidden matrices, by megatron-core's names.

    Its scheduler reads `max_lr` and `min_lr`. `lr_mult` has no effect on the rate: megatron-core tells groups of a
    checkpoint apart by it.
    """
    width = factors.width_mult
    return {
        "max_lr": optimizer.lr / width,
        "min_lr": optimizer.min_lr / width,
        "eps": optimizer.adam_eps / width,
        "lr_mult": 1.0 / width,
    }


def optimizer_overrides(config: OptimizerConfig, recipe: Recipe, modules: Iterable[Any]) -> dict[ParamKey, Any] | None:
    """Overrides of megatron-core's parameter groups; None without muP and `optimizer.groups`, which exclude each other.

    A collective of all ranks if the recipe has groups.

    Args:
        config: of the optimizer.
        recipe: of the run.
        modules: this rank's chunks.

    Raises:
        UserError: see `groups.overrides`.
    """
    optimizer = recipe.optimizer
    factors = mup(recipe.model)
    by_pattern = groups.overrides(modules, optimizer)
    if factors is None and not by_pattern:
        return None
    overrides: dict[ParamKey, Any] = megatron_optimizer.get_standard_config_overrides(config) | by_pattern
    if factors is None:
        return overrides
    return overrides | megatron_optimizer.get_mup_config_overrides(config, factors.width_mult)
