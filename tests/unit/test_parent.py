"""Processes that end with the one that started them."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil

CHILD = """
import os, signal, sys
from llmrecipes.parent import end_with_parent
end_with_parent(int(sys.argv[1]))
print(os.getpid(), flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
"""
PARENT = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1], str(os.getpid())])
child.wait()
"""


def test_a_child_ends_with_a_parent_that_is_killed_even_if_it_is_stopped() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT, CHILD], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    # Whoever adopts it may be slow to collect it.
    psutil.wait_procs([child], timeout=10)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_a_child_whose_parent_is_gone_already_does_not_begin() -> None:
    elsewhere = os.getppid()  # some process that is not the parent of the child
    done = subprocess.run([sys.executable, "-c", CHILD, str(elsewhere)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")
