"""Patches of megatron-core for both CPUs and GPUs."""

from __future__ import annotations

from llmrecipes.engine.megatron.platform.adam import install_adam
from llmrecipes.engine.megatron.platform.jitter import install_jitter
from llmrecipes.engine.megatron.platform.patching import replace, resolve
from llmrecipes.hardware.builds import transformer_engine_obstacle


def install_substitutes() -> None:
    """Fix evaluation, and provide what megatron-core imports from TransformerEngine if that is not installed."""
    install_jitter()
    install_adam()
    if transformer_engine_obstacle() is None:
        return
    # 0.16 assumes that TransformerEngine is installed, because the names it imports exist, but are None.
    replace("megatron.core.transformer.multi_latent_attention", "HAVE_TE", False)
    router = resolve("megatron.core.transformer.moe.moe_utils")
    if not hasattr(router, "te_general_gemm"):
        router.te_general_gemm = None  # 0.16 compares it with None, but the name does not exist
