"""Where a run starts: the newest valid checkpoint, or initial weights."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from llmrecipes.checkpoint.compatibility import require_readable
from llmrecipes.checkpoint.manifest import InvalidCheckpoint, inspect
from llmrecipes.checkpoint.rank_groups import serve, survey
from llmrecipes.checkpoint.store import CheckpointStore, DamagedCheckpoint, Entry, require_best
from llmrecipes.engine.base import Engine, Progress, Rank, WeightSource, World
from llmrecipes.errors import ExitCode, UserError
from llmrecipes.plan.derive import Plan
from llmrecipes.recipe.rules.distill_rules import has_teacher
from llmrecipes.recipe.rules.preference_rules import frozen_model, has_second_model, named, needs_start_weights
from llmrecipes.recipe.schema import Model
from llmrecipes.runfiles import run_of
from llmrecipes.tracking.events import Note
from llmrecipes.train.agreement import of_first_rank
from llmrecipes.train.completeness import move_aside, require_none_saved
from llmrecipes.train.spec import RunSpec

if TYPE_CHECKING:
    from llmrecipes.hf.weights import FolderWeights


logger = logging.getLogger(__name__)


class LoadsWeights(Protocol):
    """The frozen model of an engine; see `engine.parts.frozen_passes.FrozenModel`."""

    def load(self, weights: Entry | WeightSource | None = None) -> None:
        """Build it."""


@dataclass(frozen=True)
class Start:
    """Where a run starts; `notes` record what was moved aside for it."""

    entry: Entry | None
    """The checkpoint to load; without one, the model needs initial weights."""
    notes: tuple[Note, ...] = ()


def choose(store: CheckpointStore, rank: Rank, *, from_scratch: bool = False) -> Start:
    """Choose the newest valid checkpoint, before the model is built: where one is loaded, no initial weight is drawn.

    Damaged checkpoints are renamed, so that their steps can be saved again.

    Args:
        store: the checkpoints, in the run directory; claimed, if another process may write there.
        rank: this one.
        from_scratch: first move the run's history aside.

    Raises:
        UserError: on every rank: none of its checkpoints is valid (`ExitCode.STOP`).
    """
    # Rank 0 decides: ranks may see different listings of a shared file system. All of them compare hashes.
    if not rank.is_first and not from_scratch:
        serve()
    chosen: Any = of_first_rank(_chosen(store, from_scratch) if rank.is_first else None)
    if isinstance(chosen, dict):
        raise UserError(**chosen)
    return Start(*chosen)


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


def resized(start: Start, plan: Plan, saved: Plan) -> tuple[Note, ...]:
    """The note of a run that continues with another number of ranks.

    Args:
        plan: plan of what is trained next.
        saved: on these ranks, of the stage that the checkpoint is of; a later stage may have another layout.
    """
    if start.entry is None:
        return ()
    before = start.entry.manifest.layout
    now = plan.layout.as_dict()
    expected = saved.layout.as_dict()
    names = ("world_size", "data_parallel_size")
    if all(before.get(name, expected[name]) == expected[name] for name in names):
        return ()
    logger.info("resumed on %d ranks, previously %d", now["world_size"], before["world_size"])
    details = {"before": {name: before.get(name) for name in names}, "now": {name: now[name] for name in names}}
    return (Note(step=start.entry.step, event="resized", details=details),)


def back_to_best(store: CheckpointStore, rank: Rank) -> Note:
    """Delete the checkpoints after the one of the lowest held-out loss; a collective of all ranks.

    Returns:
        What was deleted.

    Raises:
        UserError: on every rank: there is none, or a newer one cannot be deleted.
    """
    withdrawn: Any = of_first_rank(_withdrawn(store) if rank.is_first else None)
    if isinstance(withdrawn, UserError):
        raise withdrawn
    step, deleted = withdrawn
    if deleted:
        logger.warning("checkpoints of steps %s are deleted: the run goes back to step %d", deleted, step)
    return Note(step=step, event="went_back_to_best", details={"deleted": deleted})


def _withdrawn(store: CheckpointStore) -> tuple[int, list[int]] | UserError:
    try:
        entry = require_best(store)
        return entry.step, store.withdraw(entry.step)
    except UserError as error:
        return error
    except OSError as error:
        return UserError(f"a newer checkpoint cannot be deleted: {error.strerror}", where=str(store.directory))


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


def _set_aside(store: CheckpointStore, damaged: DamagedCheckpoint, step: int) -> Note:
    try:
        path = store.set_aside(damaged.path)
    except OSError as error:
        raise UserError(
            f"cannot rename the damaged checkpoint: {error.strerror}",
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
        spec: spec of the run.
        resumed: a checkpoint is loaded next; one with adapters has nothing else.

    Raises:
        UserError: they are not those of the recipe's model.
    """
    if spec.recipe.train.pretrained is None or (resumed and not needs_start_weights(spec.recipe)):
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


def load_frozen_model(engine: Engine, spec: RunSpec) -> None:
    """Load the teacher of a run with `distill`, or the reference of one with `dpo`; a collective of all ranks.

    Raises:
        UserError: it is gone, corrupt, or not of the shape that the recipe says.
    """
    recipe = engine.recipe  # of the stage, whose sequences the frozen model reads
    if not has_teacher(recipe) and not has_second_model(recipe):
        return
    key = named(recipe)
    if key is None:
        with initial_weights(spec, resumed=True) as start:
            engine.parts.load(start)
        return
    if spec.teacher is None:
        raise UserError(
            "this rank was started without it",
            where=key,
            rule="llmrecipes train locates the model for its ranks",
            fix="start it with llmrecipes train or llmrecipes submit",
        )
    load_frozen_from(engine.parts, spec.teacher, frozen_model(recipe))


def load_frozen_from(frozen: LoadsWeights, path: Path, model: Model) -> None:
    """Load a frozen model; a collective of all ranks.

    Args:
        path: a checkpoint, or a folder in Hugging Face's form.
        model: section of the frozen model.

    Raises:
        UserError: as `load_frozen_model`.
    """
    if not (path / "config.json").is_file():
        try:
            frozen.load(inspect(path, full=False))
        except InvalidCheckpoint as problem:
            raise UserError(f"this checkpoint is corrupt: {problem}", where=str(path)) from problem
        return
    from llmrecipes.hf.weights import open_weights

    weights = open_weights(path, model)
    try:
        frozen.load(weights)
    finally:
        weights.close()
