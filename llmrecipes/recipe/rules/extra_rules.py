"""The rules of `model.extra`: fields of megatron-core's configuration that have no key in the recipe."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache

from pydantic import ValidationError

from llmrecipes.recipe.document import Problem, clip
from llmrecipes.recipe.reading.core_fields import converted, fields_of_model, type_of
from llmrecipes.recipe.schema import LayoutKeys, Model, Recipe, Train
from llmrecipes.recipe.sections.extra_keys import ExtraKeys
from llmrecipes.recipe.sections.section import Section
from llmrecipes.recipe.speedups.features import FEATURES, key_of

KEY = "model.extra"
CLASS = "TransformerConfig"
_PRECISION = "train.precision"
_STAGES = "layout.pipeline_model_parallel_size"
_CHUNKS = "layout.virtual_pipeline_model_parallel_size"
_LAYERS = "model.transformer_impl"
_GRAPHS = "layout.cuda_graph_impl"

_OTHER_NAMES: Mapping[str, str] = {
    "fp16": _PRECISION,
    "bf16": _PRECISION,
    "params_dtype": _PRECISION,
    "pipeline_dtype": _PRECISION,
    "enable_autocast": _PRECISION,
    "autocast_dtype": _PRECISION,
    "overlap_p2p_comm": _CHUNKS,
    "batch_p2p_comm": _CHUNKS,
    "deallocate_pipeline_outputs": _STAGES,
    "persist_layer_norm": _LAYERS,
    "moe_grouped_gemm": _LAYERS,
    "use_te_rng_tracker": _GRAPHS,
    "enable_cuda_graph": _GRAPHS,
    "external_cuda_graph": _GRAPHS,
    "cuda_graph_scope": "layout.cuda_graph_modules",
    "hierarchical_context_parallel_sizes": "layout.hierarchical_context_parallel_sizes",
    "moe_enable_deepep": "layout.moe_flex_dispatcher_backend",
    "moe_layer_recompute": "layout.recompute_modules",
    "moe_token_dropping": "model.moe_expert_capacity_factor",
    "mtp_hybrid_override_pattern": "model.mtp_num_layers",
    "mup_width_mult": "model.mup_base_hidden_size",
    "output_layer_init_method": "model.init_method",
    "embedding_init_method": "model.init_method",
    "embedding_init_method_std": "model.init_method_std",
    "qk_clip": "optimizer.qk_clip",
    "qk_clip_alpha": "optimizer.qk_clip_alpha",
    "qk_clip_threshold": "optimizer.qk_clip_threshold",
    "log_max_attention_logit": "tracking.layers_interval",
}
"""Fields that another key determines than one of their name."""

_INFERENCE = "megatron-core reads it in inference only"
_UNREAD = "what is built and trained here does not read it"
_NOT_BUILT = "the layers that it is for are not built"
_GROUPS = "the process groups that it needs are not made"
_CODE = "it names Python code, which a recipe never loads"
UNSUPPORTED: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "cache_mla_latents", "flash_decode", "mlp_chunks_for_prefill", "moe_pad_experts_for_cuda_graph_inference",
            "nccl_all_reduce_for_prefill", "symmetric_ar_type", "use_inference_optimized_layers",
        ),
        _INFERENCE,
    ),
    **dict.fromkeys(
        (
            "apply_residual_connection_post_layernorm", "cuda_graph_use_single_mempool",
            "defer_embedding_wgrad_compute", "is_hybrid_model",
            "moe_deepep_num_sms", "moe_hybridep_num_sms", "moe_per_layer_logging", "moe_router_padding_for_fp8",
            "moe_router_topk_limited_devices", "pipeline_model_parallel_comm_backend", "qk_l2_norm", "test_mode",
            "tp_comm_bootstrap_backend", "wgrad_deferral_limit",
        ),
        _UNREAD,
    ),
    **dict.fromkeys(
        (
            "experimental_attention_variant", "heterogeneous_block_specs", "hetereogenous_dist_checkpoint",
            "kitchen_attention_backend", "mrope_section", "mtp_standalone", "use_kitchen", "use_kitchen_attention",
            "use_mamba_mem_eff_path",
        ),
        _NOT_BUILT,
    ),
    **dict.fromkeys(
        (
            "expert_gtp_weight_remat_size", "expert_tensor_parallel_num_weight_shards", "gtp_weight_remat_size",
            "hybrid_context_parallel", "max_seqlen_per_dp_cp_rank", "tensor_parallel_num_weight_shards",
        ),
        _GROUPS,
    ),
    "fp8_quantizer_factory": _CODE,
    "fp4_quantizer_factory": _CODE,
    "config_logger_dir": "it writes files for which a run has no place",
    "batch_p2p_sync": "the device must not be waited for after each message",
    "calculate_per_token_loss": "the loss is the mean over the tokens of the global batch",
    "init_model_with_meta_device": "weights are created where they are trained",
    "masked_softmax_fusion": "no layer that is built has that kernel",
    "perform_initialization": "weights are filled by this program",
    "use_cpu_initialization": "it follows from the machine",
}  # fmt: skip
"""Fields that are not passed on, and why."""
_UNSUPPORTED_KINDS = {"inference_": _INFERENCE, "dsa_": _NOT_BUILT, "linear_": _NOT_BUILT, "mamba_": _NOT_BUILT}
"""The same by the first part of a name."""

LACKED_BY_LOCAL_LAYERS = (
    "activation_func_fp8_input_store", "apply_query_key_layer_scaling", "attention_softmax_in_fp32",
    "disable_parameter_transpose_cache", "flash_attention_version", "fp4", "fused_residual_rmsnorm",
    "fused_single_qkv_rope", "layernorm_zero_centered_gamma", "memory_efficient_layer_norm",
    "use_te_activation_func", "use_transformer_engine_op_fuser",
)  # fmt: skip
"""Fields of TransformerEngine's kernels, and of what our attention and norm replace in megatron-core's own layers."""

_ONLY_WITH = {"moe_": "model.num_moe_experts", "mtp_": "model.mtp_num_layers", "fp8_": "train.fp8"}
"""First part of a field's name, and the key without which it has no effect."""


