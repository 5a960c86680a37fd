"""Processes that die with their parent, even if the parent had no time to kill them.

The kernel does it (`PR_SET_PDEATHSIG`), so it also works on a process that is stopped or busy in native code, and in a
container. The signal is sent when the thread that started the process exits: that thread has to outlive the process.
"""

from __future__ import annotations

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent(parent: int) -> None:
    """Have the kernel send this process SIGKILL when its parent exits.

    Args:
        parent: process id of the parent, as passed by the parent: it may have exited before this call.

    Raises:
        OSError: the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os._exit(1)
