"""Processes that end when the one that started them is gone, also where that one had no time to end them.

The kernel does it (`PR_SET_PDEATHSIG`), so it works on a process that is stopped or busy in native code, and in a
container. Only the thread that started the process counts: start such a process from a thread that lives as long as it.
"""

from __future__ import annotations

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent(parent: int) -> None:
    """Have the kernel send this process SIGKILL when its parent ends.

    Args:
        parent: process id of the parent, from the parent itself: it may have ended before this call.

    Raises:
        OSError: the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os._exit(1)
