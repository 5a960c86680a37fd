"""Phi-3 and Phi-4: one matrix of queries, keys and values, one of gate and MLP, and a share of the channels rotated.

Longer contexts by LongRoPE (arXiv 2402.13753), which Phi-4-mini has, are refused: megatron-core does not scale so.
"""

from __future__ import annotations

from dataclasses import replace

from llmrecipes.hf.families.gpt2 import Dropout
from llmrecipes.hf.families.llama import LLAMA_FAMILY
from llmrecipes.hf.families.parts import FREE, LLAMA, WINDOWS, Heads, Rope, Window, in_layer
from llmrecipes.hf.table import SAME, STACKED_QKV

PHI3 = replace(
    LLAMA_FAMILY,
    name="phi3",
    architecture="Phi3ForCausalLM",
    needs={key: value for key, value in LLAMA.items() if key != "rotary_percent"},
    fixed=(),
    tensors={
        **LLAMA_FAMILY.tensors,
        **in_layer(
            {
                "self_attention.linear_qkv.weight": (("self_attn.qkv_proj.weight",), STACKED_QKV),
                "mlp.linear_fc1.weight": (("mlp.gate_up_proj.weight",), SAME),
            }
        ),
    },
    free=FREE - {"hidden_dropout"},
    default_only=LLAMA_FAMILY.default_only - WINDOWS,
    specials=(Heads(free=False), Rope(plain=True), Window(), Dropout()),
    # Only LongRoPE reads it.
    training_only=frozenset({"original_max_position_embeddings"}),
)
