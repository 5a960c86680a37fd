"""What megatron-core lacks where TransformerEngine is not installed, on GPUs too."""

from __future__ import annotations

import importlib.util

from llmrecipes.platform.adam import install_adam
from llmrecipes.platform.patching import replace, resolve


def install_substitutes() -> None:
    """Give megatron-core what it takes from TransformerEngine and does without; do nothing where that is installed."""
    install_adam()
    if importlib.util.find_spec("transformer_engine") is not None:
        return
    # 0.16 believes that TransformerEngine is there, because the names it imports exist, and are None.
    replace("megatron.core.transformer.multi_latent_attention", "HAVE_TE", False)
    router = resolve("megatron.core.transformer.moe.moe_utils")
    if not hasattr(router, "te_general_gemm"):
        router.te_general_gemm = None  # 0.16 compares it with None, and finds no such name