@cache
def _extra() -> ExtraKeys:
    sections: dict[str, type[Section]] = {"model": Model, "layout": LayoutKeys, "train": Train}
    fields = fields_of_model(latent=True)
    same = {name: f"{at}.{name}" for at, kind in sections.items() for name in kind.model_fields if name in fields}
    features = {
        feature.field.removeprefix(f"{CLASS}."): key_of(name)
        for name, feature in FEATURES.items()
        if feature.field.startswith(f"{CLASS}.")
    }
    kinds = {name: why for name in fields for first, why in _UNSUPPORTED_KINDS.items() if name.startswith(first)}
    return ExtraKeys(
        KEY,
        f"fields of megatron-core's {CLASS}",
        {**same, **features, **_OTHER_NAMES},
        {**kinds, **UNSUPPORTED},
        "megatron/core/transformer/transformer_config.py has all of them",
    )


def rules(recipe: Recipe) -> Iterator[Problem]:
    """Fields that megatron-core does not have, that the recipe determines, or that have no effect; and wrong values."""
    model = recipe.model
    if not model.extra:
        return
    fields = fields_of_model(latent=model.multi_latent_attention)
    if not fields:  # megatron-core is not here; the ranks check again
        return
    known = {name: kind for name, kind in fields.items() if not name.startswith("_")}
    extra = _extra()
    yield from extra.problems(model.extra, known)
    for name, value in model.extra.items():
        if name in known and name not in extra.determined and name not in extra.unsupported:
            yield from _field(recipe, name, value, known[name])


def _field(recipe: Recipe, name: str, value: object, declared: ast.expr) -> Iterator[Problem]:
    key, words = f"{KEY}.{name}", ast.unparse(declared)
    if type_of(declared) is None:
        yield Problem(key, f"a field of the type {words}", "a recipe has JSON values only", "remove it")
        return
    for prefix, needed in _ONLY_WITH.items():
        section, _, wanted = needed.partition(".")
        if name.startswith(prefix) and getattr(getattr(recipe, section), wanted) is None:
            yield Problem(
                key, f"set without {needed}", f"it has no effect without {needed}", f"remove it, or set {needed}"
            )
    try:
        converted(value, declared)
    except ValidationError:
        yield Problem(key, clip(repr(value)), f"{name} must be of the type {words}", "correct or remove it")


def not_verified(recipe: Recipe) -> Iterator[str]:
    """What is said of `model.extra` where a plan or a recipe is shown."""
    if recipe.model.extra:
        yield f"{KEY} is not verified here: {', '.join(recipe.model.extra)}; llmrecipes verify compares its layout"


def inexact(model: Model, command: str) -> Iterator[Problem]:
    """Refused by a command whose model must compute what another one does."""
    if model.extra:
        yield Problem(
            KEY,
            f"{', '.join(model.extra)}",
            f"what such a field computes is not known to {command}",
            f"train a model without {KEY}",
        )
