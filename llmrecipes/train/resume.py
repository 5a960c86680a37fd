"""Where a run starts: the newest valid checkpoint, or initial weights."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from llmrecipes.checkpoint.compatibility import require_readable
from llmrecipes.checkpoint.rank_groups import serve, survey
from llmrecipes.checkpoint.store import CheckpointStore, Damaged, Entry
from llmrecipes.engine.base import Engine, Progress, World
from llmrecipes.errors import ExitCode, UserError
from llmrecipes.runfiles import run_of
from llmrecipes.tracking.events import Note
from llmrecipes.train.completeness import move_aside, require_none_saved
from llmrecipes.train.spec import RunSpec

if TYPE_CHECKING:
    from llmrecipes.hf.weights import FolderWeights


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Start:
    """Where a run starts; `notes` record what was moved aside for it."""

    entry: Entry | None
    """The checkpoint to load; without one, the model needs initial weights."""
    notes: tuple[Note, ...] = ()


def choose(store: CheckpointStore, world: World, *, from_scratch: bool = False) -> Start:
    """Choose the newest valid checkpoint, before the model is built: where one is loaded, no initial weight is drawn.

    Damaged checkpoints are renamed, so that their steps can be saved again.

    Args:
        store: the checkpoints, in the run directory; claimed, if another process may write there.
        world: this rank.
        from_scratch: first move the run's history aside.

    Raises:
        UserError: on every rank: none of its checkpoints is valid (`ExitCode.STOP`).
    """
    # Rank 0 decides: ranks may see different listings of a shared file system. All of them compare hashes.
    if not world.is_first and not from_scratch:
        serve()
    chosen: list[Any] = [_chosen(store, from_scratch) if world.is_first else None]
    dist.broadcast_object_list(chosen, src=0)
    if isinstance(chosen[0], dict):
        raise UserError(**chosen[0])
    return Start(*chosen[0])


def resume(engine: Engine, entry: Entry, world: World) -> Progress:
    """Restore a checkpoint into the engine.

    Raises:
        UserError: on every rank: the checkpoint does not match.
    """
    require_readable(entry, engine.name)
    if entry.manifest.engine != engine.name and world.is_first:
        logger.info("%s was saved by engine %s and is resumed with %s", entry.path, entry.manifest.engine, engine.name)
    progress = engine.load_state(entry)
    if progress.step > engine.recipe.train.train_iters:
        raise UserError(
            f"train.train_iters is {engine.recipe.train.train_iters}, but the run has done {progress.step} steps",
            where=str(entry.path),
            fix=f"train.train_iters={progress.step} or more, or a new run id",
        )
    return progress


def _chosen(store: CheckpointStore, from_scratch: bool) -> tuple[Entry | None, tuple[Note, ...]] | dict[str, Any]:
    """What rank 0 broadcasts: the checkpoint to resume from, or the arguments of the error that all ranks raise."""
    try:
        return _from_scratch(store) if from_scratch else _newest(store)
    except UserError as error:
        return {"what": error.what, "where": error.where, "rule": error.rule, "fix": error.fix, "code": error.code}


def _from_scratch(store: CheckpointStore) -> tuple[None, tuple[Note, ...]]:
    aside = move_aside(run_of(store.directory).path)
    if aside is None:
        return None, ()
    logger.warning("this run's history was moved to %s; starting at step 0", aside)
    return None, (Note(step=0, event="history_moved", details={"path": str(aside)}),)


def _newest(store: CheckpointStore) -> tuple[Entry | None, tuple[Note, ...]]:
    entry, damaged = survey(store)
    if entry is None:
        require_none_saved(run_of(store.directory).path, damaged)
        return None, ()
    seen = {checkpoint.path for checkpoint in damaged}
    damaged += [checkpoint for checkpoint in store.incomplete() if checkpoint.path not in seen]
    return entry, tuple(_set_aside(store, checkpoint, entry.step) for checkpoint in damaged)


def _set_aside(store: CheckpointStore, damaged: Damaged, step: int) -> Note:
    try:
        path = store.set_aside(damaged.path)
    except OSError as error:
        raise UserError(
            f"the damaged checkpoint cannot be renamed: {error.strerror}",
            where=str(damaged.path),
            rule="a damaged checkpoint is kept under another name, so that its step can be saved again",
            fix="move it away by hand, then run the same command",
            code=ExitCode.STOP,
        ) from error
    logger.warning("checkpoint %s is damaged (%s); renamed to %s", damaged.path, damaged.reason, path.name)
    details = {"checkpoint": damaged.path.name, "reason": damaged.reason, "path": str(path)}
    return Note(step=step, event="checkpoint_damaged", details=details, alarm=True)


@contextmanager
def initial_weights(spec: RunSpec, *, resumed: bool = False) -> Iterator[FolderWeights | None]:
    """Open the weights that `train.pretrained` names; None: the recipe names none, or a checkpoint has all weights.

    Args:
        spec: of the run.
        resumed: a checkpoint is loaded next; one with adapters has nothing else.

    Raises:
        UserError: they are not those of the recipe's model.
    """
    if spec.recipe.train.pretrained is None or (resumed and spec.recipe.lora is None):
        yield None
        return
    from llmrecipes.hf.reading import resolve
    from llmrecipes.hf.weights import open_weights

    # A rank that was started without the folder finds what the Hub's cache has.
    path = spec.pretrained or resolve(spec.recipe.train.pretrained).path
    weights = open_weights(path, spec.recipe.model)
    try:
        yield weights
    finally:
        weights.close()
