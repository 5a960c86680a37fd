"""Files with the weights and gradients of every rank.

Ranks write everything they hold, so that replicas of a weight on several ranks can be compared, too.
"""

from __future__ import annotations

from pathlib import Path

import torch

from llmrecipes.engine.base import Shard


def write(path: Path, shards: list[Shard]) -> None:
    """Write shards as plain tuples, which need no unpickling of classes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save([tuple(shard) for shard in shards], path)


def read(path: Path) -> list[Shard]:
    """Read what `write` wrote."""
    return [Shard(*values) for values in torch.load(path, map_location="cpu", weights_only=True)]
