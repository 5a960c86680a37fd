"""Ranks on this machine."""

from llmrecipes.launch.local.processes import Grace, rank_environment, run_ranks
from llmrecipes.launch.local.spares import Spares

__all__ = ["Grace", "Spares", "rank_environment", "run_ranks"]
