"""Overrides of recipes for what they had when it was measured, and of gpt-tiny for what only AdamW goes with."""

ADAMW = (
    "optimizer={lr: 1e-2, min_lr: 0.0, adam_beta2: 0.96, weight_decay: 0.7}",
    "layout.use_distributed_optimizer=true",
)
UNGATED = ("model.gated_linear_unit=false", "model.activation_func=gelu", "model.ffn_hidden_size=null")
FORMER = (*ADAMW, *UNGATED, "model.init_method_std=0.08")
MICRO_BATCH = {"gpt-125m": ("layout.micro_batch_size=32",), "gpt-1b": ("layout.micro_batch_size=8",)}
"""By recipe; today it is chosen for the machine."""
