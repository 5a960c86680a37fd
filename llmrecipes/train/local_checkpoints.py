"""Local checkpoints of a run: where its ranks keep them, and a start from the newest."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from typing import cast

import torch.distributed as dist

from llmrecipes.checkpoint.local_parts import LocalParts, folder_of
from llmrecipes.checkpoint.local_saver import LocalSaver, run_token
from llmrecipes.checkpoint.manifest import CheckpointInfo, Entry
from llmrecipes.checkpoint.rank_groups import Ranks
from llmrecipes.checkpoint.store import CheckpointStore
from llmrecipes.engine.base import Engine, PartEngine, Progress, Rank
from llmrecipes.io import write_atomic
from llmrecipes.plan.derive import Plan
from llmrecipes.rundir import Run
from llmrecipes.tracking.events import Note
from llmrecipes.train.resume import Start, back_to_best, choose

logger = logging.getLogger(__name__)


class LocalCheckpoints:
    """Local checkpoints of this rank; creating it and `newest` are collectives of all ranks.

    Args:
        plan: plan of the run, whose recipe has a folder for them.
        interval: steps between them.
        run: the run, for whose parts the folder has a subfolder.
        group: all ranks; used at the start only.
    """

    def __init__(self, plan: Plan, interval: int, run: Run, group: Ranks) -> None:
        wanted = plan.recipe.checkpoint
        self.interval = interval
        self._run, self._group = run, group
        per_node = int(os.environ.get("LOCAL_WORLD_SIZE", str(group.size)))
        token = run_token(run.local_checkpoints, group)
        self.folder = folder_of(
            str(wanted.non_persistent_local_ckpt_dir), run.recipe_name, token, group.rank // per_node
        )
        self._token = token
        self.saver = LocalSaver(LocalParts(self.folder), group, per_node, plan.layout.as_dict())

    def newest(self, after: int) -> tuple[Entry, Note] | None:
        """This rank's part of the newest step that is complete, if it is newer than a step, and what to say of it."""
        if (chosen := self.saver.newest(after)) is None:
            return None
        entry, lost = chosen
        if self._group.rank == 0:
            record = {"token": self._token, "resumed": entry.step, "ranks": self._group.size}
            write_atomic(self._run.local_checkpoints, json.dumps(record) + "\n")
            logger.info("using the local checkpoint of step %d; restored from copies: %s", entry.step, lost or "none")
        return entry, Note(step=entry.step, event="resumed_locally", details={"from_copies": lost})

    def attach(self, engine: Engine) -> None:
        """Name the engine whose state is saved."""
        self._engine = cast(PartEngine, engine)  # the recipe is refused with others
        self._format = self._engine.part_format()

    def save(self, progress: Progress, info: CheckpointInfo) -> None:
        """Write the state of a step of the engine that is attached, in the background."""
        self.saver.save(self._format, self._engine.part(progress), info)

    def forget(self) -> None:
        """Delete all: the run has ended, or goes back to an earlier step; a collective of all ranks."""
        self.saver.forget()
        dist.barrier()


def open_local(plan: Plan, run: Run, group: Ranks) -> LocalCheckpoints | None:
    """The local checkpoints that a recipe wants; a collective of all ranks."""
    interval = plan.recipe.checkpoint.non_persistent_save_interval
    return None if interval is None else LocalCheckpoints(plan, interval, run, group)


def choose_from(
    store: CheckpointStore,
    rank: Rank,
    open_parts: Callable[[], LocalCheckpoints | None],
    from_scratch: bool,
    from_best: bool = False,
) -> tuple[Start, LocalCheckpoints | None]:
    """The newest step that local checkpoints have, unless the store has a newer one, whose hashes are compared then.

    Args:
        store: the checkpoints of the run.
        rank: this one.
        open_parts: see `open_local`.
        from_scratch: move the run's history aside; its local checkpoints are not found again.
        from_best: first delete the checkpoints after the one of the lowest held-out loss, and all local ones.

    Raises:
        UserError: see `choose` and `back_to_best`.
    """
    if from_scratch:
        return choose(store, rank, from_scratch=True), open_parts()
    local = open_parts()
    if from_best:
        if local is not None:
            local.forget()
        note = back_to_best(store, rank)
        start = choose(store, rank)
        return replace(start, notes=(*start.notes, note)), local
    if local is not None:
        entries = store.entries() if rank.is_first else []
        # That of the same step is as good, and nothing of it is read over the network.
        if (local_checkpoint := local.newest(after=entries[-1].step - 1 if entries else 0)) is not None:
            entry, note = local_checkpoint
            return Start(entry, (note,)), local
    return choose(store, rank), local
