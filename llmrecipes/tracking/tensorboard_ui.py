"""TensorBoard for the event files of runs, on localhost only."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from llmrecipes.errors import UserError
from llmrecipes.runfiles import RunFiles
from llmrecipes.tracking.web import HOST, reserved, started, until_interrupted

NAME = "TensorBoard"
FOLDER = "tensorboard"


@contextmanager
def server(run_dirs: Sequence[Path], port: int) -> Iterator[tuple[str, int, subprocess.Popen[bytes]]]:
    """A running TensorBoard; yields its address, the number of runs it shows, and its process; stops it at the end.

    Args:
        run_dirs: runs; those without event files are skipped.
        port: preferred port; another one if it is in use.

    Raises:
        UserError: none of the runs has event files, or TensorBoard does not start.
    """
    shown = [run_dir for run_dir in run_dirs if any((run_dir / FOLDER).glob("events.out.tfevents.*"))]
    if not shown:
        one = len(run_dirs) == 1
        raise UserError(
            "no TensorBoard files" if one else "no run has TensorBoard files",
            where=str(run_dirs[0]) if one else "",
            rule="a run writes them if its recipe has tracking.tensorboard: true",
            fix="llmrecipes ui shows runs in MLflow, llmrecipes compare in the terminal",
        )
    # A folder of links: TensorBoard scans everything below its folder, and the checkpoints of a run can be a hundred
    # thousand files.
    with TemporaryDirectory(prefix="llmrecipes-tensorboard-") as folder:
        for run_dir in shown:
            link = Path(folder, RunFiles(run_dir.resolve()).name)
            link.parent.mkdir(exist_ok=True)
            link.symlink_to((run_dir / FOLDER).resolve(), target_is_directory=True)
        environment = {"TF_CPP_MIN_LOG_LEVEL": "3", **os.environ, "PYTHONWARNINGS": "ignore"}
        with reserved(port) as port:
            command = [sys.executable, "-m", "tensorboard.main", "--logdir", folder, "--host", HOST]
            # Use the Python reader: the Rust one does not follow links.
            command += ["--port", str(port), "--load_fast", "false", "--reload_interval", "10"]
            with started(NAME, command, port, "/data/environment", environment) as process:
                yield f"http://{HOST}:{port}", len(shown), process


def serve(run_dirs: Sequence[Path], port: int) -> None:
    """Show runs until Ctrl-C."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # both end the server as well
    with server(run_dirs, port) as (address, number, process):
        what = str(run_dirs[0]) if len(run_dirs) == 1 else f"{number} runs"
        print(f"TensorBoard shows {what} at {address}/#scalars (Ctrl-C ends it)", flush=True)
        until_interrupted(NAME, process)
