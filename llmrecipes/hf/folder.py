"""A folder that is there whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llmrecipes.checkpoint.store import take_lock
from llmrecipes.errors import UserError
from llmrecipes.io import sync

_LOCK = ".lock"


@contextmanager
def published(out: Path, elsewhere: str = "--out DIR") -> Iterator[Path]:
    """A hidden folder beside `out` that is renamed to it when the block ends, with everything in it on the disk.

    If the block is left by an exception, nothing remains. What a killed process has left is removed by the next one.

    Args:
        out: the final name.
        elsewhere: the option that chooses another place.

    Raises:
        UserError: it exists already, another process writes it, or the disk is full or fails.
    """
    require_absent(out, elsewhere)
    hidden = out.with_name(f".{out.name}.part")
    try:
        hidden.mkdir(parents=True, exist_ok=True)
        try:
            lock = take_lock(hidden / _LOCK)
        except UserError as busy:
            raise UserError("another process is writing this", where=str(out), fix=f"wait, or {elsewhere}") from busy
        try:
            _empty(hidden)
            yield hidden
            for path in (*sorted(hidden.rglob("*")), hidden):
                sync(path)
            require_absent(out, elsewhere)
            (hidden / _LOCK).unlink()
            hidden.rename(out)
            sync(out.parent)
        except BaseException:
            shutil.rmtree(hidden, ignore_errors=True)
            raise
        finally:
            os.close(lock)
    except OSError as error:
        raise UserError(
            f"this cannot be written: {error.strerror}",
            where=str(error.filename or out),
            rule="nothing is left behind",
            fix=f"free some disk space if it is full, or write to another disk with {elsewhere}",
        ) from error


def require_absent(out: Path, elsewhere: str = "--out DIR") -> None:
    """Check that nothing has the name of a folder to be written.

    Args:
        out: the folder.
        elsewhere: the option that chooses another place.

    Raises:
        UserError: something has.
    """
    if out.exists() or out.is_symlink():
        raise UserError(
            "this exists already", where=str(out), rule="nothing is overwritten", fix=f"remove it, or {elsewhere}"
        )


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.name == _LOCK:
            continue
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
