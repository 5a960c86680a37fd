"""Logits and gradients against transformers' GPT-2, Llama, Mixtral, Qwen3-MoE and DeepSeek-V3, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers

from llmrecipes.engine.megatron.model.gpt import RecipeGPTModel, build
from llmrecipes.engine.megatron.platform import select
from llmrecipes.hardware.cluster import Cluster
from llmrecipes.plan.derive import derive
from llmrecipes.recipe.schema import Recipe

pytestmark = pytest.mark.usefixtures("world")

BOUND = 1e-5
LENGTH, VOCABULARY, HIDDEN, HEADS, GROUPS, LAYERS, FFN, EXPERTS = 32, 384, 64, 4, 2, 2, 96, 8
ROOMY = Cluster(gpus=(), cpu_cores=1, memory_bytes=1 << 40, memory_available_bytes=1 << 40, disk_free_bytes=1 << 40)

State = dict[str, torch.Tensor]

SHAPE: dict[str, Any] = {
    "num_layers": LAYERS, "hidden_size": HIDDEN, "num_attention_heads": HEADS, "seq_length": LENGTH,
    "vocab_size": VOCABULARY,
}  # fmt: skip
LLAMA: dict[str, Any] = {
    **SHAPE, "ffn_hidden_size": FFN, "num_query_groups": GROUPS, "position_embedding_type": "rope",
    "normalization": "RMSNorm", "activation_func": "silu", "gated_linear_unit": True, "add_bias_linear": False,
    "share_embeddings_and_output_weights": False,
}  # fmt: skip
MIXTRAL: dict[str, Any] = {**LLAMA, "num_moe_experts": EXPERTS, "moe_router_topk": 2}
DEEPSEEK: dict[str, Any] = {
    **MIXTRAL, "num_query_groups": None, "layernorm_epsilon": 1e-6, "multi_latent_attention": True,
    "qk_layernorm": True,
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_head_dim": 16, "qk_pos_emb_head_dim": 8, "v_head_dim": 16,
    "moe_layer_freq": [0, 1], "moe_shared_expert_intermediate_size": FFN, "moe_router_load_balancing_type": "none",
    "moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid", "moe_router_num_groups": 2,
    "moe_router_group_topk": 1, "moe_router_topk_scaling_factor": 2.5,
}  # fmt: skip

THEIRS: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": FFN, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "max_position_embeddings": LENGTH,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}  # fmt: skip

SCALED_ROPE: dict[str, Any] = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


# -- names -----------------------------------------------------------------------------------------------------------


def split_qkv(fused: torch.Tensor, groups: int) -> list[torch.Tensor]:
    """Query, key and value rows of megatron-core's projection, which holds them group by group."""
    width, each = HIDDEN // HEADS, HEADS // groups
    rows = fused.reshape(groups, each + 2, width, *fused.shape[1:])
    parts = (rows[:, :each], rows[:, each : each + 1], rows[:, each + 1 :])
    return [part.reshape(-1, *fused.shape[1:]) for part in parts]


def as_gpt2(ours: State) -> State:
    """Weights, or their gradients, by the names of GPT-2."""
    state = {
        "transformer.wte.weight": ours["embedding.word_embeddings.weight"],
        "transformer.wpe.weight": ours["embedding.position_embeddings.weight"],
    }
    names = {
        "ln_1": "input_layernorm", "attn.c_proj": "self_attention.linear_proj", "ln_2": "pre_mlp_layernorm",
        "mlp.c_fc": "mlp.linear_fc1", "mlp.c_proj": "mlp.linear_fc2",
    }  # fmt: skip
    for kind in ("weight", "bias"):
        state[f"transformer.ln_f.{kind}"] = ours[f"decoder.final_layernorm.{kind}"]
        for layer in range(LAYERS):
            theirs, here = f"transformer.h.{layer}", f"decoder.layers.{layer}"
            for name, mine in names.items():
                # transformers' Conv1D holds its matrices transposed.
                state[f"{theirs}.{name}.{kind}"] = _transposed(ours[f"{here}.{mine}.{kind}"])
            fused = torch.cat(split_qkv(ours[f"{here}.self_attention.linear_qkv.{kind}"], HEADS))
            state[f"{theirs}.attn.c_attn.{kind}"] = _transposed(fused)
    return state


