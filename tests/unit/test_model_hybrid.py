"""The model, a `HybridModel` of megatron-core, against its deprecated `GPTModel`: same weights, same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.hybrid.hybrid_layer_allocation import parse_hybrid_pattern
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from llmrecipes.engine.core.model.gpt import BuiltModel
from llmrecipes.engine.core.model.layer_spec import TorchNorm, _replace
from llmrecipes.recipe.derived.layer_pattern import layer_pattern
from llmrecipes.recipe.schema import Recipe
from tests.dist.table import VARIANTS, make
from tests.helpers import LLAMA, built

pytestmark = pytest.mark.usefixtures("world")

OTHERS: dict[str, dict[str, Any]] = {
    "llama with the scaling of Llama 3": {"model": {**LLAMA, "rope_scaling": True, "rope_scaling_factor": 32.0}},
    "llama with linear interpolation": {"model": {**LLAMA, "rotary_seq_len_interpolation_factor": 4.0}},
    "llama with half of the channels rotated": {"model": {**LLAMA, "rotary_percent": 0.5}},
}
MODELS = OTHERS | {
    name: case
    for name, case in VARIANTS.items()
    if case.keys() <= {"model"} and "hidden_dropout" not in case.get("model", {})
}
"""Variants of the model, not of training. Masks of dropout are ours: `GPTModel` draws others."""


def gpt_of(recipe: Recipe, ours: BuiltModel) -> GPTModel:
    """megatron-core's GPT with our parts and the weights of our model."""
    config, model = ours.config, recipe.model
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=config.normalization)
    block.layer_norm = TorchNorm
    _replace(block.layer_specs, config, "local")
    prediction = get_gpt_mtp_block_spec(config, block, use_transformer_engine=False) if model.mtp_num_layers else None
    for layer in prediction.layer_specs if prediction else ():
        parts = layer.submodules
        parts.enorm = parts.hnorm = parts.layer_norm = TorchNorm
    theirs = GPTModel(
        config,
        block,
        vocab_size=ours.module.vocab_size,
        max_sequence_length=ours.module.max_sequence_length,
        share_embeddings_and_output_weights=model.share_embeddings_and_output_weights,
        position_embedding_type=model.position_embedding_type,
        rotary_percent=model.rotary_percent,
        rotary_base=model.rotary_base,
        rope_scaling=model.rope_scaling,
        rope_scaling_factor=model.rope_scaling_factor,
        seq_len_interpolation_factor=model.rotary_seq_len_interpolation_factor,
        mtp_block_spec=prediction,
    )
    theirs.load_state_dict(ours.module.state_dict())
    return theirs


@pytest.mark.parametrize("name", MODELS)
def test_every_model_is_megatron_cores_gpt(name: str) -> None:
    recipe = make(MODELS[name])
    ours = built(recipe)
    theirs = gpt_of(recipe, ours)
    ids = torch.randint(
        recipe.model.vocab_size, (2, recipe.model.seq_length), generator=torch.Generator().manual_seed(4)
    )
    positions = torch.arange(ids.size(1)).expand(2, -1)
    MTPLossLoggingHelper.tracker.clear()
    # One loss for both, because ours takes other sums.
    theirs.compute_language_model_loss = ours.module.compute_language_model_loss
    results = []
    for module in (ours.module, theirs):
        losses = module(ids, positions, None, labels=ids.roll(-1, 1), loss_mask=torch.ones(ids.shape))
        losses.mean().backward()
        gradients = {name: weight.grad for name, weight in module.named_parameters() if weight.grad is not None}
        results.append((losses, gradients))
    (mine, my_gradients), (other, other_gradients) = results
    assert torch.equal(mine, other)
    assert my_gradients.keys() == other_gradients.keys()
    assert not [name for name in my_gradients if not torch.equal(my_gradients[name], other_gradients[name])]


def test_a_pattern_has_two_symbols_a_layer_and_says_where_stages_end() -> None:
    def pattern(degrees: dict[str, Any], **model: Any) -> str:
        return layer_pattern(make({"model": {"num_layers": 4, **model}, "layout": degrees}))

    assert pattern({}) == "*-*-*-*-"
    assert pattern({"pipeline_model_parallel_size": 2}) == "*-*-|*-*-"
    ends = {"pipeline_model_parallel_size": 2, "num_layers_in_first_pipeline_stage": 1}
    assert pattern(ends) == "*-|*-*-*-"
    chunks = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    assert pattern({**chunks, "pipeline_model_parallel_layout": "Et||tt|tL"}) == "*-||*-*-|*-"
    deepseek = make(VARIANTS["deepseek"])
    read = parse_hybrid_pattern(layer_pattern(deepseek))
    assert read.main_pattern is not None and set(read.main_pattern) <= {"+", "-", "E"}
    assert read.mtp_num_depths == deepseek.model.mtp_num_layers
