"""What is changed in megatron-core on CPUs and GPUs alike."""

from __future__ import annotations

import importlib.util

from llmrecipes.engine.megatron.platform.adam import install_adam
from llmrecipes.engine.megatron.platform.jitter import install_jitter
from llmrecipes.engine.megatron.platform.patching import replace, resolve


def install_substitutes() -> None:
    """Correct what is wrong in evaluation, and give megatron-core what it takes from TransformerEngine where that is
    not installed."""
    install_jitter()
    install_adam()
    if importlib.util.find_spec("transformer_engine") is not None:
        return
    # 0.16 believes that TransformerEngine is there, because the names it imports exist, and are None.
    replace("megatron.core.transformer.multi_latent_attention", "HAVE_TE", False)
    router = resolve("megatron.core.transformer.moe.moe_utils")
    if not hasattr(router, "te_general_gemm"):
        router.te_general_gemm = None  # 0.16 compares it with None, and finds no such name
