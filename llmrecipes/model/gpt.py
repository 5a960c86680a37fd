"""Construction of the model of one rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from llmrecipes.model.config import transformer_config
from llmrecipes.model.init import initialise
from llmrecipes.model.spec import block_spec, choose
from llmrecipes.plan.derive import Plan
from llmrecipes.platform import Platform
from llmrecipes.recipe.schema import Recipe


class RecipeGPTModel(GPTModel):
    """megatron-core's GPT with label smoothing, and a loss that reads the logits once.

    megatron-core's cross entropy is built for logits split over tensor-parallel ranks; on whole rows torch's needs
    fewer passes over what is the largest tensor of a small model.
    """

    label_smoothing: float = 0.0

    def compile_layers(self) -> None:
        """Compile layer by layer: all layers share one compiled graph, so compilation does not grow with depth."""
        for layer in self.decoder.layers:
            layer.compile(dynamic=False)
        self.compute_language_model_loss = torch.compile(self.compute_language_model_loss, dynamic=False)  # type: ignore[method-assign]

    def compute_language_model_loss(self, labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Cross entropy of each token.

        Args:
            labels: [b, s] token ids.
            logits: [s, b, padded vocabulary].

        Returns:
            [b, s] in fp32. Smoothed in training only, so that validation losses of all recipes compare.
        """
        smoothing = self.label_smoothing if self.training else 0.0
        flat = logits.reshape(-1, logits.size(-1)).float()
        loss = F.cross_entropy(flat, labels.t().reshape(-1), reduction="none", label_smoothing=smoothing)
        return loss.view(labels.size(1), labels.size(0)).t().contiguous()


@dataclass(frozen=True)
class BuiltModel:
    """A model and how it was built."""

    module: RecipeGPTModel
    config: TransformerConfig
    implementation: str
    """`transformer_engine` or `local`."""
    reason: str
    """Why that one."""


def build(recipe: Recipe, plan: Plan, platform: Platform) -> BuiltModel:
    """The initialised model of this rank, on the platform's device.

    Args:
        recipe: the resolved recipe.
        plan: its derived sizes.
        platform: where parameters live.
    """
    model = recipe.model
    implementation, reason = choose(model.transformer_impl)
    config = transformer_config(
        recipe, plan, on_gpu=platform.name == "cuda", transformer_engine=implementation == "transformer_engine"
    )
    module = RecipeGPTModel(
        config,
        block_spec(
            implementation,
            num_layers=model.num_layers,
            normalization=model.normalization,
            qk_layernorm=model.qk_layernorm,
        ),
        vocab_size=plan.padded_vocab_size,
        max_sequence_length=plan.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=model.share_embeddings_and_output_weights,
        position_embedding_type=model.position_embedding_type,
        rotary_percent=model.rotary_percent,
        rotary_base=int(model.rotary_base),
        rope_scaling=model.rope_scaling,
        rope_scaling_factor=model.rope_scaling_factor,
    )
    module.label_smoothing = recipe.train.label_smoothing
    module.to(device=platform.device, dtype=config.params_dtype)
    initialise(module.named_parameters(), model, recipe.train.seed)
    return BuiltModel(module, config, implementation, reason)
