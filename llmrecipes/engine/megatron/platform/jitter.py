"""Noise on the input of routers is for training; megatron-core adds it in evaluation and generation too."""

from __future__ import annotations

from functools import wraps
from typing import Any

from llmrecipes.engine.megatron.platform.patching import replace, resolve

ROUTER, METHOD = "megatron.core.transformer.moe.router.TopKRouter", "apply_input_jitter"


def install_jitter() -> None:
    """Let `moe_input_jitter_eps` change nothing outside of training."""
    plain = resolve(f"{ROUTER}.{METHOD}")
    if hasattr(plain, "__wrapped__"):  # it is installed
        return

    @wraps(plain)
    def in_training(router: Any, values: Any) -> Any:
        return plain(router, values) if router.training else values

    replace(ROUTER, METHOD, in_training)
