"""Run a command with the arguments of the environment variable ARGS behind its own.

ARGS is split as a shell would split it, quotes included, but nothing in it is expanded or executed:
`make generate RUN=… ARGS='--prompt "def "'`.
"""

from __future__ import annotations

import os
import shlex
import sys


def main() -> None:
    try:
        more = shlex.split(os.environ.get("ARGS", ""))
    except ValueError as error:
        sys.exit(f"ARGS={os.environ['ARGS']}: {error}")
    command = [*sys.argv[1:], *more]
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
