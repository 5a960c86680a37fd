"""Resident memory of gpt-tiny's rank over a long run, from /proc: it has to become flat.

    python -m benchmarks.resident_memory --steps 2000 --json resident_memory.json

VmRSS and its anonymous part, read every two seconds, beside the step in metrics.jsonl at that time.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from benchmarks.common import ROOT, close, machine, parser, show
from llmrecipes.units import MIB

PROGRAM = (sys.executable, "-m", "llmrecipes.cli")
SECONDS = 2.0
PARTS = 10


def measure(folder: Path, steps: int, precision: str, data_dir: Path) -> list[tuple[int, int, int]]:
    """Step, resident and anonymous bytes of the rank, from its first step to its last."""
    paths = ["--data-dir", str(data_dir), "--runs-dir", str(folder / "runs"), "--run-id", "long"]
    changes = [f"train.train_iters={steps}", f"scheduler.lr_decay_iters={steps}", f"train.precision={precision}"]
    metrics = folder / "runs" / "gpt-tiny" / "long" / "metrics.jsonl"
    found = []
    with subprocess.Popen([*PROGRAM, "train", "gpt-tiny", *changes, "--no-sample", *paths], cwd=ROOT) as process:
        while process.poll() is None:
            time.sleep(SECONDS)
            done = metrics.read_text("utf-8").count('"loss"') if metrics.exists() else 0
            memory = _largest(process.pid)
            if done and memory is not None and memory[0]:  # 0: it has ended
                found.append((done, *memory))
    assert process.returncode == 0
    return found


def _largest(pid: int) -> tuple[int, int] | None:
    """Memory of the rank: the process with the most, of the command and its children."""
    sizes = []
    try:
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            memory = process.memory_info()
            sizes.append((memory.rss, memory.rss - memory.shared))
    except psutil.NoSuchProcess:
        return None
    return max(sizes)


def main() -> None:
    """Print the memory at the tenths of the run."""
    options = parser(__doc__)
    options.add_argument("--steps", type=int, default=2000)
    options.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    options.add_argument("--data-dir", type=Path, help="prepared data of gpt-tiny; default: prepared anew")
    chosen = options.parse_args()
    started_on = machine()
    with tempfile.TemporaryDirectory() as folder:
        data_dir = (chosen.data_dir or Path(folder) / "data").absolute()
        found = measure(Path(folder), chosen.steps, chosen.precision, data_dir)
    rows = []
    for part in range(1, PARTS + 1):
        before = [row for row in found if row[0] <= part * chosen.steps / PARTS]
        if before:
            step, resident, anonymous = before[-1]
            rows.append([step, resident // MIB, anonymous // MIB])
    show(f"gpt-tiny, {chosen.precision}", ("step", "resident MiB", "anonymous MiB"), rows)
    close({"samples": found}, started_on, chosen.json)


if __name__ == "__main__":
    main()
