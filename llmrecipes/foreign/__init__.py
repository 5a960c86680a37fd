"""Configurations of other programs as recipes: `llmrecipes new --from FILE`."""
