"""Every key of config.json, missing and odd, is read as transformers' own configuration class reads it, or refused.

That the values compute the same is the subject of test_model_hf.py and test_hf_import.py.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from llmrecipes.engine.core.model.gpt import build
from llmrecipes.engine.core.platform import select
from llmrecipes.errors import UserError
from llmrecipes.hf import completion
from llmrecipes.hf.family import FAMILIES, LACKING, config_of, family_named
from llmrecipes.hf.match import section_of, validated
from llmrecipes.hf.reading import CONFIG
from llmrecipes.hf.table import NEUTRAL, resolved
from llmrecipes.hf.weights import open_weights
from llmrecipes.plan.derive import derive
from llmrecipes.recipe.load import load_values
from llmrecipes.recipe.schema import TRAINING_ONLY
from tests.helpers import ROOMY
from tests.hf_models import CONFIGS as MODELS
from tests.hf_models import SIZES, VOCABULARY, saved
from tests.refusals import refused

Config = dict[str, Any]

CONFIGS = {**MODELS, "apertus": lambda: transformers.ApertusConfig(**SIZES, hidden_act="gelu")}

PLACE = "_name_or_path"
SCALINGS: dict[str, Any] = {
    "linear": {"rope_type": "linear", "factor": 2.0},
    "type of older files": {"type": "linear", "factor": 2.0},
    "both types": {"type": "yarn", "rope_type": "linear", "factor": 2.0},
    "linear without factor": {"rope_type": "linear"},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "longrope": {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "factor": 2.0},
    "llama3": {
        "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "llama3 without factor": {
        "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "llama3 without length": {
        "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    },
    "yarn": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32},
    "yarn without length": {"rope_type": "yarn", "factor": 2.0},
    "yarn without factor": {"rope_type": "yarn", "original_max_position_embeddings": 32},
    "base": {"rope_type": "default", "rope_theta": 5e5},
    "base only": {"rope_theta": 5e5},
    "half of the channels": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    "empty": {},
    "by kind of layer": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}},
    "a name": "linear",
}  # fmt: skip
ODD: Config = {
    "activation_function": ["gelu", "gelu_fast", "relu"],
    "attention_bias": [True],
    "attention_dropout": [0.125],
    "decoder_sparse_step": [0, 2],
    "first_k_dense_replace": [0, 2, 3],
    "head_dim": [0, 7, 32],
    "hidden_act": ["gelu", "swish", "relu"],
    "hidden_size": [32],
    "initializer_range": [0.013],
    "layer_types": [
        [], ["full_attention"], ["full_attention"] * 2, ["sliding_attention"] * 2,
        ["full_attention", "sliding_attention"], ["chunked_attention"] * 2,
    ],
    "max_position_embeddings": [32, 1 << 17],
    "max_window_layers": [0, 1, 5],
    "mlp_only_layers": [[], [0], [1], [5]],
    "n_ctx": [8],
    "n_group": [1, 2],
    "n_inner": [32],
    "n_shared_experts": [0, 2],
    "norm_topk_prob": [False, True],
    "num_experts": [2],
    "num_experts_per_tok": [1, 3],
    "num_key_value_heads": [0, 1, 3, 4],
    "num_local_experts": [2],
    "partial_rotary_factor": [0.5, 1],
    "q_lora_rank": [12],
    "rms_norm_eps": [1e-6, 1e-3],
    "rope_interleave": [False],
    "rope_theta": [7e5, "1e4"],
    "routed_scaling_factor": [1.0],
    "scale_attn_by_inverse_layer_idx": [True],
    "scale_attn_weights": [False],
    "scoring_func": ["softmax"],
    "sliding_window": [-1, 0, 16, 1000],
    "tie_word_embeddings": [True, False, "true"],
    "topk_group": [2],
    "use_sliding_window": [True],
}  # fmt: skip
"""Values besides null. Keys that a family does not have are tried on it too."""


def changes(whole: Config) -> Iterator[tuple[str, Config]]:
    """A config.json with a key missing, null or odd, and with each way to say the rotation."""
    for key in sorted({*whole, *ODD}):
        if key in whole:
            yield f"without {key}", {name: value for name, value in whole.items() if name != key}
        for value in (None, *ODD.get(key, ())):
            yield f"{key}={value}", {**whole, key: value}
    plain = {name: value for name, value in whole.items() if name != "rope_parameters"}
    linear = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
    for name, scaling in SCALINGS.items():
        for key in ("rope_scaling", "rope_parameters"):
            yield f"{key}: {name}", {**plain, key: scaling}
            yield f"{key}: {name}, and a base", {**plain, key: scaling, "rope_theta": 7e5}
        yield (
            f"rope_scaling: {name}, and rope_parameters",
            {**plain, "rope_scaling": scaling, "rope_parameters": linear},
        )
        yield (
            f"rope_parameters: {name}, and rope_scaling",
            {**plain, "rope_scaling": linear, "rope_parameters": scaling},
        )


def read(config: Config, folder: Path) -> Config | None:
    """The section `model` of a config.json; None: refused."""
    try:
        section = section_of(config, folder)[1]
        model = validated(section, 8, str(folder / CONFIG))
    except UserError as error:
        assert str(folder / CONFIG) in str(error)
        return None
    return resolved(model)


def computed(config: Config, folder: Path) -> Config | None:
    """What transformers' own class of a config.json says, by the keys of recipes; None: it refuses the file."""
    (folder / CONFIG).write_text(json.dumps(config))
    try:
        theirs: Any = transformers.AutoConfig.from_pretrained(folder)
    except Exception:  # each validator has its own
        return None
    has = set(type(theirs)().to_dict()) | set(theirs.attribute_map)  # it also keeps keys that it does not know
    names = {
        "num_layers": ["num_hidden_layers"], "hidden_size": ["hidden_size"], "vocab_size": ["vocab_size"],
        "num_attention_heads": ["num_attention_heads"], "num_query_groups": ["num_key_value_heads"],
        "share_embeddings_and_output_weights": ["tie_word_embeddings"], "init_method_std": ["initializer_range"],
        "ffn_hidden_size": ["n_inner", "intermediate_size"], "hidden_dropout": ["resid_pdrop"],
        "layernorm_epsilon": ["rms_norm_eps", "layer_norm_epsilon"],
        "attention_dropout": ["attention_dropout", "attn_pdrop"],
        "moe_router_topk": ["num_experts_per_tok"], "moe_ffn_hidden_size": ["moe_intermediate_size"],
        "num_moe_experts": ["n_routed_experts", "num_local_experts"],
        "q_lora_rank": ["q_lora_rank"], "kv_lora_rank": ["kv_lora_rank"], "v_head_dim": ["v_head_dim"],
        "qk_head_dim": ["qk_nope_head_dim"], "qk_pos_emb_head_dim": ["qk_rope_head_dim"],
    }  # fmt: skip
    found = {ours: getattr(theirs, name) for ours, either in names.items() for name in either if name in has}
    if found["ffn_hidden_size"] is None:
        found["ffn_hidden_size"] = 4 * theirs.hidden_size
    if "sliding_window" not in has:
        found["max_position_embeddings"] = theirs.max_position_embeddings
    if "kv_lora_rank" in has:  # every query head has its own key and value, of the sizes above
        del found["num_query_groups"]
    else:
        found["kv_channels"] = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    if "rope_parameters" in has:
        rotation = theirs.rope_parameters
        found["rotary_base"] = rotation["rope_theta"]
        found["rotary_seq_len_interpolation_factor"] = rotation["factor"] if rotation["rope_type"] == "linear" else None
        found["rope_scaling"] = rotation["rope_type"] == "llama3"
    return found


