"""Entry and exit of every rank: reads its spec, and reports user errors as one message."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TypeVar

from llmrecipes.console import setup_logging
from llmrecipes.errors import ExitCode, UserError
from llmrecipes.faults.parent import end_with_parent
from llmrecipes.launch.open_files import allow_open_files
from llmrecipes.launch.ranks import LAUNCHER
from llmrecipes.train.spec import RankSpec

S = TypeVar("S", bound=RankSpec)

SECONDS_BEHIND_THE_FIRST = 2.0


def rank_main(kind: type[S], run: Callable[[S], ExitCode]) -> NoReturn:
    """Entry point of a rank: `python -m <module> <spec.json>`.

    Args:
        kind: class of the spec.
        run: runs the rank; returns the exit code.
    """
    # Nothing is lost before training starts: until then a signal ends this process immediately, without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    if launcher := os.environ.pop(LAUNCHER, ""):  # not for the processes that this one starts
        end_with_parent(int(launcher))
    setup_logging(rank=int(os.environ.get("RANK", "0")))
    sys.exit(guarded(run, kind.model_validate_json(Path(sys.argv[1]).read_text("utf-8"))))


def guarded(run: Callable[[S], ExitCode], spec: S) -> int:
    """Run a rank and print a user error as one message; returns the exit code."""
    from llmrecipes.faults.memory import out_of_memory

    try:
        allow_open_files(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))
        return int(run(spec))
    except UserError as error:
        explained = error
    except (MemoryError, RuntimeError) as error:
        found = out_of_memory(error, spec.recipe, data_parallel_size=int(os.environ.get("WORLD_SIZE", "1")))
        if found is None:
            raise
        explained = found
    print(f"error: {explained}", file=sys.stderr, flush=True)
    if os.environ.get("RANK", "0") != "0":
        # Most errors are raised on all ranks, and launchers kill the others when one exits: let rank 0 report first.
        time.sleep(SECONDS_BEHIND_THE_FIRST)
    return int(explained.code)


def nodes() -> int:
    """Nodes of this world; each has the same number of ranks."""
    return max(1, int(os.environ.get("WORLD_SIZE", "1")) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
