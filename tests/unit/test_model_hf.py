"""Logits, gradients and greedy text of every family against transformers, with random weights, through files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers

from llmrecipes.engine.core.generation import generate
from llmrecipes.engine.core.model.gpt import RecipeModel, build
from llmrecipes.engine.core.platform import select
from llmrecipes.engine.sampling import Sampling
from llmrecipes.hf.family import FAMILIES, config_of, family_of
from llmrecipes.hf.match import section_of
from llmrecipes.hf.safetensors import write
from llmrecipes.hf.table import Family, resolved
from llmrecipes.hf.weights import AsHuggingFace
from llmrecipes.plan.derive import derive
from llmrecipes.recipe.derived.weight_names import weights
from llmrecipes.recipe.rules.moe_rules import LATENT_YARN
from llmrecipes.recipe.schema import Model, Recipe
from tests.helpers import ROOMY, another
from tests.refusals import refused

pytestmark = pytest.mark.usefixtures("world")

BOUND = 1e-5
LENGTH, VOCABULARY, HIDDEN, HEADS, GROUPS, LAYERS, FFN, EXPERTS = 32, 381, 64, 4, 2, 3, 96, 8

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
    "qk_layernorm": True, "moe_ffn_hidden_size": 48,
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_head_dim": 16, "qk_pos_emb_head_dim": 8, "v_head_dim": 12,
    "moe_layer_freq": [0, 1, 1], "moe_shared_expert_intermediate_size": 96, "moe_router_load_balancing_type": "none",
    "moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid", "moe_router_num_groups": 2,
    "moe_router_group_topk": 1, "moe_router_topk_scaling_factor": 2.5,
}  # fmt: skip
GPT_OSS: dict[str, Any] = {
    **MIXTRAL, "num_layers": 4, "add_bias_linear": True, "activation_func": "quick_gelu", "glu_linear_offset": 1.0,
    "activation_func_clamp_value": 2.0, "softmax_type": "learnable", "window_size": [6, 0],
    "window_attn_skip_freq": [1, 0, 1, 0], "kv_channels": 24, "init_method_std": 0.08,
}  # fmt: skip
YARN: dict[str, Any] = {
    "position_embedding_type": "yarn", "yarn_rotary_scaling_factor": 4.0, "yarn_original_max_position_embeddings": 8,
}  # fmt: skip
TINY: dict[str, Any] = {
    **SHAPE, "position_embedding_type": "rope", "normalization": "RMSNorm", "add_bias_linear": False,
    "qk_layernorm": True, "share_embeddings_and_output_weights": False,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A model, and the family that it belongs to."""

    family: str
    model: dict[str, Any]
    asked: bool = False
    """Whether the family is only used when it is asked for: another one has the same form."""
    config: dict[str, Any] = field(default_factory=dict)
    """What its config.json has to say, in transformers' own words."""


