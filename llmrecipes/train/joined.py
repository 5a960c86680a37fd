"""A rank that has joined the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llmrecipes.checkpoint.rank_groups import Ranks
from llmrecipes.checkpoint.store import CheckpointStore
from llmrecipes.data.folder.prepared import Prepared
from llmrecipes.engine.base import Platform, Rank, World
from llmrecipes.faults.signals import StopRequest
from llmrecipes.hardware.cluster import Cluster
from llmrecipes.plan.run_plan import RunPlan
from llmrecipes.recipe.schema import Recipe
from llmrecipes.train.observers.base import Observers
from llmrecipes.train.spec import RunSpec


@dataclass(frozen=True)
class Joined:
    """What the stages of a run share on a rank.

    Attributes:
        lay_out: see `stage.layouts`.
        group: group of the savers.
        network: NCCL network; None: there is none.
    """

    spec: RunSpec
    plan: RunPlan
    cluster: Cluster
    platform: Platform
    rank: Rank
    lay_out: Callable[[Recipe], World]
    prepared: Prepared
    store: CheckpointStore
    stop: StopRequest
    group: Ranks
    network: str | None
    observers: Observers