def _transposed(value: torch.Tensor) -> torch.Tensor:
    return value.t() if value.dim() == 2 else value


def as_llama(ours: State) -> State:
    """Weights, or their gradients, by the names of Llama and of the models that were made after it."""
    state = {
        "model.embed_tokens.weight": ours["embedding.word_embeddings.weight"],
        "lm_head.weight": ours["output_layer.weight"],
        "model.norm.weight": ours["decoder.final_layernorm.weight"],
    }
    for layer in range(LAYERS):
        theirs, prefix = f"model.layers.{layer}", f"decoder.layers.{layer}."
        here = {name.removeprefix(prefix): value for name, value in ours.items() if name.startswith(prefix)}
        part = {
            "input_layernorm.weight": here["input_layernorm.weight"],
            "post_attention_layernorm.weight": here["pre_mlp_layernorm.weight"],
            **_attention(here),
            **(_experts(here) if "mlp.router.weight" in here else _mlp(here, "mlp")),
        }
        state |= {f"{theirs}.{name}": value for name, value in part.items()}
    return state


def _attention(here: State) -> State:
    state = {"self_attn.o_proj.weight": here["self_attention.linear_proj.weight"]}
    if "self_attention.linear_qkv.weight" in here:
        for name, part in zip("qkv", split_qkv(here["self_attention.linear_qkv.weight"], GROUPS), strict=True):
            state[f"self_attn.{name}_proj.weight"] = part
    names = {
        "q_norm": "q_layernorm", "k_norm": "k_layernorm", "q_a_proj": "linear_q_down_proj",
        "q_b_proj": "linear_q_up_proj", "kv_a_proj_with_mqa": "linear_kv_down_proj",
        "kv_b_proj": "linear_kv_up_proj", "kv_a_layernorm": "kv_layernorm",
    }  # fmt: skip
    if "self_attention.linear_q_down_proj.weight" in here:
        names["q_a_layernorm"] = names.pop("q_norm")
    for name, mine in names.items():
        if (value := here.get(f"self_attention.{mine}.weight")) is not None:
            state[f"self_attn.{name}.weight"] = value
    return state


def _mlp(here: State, name: str) -> State:
    gate, up = here[f"{name}.linear_fc1.weight"].chunk(2)
    return {
        f"{name}.gate_proj.weight": gate,
        f"{name}.up_proj.weight": up,
        f"{name}.down_proj.weight": here[f"{name}.linear_fc2.weight"],
    }


def _experts(here: State) -> State:
    def stacked(matrix: str) -> torch.Tensor:
        return torch.stack([here[f"mlp.experts.local_experts.{number}.{matrix}.weight"] for number in range(EXPERTS)])

    state = {
        "mlp.gate.weight": here["mlp.router.weight"],
        "mlp.experts.gate_up_proj": stacked("linear_fc1"),
        "mlp.experts.down_proj": stacked("linear_fc2"),
    }
    if "mlp.router.expert_bias" in here:
        state["mlp.gate.e_score_correction_bias"] = here["mlp.router.expert_bias"]
    if "mlp.shared_experts.linear_fc1.weight" in here:
        state |= _mlp(here, "mlp.shared_experts")
    return state


# -- models ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A model in both libraries."""

    model: dict[str, Any]
    theirs: Callable[[], torch.nn.Module]
    names: Callable[[State], State] = as_llama


