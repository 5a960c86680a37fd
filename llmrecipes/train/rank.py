"""Entry and exit of every rank: reads its spec, reports errors at once, and leaves without waiting for other ranks."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NoReturn, TypeVar

from llmrecipes.console import setup_logging
from llmrecipes.errors import ExitCode, UserError
from llmrecipes.launch.open_files import allow_open_files
from llmrecipes.launch.ranks import LAUNCHER, SPARE, SPARE_RANK, SPARE_READY, SPARE_TAKEN
from llmrecipes.loading import announce_loading
from llmrecipes.parent import end_with_parent
from llmrecipes.recipe.schema import Recipe
from llmrecipes.redact import guard_streams
from llmrecipes.train.spec import RankSpec

S = TypeVar("S", bound=RankSpec)

SECONDS_BEHIND_THE_FIRST = 2.0
CRASHED = 1
"""Exit code after an error that is not a `UserError`, as Python's."""
_REPORTED = "_llmrecipes_exit_code"


def rank_main(kind: type[S], run: Callable[[S], ExitCode], import_all: Callable[[S], None] | None = None) -> NoReturn:
    """Entry point of a rank: `python -m <module> <spec.json>`, or of its spare, with `--spare`.

    Args:
        kind: class of the spec.
        run: runs the rank; returns the exit code.
        import_all: imports what `run` needs; None: the module has no spares.
    """
    guard_streams()
    # Nothing is lost before training starts: until then a signal ends this process immediately, without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    if launcher := os.environ.pop(LAUNCHER, ""):  # not for the processes that this one starts
        end_with_parent(int(launcher))
    if import_all is not None and sys.argv[2:] == [SPARE]:
        spare = kind.model_validate_json(Path(sys.argv[1]).read_text("utf-8"))
        wait_as_spare(partial(import_all, spare))
    setup_logging(rank=(rank := int(os.environ.get("RANK", "0"))))
    if rank == 0:
        announce_loading()
    leave(process_exit_code(run, kind.model_validate_json(Path(sys.argv[1]).read_text("utf-8"))))


LOWEST_PRIORITY = 19
NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""With it torch asks NVML whether there are GPUs, so that a process that only waits does not initialise CUDA."""


def wait_as_spare(import_all: Callable[[], None]) -> None:
    """Import at the lowest priority, and return when this process becomes a rank; otherwise it ends here.

    Standard input is the launcher's socket, from which the rank's variables come.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to every process of the group
    os.environ[NVML_CHECK] = "1"

    def run() -> None:
        # Of this thread only: a process cannot raise its own priority again.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
        with suppress(Exception), warnings.catch_warnings():  # the rank meets an error again, and reports it
            warnings.simplefilter("ignore")  # those of libraries are in the log of the first start
            import_all()

    importing = threading.Thread(target=run)
    importing.start()
    importing.join()
    with socket.socket(fileno=os.dup(0)) as connection, connection.makefile("rb") as lines:
        try:
            connection.send(SPARE_READY)
            line = lines.readline()
            connection.send(SPARE_TAKEN)
        except OSError:
            line = b""
        if not line:
            os._exit(ExitCode.DONE)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    del os.environ[NVML_CHECK]
    os.environ.pop(SPARE_RANK, None)
    os.environ.update(json.loads(line))
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def guarded(run: Callable[[S], ExitCode], spec: S) -> int:
    """Run a rank and print a user error as one message; returns the exit code. Any other error is raised."""
    try:
        allow_open_files(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))
        return int(run(spec))
    except Exception as error:
        code: int | None = getattr(error, _REPORTED, None)
        if code is not None:
            return code
        explained = _explained(error, spec.recipe)
        if explained is None:
            raise
        return _report_user_error(explained)


def process_exit_code(run: Callable[[S], ExitCode], spec: S) -> int:
    """`guarded`, for a process that is a rank: any other error is printed, and its exit code is 1."""
    try:
        code = guarded(run, spec)
    except Exception:
        traceback.print_exc()
        return CRASHED
    if code not in (ExitCode.DONE, ExitCode.REQUEUE, CRASHED) and os.environ.get("RANK", "0") != "0":
        # Most user errors are raised on all ranks, and launchers kill the others when one exits: rank 0 reports first.
        time.sleep(SECONDS_BEHIND_THE_FIRST)
    return code


@contextmanager
def failure_reported(recipe: Recipe) -> Iterator[None]:
    """The innermost block of a rank that has joined others: an error is printed before anything is closed.

    Closing may wait for a checkpoint that is being written, or for a GPU whose collective never ends. So this process
    ends at the latest `train.exit_grace_seconds` after the error.
    """
    try:
        yield
    except Exception as error:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            explained = _explained(error, recipe)
            if explained is None:
                traceback.print_exc()
            code = CRASHED if explained is None else _report_user_error(explained)
            setattr(error, _REPORTED, code)
            last = threading.Timer(recipe.train.exit_grace_seconds, os._exit, (code,))
            last.daemon = True
            last.start()
        raise


def leave(code: int) -> NoReturn:
    """End this process.

    After an error without any clean-up: at the end of an interpreter NCCL's communicators are aborted, which may wait
    for ranks that wait for this one.
    """
    if code in (ExitCode.DONE, ExitCode.REQUEUE):
        sys.exit(code)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _explained(error: Exception, recipe: Recipe) -> UserError | None:
    """The error as the user should see it; None for a bug, which keeps its traceback."""
    if isinstance(error, UserError):
        return error
    if not isinstance(error, MemoryError | RuntimeError):
        return None
    from llmrecipes.faults.out_of_memory import out_of_memory

    return out_of_memory(error, recipe, ranks=int(os.environ.get("WORLD_SIZE", "1")), nodes=nodes())


def _report_user_error(error: UserError) -> int:
    print(f"error: {error}", file=sys.stderr, flush=True)
    return int(error.code)


def nodes() -> int:
    """Nodes of this world; each has the same number of ranks."""
    return max(1, int(os.environ.get("WORLD_SIZE", "1")) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
