"""All device selection and all patches of megatron-core."""

from llmrecipes.engine.base import Platform
from llmrecipes.engine.core.platform.select import select

__all__ = ["Platform", "select"]
