"""The plan's counts against the model that megatron-core really builds."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dist.worlds import GlooWorld

Measured = dict[str, dict[str, int]]

BASE = {"num_layers": 2, "hidden_size": 128, "num_attention_heads": 4, "seq_length": 128, "vocab_size": 500}
LLAMA = {
    "position_embedding_type": "rope", "normalization": "RMSNorm", "activation_func": "silu",
    "gated_linear_unit": True, "add_bias_linear": False, "num_query_groups": 2, "ffn_hidden_size": 352,
    "share_embeddings_and_output_weights": False,
}  # fmt: skip
EXPERTS = {"num_moe_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 160, "add_bias_linear": False}
LATENT = {
    **{key: value for key, value in LLAMA.items() if key != "num_query_groups"}, "multi_latent_attention": True,
    "qk_layernorm": True, "q_lora_rank": 48, "kv_lora_rank": 32, "qk_head_dim": 24, "qk_pos_emb_head_dim": 8,
    "v_head_dim": 16,
}  # fmt: skip


def _again(*modules: str) -> dict[str, Any]:
    """With so many logits that the loss is the fullest moment, not a layer that is being recomputed."""
    return {"recompute_granularity": "selective", "recompute_modules": modules, "vocab_size": 4000}


MODELS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "deep": {"num_layers": 5},
    "bf16": {"precision": "bf16"},
    "dropout": {"hidden_dropout": 0.1},
    "attention dropout": {"attention_dropout": 0.1},
    "norms of queries and keys": {"qk_layernorm": True},
    "sinks": {"softmax_type": "learnable"},
    "sinks of grouped queries": {**LLAMA, "softmax_type": "learnable", "precision": "bf16"},
    "recomputed sinks": {**LLAMA, **_again("core_attn"), "softmax_type": "learnable"},
    "a window": {**LLAMA, "window_size": [15, 0]},
    "windows and dropout": {"window_size": [15, 0], "window_attn_skip_freq": 2, "attention_dropout": 0.1},
    "wide heads": {"kv_channels": 48, "add_bias_linear": False, "add_qkv_bias": True, "num_query_groups": 1},
    "unpadded": {"make_vocab_size_divisible_by": 1, "max_position_embeddings": 200},
    "llama": LLAMA,
    "llama bf16": {**LLAMA, "precision": "bf16"},
    "selective": {"recompute_granularity": "selective"},
    "experts": {**EXPERTS, "num_layers": 3, "moe_layer_freq": 2},
    "gated experts": {**LLAMA, **EXPERTS, "num_layers": 3, "moe_layer_freq": [0, 1, 1]},
    "experts in bf16": {**LLAMA, **EXPERTS, "precision": "bf16"},
    "experts with biases": {**EXPERTS, "add_bias_linear": True, "num_layers": 3, "moe_layer_freq": 2},
    "gpt-oss": {
        **LLAMA, **EXPERTS, "add_bias_linear": True, "activation_func": "quick_gelu", "glu_linear_offset": 1.0,
        "activation_func_clamp_value": 7.0, "softmax_type": "learnable",
    },
    "gpt-oss in bf16": {
        **LLAMA, **EXPERTS, "add_bias_linear": True, "activation_func": "quick_gelu", "glu_linear_offset": 1.0,
        "activation_func_clamp_value": 7.0, "softmax_type": "learnable", "precision": "bf16",
    },
    "a clamped gate": {
        **LLAMA, "activation_func": "quick_gelu", "glu_linear_offset": 1.0, "activation_func_clamp_value": 7.0,
    },
    "shared experts": {**LLAMA, **EXPERTS, "moe_shared_expert_intermediate_size": 96},
    "latent attention": LATENT,
    "latent attention, whole queries": {**LATENT, "q_lora_rank": None},
    "multi-token prediction": {**LLAMA, "mtp_num_layers": 2},
    "deepseek": {
        **LATENT, **EXPERTS, "num_layers": 3, "moe_layer_freq": [0, 1, 1], "moe_shared_expert_intermediate_size": 96,
        "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True, "mtp_num_layers": 1,
    },
    "recomputed norms": {**LLAMA, **_again("layernorm")},
    "recomputed MLP": {**LLAMA, **_again("mlp"), "precision": "bf16", "hidden_dropout": 0.1},
    "recomputed norms and MLP": {**_again("layernorm", "mlp"), "add_bias_linear": False},
    "recomputed scores": {**LLAMA, **_again("core_attn"), "attention_dropout": 0.1},
    "recomputed latent attention": {**LATENT, **_again("core_attn", "mla_up_proj", "layernorm")},
    "recomputed projection of latent attention": {**LATENT, **_again("mla_up_proj"), "q_lora_rank": None},
    "recomputed scores of latent attention": {**LATENT, **_again("core_attn"), "precision": "bf16"},
    "recomputed experts": {
        **LLAMA, **EXPERTS, **_again("moe", "mlp", "layernorm"), "num_layers": 3, "moe_layer_freq": [0, 1, 1],
        "moe_shared_expert_intermediate_size": 96, "mtp_num_layers": 1,
    },
    "recomputed shared experts": {
        **LLAMA, **EXPERTS, **_again("shared_experts", "layernorm"), "moe_shared_expert_intermediate_size": 96,
    },
}  # fmt: skip
ON_LAYOUT = ("recompute_granularity", "recompute_modules")


def measure() -> Measured:
    """Parameters and bytes that autograd keeps, planned and real, for each of MODELS: job of a rank without a group."""
    import torch

    from llmrecipes.engine.core.model.gpt import build
    from llmrecipes.engine.core.platform import select
    from llmrecipes.engine.core.world import join
    from llmrecipes.hardware.cluster import Cluster
    from llmrecipes.plan.derive import derive
    from llmrecipes.recipe.schema import LayoutKeys, Recipe

    platform = select()
    platform.install()
    cpu = Cluster(gpus=(), cpu_cores=1, memory_bytes=1 << 40, memory_available_bytes=1 << 40, disk_free_bytes=1 << 40)
    found: Measured = {}
    with join(platform, 1, LayoutKeys()):
        for name, changes in MODELS.items():
            of_model = dict(changes)
            layout = {key: of_model.pop(key) for key in ON_LAYOUT if key in of_model} | {"micro_batch_size": 2}
            precision = of_model.pop("precision", "fp32")
            train = {"train_iters": 1, "global_batch_size": 2, "precision": precision}
            sections = {"model": {**BASE, **of_model}, "train": train, "optimizer": {"lr": 1e-3}, "layout": layout}
            recipe = Recipe.model_validate({"name": "t", **sections})
            plan = derive(recipe, 1, cpu)
            built = build(plan, platform)
            module = built.module.to(dtype=built.config.params_dtype).train()
            own = {tensor.untyped_storage().data_ptr() for tensor in [*module.parameters(), *module.buffers()]}
            kept: dict[int, torch.UntypedStorage] = {}

            def keep(tensor: torch.Tensor, kept: dict[int, torch.UntypedStorage] = kept) -> torch.Tensor:
                storage = tensor.untyped_storage()
                kept[storage.data_ptr()] = storage
                return tensor

            ids = torch.zeros(2, recipe.model.seq_length, dtype=torch.int64)
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                module(ids, ids, None, labels=ids)
            log_softmax = 4 * ids.numel() * plan.shape.vocab_size * (1 + (recipe.model.mtp_num_layers or 0))
            found[name] = {
                "parameters": sum(parameter.numel() for parameter in module.parameters()),
                "planned_parameters": plan.num_parameters.total,
                "kept": sum(storage.nbytes() for pointer, storage in kept.items() if pointer not in own) - log_softmax,
                "planned_kept": plan.memory.activations,
            }
    return found


@pytest.fixture(scope="module")
def measured(worlds: dict[int, GlooWorld]) -> Measured:
    found: Measured = worlds[1].start(measure, group=False).result()
    return found


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_exact(name: str, measured: Measured) -> None:
    assert measured[name]["planned_parameters"] == measured[name]["parameters"]


@pytest.mark.parametrize("name", MODELS)
def test_activations_are_those_that_autograd_keeps(name: str, measured: Measured) -> None:
    assert measured[name]["planned_kept"] == pytest.approx(measured[name]["kept"], rel=0.03)
