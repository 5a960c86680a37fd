"""How long a Slurm job is away: from the warning, over save, requeue and start, to the next training step.

    python -m benchmarks.requeue_slurm --json requeue_slurm.json

Needs root and Debian's Slurm: it starts a cluster of two nodes on this machine, as the system tests do, and trains a
tiny model on 2 nodes × 2 ranks. `in the queue` is Slurm's own delay, which follows from munge's cred_expire (5 s here).
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from benchmarks.common import ROOT, close, machine, parser, show
from tests.helpers import tiny, train_lines, write_recipe
from tests.system.slurm.daemons import PROGRAMS, Lab, cluster, missing

RECIPE = tiny(train={"train_iters": 100_000, "eval_interval": 100_000}, checkpoint={"save_interval": 100_000})
WARM_STEP = 20


def measure(lab: Lab, job: str, run_dir: Path, number: int) -> dict[str, float]:
    """Seconds of one interruption."""
    done = len(train_lines(run_dir))
    lab.until(lambda: True if len(train_lines(run_dir)) >= done + WARM_STEP else None, "no training")
    warned = time.monotonic()
    lab.run("scancel", "--signal=USR1", job)
    lab.until(lambda: True if int(lab.job(job)["Restarts"]) >= number else None, "no restart")
    requeued = time.monotonic()
    saved = len(train_lines(run_dir))
    lab.wait(job, "RUNNING")
    running = time.monotonic()
    lab.until(lambda: True if len(train_lines(run_dir)) > saved else None, "no step after the restart")
    stepped = time.monotonic()
    return {
        "saved and requeued": requeued - warned,
        "in the queue": running - requeued,
        "from start to step": stepped - running,
        "requeued to next step": stepped - requeued,
    }


def main() -> None:
    """Print one table."""
    options = parser(__doc__)
    options.add_argument("--restarts", type=int, default=3, help="times the job is interrupted")
    chosen = options.parse_args()
    if lacks := missing(PROGRAMS):
        sys.exit(f"Slurm: {lacks}")
    started_on = machine()
    with tempfile.TemporaryDirectory() as name, cluster(2, 2) as lab:
        folder = Path(name)
        path = write_recipe(RECIPE, folder)
        words = ["--python", sys.executable, "--ranks-per-node", "2", "--run-id", "away", path]
        job = lab.run(
            "env", f"PYTHONPATH={ROOT}", "OMP_NUM_THREADS=1", "CUDA_VISIBLE_DEVICES=", "sbatch", "--parsable", "-N2",
            str(ROOT / "slurm/train.sbatch"), *words, cwd=folder,
        ).stdout.strip()  # fmt: skip
        run_dir = folder / "runs" / RECIPE.name / "away"
        figures = [measure(lab, job, run_dir, number) for number in range(1, chosen.restarts + 1)]
        lab.run("scancel", job)
        lab.wait(job, "CANCELLED")
    rows = [[name, *(f"{figure[name]:.1f}" for figure in figures)] for name in figures[0]]
    show("seconds", ("", *(f"restart {number}" for number in range(1, len(figures) + 1))), rows)
    close({"restarts": figures}, started_on, chosen.json)


if __name__ == "__main__":
    main()
