"""The lock that allows only one process to train a run."""

from __future__ import annotations

import fcntl
import logging
import os
from pathlib import Path

from llmrecipes.errors import UserError

logger = logging.getLogger(__name__)


def take_lock(path: Path) -> int:
    """Lock a file, created if missing; returns the descriptor, which holds the lock until it is closed.

    Raises:
        UserError: another live process holds it.
        OSError: the file cannot be created.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        # A POSIX record lock: unlike flock's it is not inherited by forked data loader workers, which may
        # outlive a killed trainer by seconds.
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as problem:
        os.close(descriptor)
        raise UserError(
            "another process is training this run",
            where=str(path.parent),
            fix="wait until it has finished, or use another --run-id",
        ) from problem
    except OSError as problem:
        logger.warning("%s: locks are not supported here (%s)", path.parent, problem.strerror)
    return descriptor
