"""A start from a copy of a run's checkpoint (`checkpoint.copy_to`), on a machine that has an older one, or none."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from llmrecipes.checkpoint.compatibility import require_compatible
from llmrecipes.checkpoint.manifest import Manifest
from llmrecipes.checkpoint.rank_groups import Ranks, own_share
from llmrecipes.checkpoint.remote import KEY, RemoteCheckpoints
from llmrecipes.checkpoint.store import CheckpointStore
from llmrecipes.errors import UserError
from llmrecipes.recipe.schema import Recipe
from llmrecipes.runfiles import METRICS, REWINDS
from llmrecipes.train.changed_steps import require_accepted
from llmrecipes.train.spec import RunSpec
from llmrecipes.units import gib

logger = logging.getLogger(__name__)

BESIDE = (METRICS, REWINDS)
"""Files of a run that are copied with each checkpoint, because its continuation needs them or shows them."""


@dataclass(frozen=True)
class _Later:
    """A copy that is later than the run's own checkpoints."""

    folder: str
    manifest: Manifest
    content: bytes
    """Of its manifest.json."""


def bring(spec: RunSpec, store: CheckpointStore, ranks: Ranks) -> None:
    """Fetch the newest copy that is later than the run's own checkpoints; a collective of all ranks.

    A copy that is damaged is left, and the one before it fetched. With `--from-scratch` all copies are set aside.

    Args:
        spec: spec of the run.
        store: its checkpoints, claimed.
        ranks: all ranks.

    Raises:
        UserError: on every rank: the store cannot be asked, and the run has no checkpoint of its own, or is to start
            from scratch; or a copy cannot be written.
    """
    if spec.recipe.checkpoint.copy_to is None:
        return
    copies = _later(spec, store) if ranks.rank == 0 else iter(())
    while (later := _of_first(ranks, next(copies, None))) is not None:
        if _fetched(spec, store, ranks, later):
            return


def _of_first(ranks: Ranks, answer: Any) -> Any:
    """The answer of the first rank; an error is raised on every rank."""
    shared: Any = ranks.broadcast(answer)
    if isinstance(shared, UserError):
        raise shared
    return shared


def _later(spec: RunSpec, store: CheckpointStore) -> Iterator[_Later | UserError]:
    """The copies that are later than the run's own checkpoints, newest first; on the first rank."""
    own = max((entry.step for entry in store.entries()), default=0)
    try:
        remote = RemoteCheckpoints(str(spec.recipe.checkpoint.copy_to), spec.run.name)
        if spec.from_scratch:
            remote.set_aside()
        copies = remote.copies()
    except UserError as error:
        if own and not spec.from_scratch:
            logger.warning("the store is not asked for copies later than step %d: %s", own, error)
            return
        yield UserError(
            f"copies of this run's checkpoints cannot be looked for: {error.what}",
            where=error.where,
            rule="a run starts at step 0 only if it has no copies that a later start would continue from",
            fix=f"{error.fix}; or {KEY}=null, to start without copies",
            again=error.again,
        )
        return
    for step, folder in reversed(copies.items()):
        if step <= own:
            return
        try:
            manifest, content = remote.manifest(folder)
        except UserError as error:
            _not_used(step, error)
            continue
        try:
            then = manifest.recipe or {}
            require_compatible(spec.recipe.model_dump(mode="json"), then, where=remote.url)
            accept = spec.accept_changes
            require_accepted(spec.recipe, Recipe.model_validate(then), step, where=remote.url, accept=accept)
        except UserError as error:
            yield error
            return
        logger.info("fetching the checkpoint of step %d from %s", step, remote.url)
        yield _Later(folder, manifest, content)


def _fetched(spec: RunSpec, store: CheckpointStore, ranks: Ranks, later: _Later) -> bool:
    """Fetch a copy, each rank its share; False on every rank if it is damaged.

    Raises:
        UserError: on every rank: it cannot be written.
    """
    manifest = later.manifest
    temporary = store.temporary_path(manifest.step, "copy")
    _of_first(ranks, _prepared(store, manifest) if ranks.rank == 0 else None)
    names = own_share(manifest.files, ranks.rank, ranks.size)
    remote = RemoteCheckpoints(str(spec.recipe.checkpoint.copy_to), spec.run.name)
    failure: UserError | None = None
    try:
        remote.fetch(later.folder, {name: manifest.files[name] for name in names}, temporary)
    except UserError as error:
        failure = error
    except OSError as error:
        failure = _unwritable(store, error)
    failures = ranks.gather(failure)
    if failures is not None:
        failure = next(filter(None, failures), None) or _published(spec, store, remote, later)
        if failure is not None:
            store.discard(temporary)
            if failure.where != str(store.directory):
                _not_used(manifest.step, failure)
    failure = ranks.broadcast(failure)
    if failure is not None and failure.where == str(store.directory):
        raise failure
    return failure is None


def _prepared(store: CheckpointStore, manifest: Manifest) -> UserError | None:
    """An empty folder for a copy, which has to fit."""
    try:
        store.discard(store.temporary_path(manifest.step, "copy"))
        free = shutil.disk_usage(store.temporary(manifest.step, "copy")).free
    except OSError as error:
        return _unwritable(store, error)
    if manifest.size <= free:
        return None
    store.discard(store.temporary_path(manifest.step, "copy"))
    what = f"the copy of step {manifest.step} needs {gib(manifest.size)}, {gib(free)} free"
    return UserError(what, where=str(store.directory), fix="free some space, or --runs-dir on another disk")


def _published(spec: RunSpec, store: CheckpointStore, remote: RemoteCheckpoints, later: _Later) -> UserError | None:
    """The copy as a checkpoint of the run, with the files beside it that the run does not have."""
    try:
        for name in BESIDE:
            if not (spec.run.path / name).exists():
                remote.fetch_beside(spec.run.path / name)
        store.adopt(store.temporary_path(later.manifest.step, "copy"), later.content, later.manifest.step)
    except UserError as error:
        return error
    except OSError as error:
        return _unwritable(store, error)
    return None


def _not_used(step: int, why: UserError) -> None:
    logger.error("ALARM: the copy of step %d is not used: %s", step, why)


def _unwritable(store: CheckpointStore, error: OSError) -> UserError:
    return UserError(
        f"a copy cannot be written: {error.strerror or error}",
        where=str(store.directory),
        fix="free some space, or make it writable",
    )
