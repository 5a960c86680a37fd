"""Ranks on this machine."""

from llmrecipes.launch.local.ranks import Grace, rank_environment, run_ranks

__all__ = ["Grace", "rank_environment", "run_ranks"]
