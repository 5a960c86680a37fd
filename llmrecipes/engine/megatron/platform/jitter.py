"""Input noise of routers is for training only; megatron-core also adds it in evaluation and generation."""

from __future__ import annotations

from functools import wraps
from typing import Any

from llmrecipes.engine.megatron.platform.patching import replace, resolve

ROUTER, METHOD = "megatron.core.transformer.moe.router.TopKRouter", "apply_input_jitter"


def install_jitter() -> None:
    """Disable `moe_input_jitter_eps` outside of training."""
    plain = resolve(f"{ROUTER}.{METHOD}")
    if hasattr(plain, "__wrapped__"):  # already installed
        return

    @wraps(plain)
    def in_training(router: Any, values: Any) -> Any:
        return plain(router, values) if router.training else values

    replace(ROUTER, METHOD, in_training)
