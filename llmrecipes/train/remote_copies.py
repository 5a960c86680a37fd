"""A start from a copy of a run's checkpoint (`checkpoint.copy_to`), on a machine that has an older one, or none."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, cast

from llmrecipes.checkpoint.compatibility import require_compatible
from llmrecipes.checkpoint.manifest import Manifest
from llmrecipes.checkpoint.rank_groups import Ranks, own_share
from llmrecipes.checkpoint.remote import KEY, RemoteCheckpoints
from llmrecipes.checkpoint.store import CheckpointStore
from llmrecipes.errors import UserError
from llmrecipes.recipe.schema import Recipe
from llmrecipes.rundir import Run
from llmrecipes.runfiles import METRICS, REWINDS
from llmrecipes.train.spec import RunSpec

logger = logging.getLogger(__name__)

Choice = tuple[int, Manifest, bytes]
"""Step, manifest, and its bytes."""
BESIDE = (METRICS, REWINDS)
"""Files of a run that are copied with each checkpoint, because its continuation needs them or shows them."""


def bring(spec: RunSpec, store: CheckpointStore, ranks: Ranks) -> None:
    """Fetch the newest copy that is later than the run's own checkpoints; a collective of all ranks.

    A copy that is damaged is left, and the one before it fetched.

    Args:
        spec: spec of the run.
        store: its checkpoints, claimed.
        ranks: all ranks.

    Raises:
        UserError: on every rank: the store cannot be asked, and the run has no checkpoint of its own; a copy cannot be
            written.
    """
    url = spec.recipe.checkpoint.copy_to
    if url is None or spec.from_scratch:
        return
    choices = _later(spec.recipe, url, spec.run, store) if ranks.rank == 0 else iter(())
    while (chosen := _shared(ranks, choices)) is not None:
        step, manifest, content = chosen
        if _fetched(url, spec.run, store, ranks, step, manifest, content):
            return


def _later(recipe: Recipe, url: str, run: Run, store: CheckpointStore) -> Iterator[Choice | UserError]:
    """The copies that are later than the run's own checkpoints, newest first; on the first rank."""
    own = [entry.step for entry in store.entries()]
    try:
        remote = RemoteCheckpoints(url, run.name)
        steps = remote.steps()
    except UserError as error:
        if not own:
            yield UserError(
                f"copies of this run's checkpoints cannot be looked for: {error.what}",
                where=error.where,
                rule="a run without checkpoints of its own starts at step 0 only if it has no copies either",
                fix=f"{error.fix}; or {KEY}=null, to start without copies",
                again=error.again,
            )
            return
        logger.warning("copies are not looked for, the run has its own step %d: %s", own[-1], error)
        return
    for step in reversed(steps):
        if own and step <= own[-1]:
            return
        try:
            manifest, content = remote.manifest(step)
        except UserError as error:
            logger.error("ALARM: the copy of step %d is not used: %s", step, error)
            continue
        try:
            require_compatible(recipe.model_dump(mode="json"), manifest.recipe or {}, where=remote.url)
        except UserError as error:
            yield error
            return
        logger.info("fetching the checkpoint of step %d from %s", step, remote.url)
        yield step, manifest, content


def _shared(ranks: Ranks, choices: Iterator[Choice | UserError]) -> Choice | None:
    """The next choice of the first rank."""
    chosen: Any = ranks.broadcast(next(choices, None))
    if isinstance(chosen, UserError):
        raise chosen
    return cast("Choice | None", chosen)


def _fetched(
    url: str, run: Run, store: CheckpointStore, ranks: Ranks, step: int, manifest: Manifest, content: bytes
) -> bool:
    """Fetch a copy, each rank its share; False on every rank if it is damaged.

    Raises:
        UserError: on every rank: it cannot be written.
    """
    prepared: UserError | None = None
    if ranks.rank == 0:
        try:
            store.discard(store.temporary_path(step, "copy"))
            store.temporary(step, "copy")
        except OSError as error:
            prepared = _unwritable(store, error)
    answer: Any = ranks.broadcast(prepared)
    if answer is not None:
        raise answer
    temporary = store.temporary_path(step, "copy")
    names = own_share(manifest.files, ranks.rank, ranks.size)
    failed: UserError | None = None
    try:
        remote = RemoteCheckpoints(url, run.name)
        remote.fetch(step, names, manifest.files, temporary)
    except UserError as error:
        failed = error
    except OSError as error:
        failed = _unwritable(store, error)
    failures = ranks.gather(failed)
    outcome: UserError | None = None
    if failures is not None:
        outcome = next(filter(None, failures), None)
        if outcome is None:
            try:
                for name in BESIDE:
                    if not (run.path / name).exists():
                        remote.fetch_beside(name, run.path / name)
                store.adopt(temporary, content, step)
            except UserError as error:
                outcome = error
            except OSError as error:
                outcome = _unwritable(store, error)
        if outcome is not None:
            store.discard(temporary)
    shared: Any = ranks.broadcast(outcome)
    if shared is None:
        return True
    if shared.where == str(store.directory):
        raise shared
    if ranks.rank == 0:
        logger.error("ALARM: the copy of step %d is not used: %s", step, shared)
    return False


def _unwritable(store: CheckpointStore, error: OSError) -> UserError:
    return UserError(
        f"a copy cannot be written: {error.strerror or error}",
        where=str(store.directory),
        fix="free some space, or make it writable",
    )
