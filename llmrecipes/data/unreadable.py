"""Diagnosis of a read failure: the file that has changed, or what killed the worker process."""

from __future__ import annotations

import signal
import socket

from llmrecipes.data import index, listing, manifest
from llmrecipes.data.loader import ReaderLost
from llmrecipes.data.prepared import Prepared
from llmrecipes.errors import ExitCode, UserError
from llmrecipes.recipe.schema import Recipe


def explain(error: ReaderLost | OSError, recipe: Recipe, prepared: Prepared) -> UserError:
    """The error for it: `STOP` if prepared data has changed, `REQUEUE` if a restart may succeed.

    Args:
        error: what the loader raised.
        recipe: of the run.
        prepared: its data, whose files are checked again.
    """
    try:
        folder = index.folder(recipe, prepared)
        manifest.check_sizes(prepared.path, prepared.manifest)
        listing.require_listed(folder, listing.read(folder)[0])
    except (UserError, OSError) as changed:
        what, where = (changed.what, changed.where) if isinstance(changed, UserError) else (str(changed), "")
        return UserError(
            f"prepared data changed during the run: {what}",
            where=where,
            rule="prepared data stays as it is while a run reads it",
            fix="copy the file again from where it was prepared, or delete the folder and prepare again; then resume",
            code=ExitCode.STOP,
        )
    here = socket.gethostname()
    if isinstance(error, OSError):
        return UserError(
            f"cannot read prepared data on {here}: {error.strerror or error}",
            where=str(error.filename or prepared.path),
            fix=f"look at the file system of {here} (dmesg), then resume",
            code=ExitCode.REQUEUE,
        )
    return UserError(
        f"data loader process {error.pid} on {here} {_end(error.exitcode)}",
        where="data.num_workers",
        fix=_FIXES.get(-error.exitcode, f"look at the log of {here} (dmesg), then resume"),
        code=ExitCode.REQUEUE,
    )


_FIXES: dict[int, str] = {
    signal.SIGKILL: "most often by the kernel, out of memory: more memory for the job, or a smaller data.num_workers "
    "or data.prefetch_factor",
    signal.SIGBUS: "most often /dev/shm is full: make it larger (docker run --shm-size), or a smaller data.num_workers "
    "or data.prefetch_factor",
}


def _end(exitcode: int) -> str:
    return f"was killed by {signal.Signals(-exitcode).name}" if exitcode < 0 else f"ended with exit code {exitcode}"