CASES = {
    "gpt-2": Case("gpt2", SHAPE, config={"activation_function": "gelu", "tie_word_embeddings": True}),
    "gpt-2 as published": Case("gpt2", {**SHAPE, "activation_func": "gelu_tanh", "layernorm_epsilon": 1e-4}),
    "gpt-2, untied": Case("gpt2", {**SHAPE, "share_embeddings_and_output_weights": False, "ffn_hidden_size": FFN}),
    "llama": Case("llama", {**LLAMA, "rotary_base": 5e5, "layernorm_epsilon": 1e-4}, config={"rms_norm_eps": 1e-4}),
    "llama 3.1, tied": Case(
        "llama",
        {**LLAMA, "rope_scaling": True, "rope_scaling_factor": 4.0, "share_embeddings_and_output_weights": True},
        config={"tie_word_embeddings": True},
    ),
    "llama, yarn": Case("llama", {**LLAMA, **YARN, "yarn_mscale": 0.7, "yarn_mscale_all_dim": 0.4}),
    "qwen2, yarn": Case(
        "qwen2",
        {
            **LLAMA, **YARN, "add_qkv_bias": True, "yarn_mscale": 0.0, "yarn_beta_fast": 2.0, "yarn_beta_slow": 0.2,
            "yarn_correction_range_round_to_int": False,
        },
    ),
    "llama, wide heads": Case("llama", {**LLAMA, "kv_channels": 24}, config={"head_dim": 24}),
    "mistral": Case("mistral", LLAMA, asked=True, config={"sliding_window": None}),
    "mistral, window": Case(
        "mistral", {**LLAMA, "window_size": [6, 0]}, config={"sliding_window": 7},
    ),
    "qwen2, windows": Case(
        "qwen2",
        {**LLAMA, "num_layers": 4, "add_qkv_bias": True, "window_size": [3, 0], "window_attn_skip_freq": [0, 1, 0, 1]},
        config={"sliding_window": 4, "layer_types": ["full_attention", "sliding_attention"] * 2},
    ),
    "qwen3, two tokens": Case(
        "qwen3",
        {**LLAMA, "num_layers": 2, "qk_layernorm": True, "window_size": [1, 0], "window_attn_skip_freq": [1, 0]},
        config={"sliding_window": 2, "max_window_layers": 0},
    ),
    "mixtral, window": Case("mixtral", {**MIXTRAL, "window_size": [6, 0]}, config={"sliding_window": 7}),
    "qwen3-moe, window": Case(
        "qwen3_moe", {**MIXTRAL, "qk_layernorm": True, "window_size": [6, 0]}, config={"sliding_window": 7},
    ),
    "ministral": Case(
        "ministral", {**LLAMA, "window_size": [6, 0], "window_attn_skip_freq": [1, 0, 0], "kv_channels": 24},
        config={"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention", "full_attention"]},
    ),
    "seed-oss": Case(
        "seed_oss", {**LLAMA, "add_qkv_bias": True, "kv_channels": 24}, config={"attention_bias": True},
    ),
    "phi-3": Case("phi3", {**LLAMA, "rotary_percent": 0.5, "window_size": [6, 0]}, config={"sliding_window": 7}),
    "phi-4": Case("phi3", LLAMA, asked=True, config={"sliding_window": None}),
    "smollm3": Case("smollm3", {**LLAMA, "no_rope_freq": [0, 1, 1]}, config={"no_rope_layers": [1, 0, 0]}),
    "smollm3, windows": Case(
        "smollm3",
        {
            **LLAMA, "num_layers": 4, "no_rope_freq": [0, 1, 0, 1], "window_size": [6, 0],
            "window_attn_skip_freq": [0, 1, 0, 0], "share_embeddings_and_output_weights": True,
        },
        config={"layer_types": ["full_attention", "sliding_attention", "full_attention", "full_attention"]},
    ),
    "ernie 4.5": Case("ernie4_5", {**LLAMA, "kv_channels": 24}, asked=True, config={"use_bias": False}),
    "ernie 4.5, yarn": Case("ernie4_5", {**LLAMA, **YARN}, asked=True),
    "qwen2": Case("qwen2", {**LLAMA, "add_qkv_bias": True, "share_embeddings_and_output_weights": True}),
    "qwen3": Case("qwen3", {**LLAMA, "qk_layernorm": True, "kv_channels": 24}),
    "apertus: gpt-tiny": Case("apertus", TINY, config={"hidden_act": "gelu"}),
    "apertus, scaled rope": Case(
        "apertus", {**TINY, "rope_scaling": True, "activation_func": "squared_relu", "num_query_groups": 2}
    ),
    "mixtral": Case("mixtral", MIXTRAL, config={"num_local_experts": EXPERTS}),
    "mixtral, narrow experts": Case("mixtral", {**MIXTRAL, "moe_ffn_hidden_size": 32, "moe_router_topk": 3}),
    "qwen3-moe": Case("qwen3_moe", {**MIXTRAL, "qk_layernorm": True}, config={"norm_topk_prob": True}),
    "qwen3-moe, dense layers": Case(
        "qwen3_moe",
        {
            **MIXTRAL, "qk_layernorm": True, "kv_channels": 24, "moe_ffn_hidden_size": 32, "moe_layer_freq": 2,
            "moe_router_pre_softmax": True,
        },
        config={"mlp_only_layers": [1], "norm_topk_prob": False},
    ),
    "glm-4.5": Case(
        "glm4_moe",
        {
            **MIXTRAL, "moe_ffn_hidden_size": 48, "moe_layer_freq": [0, 1, 1], "qk_layernorm": True,
            "moe_shared_expert_intermediate_size": 96, "moe_router_load_balancing_type": "none",
            "moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid", "add_qkv_bias": True,
            "moe_router_topk_scaling_factor": 2.5, "rotary_percent": 0.5, "kv_channels": 24,
        },
        config={"first_k_dense_replace": 1, "n_shared_experts": 2},
    ),
    "gpt-oss": Case(
        "gpt_oss",
        {**GPT_OSS, **YARN, "yarn_correction_range_round_to_int": False, "moe_ffn_hidden_size": 48},
        config={
            "swiglu_limit": 2.0, "sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"] * 2,
            "attention_bias": True, "intermediate_size": 48,
        },
    ),
    "gpt-oss, plain": Case(
        "gpt_oss", {**GPT_OSS, "window_size": None, "window_attn_skip_freq": None},
        config={"layer_types": ["full_attention"] * 4},
    ),
    "deepseek-v3": Case("deepseek_v3", DEEPSEEK, config={"first_k_dense_replace": 1, "n_shared_experts": 2}),
    "deepseek-v3, yarn": Case(
        "deepseek_v3",
        {
            **DEEPSEEK, "rope_type": "yarn", "rotary_scaling_factor": 4.0, "original_max_position_embeddings": 8,
            "mscale_all_dim": 1.0, "beta_fast": 2.0, "beta_slow": 0.2,
        },
    ),
    "deepseek-v3, one group": Case(
        "deepseek_v3",
        {
            **DEEPSEEK, "moe_router_num_groups": None, "moe_router_group_topk": None,
            "moe_router_topk_scaling_factor": None, "moe_layer_freq": 1,
        },
        config={"n_group": 1, "routed_scaling_factor": 1.0},
    ),
}  # fmt: skip


