"""Every device choice and every patch of megatron-core; nothing of it stands elsewhere."""

from llmrecipes.engine.base import Platform
from llmrecipes.engine.megatron.platform.select import select

__all__ = ["Platform", "select"]
