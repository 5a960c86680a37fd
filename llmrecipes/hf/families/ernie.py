"""ERNIE 4.5, dense: Llama that rotates neighbouring channels of a head, where megatron-core rotates those half a head
apart. The rows of queries and keys are in another order, and compute the same."""

from __future__ import annotations

from dataclasses import replace

import torch

from llmrecipes.hf.families.llama import LLAMA_FAMILY
from llmrecipes.hf.families.parts import ATTENTION, LAYER
from llmrecipes.hf.table import QKV, Fixed, To
from llmrecipes.recipe.derived.shape import shape
from llmrecipes.recipe.schema import Model


class _PairedQueryKeyValue:
    """Channels i and i + d / 2 of a head of d become 2 i and 2 i + 1."""

    def split(self, tensor: torch.Tensor, model: Model) -> list[torch.Tensor]:
        *rotated, value = QKV.split(tensor, model)
        half = shape(model).kv_channels // 2
        paired = [rows.reshape(-1, 2, half, *rows.shape[1:]).transpose(1, 2) for rows in rotated]
        return [*(rows.reshape(-1, *tensor.shape[1:]) for rows in paired), value]


_PAIRED = _PairedQueryKeyValue()
_QKV = f"{LAYER}self_attention.linear_qkv.weight"

ERNIE_4_5 = replace(
    LLAMA_FAMILY,
    name="ernie4_5",
    architecture="Ernie4_5ForCausalLM",
    keys=tuple(key for key in LLAMA_FAMILY.keys if key.theirs != "attention_dropout"),
    fixed=(Fixed("use_bias", False),),
    tensors={**LLAMA_FAMILY.tensors, _QKV: To(ATTENTION[_QKV].names, _PAIRED)},
    free=LLAMA_FAMILY.free | {"attention_dropout"},
)