CASES = {
    "gpt-2": Case(
        SHAPE,
        lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=HIDDEN, n_layer=LAYERS, n_head=HEADS,
                activation_function="gelu", attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
            )
        ),
        as_gpt2,
    ),
    "llama": Case(LLAMA, lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**THEIRS))),
    "llama with scaled rope": Case(
        {**LLAMA, "rotary_base": 500000.0, "rope_scaling": True, "rope_scaling_factor": 8.0},
        lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**THEIRS, "rope_parameters": SCALED_ROPE})),
    ),
    "mixtral": Case(
        MIXTRAL,
        lambda: transformers.MixtralForCausalLM(
            transformers.MixtralConfig(**THEIRS, num_local_experts=EXPERTS, num_experts_per_tok=2)
        ),
    ),
    "qwen3-moe": Case(
        {**MIXTRAL, "qk_layernorm": True, "kv_channels": HIDDEN // HEADS},
        lambda: transformers.Qwen3MoeForCausalLM(
            transformers.Qwen3MoeConfig(
                **THEIRS, num_experts=EXPERTS, num_experts_per_tok=2, moe_intermediate_size=FFN, norm_topk_prob=True,
                head_dim=HIDDEN // HEADS,
            )
        ),
    ),
    "deepseek-v3": Case(
        DEEPSEEK,
        lambda: transformers.DeepseekV3ForCausalLM(
            transformers.DeepseekV3Config(
                **{**THEIRS, "num_key_value_heads": HEADS, "rms_norm_eps": 1e-6}, q_lora_rank=24, kv_lora_rank=16,
                qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, first_k_dense_replace=1,
                moe_intermediate_size=FFN, n_routed_experts=EXPERTS, n_shared_experts=1, num_experts_per_tok=2,
                n_group=2, topk_group=1, routed_scaling_factor=2.5, norm_topk_prob=True,
            )
        ),
    ),
}  # fmt: skip


def randomised(model: dict[str, Any]) -> RecipeGPTModel:
    """Our model; its norms, biases and expert biases are random too."""
    sections = {
        "model": model,
        "train": {"train_iters": 1, "micro_batch_size": 2, "global_batch_size": 2, "precision": "fp32"},
        "optimizer": {"lr": 1e-3},
    }
    recipe = Recipe.model_validate({"name": "hf", **sections})
    module = build(derive(recipe, 1, ROOMY), select()).module
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=random), alpha=0.1)
        for name, buffer in module.named_buffers():
            if name.endswith("expert_bias"):
                buffer.add_(torch.randn(buffer.shape, generator=random), alpha=0.1)
    return module


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """‖one - other‖ / ‖other‖."""
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize("name", CASES)
def test_logits_and_gradients_are_those_of_transformers(name: str) -> None:
    case = CASES[name]
    ours, theirs = randomised(case.model), case.theirs()
    weights = case.names({key: value for key, value in ours.state_dict().items() if value is not None})
    loaded = theirs.load_state_dict(weights, strict=False)
    assert not loaded.unexpected_keys
    assert set(loaded.missing_keys) <= {"lm_head.weight"}, "only a tied output layer has no weights of its own"
    ids = torch.randint(VOCABULARY, (2, LENGTH + 1), generator=torch.Generator().manual_seed(4))
    tokens, labels = ids[:, :-1], ids[:, 1:]
    positions = torch.arange(LENGTH).expand(2, -1)

    logits = theirs.eval()(tokens).logits
    with torch.no_grad():
        assert distance(ours.eval()(tokens, positions, None), logits) < BOUND

    F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    ours.train()(tokens, positions, None, labels=labels).mean().backward()
    mine = {key: parameter.grad for key, parameter in ours.named_parameters() if parameter.grad is not None}
    gradients = case.names(mine)
    expected = {key: parameter.grad for key, parameter in theirs.named_parameters() if parameter.grad is not None}
    assert expected.keys() == gradients.keys()
    differences = {key: distance(gradient, expected[key]) for key, gradient in gradients.items()}
    assert max(differences.values()) < BOUND, {key: value for key, value in differences.items() if value >= BOUND}
