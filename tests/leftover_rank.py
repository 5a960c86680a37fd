"""A rank that does not end with its launcher, as one that is being started, and its forked helper."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

if __name__ == "__main__":
    if sys.argv[1] != "end at once":
        os.fork()
        with Path(sys.argv[1]).open("w") as said:  # less than a pipe takes at once
            said.write(f"{os.getpid()}\n")
        signal.pause()
