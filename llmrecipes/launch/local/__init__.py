"""Ranks on this machine."""

from llmrecipes.launch.local.processes import Grace, rank_environment, run_ranks

__all__ = ["Grace", "rank_environment", "run_ranks"]