class Weights:
    """Tensors in memory; see `TensorSource`."""

    def __init__(self, state: State) -> None:
        self._state = state

    def names(self) -> Sequence[str]:
        return list(self._state)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._state[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self._state[name].dtype

    def read(self, name: str) -> torch.Tensor:
        return self._state[name]


def randomised(model: dict[str, Any]) -> RecipeModel:
    """Our model; its norms, biases and expert biases are random too."""
    sections = {
        "model": model,
        "train": {"train_iters": 1, "global_batch_size": 2, "precision": "fp32"},
        "optimizer": {"lr": 1e-3},
        "layout": {"micro_batch_size": 2},
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


def state_of(module: RecipeModel) -> State:
    return {name: value.detach() for name, value in module.state_dict().items() if value is not None}


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """‖one - other‖ / ‖other‖."""
    return float((one - other).norm() / other.norm())


def exported(case: Case, ours: RecipeModel, folder: Path) -> tuple[Any, Family]:
    """Our model as transformers loads it from files."""
    model = Model.model_validate(case.model)
    family = family_of(model, case.family if case.asked else None)
    assert family.name == case.family
    write(AsHuggingFace(Weights(state_of(ours)), family, model), config_of(family, model), folder, shard_bytes=60_000)
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    assert type(theirs).__name__ == family.architecture
    assert len(list(folder.glob("*.safetensors"))) > 3
    return theirs.eval(), family


@pytest.mark.parametrize("name", CASES)
def test_a_family_computes_the_same_in_transformers(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    ours = randomised(case.model)
    theirs, family = exported(case, ours, tmp_path)
    model = Model.model_validate(case.model)
    assert {key: tuple(value.shape) for key, value in state_of(ours).items()} == weights(model)
    assert {key: getattr(theirs.config, key) for key in case.config} == case.config

    ids = torch.randint(VOCABULARY, (2, LENGTH + 1), generator=torch.Generator().manual_seed(4))
    tokens, labels = ids[:, :-1], ids[:, 1:]
    positions = torch.arange(LENGTH).expand(2, -1)
    logits = theirs(tokens).logits
    with torch.no_grad():
        assert distance(ours.eval()(tokens, positions, None)[..., :VOCABULARY], logits) < BOUND

    # Of the loss over the rows that both have: ours has rows of padding besides.
    F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    F.cross_entropy(ours(tokens, positions, None)[..., :VOCABULARY].flatten(0, 1), labels.flatten()).backward()
    mine = {key: parameter.grad for key, parameter in ours.named_parameters() if parameter.grad is not None}
    parts = [
        (their, pair.expert, part)
        for key, gradient in mine.items()
        for pair in [family.pair(key, model.num_layers)]
        for their, part in zip(pair.theirs, pair.transform.split(gradient, model), strict=True)
    ]
    gradients = stacked({their: part for their, expert, part in parts if expert is None})
    for their in dict.fromkeys(their for their, expert, _ in parts if expert is not None):
        gradients[their] = torch.stack([part for name, _, part in parts if name == their])
    expected = {key: parameter.grad for key, parameter in theirs.named_parameters() if parameter.grad is not None}
    assert expected.keys() == gradients.keys()
    differences = {key: distance(gradient, expected[key]) for key, gradient in gradients.items()}
    assert max(differences.values()) < BOUND, {key: value for key, value in differences.items() if value >= BOUND}


def stacked(state: State) -> State:
    """Experts one by one, as on disk, as transformers computes with them: all of a layer in a tensor."""
    found: State = {}
    experts: dict[str, dict[str, list[torch.Tensor]]] = {}
    names = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}
    for name, value in state.items():
        if match := re.fullmatch(r"(.+\.experts)\.\d+\.(\w+)\.weight", name):
            part = experts.setdefault(match[1].replace("block_sparse_moe", "mlp"), {})
            part.setdefault(names[match[2]], []).append(value)
        else:
            found[name.replace("block_sparse_moe", "mlp")] = value
    for name, part in experts.items():
        found[f"{name}.gate_up_proj"] = torch.cat([torch.stack(part["gate"]), torch.stack(part["up"])], 1)
        found[f"{name}.down_proj"] = torch.stack(part["down"])
    return found


@pytest.mark.parametrize("name", ["gpt-2 as published", "llama", "apertus: gpt-tiny", "mixtral", "deepseek-v3",
                                  "qwen2, windows", "mixtral, window", "gpt-oss"])  # fmt: skip
def test_greedy_text_is_the_same_token_by_token(name: str, tmp_path: Path) -> None:
    ours = randomised(CASES[name].model)
    theirs, _ = exported(CASES[name], ours, tmp_path)
    prompt = [3, 1, 4, 1, 5]
    greedy = Sampling(temperature=0)
    mine = list(generate(ours.eval(), prompt, max_new_tokens=24, sampling=greedy, vocab_size=VOCABULARY, eod=None))
    found = theirs.generate(
        torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert found[0, len(prompt) :].tolist() == mine
    assert len(set(mine)) > 1


def test_every_family_accounts_for_every_key_of_the_model() -> None:
    accounts = {name: family.accounts() for name, family in FAMILIES.items()}
    wrong = [
        f"{family}: model.{key} has {len(names)} accounts, {names}: see 'A recipe key' in CONTRIBUTING.md"
        for family, account in accounts.items()
        for key in sorted({*Model.model_fields, *frozenset().union(*account.values())})
        if len(names := [name for name, keys in account.items() if key in keys]) != 1 or key not in Model.model_fields
    ]
    assert not wrong, "\n".join(wrong)


LINKED: dict[str, dict[str, Any]] = {
    "rope_scaling_factor": {"rope_scaling": True},
    "window_attn_skip_freq": {"window_size": [3, 0]},
    **{key: {"rope_type": "yarn"} for key in LATENT_YARN},
    **{key: YARN for key in Model.model_fields if key.startswith("yarn_")},
}
"""What a key needs to have an effect."""


@pytest.mark.parametrize("name", FAMILIES)
def test_accounts_of_a_family_are_true(name: str) -> None:
    """Another value of a key changes config.json or is refused, unless it is free."""
    family = FAMILIES[name]
    plain = [case.model for case in CASES.values() if case.family == name]
    base = next(model for model in plain if model.get("position_embedding_type") != "yarn")
    for account, keys in family.accounts().items():
        for key in keys:
            linked = LINKED.get(key, {}) if account == "translated" else {}
            model = Model.model_validate({**base, "max_position_embeddings": 2 * LENGTH, **linked})
            changed = model.model_copy(update={key: another(model, key)})
            config, problems = family.config_of(changed)
            if account == "free":
                assert (config, problems) == family.config_of(model), key
            elif account in ("needed", "default only"):
                assert f"model.{key}" in {problem.key for problem in problems}, key
            else:
                assert problems or config != family.config_of(model)[0], key


def test_a_key_without_an_account_is_exported_with_its_default_only() -> None:
    class Interleaved(Model):
        rotary_interleaved: bool = False

    assert family_of(Interleaved.model_validate(LLAMA)).name == "llama"
    for name in ("llama", None):
        with refused("model.rotary_interleaved", rule="False"):
            family_of(Interleaved.model_validate({**LLAMA, "rotary_interleaved": True}), name)


def test_groups_of_experts_are_scored_by_two_experts(tmp_path: Path) -> None:
    """megatron-core takes as many as a chosen group gives, here four."""
    four = Model.model_validate({**DEEPSEEK, "moe_router_topk": 4})
    with refused("model.moe_router_group_topk", rule="4"):
        family_of(four, "deepseek_v3")
    config = config_of(FAMILIES["deepseek_v3"], Model.model_validate(DEEPSEEK))
    with refused("topk_group", rule="4"):
        section_of({**config, "num_experts_per_tok": 4}, tmp_path)


@pytest.mark.parametrize("name", CASES)
def test_config_json_says_the_whole_model(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    model = Model.model_validate(case.model)
    family = family_of(model, case.family if case.asked else None)
    back = Model.model_validate({**section_of(config_of(family, model), tmp_path)[1], "seq_length": LENGTH})
    sizes = {key: value for key, value in resolved(back).items() if key != "ffn_hidden_size"}
    assert weights(back) == weights(model)
    there = resolved(model)
    different = {key for key, value in sizes.items() if value != there[key]}
    # Keys of the training alone, and a pattern that can be written in two ways.
    assert different <= {"moe_router_load_balancing_type", "moe_layer_freq", "moe_ffn_hidden_size"}
    assert resolved(back).get("moe_ffn_hidden_size") == there.get("moe_ffn_hidden_size")
    assert config_of(family, back) == config_of(family, model)
