"""GPT-2: learned positions, LayerNorm, biases, a tied output layer, and matrices that are transposed."""

from __future__ import annotations

from typing import Any

from llmrecipes.hf.families.parts import DENSE, EXPERT_KEYS, FREE, LATENT, UNSUPPORTED, WINDOWS, YARN
from llmrecipes.hf.table import (
    ACTIVATIONS,
    FUSED_QKV,
    SAME,
    TRANSPOSED,
    VOCABULARY,
    Config,
    Family,
    Fixed,
    Key,
    To,
    Unsupported,
)
from llmrecipes.recipe.schema import Model


class Dropout:
    """`hidden_dropout` is that after the embedding and after each branch."""

    theirs = ("embd_pdrop", "resid_pdrop")
    ours = ("hidden_dropout",)

    def config_of(self, model: Model) -> tuple[dict[str, Any], list[Unsupported]]:
        """See `Special`."""
        return dict.fromkeys(self.theirs, model.hidden_dropout), []

    def model_of(self, config: Config) -> tuple[dict[str, Any], list[Unsupported]]:
        """See `Special`."""
        embedding, branches = (config[key] for key in self.theirs)
        rule = "it is the same as resid_pdrop"
        return {"hidden_dropout": branches}, [Unsupported("embd_pdrop", embedding, rule)] * (embedding != branches)


class _Gpt2Heads:
    """Each query head has a key and a value head, and its share of the width."""

    theirs = ("n_inner",)
    ours = ("ffn_hidden_size", "num_query_groups", "kv_channels")

    def config_of(self, model: Model) -> tuple[dict[str, Any], list[Unsupported]]:
        heads, groups = model.num_attention_heads, model.num_query_groups
        channels = model.kv_channels
        obstacles = []
        if groups not in (None, heads):
            obstacles.append(
                Unsupported("model.num_query_groups", groups, "a model of type gpt2 has one for every query head")
            )
        if channels is not None and channels * heads != model.hidden_size:
            rule = "a model of type gpt2 has hidden_size / num_attention_heads channels in a head"
            obstacles.append(Unsupported("model.kv_channels", channels, rule))
        return {"n_inner": model.ffn_hidden_size or 4 * model.hidden_size}, obstacles

    def model_of(self, config: Config) -> tuple[dict[str, Any], list[Unsupported]]:
        inner = config["n_inner"]
        return {} if inner is None else {"ffn_hidden_size": inner}, []


def _both(ours: str, theirs: str, how: Any = SAME) -> dict[str, To]:
    return {f"{ours}.{kind}": To((f"{theirs}.{kind}",), how) for kind in ("weight", "bias")}


_LAYER = "decoder.layers.*."
_BLOCK = "transformer.h.*."

GPT2 = Family(
    name="gpt2",
    architecture="GPT2LMHeadModel",
    prefix="transformer.",
    needs={
        **DENSE,
        "position_embedding_type": "learned_absolute",
        "normalization": "LayerNorm",
        "gated_linear_unit": False,
        "add_bias_linear": True,
        "qk_layernorm": False,
    },
    keys=(
        Key("vocab_size", "vocab_size"),
        Key("n_positions", "max_position_embeddings"),
        Key("n_embd", "hidden_size"),
        Key("n_layer", "num_layers"),
        Key("n_head", "num_attention_heads"),
        Key("activation_function", "activation_func", ACTIVATIONS),
        Key("attn_pdrop", "attention_dropout"),
        Key("layer_norm_epsilon", "layernorm_epsilon"),
        Key("initializer_range", "init_method_std"),
        Key("tie_word_embeddings", "share_embeddings_and_output_weights"),
    ),
    fixed=(
        Fixed("scale_attn_weights", True),
        Fixed("scale_attn_by_inverse_layer_idx", False),
        Fixed("reorder_and_upcast_attn", False),
        Fixed("add_cross_attention", False),
    ),
    tensors={
        "embedding.word_embeddings.weight": To(("transformer.wte.weight",), VOCABULARY),
        "embedding.position_embeddings.weight": To(("transformer.wpe.weight",)),
        **_both("decoder.final_layernorm", "transformer.ln_f"),
        "output_layer.weight": To(("lm_head.weight",), VOCABULARY),
        **_both(f"{_LAYER}input_layernorm", f"{_BLOCK}ln_1"),
        **_both(f"{_LAYER}self_attention.linear_qkv", f"{_BLOCK}attn.c_attn", FUSED_QKV),
        **_both(f"{_LAYER}self_attention.linear_proj", f"{_BLOCK}attn.c_proj", TRANSPOSED),
        **_both(f"{_LAYER}pre_mlp_layernorm", f"{_BLOCK}ln_2"),
        **_both(f"{_LAYER}mlp.linear_fc1", f"{_BLOCK}mlp.c_fc", TRANSPOSED),
        **_both(f"{_LAYER}mlp.linear_fc2", f"{_BLOCK}mlp.c_proj", TRANSPOSED),
    },
    # add_bias_linear includes it; and nothing is rotated.
    free=FREE - {"hidden_dropout"} | {"add_qkv_bias", "rotary_base", "rotary_percent", "rope_scaling_factor"},
    default_only=UNSUPPORTED
    | EXPERT_KEYS
    | LATENT
    | YARN
    | WINDOWS
    | {"rope_scaling", "rotary_seq_len_interpolation_factor"},
    specials=(Dropout(), _Gpt2Heads()),
    training_only=frozenset(
        {
            "n_ctx",
            "summary_activation",
            "summary_first_dropout",
            "summary_proj_to_labels",
            "summary_type",
            "summary_use_proj",
        }
    ),
)
