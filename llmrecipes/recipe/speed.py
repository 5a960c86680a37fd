"""The section `speed`: features of megatron-core that change how fast a run trains, not what it trains.

Names are Megatron's. A key that is unset is chosen by rule for the machine (`recipe.features`); one that is set and
cannot be had is refused.
"""

from __future__ import annotations

from llmrecipes.recipe.section import Section

Switch = bool | None


class Speed(Section):
    """Features of megatron-core that change the speed of a run, not its training; `llmrecipes show --speed` lists what
    a run has, and why. Unset keys are chosen by rule for the machine."""

    bias_activation_fusion: Switch = None
    """Compute the gated activation of the MLP (SwiGLU only) in one kernel. Unset: on GPUs with a compiler, and with
    `train.torch_compile`."""
    bias_dropout_fusion: Switch = None
    """Add bias, dropout and residual in one kernel. Unset: on GPUs with a compiler where the model has biases or
    `hidden_dropout`, and with `train.torch_compile`."""
    apply_rope_fusion: Switch = None
    """Apply rotary embeddings in one kernel (TransformerEngine). Unset: with `position_embedding_type: rope`; of latent
    attention, whose kernel needs `rope_type: yarn`, only if it is set."""
    gradient_accumulation_fusion: Switch = None
    """Add the gradient of a weight to the gradient buffer in the kernel of its product (TransformerEngine). Unset: on
    with its layers."""