@pytest.mark.rotating
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_config_is_read_as_transformers_reads_it(kind: str, tmp_path: Path) -> None:
    whole = plain(kind)
    wrong = []
    for name, config in changes(whole):
        ours = read(config, tmp_path)
        without = name.removeprefix("without ") if name.startswith("without ") else None
        if ours is None and (without is None or without in UNSUPPORTED_DEFAULTS.get(kind, ())):
            continue
        theirs = computed(config, tmp_path)
        if ours is None:
            wrong += [] if theirs is None else [f"{name}: refused, but transformers has a default"]
        elif theirs is None or (differ := {key: value for key, value in theirs.items() if ours[key] != value}):
            wrong.append(f"{name}: {'refused' if theirs is None else differ}")
    assert not wrong, "\n".join(wrong)


UNSUPPORTED_DEFAULTS = {
    "apertus": ("hidden_act",), "deepseek_v3": ("num_experts_per_tok", "topk_group"),
    "gpt2": ("embd_pdrop", "resid_pdrop"), "smollm3": ("sliding_window", "use_sliding_window"),
}  # fmt: skip
"""Keys whose default in transformers no recipe can have, with the others of these files."""


def plain(kind: str) -> Config:
    """config.json without keys that do not change what is computed."""
    whole: Config = json.loads(CONFIGS[kind]().to_json_string(use_diff=False))
    return {key: value for key, value in whole.items() if key not in NEUTRAL or key == "model_type"}


@pytest.mark.rotating
@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("kind", CONFIGS)
def test_what_is_accepted_computes_the_same(kind: str, tmp_path: Path) -> None:
    """One file for each reading of the changes that transformers can compute with the same weights."""
    saved(CONFIGS[kind](), tmp_path)
    tried: list[Config] = []
    wrong = []
    for name, config in changes(plain(kind)):
        section = read(config, tmp_path)
        ours = {key: value for key, value in (section or {}).items() if key not in TRAINING_ONLY}
        if not ours or ours in tried:
            continue
        tried.append(ours)
        (tmp_path / CONFIG).write_text(json.dumps({"pad_token_id": None, **config, "dtype": "float32"}))
        difference = distance(tmp_path)
        if difference is not None and difference > 1e-5:
            wrong.append(f"{name}: {difference:.1e}")
    assert len(tried) > 3
    assert not wrong, "\n".join(wrong)


