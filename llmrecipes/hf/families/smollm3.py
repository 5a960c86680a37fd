"""SmolLM3: Llama without rotation in some layers (NoPE, arXiv 2501.18795), which may have a sliding window."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmrecipes.hf.families.llama import LLAMA_FAMILY
from llmrecipes.hf.families.parts import WINDOWS, Heads, Rope, Window
from llmrecipes.hf.table import Config, Unsupported
from llmrecipes.recipe.derived.shape import unrotated
from llmrecipes.recipe.schema import Model


class _NoRotation:
    """1 for a layer with rotation in their list, without in ours."""

    theirs = ("no_rope_layers", "no_rope_layer_interval")
    ours = ("no_rope_freq",)

    def config_of(self, model: Model) -> tuple[dict[str, Any], list[Unsupported]]:
        return {"no_rope_layers": [int(not left_out) for left_out in unrotated(model)]}, []

    def model_of(self, config: Config) -> tuple[dict[str, Any], list[Unsupported]]:
        rotated = config["no_rope_layers"]
        layers = config["num_hidden_layers"]
        if len(rotated) != layers or {*rotated} - {0, 1}:
            return {}, [Unsupported("no_rope_layers", rotated, f"0 or 1 for each of {layers} layers")]
        return ({} if all(rotated) else {"no_rope_freq": [1 - layer for layer in rotated]}), []


SMOLLM3 = replace(
    LLAMA_FAMILY,
    name="smollm3",
    architecture="SmolLM3ForCausalLM",
    default_only=LLAMA_FAMILY.default_only - WINDOWS - {"no_rope_freq"},
    specials=(Heads(free=False), Rope(), Window(by_layer=True, switch=True), _NoRotation()),
)
