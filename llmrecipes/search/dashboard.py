"""optuna-dashboard on the storage of a study, on localhost only."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from subprocess import Popen

from llmrecipes.search.storage import url_with_driver
from llmrecipes.tracking.web import HOST, reserved, started, until_interrupted

NAME = "optuna-dashboard"
# As optuna-dashboard starts itself, without a line for each request.
SCRIPT = """
import sys, bottle, optuna_dashboard
bottle.run(optuna_dashboard.wsgi(sys.argv[1]), host=sys.argv[2], port=int(sys.argv[3]), quiet=True)
"""


@contextmanager
def server(place: str, port: int) -> Iterator[tuple[str, Popen[bytes]]]:
    """A running dashboard; yields its address and process once it responds, stops it at the end.

    Args:
        place: URL of the storage, or path of a journal file.
        port: of the dashboard, if it is free.

    Raises:
        UserError: it does not start.
    """
    storage = url_with_driver(place) if "://" in place else place
    with reserved(port) as port:
        command = [sys.executable, "-c", SCRIPT, storage, HOST, str(port)]
        with started(NAME, command, port, "/api/studies", os.environ) as process:
            yield f"http://{HOST}:{port}", process


def serve(place: str, study_id: int, port: int = 8080) -> None:
    """Show a study until Ctrl-C.

    Args:
        place: URL of the storage, or path of a journal file.
        study_id: of the study in its storage, which may have many.
        port: of the dashboard, if it is free.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # here a signal ends the server, it is no early end of a search
        signal.signal(number, signal.default_int_handler)
    with server(place, port) as (address, process):
        print(
            f"optuna-dashboard shows the study at {address}/dashboard/studies/{study_id} (Ctrl-C ends it)", flush=True
        )
        until_interrupted(NAME, process)