def distance(folder: Path) -> float | None:
    """Of logits, relative; None: these weights are not those of such a model."""
    config = json.loads((folder / CONFIG).read_text())
    section = section_of(config, folder)[1]
    length = min(24, section["max_position_embeddings"])
    values = {
        "name": "x", "model": {**section, "seq_length": length}, "optimizer": {"lr": 1e-3},
        "train": {"train_iters": 1, "global_batch_size": 1, "precision": "fp32"}, "layout": {"micro_batch_size": 1}
    }  # fmt: skip
    if section["position_embedding_type"] == "yarn" and config.get("head_dim", 0) is None:
        return None  # Mixtral: transformers' YaRN fails
    try:
        recipe = load_values(values, folder / CONFIG, ()).recipe
        weights = open_weights(folder, recipe.model)
    except UserError:
        return None
    tokens = torch.randint(VOCABULARY, (2, length), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        ours = build(derive(recipe, 1, ROOMY), select(), weights).module.eval()
        logits = ours(tokens, torch.arange(length).expand(2, -1), None)[..., :VOCABULARY]
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
        expected = theirs(tokens).logits
    return float((logits - expected).norm() / expected.norm())


@pytest.mark.parametrize("kind", CONFIGS)
def test_every_key_that_is_read_is_written_as_it_was(kind: str, tmp_path: Path) -> None:
    """Where no key has the value that transformers assumes."""
    changed = {"initializer_range": 0.013, "attention_dropout": 0.125, "attn_pdrop": 0.125, "rms_norm_eps": 3e-5,
               "layer_norm_epsilon": 3e-5, "n_inner": 96, "embd_pdrop": 0.25, "resid_pdrop": 0.25}  # fmt: skip
    fixed = {entry.theirs for entry in FAMILIES[kind].fixed}
    whole = json.loads(CONFIGS[kind]().to_json_string(use_diff=False))
    whole |= {key: value for key, value in changed.items() if key in whole and key not in fixed}
    family, section = section_of(whole, tmp_path)
    written = config_of(family, validated(section, 8, ""))
    apart = {"rope_theta", "rope_scaling", "num_nextn_predict_layers"}
    lost = {key: (whole[key], value) for key, value in written.items() if whole.get(key) not in (None, value)}
    assert not {key: values for key, values in lost.items() if key not in apart and not key.endswith("token_id")}


def test_scaling_in_both_keys_is_that_of_rope_scaling(tmp_path: Path) -> None:
    plain_rope = {"rope_type": "default", "rope_theta": 1e4}
    both = {**plain("llama"), "rope_parameters": plain_rope, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}
    assert section_of(both, tmp_path)[1]["rotary_seq_len_interpolation_factor"] == 4.0


@pytest.mark.parametrize(
    ("key", "config"),
    [
        ("factor", {**plain("llama"), "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}),
        ("layer_types", {**plain("qwen2"), "layer_types": ["full_attention"]}),
        ("ministral", {**plain("mistral"), "layer_types": ["full_attention"] * 2}),
    ],
)
def test_what_transformers_refuses_is_refused_with_its_reason(key: str, config: Config, tmp_path: Path) -> None:
    with refused(tmp_path / CONFIG) as error:
        section_of(config, tmp_path)
    assert key in str(error.value)


def test_a_process_without_torch_completes_every_config_as_this_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, "transformers")
        beside = completion.beside()
        beside.__enter__()
    try:
        (process,) = completion._begun
        for made in CONFIGS.values():
            config = made().to_diff_dict()
            here = completion._here(config)
            monkeypatch.setattr(completion, "_here", None)
            assert completion.completed(config) | {PLACE: ""} == json.loads(json.dumps(here)) | {PLACE: ""}
            monkeypatch.undo()
        assert completion.generation_keys() == transformers.GenerationConfig().to_dict().keys()
        with pytest.raises(completion.Refused, match="hidden_size"):
            completion.completed({"model_type": "llama", "hidden_size": "wide"})
        assert process.poll() is None
        process.kill()
        process.wait()
        assert completion.completed({"model_type": "llama"})["model_type"] == "llama", "without it this one answers"
    finally:
        beside.__exit__(None, None, None)
    assert completion._begun == []


def test_well_known_types_are_refused_with_the_layers_that_they_need() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    assert LACKING.keys() <= CONFIG_MAPPING_NAMES.keys()
    assert not LACKING.keys() & FAMILIES.keys()
    for kind, layers in LACKING.items():
        with refused("config.json") as caught:
            family_named(kind, "config.json")
        assert f"'{kind}'" in caught.value.what and layers in caught.value.rule
