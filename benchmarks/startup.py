"""How long a user waits: for `llmrecipes list` and `--help`, and from the command to gpt-tiny's first training step.

    python -m benchmarks.startup --json startup.json
    python -m benchmarks.startup --starts 0        # only list and --help

For list and --help it is processor time (user and system), to which other work on the machine adds least; compare the
minima. The data is prepared before the clock starts. The first step has ended when its line is in metrics.jsonl.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.common import ROOT, close, machine, parser, show

PROGRAM = (sys.executable, "-m", "llmrecipes.cli")
LISTINGS = 10
WATCH_SECONDS = 0.02
LONGEST_START = 300.0


def processor_seconds(command: str) -> list[float]:
    """Processor time of each of some `llmrecipes COMMAND`."""
    seconds = []
    for _ in range(LISTINGS):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([*PROGRAM, command], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return seconds


def first_step_seconds(folder: Path, attempt: int) -> float:
    """Seconds from `llmrecipes train gpt-tiny` to its first line with a loss."""
    paths = ["--data-dir", str(folder / "data"), "--runs-dir", str(folder / "runs")]
    run_id = f"start-{attempt}"
    metrics = folder / "runs" / "gpt-tiny" / run_id / "metrics.jsonl"
    command = [*PROGRAM, "train", "gpt-tiny", "train.train_iters=3", "--no-sample", "--run-id", run_id, *paths]
    started = time.perf_counter()
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) as process:
        while not _has_step(metrics):
            assert process.poll() in (None, 0), f"training ended with {process.returncode}"
            assert time.perf_counter() - started < LONGEST_START
            time.sleep(WATCH_SECONDS)
        seconds = time.perf_counter() - started
    assert process.returncode == 0
    return seconds


def _has_step(metrics: Path) -> bool:
    if not metrics.exists():
        return False
    return any(
        "loss" in json.loads(line) for line in metrics.read_text("utf-8").splitlines(keepends=True) if line[-1:] == "\n"
    )


def main() -> None:
    """Print one table."""
    options = parser(__doc__)
    options.add_argument("--starts", type=int, default=3, help="times the training is started")
    chosen = options.parse_args()
    started_on = machine()
    figures = {f"llmrecipes {command}, processor": processor_seconds(command) for command in ("list", "--help")}
    if chosen.starts:
        with tempfile.TemporaryDirectory() as folder:
            prepare = [*PROGRAM, "prepare", "gpt-tiny", "--data-dir", f"{folder}/data"]
            subprocess.run(prepare, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
            figures["first training step"] = [first_step_seconds(Path(folder), n) for n in range(chosen.starts)]
    rows = [
        [name, f"{statistics.median(seconds):.2f}", f"{min(seconds):.2f}-{max(seconds):.2f}", len(seconds)]
        for name, seconds in figures.items()
    ]
    show("seconds", ("", "median", "range", "times"), rows)
    close(figures, started_on, chosen.json)


if __name__ == "__main__":
    main()
